"""The client's side of the relay on a transport that keeps what is written: what fuzzers feed, without sockets.

Requests are taken down instead of being served, so that one run costs some microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from common import apis
from common.relay.client import ClientConnection
from common.relay.exchange import Exchange
from common.relay.framing import MAX_HEADERS
from common.relay.heads import passed_on, request_head


@dataclass
class Limits:
    """Small, so that inputs reach them."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    max_body_bytes: int = 2000
    max_header_bytes: int = 1024
    write_timeout_s: float = 10.0
    keepalive_timeout_s: float = 10.0
    max_connections: int = 10


class Listener:
    """As much of a listener as a connection asks for."""

    limits = Limits()
    leaving = False
    half_close = False

    def opened(self, connection: ClientConnection) -> None:
        """See Listener."""

    def closed(self, connection: ClientConnection) -> None:
        """See Listener."""

    def refusal(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        """See Refusal."""
        return b"application/json", apis.error_body(apis.family_of(exchange.path), (status, message))


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing, "written after the end"
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> Any:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The sending side ends; a refusal may still be read."""

    def pause_reading(self) -> None:
        """Fuzzers go on feeding; the bound on what is held is the test's to check."""

    resume_reading = pause_reading


class Connection(ClientConnection):
    """Takes requests down and answers each with 204 at once."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        super().__init__(cast("Any", Listener()))
        self.requests: list[tuple[bytes, bytes, bytes]] = []

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        self.requests.append((exchange.method, exchange.target, exchange.body))
        check_head(exchange)
        self.respond(204, [], b"")


def check_head(exchange: Exchange) -> None:
    """What every request that is let through has: a head that has one meaning for whoever reads it next."""
    assert len(exchange.headers) <= MAX_HEADERS
    assert len(exchange.body) <= Listener.limits.max_body_bytes
    kept = passed_on(exchange.headers)
    head = request_head(exchange.method, exchange.target, b"server", kept, b"", len(exchange.body))
    lines = head.split(b"\r\n")
    assert lines[-2:] == [b"", b""]
    names = [line.split(b":", 1)[0].lower() for line in lines[1:-2]]
    assert names.count(b"content-length") == 1
    assert names.count(b"host") == 1
    for name in (b"transfer-encoding", b"connection", b"te", b"upgrade", b"expect", b"trailer", b""):
        assert name not in names, head
    assert not any(name.replace(b"_", b"-").startswith(b"x-headwater-") for name in names), head
    assert b"\n" not in b"".join(lines)
    assert b"\r" not in b"".join(lines)
    assert b"\0" not in head


def feed(pieces: list[bytes]) -> Connection:
    """A connection that was sent these pieces, until it would have closed."""
    connection, transport = Connection(), Transport()
    connection.connection_made(cast("Any", transport))
    for piece in pieces:
        if piece and not transport.closing:
            connection.data_received(piece)
    return connection
