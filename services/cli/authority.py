"""An authority in a folder, and the certificates that it signs (P-256, X.509). Needs cryptography, an extra."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS: Final = 3650
KEPT: Final = 1 / 3  # a certificate is renewed when less than this of its life is left
BACKDATED: Final = timedelta(minutes=5)  # for clocks that are behind
PEM: Final = serialization.Encoding.PEM


def make(folder: Path, wanted: list[tuple[str, list[str]]], now: datetime, days: int, *, renew: bool) -> list[str]:
    """Make what is wanted, (name, hosts), and is not there yet; what was done, in words. Raises OSError, ValueError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    said = []
    if not (folder / "ca.pem").exists():
        said.append(
            f"{folder}/ca.pem: made; whoever has ca-key.pem can be any tier: keep it off the machines that serve"
        )
    authority, key = _authority(folder, now)
    for name, hosts in wanted:
        file = folder / f"{name}.pem"
        if not renew and _kept(file, hosts, authority, now):
            said.append(f"{file}: still good")
            continue
        leaf = ec.generate_private_key(ec.SECP256R1())
        _write(folder / f"{name}-key.pem", _pem(leaf))
        _write(file, _signed(name, hosts, leaf, authority, key, now, days).public_bytes(PEM), 0o644)
        said.append(f"{file}: made for {', '.join(hosts)}, good for {days} days")
    return said


def _authority(folder: Path, now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The one that is there, or a new one."""
    file, key_file = folder / "ca.pem", folder / "ca-key.pem"
    if file.exists() and key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} is no key that this command made")
        return x509.load_pem_x509_certificate(file.read_bytes()), key
    if file.exists() or key_file.exists():
        raise ValueError(f"of {file} and {key_file} only one is there: with neither, a new authority is made")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Headwater authority")])
    builder = _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    authority = builder.sign(key, hashes.SHA256())
    _write(key_file, _pem(key))
    _write(file, authority.public_bytes(PEM), 0o644)
    return authority, key


def _signed(
    name: str,
    hosts: list[str],
    leaf: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, authority.subject, leaf.public_key(), now, days)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_san(host) for host in hosts]), critical=False)
    builder = builder.add_extension(issuer, critical=False)
    return builder.sign(key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - BACKDATED).not_valid_after(now + timedelta(days=days))
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _kept(file: Path, hosts: list[str], authority: x509.Certificate, now: datetime) -> bool:
    """Whether a certificate is there, for these hosts, of this authority, and good for a while."""
    if not file.exists():
        return False
    there = x509.load_pem_x509_certificate(file.read_bytes())
    sans = there.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    left = (there.not_valid_after_utc - now) / (there.not_valid_after_utc - there.not_valid_before_utc)
    same = sorted(map(repr, sans)) == sorted(repr(_san(host)) for host in hosts)
    key_id = there.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    ours = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    return same and left > KEPT and key_id == ours


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Whole or not at all, and never readable to others before it has its mode."""
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    new.replace(file)
