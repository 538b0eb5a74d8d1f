"""Guards the admin listener: on loopback against web pages, and beyond it by tokens.

On loopback whoever has an account on the machine is trusted, but not a page in his browser: requests from another
origin, or under a host name that is not the machine's own (DNS rebinding), are refused. As soon as there are tokens
each request needs one; off loopback without any, nothing but health and metrics is answered, unless the network is said
to be the operators' own (`auth.admin_open`). Balancers ask each other with a token made of the keys that sign their
route headers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

HEALTH: Final = frozenset(("/livez", "/readyz"))  # for probes, which have no tokens
METRICS: Final = "/metrics"
CHALLENGE: Final = b'Bearer realm="headwater admin", Basic realm="headwater admin"'  # the second for browsers
WANTED: Final = "a token is needed: send one of auth.admin_tokens as `Authorization: Bearer TOKEN`"
UNGUARDED: Final = "the admin listener is not on loopback and has no token: configure auth.admin_tokens"


def peer_token(key: bytes) -> str:
    """What a balancer shows others, made of a key that signs route headers."""
    return hmac.new(key, b"admin", hashlib.sha256).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or a host name that was asked for, is this machine's own."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """In front of the admin application. `tokens` gives those that are good now, `route_keys` the keys of peers."""

    def __init__(
        self,
        app: App,
        host: str,
        tokens: Iterable[str],
        route_keys: Callable[[], Iterable[bytes]],
        *,
        open_metrics: bool,
        open_admin: bool = False,
    ) -> None:
        self._app = app
        self._loopback = is_loopback(host)
        self._tokens = tuple(token.encode() for token in tokens)
        self._route_keys = route_keys
        self._open_admin = open_admin and not self._tokens
        self._open = HEALTH | {METRICS} if open_metrics else HEALTH

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return  # nothing here is a WebSocket
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, why = refusal
        answer = [(b"content-type", b"application/json")]
        if status == 401:
            answer.append((b"www-authenticate", CHALLENGE))
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": json.dumps({"detail": why}).encode()})

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Why a request is refused, None if it is not."""
        if path in self._open:
            return None
        if _from_elsewhere(headers):
            return 403, "a page of another origin may not ask this"
        if self._open_admin:
            return None
        if not self._tokens and self._loopback:
            host = _host_of(headers.get(b"host", b"").decode("latin-1"))
            known = not host or is_loopback(host)
            return None if known else (403, "this listener is on loopback, and was asked for by another name")
        if self._knows(_shown(headers.get(b"authorization", b""))):
            return None
        return (401, WANTED) if self._tokens else (403, UNGUARDED)

    def _knows(self, shown: bytes) -> bool:
        good = [*self._tokens, *(peer_token(key).encode() for key in self._route_keys())]
        return bool(shown) and any([hmac.compare_digest(shown, token) for token in good])  # noqa: C419 - all, always


def _shown(authorization: bytes) -> bytes:
    """The token in a header, b"" without one: a bearer's, or the password of a browser's or a URL's user."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return b64decode(value, validate=True).partition(b":")[2]
        except Base64Error:
            return b""
    return b""


def _from_elsewhere(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser sent it for a page that is not ours."""
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode(
        "latin-1"
    )


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return header
