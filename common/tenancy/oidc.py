"""Tokens of an OpenID Connect provider (JWTs): who is the tenant that one speaks for.

The provider's keys are fetched in the background, kept while it is out of reach, and never on a request's path. A token
that was checked once is known by its hash until it expires. Only asymmetric algorithms are taken, those that are
configured and never those that a token names for itself. Needs PyJWT (`pip install 'headwater[security]'`).

Source: RFC 8725 (best current practices for JWTs), OpenID Connect Discovery 1.0.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import jwt
import msgspec
import structlog

from common import clock
from common.config import OidcIssuer
from common.errors import AccessError, ConfigError, Unauthenticated

log = structlog.get_logger()

MAX_DOCUMENT_BYTES: Final = 262_144
MAX_KEYS: Final = 64  # of one issuer
MAX_TOKENS: Final = 10_000  # known by their hashes, about 3 MB
MIN_REFRESH_S: Final = 10.0  # a token with an unknown key has keys fetched anew, no more often than this
RETRY_S: Final = (1.0, 60.0)  # first and longest pause while an issuer is out of reach
MAX_AGE_S: Final = 86_400.0  # keys that could not be fetched anew for so long are believed no more
MIN_RSA_BITS: Final = 2048
FETCH_TIMEOUT_S: Final = 5.0
KINDS: Final = {"RSA": ("RS", "PS"), "EC": ("ES",), "OKP": ("EdDSA",)}  # of keys, and the algorithms they are for


@dataclass(frozen=True, slots=True)
class Verified:
    """Of a good token. `subject` is a hash of who it was issued to; `expires_at` seconds since the epoch."""

    tenant: str
    subject: str
    expires_at: float


class KeysUnavailable(AccessError):  # noqa: N818 - the tree names conditions
    """The provider's keys are not known, or not anew: the token may be good."""

    status = 503
    code = "signing_keys_unavailable"


class _Keys:
    """The keys of one issuer, fetched in the background."""

    def __init__(self, issuer: OidcIssuer) -> None:
        self.issuer = issuer
        self.by_id: dict[str, jwt.PyJWK] = {}
        self.fetched_at: float | None = None  # the last success
        self.tried_at = -MIN_REFRESH_S
        self._wanted = asyncio.Event()
        try:
            _refuse_plain_http(issuer.jwks_url or issuer.issuer)
        except ValueError as error:
            raise ConfigError(f"tenants.oidc: {error}") from None

    def find(self, key_id: str | None, now: float) -> jwt.PyJWK:
        """The key that a token names. Raises Unauthenticated or KeysUnavailable."""
        if self.fetched_at is None or now - self.fetched_at > MAX_AGE_S:
            raise KeysUnavailable("the keys of the token's issuer could not be fetched yet", retry_after_s=1.0)
        found = self.by_id.get(key_id or "")
        if found is None and key_id is None and len(self.by_id) == 1:
            found = next(iter(self.by_id.values()))
        if found is not None:
            return found
        if now - self.tried_at < MIN_REFRESH_S:
            raise Unauthenticated("the token is signed with a key that its issuer does not publish")
        self._wanted.set()
        raise KeysUnavailable("the keys of the token's issuer are being fetched anew", retry_after_s=1.0)

    async def run(self, changed: Any) -> None:
        """Fetch now and then, until cancelled; `changed` is called when a key is gone."""
        pause_s, failing = RETRY_S[0], False
        while True:
            self._wanted.clear()
            self.tried_at = clock.now()
            try:
                found = await self._fetch()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
                if not failing:
                    log.warning("issuer_keys_unavailable", issuer=self.issuer.issuer, reason=_words(error))
                failing = True
                wait_s, pause_s = pause_s, min(2.0 * pause_s, RETRY_S[1])
            else:
                if failing or self.fetched_at is None:
                    log.info("issuer_keys_fetched", issuer=self.issuer.issuer, keys=len(found))
                gone = self.by_id.keys() - found.keys()
                self.by_id, self.fetched_at = found, clock.now()
                failing, wait_s, pause_s = False, self.issuer.refresh_s, RETRY_S[0]
                if gone:
                    changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()

    async def _fetch(self) -> dict[str, jwt.PyJWK]:
        context = await asyncio.to_thread(_context, self.issuer.ca_file)
        async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, trust_env=False, verify=context) as client:
            async with asyncio.timeout(2.0 * FETCH_TIMEOUT_S):
                url = self.issuer.jwks_url
                if not url:
                    page = f"{self.issuer.issuer.rstrip('/')}/.well-known/openid-configuration"
                    told = await _document(client, page)
                    if told.get("issuer") != self.issuer.issuer:
                        raise ValueError(f"{page} is of another issuer")
                    url = str(told.get("jwks_uri", ""))
                    _refuse_plain_http(url)
                return _usable(await _document(client, url))


class Oidc:
    """Checks tokens of the issuers that are configured. `run` has to run beside."""

    def __init__(self, issuers: Sequence[OidcIssuer]) -> None:
        self._keys = {issuer.issuer: _Keys(issuer) for issuer in issuers}
        self._known: OrderedDict[bytes, Verified] = OrderedDict()

    async def run(self) -> None:
        """Keep the keys of all issuers fresh, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for keys in self._keys.values():
                group.create_task(keys.run(self._known.clear))

    @property
    def ready(self) -> bool:
        """Whether the keys of every issuer are there."""
        return all(keys.fetched_at is not None for keys in self._keys.values())

    def verify(self, token: str) -> Verified:
        """What a token says. Raises Unauthenticated for one that is not good, KeysUnavailable.

        Some 100 µs for a token that is new here, 2 µs for one that is known.
        """
        digest = sha256(token.encode("utf-8", "surrogateescape")).digest()
        known = self._known.get(digest)
        if known is not None:
            if known.expires_at > clock.wall_ns() / 1e9:
                self._known.move_to_end(digest)
                return known
            del self._known[digest]
            raise Unauthenticated("the token has expired", code="token_expired")
        verified = self._check(token)
        self._known[digest] = verified
        if len(self._known) > MAX_TOKENS:
            self._known.popitem(last=False)
        return verified

    def _check(self, token: str) -> Verified:
        try:
            header = jwt.get_unverified_header(token)
            unchecked = jwt.decode(token, options={"verify_signature": False})
            keys = self._keys.get(str(unchecked.get("iss")))
            if keys is None:
                raise Unauthenticated("the token is of an issuer that is not trusted here")
            issuer = keys.issuer
            key = keys.find(header.get("kid"), clock.now())
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[a for a in issuer.algorithms if a.startswith(KINDS[str(key.key_type)])],
                audience=list(issuer.audience),
                issuer=issuer.issuer,
                leeway=issuer.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired", code="token_expired") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            # The name alone: a message may quote the token.
            raise Unauthenticated(f"the token is not accepted ({type(error).__name__})") from None
        tenant = issuer.tenant or claims.get(issuer.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise Unauthenticated(f"the token does not say for whom it is: it has no claim '{issuer.tenant_claim}'")
        subject = sha256(f"{issuer.issuer} {claims.get('sub', '')}".encode()).hexdigest()[:16]
        return Verified(tenant, subject, float(claims["exp"]) + issuer.leeway_s)


async def _document(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """A JSON object of bounded size; redirects are not followed. Raises ValueError, httpx.HTTPError."""
    body = bytearray()
    async with client.stream("GET", url) as reply:
        if reply.status_code != 200:
            raise ValueError(f"{url} answers {reply.status_code}")
        async for chunk in reply.aiter_bytes():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{url} is larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(body), type=dict[str, Any])
    except msgspec.DecodeError:
        raise ValueError(f"{url} is no JSON object") from None


def _usable(document: dict[str, Any]) -> dict[str, jwt.PyJWK]:
    """The public keys for signatures, by their ids. Raises ValueError when there is none."""
    listed = document.get("keys")
    found: dict[str, jwt.PyJWK] = {}
    for told in listed[:MAX_KEYS] if isinstance(listed, list) else ():
        if not isinstance(told, dict) or told.get("kty") not in KINDS or told.get("use", "sig") != "sig":
            continue
        with suppress(jwt.PyJWTError, ValueError, TypeError):  # of a kind that is not known here: the others count
            key = jwt.PyJWK({k: v for k, v in told.items() if k != "d"})
            if getattr(key.key, "key_size", MIN_RSA_BITS) >= MIN_RSA_BITS or told["kty"] != "RSA":
                found[str(told.get("kid", ""))] = key
    if not found:
        raise ValueError("the issuer publishes no key that can be used")
    return found


def _context(ca_file: str) -> ssl.SSLContext:
    """Reading the authorities takes some 20 ms, hence in a thread."""
    return ssl.create_default_context(cafile=ca_file) if ca_file else httpx.create_ssl_context()


def _refuse_plain_http(url: str) -> None:
    """Keys that come over plain HTTP are anybody's. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(f"{url[:200]!r} must be an https URL")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
