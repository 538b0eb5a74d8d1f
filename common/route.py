"""The route header: what one tier tells the next about a request, signed so that only peers are believed.

The first tier reads the body; the ones below read this header instead. It holds what policy sees of the request, the
node it was sent to, how many servers have tried it, and which tiers it has passed, so that no request circles.
Layout: base64url(JSON) "." base64url(HMAC-SHA256 of that text), the first key signing and every key verifying.
A field that a newer peer adds is skipped by an older one, and one that an older peer lacks has its default.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error

import msgspec

from common.types import InferenceRequest, Path

HEADER = b"x-headwater-route"
MAX_HOPS = 6  # tiers one request may pass; three is the longest honest way, with one detour between regions
MAX_HEADER_BYTES = 8192


class OtherVersion(ValueError):  # noqa: N818 - a condition, as in `errors`
    """A peer has signed what this version cannot read; it is no client's request, and must not be taken for one."""


class Route(msgspec.Struct, array_like=True):
    """What travels with a request from tier to tier."""

    request: InferenceRequest
    node: Path  # the receiver is asked to choose among this node's children
    attempts: int = 0  # servers that have tried it
    visited: tuple[str, ...] = ()  # ids of the tiers it passed


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Route)


class RouteSigner:
    """Writes and checks route headers with shared keys, which may be replaced while it is in use."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        assert keys, "a signer needs at least one key"
        self.keys = keys

    def sign(self, route: Route) -> bytes:
        """The header's value."""
        text = urlsafe_b64encode(_encoder.encode(route))
        return text + b"." + self._mac(self.keys[0], text)

    def verify(self, value: bytes) -> Route | None:
        """The route, or None for anything that no peer with one of our keys has signed. Raises OtherVersion."""
        text, dot, mac = value.partition(b".")
        if not dot or len(value) > MAX_HEADER_BYTES:
            return None
        if not any(hmac.compare_digest(mac, self._mac(key, text)) for key in self.keys):
            return None
        try:
            return _decoder.decode(urlsafe_b64decode(text))
        except (msgspec.DecodeError, msgspec.ValidationError, Base64Error) as error:
            raise OtherVersion(f"a peer of another version says what is not understood here: {error}") from None

    @staticmethod
    def _mac(key: bytes, text: bytes) -> bytes:
        return urlsafe_b64encode(hmac.new(key, text, hashlib.sha256).digest()[:24])
