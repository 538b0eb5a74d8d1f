"""Tokens of a provider that rotates its keys, is gone, or lies; and tokens that only look like its own."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from common import clock
from common.errors import ConfigError, Unauthenticated
from common.tenancy import oidc
from common.tenancy.oidc import KeysUnavailable, Oidc
from tests.common.tenancy.issuer import Provider, Settings, rsa_key
from tests.servers import eventually


@asynccontextmanager
async def checking(*issuers: Settings, ready: bool = True) -> AsyncIterator[Oidc]:
    checker = Oidc(issuers)
    task = asyncio.create_task(checker.run())
    try:
        if ready:
            await eventually(lambda: checker.ready, 20.0)
        yield checker
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider() as server:
        yield server


def refused(checker: Oidc, token: str) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as caught:
        checker.verify(token)
    assert token not in str(caught.value)
    return caught.value


async def test_a_good_token_names_its_tenant(provider: Provider) -> None:
    async with checking(Settings(provider.url)) as checker:
        token = provider.token()
        verified = checker.verify(token)
        assert verified.tenant == "acme"
        assert "someone" not in verified.subject
        assert verified == checker.verify(token)
        assert verified.subject == checker.verify(provider.token(exp=time.time() + 60)).subject
        assert provider.asked == 2  # discovery and keys, and nothing for a request


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("RS256", rsa_key()),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    ],
    ids=["RS256", "ES256", "EdDSA"],
)
async def test_each_kind_of_key(provider: Provider, algorithm: str, key: Any) -> None:
    provider.keys = {"k": key}
    async with checking(Settings(provider.url, jwks_url=f"{provider.url}/keys")) as checker:
        assert checker.verify(provider.token("k", algorithm)).tenant == "acme"
        assert provider.asked == 1


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"exp": 1.0}, "expired"),
        ({"exp": None}, "MissingRequiredClaim"),
        ({"aud": "another"}, "InvalidAudience"),
        ({"aud": None}, "MissingRequiredClaim"),
        ({"iss": "https://evil.example"}, "not trusted"),
        ({"iss": None}, "not trusted"),
        ({"nbf": 2e10, "exp": 3e10}, "ImmatureSignature"),
        ({"tenant": None}, "no claim 'tenant'"),
        ({"tenant": ["acme"]}, "no claim 'tenant'"),
        ({"tenant": ""}, "no claim 'tenant'"),
    ],
)
async def test_a_token_that_is_not_for_us_now(provider: Provider, claims: dict[str, Any], said: str) -> None:
    async with checking(Settings(provider.url)) as checker:
        assert said in str(refused(checker, provider.token(**claims)))


async def test_a_fixed_tenant_needs_no_claim(provider: Provider) -> None:
    async with checking(Settings(provider.url, tenant="staff")) as checker:
        assert checker.verify(provider.token(tenant=None)).tenant == "staff"


def forged(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


async def test_a_token_without_a_signature_is_nobody(provider: Provider) -> None:
    good = jwt.decode(provider.token(), options={"verify_signature": False})
    async with checking(Settings(provider.url, algorithms=("RS256", "ES256"))) as checker:
        for name in ("none", "None", "NONE"):
            refused(checker, forged({"alg": name, "kid": "one"}, good))
        head, body, _ = provider.token().split(".")
        refused(checker, f"{head}.{body}.")
        refused(checker, f"{head}.{body}.AAAA")


async def test_a_public_key_is_no_shared_secret(provider: Provider) -> None:
    """The classic confusion: HS256 with the published key as the secret."""
    key = rsa_key()
    provider.keys = {"one": key}
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    claims = jwt.decode(provider.token(algorithm="RS256"), options={"verify_signature": False})
    import hashlib
    import hmac

    head, body, _ = forged({"alg": "HS256", "kid": "one"}, claims).split(".")
    mac = hmac.new(pem, f"{head}.{body}".encode(), hashlib.sha256).digest()
    token = f"{head}.{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    async with checking(Settings(provider.url)) as checker:
        refused(checker, token)


async def test_another_key_under_a_known_name_is_refused(provider: Provider) -> None:
    async with checking(Settings(provider.url)) as checker:
        refused(checker, provider.token(key=ec.generate_private_key(ec.SECP256R1())))


async def test_a_token_cannot_bring_its_own_key_or_choose_the_algorithm(provider: Provider) -> None:
    provider.keys = {"one": rsa_key()}
    other = rsa_key()
    jwk = jwt.algorithms.RSAAlgorithm.to_jwk(other.public_key(), as_dict=True)
    claims = jwt.decode(provider.token(algorithm="RS256"), options={"verify_signature": False})
    headers = {"kid": "one", "jwk": jwk, "jku": "http://127.0.0.1:1/keys", "x5u": "http://127.0.0.1:1/"}
    async with checking(Settings(provider.url, algorithms=("RS256",))) as checker:
        refused(checker, jwt.encode(claims, other, algorithm="RS256", headers=headers))
        refused(checker, provider.token(algorithm="RS512"))


@pytest.mark.parametrize(
    "token", ["", "a", "a.b", "a.b.c", "a.b.c.d", "...", "eyJ" + "A" * 5000, "\udcff.x.y", "[" * 9000]
)
async def test_what_is_no_token_at_all(provider: Provider, token: str) -> None:
    async with checking(Settings(provider.url)) as checker:
        with pytest.raises(Unauthenticated):
            checker.verify(token)


async def test_keys_that_cannot_be_used_are_left_out(provider: Provider) -> None:
    provider.keys["short"] = rsa_key(1024)
    provider.extra = [
        {"kty": "oct", "k": "AAAA", "kid": "secret"},
        {"kty": "RSA", "kid": "broken"},
        {"kty": "EC", "crv": "P-999", "kid": "strange"},
        {"kty": "RSA", "use": "enc", "kid": "enc"},
    ]
    async with checking(Settings(provider.url)) as checker:
        assert checker.verify(provider.token()).tenant == "acme"
        assert set(checker._keys[provider.url].by_id) == {"one"}


# -- keys change, and the provider is gone -----------------------------------------------------------------------------


async def test_a_new_key_is_fetched_behind_the_request(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "MIN_REFRESH_S", 0.0)
    async with checking(Settings(provider.url)) as checker:
        provider.keys["two"] = ec.generate_private_key(ec.SECP256R1())
        token = provider.token("two")
        with pytest.raises(KeysUnavailable) as caught:
            checker.verify(token)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)

        def accepted() -> bool:
            try:
                return checker.verify(token).tenant == "acme"
            except KeysUnavailable:
                return False

        await eventually(accepted, 20.0)


async def test_unknown_keys_do_not_make_us_ask_all_the_time(provider: Provider) -> None:
    async with checking(Settings(provider.url)) as checker:
        other = ec.generate_private_key(ec.SECP256R1())
        for n in range(50):
            refused(checker, provider.token(f"made-up-{n}", key=other))
            await asyncio.sleep(0)
        assert provider.asked == 2


async def test_a_withdrawn_key_takes_its_tokens_with_it(provider: Provider) -> None:
    async with checking(Settings(provider.url, refresh_s=0.05)) as checker:
        token = provider.token()
        checker.verify(token)
        provider.keys = {"two": ec.generate_private_key(ec.SECP256R1())}
        await eventually(lambda: set(checker._keys[provider.url].by_id) == {"two"}, 20.0)
        refused(checker, token)


async def test_a_known_token_expires(provider: Provider) -> None:
    async with checking(Settings(provider.url)) as checker:
        token = provider.token(exp=time.time() + 1.5)
        assert checker.verify(token).tenant == "acme"

        def expired() -> bool:
            try:
                checker.verify(token)
            except Unauthenticated as error:
                return error.code == "token_expired"
            return False

        await eventually(expired, 20.0)


async def test_with_the_provider_gone_known_keys_go_on(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(oidc, "RETRY_S", (0.02, 0.02))
    async with checking(Settings(provider.url, refresh_s=0.02)) as checker:
        token = provider.token()
        provider.status = 500
        asked = provider.asked
        await eventually(lambda: provider.asked > asked + 3, 20.0)
        assert checker.verify(token).tenant == "acme"
        keys = checker._keys[provider.url]
        keys.fetched_at = clock.now() - oidc.MAX_AGE_S - 1.0
        with pytest.raises(KeysUnavailable):
            checker.verify(provider.token())
        assert capsys.readouterr().out.count("issuer_keys_unavailable") == 1


@pytest.mark.parametrize("trouble", ["status", "redirect", "size", "issuer", "empty"])
async def test_documents_that_are_not_believed(
    provider: Provider, trouble: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(oidc, "RETRY_S", (0.02, 0.02))
    provider.status = {"status": 404, "redirect": 302}.get(trouble, 200)
    provider.padding = oidc.MAX_DOCUMENT_BYTES if trouble == "size" else 0
    provider.claimed_issuer = "https://evil.example" if trouble == "issuer" else ""
    if trouble == "empty":
        provider.keys = {}
    token = provider.token("one", key=ec.generate_private_key(ec.SECP256R1()))
    async with checking(Settings(provider.url), ready=False) as checker:
        await eventually(lambda: provider.asked > 4, 20.0)
        assert not checker.ready
        with pytest.raises(KeysUnavailable):
            checker.verify(token)
    assert "issuer_keys_unavailable" in capsys.readouterr().out


def test_keys_over_plain_http_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="https"):
        Oidc([Settings("http://idp.example.com")])
    with pytest.raises(ConfigError, match="https"):
        Oidc([Settings("https://idp.example.com", jwks_url="http://idp.example.com/keys")])


async def test_what_is_remembered_of_tokens_is_bounded(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "MAX_TOKENS", 3)
    async with checking(Settings(provider.url)) as checker:
        for n in range(6):
            checker.verify(provider.token(jti=str(n)))
        assert len(checker._known) == 3
