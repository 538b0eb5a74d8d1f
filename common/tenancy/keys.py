"""Keys: made, hashed, found in a request, and taken out of it before it goes on.

A key is `hw-` and 43 characters, 256 random bits in base64url. It is shown once, when it is made.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from hashlib import sha256
from typing import Final

from common.tenancy.directory import KeySpec

Headers = list[tuple[bytes, bytes]]
"""(name in lower case, value), as received."""

PREFIX: Final = "hw-"
CREDENTIALS: Final = (
    b"authorization",
    b"x-api-key",
    b"api-key",
)  # OpenAI's, Anthropic's, Azure's; the first one counts
QUERY: Final = frozenset((b"api_key", b"api-key", b"apikey", b"access_token"))  # never taken from there, nor passed on
MAX_CREDENTIAL_BYTES: Final = 16_384


def make(created: datetime, expires: datetime | None = None, note: str = "") -> tuple[str, KeySpec]:
    """A new key, and what is kept of it."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, KeySpec(id="k" + secrets.token_hex(6), sha256=hashed(key), created=created, expires=expires, note=note)


def hashed(key: str) -> str:
    """What is kept of a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def credential(headers: Headers) -> str | None:
    """The credential of a request, None if it has none; "" for one that no client means."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in CREDENTIALS:
            if name in found and found[name] != value:
                return ""  # two readers could disagree on which one counts
            found[name] = value
    for name in CREDENTIALS:
        value = found.get(name, b"").strip()
        if name == b"authorization" and value:
            scheme, _, value = value.partition(b" ")
            value = value.strip() if scheme.lower() == b"bearer" else b""
            if not value:
                return ""
        if value:
            return value.decode("ascii", "surrogateescape") if len(value) <= MAX_CREDENTIAL_BYTES else ""
    return None


def without_credentials(headers: Headers) -> Headers:
    """The headers as they may go on."""
    return [header for header in headers if header[0] not in CREDENTIALS]


def without_query_credentials(target: bytes) -> bytes:
    """A request's target without the parameters that some clients put their keys into."""
    path, mark, query = target.partition(b"?")
    if not mark:
        return target
    parts = query.split(b"&")
    kept = [part for part in parts if part.partition(b"=")[0].lower() not in QUERY]
    if len(kept) == len(parts):
        return target
    return path + mark + b"&".join(kept) if kept else path
