"""One request and the state of its answer: what the client's side, the server's side and `serving` share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from common.relay import heads
from common.types import Path

if TYPE_CHECKING:
    from common.relay.keepalive import Pings
    from common.relay.sending import Answer, Sending
    from common.relay.upstream import UpstreamConnection


class ClientLimits(Protocol):
    """The bounds a listener keeps, from the configuration (`limits:`); seconds and bytes."""

    header_timeout_s: float
    body_timeout_s: float
    max_body_bytes: int
    max_header_bytes: int
    write_timeout_s: float
    keepalive_timeout_s: float
    max_connections: int
    max_connections_per_address: int
    requests_per_s_per_address: float
    unlimited_addresses: tuple[str, ...]


class Client(Protocol):
    """Who gets the answer: a connection, or what stands for one. No class, so that compiled code takes either."""

    @property
    def limits(self) -> ClientLimits:
        """The bounds it is held to."""

    @property
    def peername(self) -> str:
        """Its address."""

    @property
    def verified(self) -> bool:
        """Whether it has shown a certificate."""

    @property
    def write_paused(self) -> bool:
        """Whether it cannot take more now."""

    @property
    def transport(self) -> Abortable:
        """Its socket."""

    def write(self, data: bytes) -> None:
        """See `ClientConnection`, as for all that follow."""

    def respond(self, status: int, headers: heads.Headers, body: bytes, added: bytes = b"") -> None:
        """A whole answer of our own."""

    def finished(self) -> None:
        """The answer is complete."""

    def cut(self, last_words: bytes = b"") -> None:
        """The answer broke."""


class Abortable(Protocol):
    """What can be closed at once."""

    def abort(self) -> None:
        """Close it."""


class Carrier(Protocol):
    """Who brings one request to a server and its answer back, where that is not the relay."""

    node: Path  # where the request's stages begin
    exclude: frozenset[Path]  # instances it may not go to

    async def forward(self, url: str, sending: Sending) -> Answer:
        """As `Relay.forward`."""


class Exchange:
    """One request and the state of its answer."""

    __slots__ = (
        "body",
        "carrier",
        "chunked",
        "client",
        "close",
        "committed",
        "ended",
        "expects_continue",
        "fields",
        "head_complete",
        "headers",
        "method",
        "old",
        "pieces",
        "pings",
        "refused",
        "started_at",
        "started_wall_ns",
        "status",
        "target",
        "until_close",
        "upstream",
    )

    def __init__(self, client: Client, carrier: Carrier | None = None) -> None:
        self.client = client
        self.carrier = carrier
        self.method = b""
        self.target = b""
        self.headers: heads.Headers = []
        self.fields: dict[bytes, bytes] = {}  # the first value of each header, once the head is complete
        self.body: bytes = b""
        self.pieces: list[bytes] = []  # of the body, while it comes
        self.head_complete = False
        self.expects_continue = False
        self.old = False  # HTTP/1.0
        self.close = False  # the connection ends with this answer
        self.chunked = False  # the answer is written in chunks
        self.until_close = False  # the answer ends with the connection: its reader cannot tell a cut from an end
        self.refused: tuple[int, str] | None = None
        self.status = 0  # of the answer, 0 until its head is written
        self.committed = False  # a byte of some server's answer, or all of our own, is with the client: no way back
        self.ended = False  # by us, for this process is leaving
        self.started_at = 0.0
        self.started_wall_ns = 0
        self.upstream: UpstreamConnection | None = None
        self.pings: Pings | None = None  # keep-alive comments, where they are asked for

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.split(b"?", 1)[0].decode("latin-1")

    @property
    def connection_line(self) -> bytes:
        """What the answer's head says of the connection; HTTP/1.0 has to be told that it lives on."""
        if self.close:
            return b"connection: close\r\n"
        return b"connection: keep-alive\r\n" if self.old else b""

    def drop(self, name: bytes) -> None:
        """Forget a header."""
        self.headers = [(k, v) for k, v in self.headers if k != name]
        self.fields.pop(name, None)

    def header(self, name: bytes) -> str | None:
        """The first value of a header as text, or None."""
        value = self.fields.get(name)
        return None if value is None else value.decode("latin-1")


Handler = Callable[[Exchange], Awaitable[None]]
Refusal = Callable[[Exchange, int, str], tuple[bytes, bytes]]
"""(exchange, status, message) -> (content type, body) in the shape of the API that was called."""
