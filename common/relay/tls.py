"""TLS: of the listeners, towards peers, towards instances; certificates are read anew when they change.

HTTP/1.1 is all that is offered (ALPN), so a client that would rather speak HTTP/2 falls back. A peer is known by a
certificate of our own authority, in both directions; a client need not show one.
Source: RFC 8446 (TLS 1.3), RFC 7301 (ALPN); TLS 1.2 is the least that is spoken (RFC 8996 ends those before).
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Protocol

import structlog

from common.errors import ConfigError

log = structlog.get_logger()

LOOK_INTERVAL_S = 2.0  # files are looked at this often; renewals come days apart
Seen = tuple[tuple[int, int, int], ...]


class TlsFiles(Protocol):
    """Settings of `tls:`; paths of PEM files, "" where there is none."""

    cert_file: str
    key_file: str
    ca_file: str
    instances_ca_file: str
    instances_verify: bool
    peers_required: bool
    admin: bool


def _problem(error: OSError) -> str:
    """What is wrong with a file: ssl's own errors are OSErrors as well, and their text is for nobody."""
    if isinstance(error, ssl.SSLError):
        return f"not a valid certificate or key: {error.reason or error}"
    return error.strerror or str(error)


class Certificates:
    """The contexts of one process."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError for files that cannot be used."""
        if bool(files.cert_file) != bool(files.key_file):
            raise ConfigError("tls: cert_file and key_file go together")
        if files.peers_required and not (files.ca_file and files.cert_file):
            raise ConfigError("tls.peers_required: needs ca_file, cert_file and key_file")
        if files.admin and not files.cert_file:
            raise ConfigError("tls.admin: needs cert_file and key_file")
        self._files = files
        self.listener: ssl.SSLContext | None = None
        self.admin: ssl.SSLContext | None = None
        try:
            if files.cert_file:
                self.listener = self._listener(files.ca_file)
                self.admin = self._listener("") if files.admin else None
            self.peers = self._client(files.ca_file, verify=True, own=True)
            self.instances = self._client(files.instances_ca_file, verify=files.instances_verify, own=False)
        except OSError as error:
            raise ConfigError(f"tls: {error.filename or 'the certificates'}: {_problem(error)}") from None
        self._seen = self._state()

    def _listener(self, ca_file: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.cert_file, self._files.key_file)
        context.set_alpn_protocols(["http/1.1"])
        if ca_file:
            context.load_verify_locations(ca_file)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def _client(self, ca_file: str, *, verify: bool, own: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca_file or None)
        context.set_alpn_protocols(["http/1.1"])
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if own and self._files.cert_file:
            context.load_cert_chain(self._files.cert_file, self._files.key_file)
        return context

    # -- when files change -------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Use new certificates for new connections as soon as they are there, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Load what has changed; what cannot be used is told of once, and what was loaded stays in use."""
        seen = self._state()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load()
        except OSError as error:
            log.warning("certificate_not_loaded", reason=_problem(error), meanwhile="the last one stays in use")
        else:
            log.info("certificate_loaded", file=self._files.cert_file)

    def _load(self) -> None:
        files = self._files
        if files.cert_file:
            # Tried on a context of its own: a certificate whose key is still the old one must not be half loaded.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert_file, files.key_file)
        for context in (self.listener, self.admin, self.peers):
            if context is not None and files.cert_file:
                context.load_cert_chain(files.cert_file, files.key_file)
            if context is not self.admin and context is not None and files.ca_file:
                context.load_verify_locations(files.ca_file)
        if files.instances_ca_file:
            self.instances.load_verify_locations(files.instances_ca_file)

    def _state(self) -> Seen:
        files = (self._files.cert_file, self._files.key_file, self._files.ca_file, self._files.instances_ca_file)
        return tuple(_state_of(file) for file in files)


def _state_of(file: str) -> tuple[int, int, int]:
    try:
        found = os.stat(file) if file else None
    except OSError:
        found = None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found is not None else (0, 0, 0)
