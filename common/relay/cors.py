"""Browsers on other origins: which ones may call the data listener.

A preflight carries no key and reaches no server; it is answered here, and so is the question on each answer of an
allowed origin. Nothing is allowed unless it is configured, and no origin is ever reflected that is not.
Source: the Fetch standard, CORS protocol.
"""

from __future__ import annotations

from common.relay import heads

ALLOWED_METHODS = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600
EXPOSED = (
    b"x-headwater-decision, x-headwater-served-by, retry-after, x-ratelimit-limit-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)
PREFIX = b"access-control-"


class Cors:
    """The origins that are allowed; `*` allows all, without credentials."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)

    def __bool__(self) -> bool:
        return self._all or bool(self._origins)

    def _allowed(self, headers: heads.Headers) -> bytes | None:
        origin = heads.find(headers, b"origin")
        if origin is None:
            return None
        if self._all:
            return b"*"
        return origin if origin.lower() in self._origins else None

    def preflight(self, headers: heads.Headers) -> heads.Headers | None:
        """Header fields that answer a preflight; None where it is not allowed, or is none."""
        asked = heads.find(headers, b"access-control-request-method")
        allowed = self._allowed(headers)
        if asked is None or allowed is None:
            return None
        fields = [
            (b"access-control-allow-origin", allowed),
            (b"access-control-allow-methods", ALLOWED_METHODS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
            (b"vary", b"origin, access-control-request-headers"),
        ]
        wanted = heads.find(headers, b"access-control-request-headers")
        if wanted is not None:
            fields.append((b"access-control-allow-headers", wanted))
        return fields

    def answer(self, headers: heads.Headers) -> heads.Headers:
        """Header fields to add to an answer for the request that had these headers."""
        allowed = self._allowed(headers)
        if allowed is None:
            return []
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"origin"),
        ]
