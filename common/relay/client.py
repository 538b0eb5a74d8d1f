"""The client's side of the relay: one connection, its requests one after the other, their answers written back.

Parses with llhttp in its strict mode (whatever is ambiguous is refused there), bounds the head, the body and the time
to receive either, and starts the handler when a request is complete. While an answer is under way it keeps reading, so
that a client who leaves is noticed at once; what a pipelining client sends ahead is bounded by pausing its socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from common import clock
from common.relay import heads
from common.relay.sweeper import Sweeper

if TYPE_CHECKING:
    from common.relay.upstream import UpstreamConnection

MAX_HEADERS = 256  # fields in one head; browsers and SDKs send about twenty
LINGER_NOT = pack("ii", 1, 0)
PIPELINED = 1  # complete requests held behind the one under way; beyond that the socket is not read


class ClientLimits(Protocol):
    """The bounds a listener keeps, from the configuration (`limits:`); seconds and bytes."""

    header_timeout_s: float
    body_timeout_s: float
    max_body_bytes: int
    max_header_bytes: int
    write_timeout_s: float
    keepalive_timeout_s: float


class Exchange:
    """One request and the state of its answer."""

    __slots__ = (
        "body",
        "body_bytes",
        "chunked",
        "client",
        "close",
        "expects_continue",
        "head_complete",
        "headers",
        "method",
        "old",
        "refused",
        "started_at",
        "started_wall_ns",
        "status",
        "target",
        "until_close",
        "upstream",
    )

    def __init__(self, client: ClientConnection) -> None:
        self.client = client
        self.method = b""
        self.target = b""
        self.headers: heads.Headers = []
        self.body: bytes = b""
        self.body_bytes: list[bytes] = []
        self.head_complete = False
        self.expects_continue = False
        self.old = False  # HTTP/1.0
        self.close = False  # the connection ends with this answer
        self.chunked = False  # the answer is written in chunks
        self.until_close = False  # the answer ends with the connection: its reader cannot tell a cut from an end
        self.refused: tuple[int, str] | None = None
        self.status = 0  # of the answer, 0 until its head is written
        self.started_at = 0.0
        self.started_wall_ns = 0
        self.upstream: UpstreamConnection | None = None

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.split(b"?", 1)[0].decode("latin-1")

    def header(self, name: bytes) -> str | None:
        """The first value of a header as text, or None."""
        value = heads.find(self.headers, name)
        return None if value is None else value.decode("latin-1")


Handler = Callable[[Exchange], Awaitable[None]]
Refusal = Callable[[Exchange, int, str], tuple[bytes, bytes]]
"""(exchange, status, message) -> (content type, body) in the shape of the API that was called."""


class ClientConnection(asyncio.Protocol):
    """One client's connection; see the module."""

    __slots__ = (
        "_body_size",
        "_buffered",
        "_handler",
        "_header_bytes",
        "_parser",
        "_parsing",
        "_queue",
        "_refusal",
        "_sweeper",
        "_task",
        "current",
        "deadline",
        "half_close",
        "limits",
        "on_close",
        "on_open",
        "peername",
        "transport",
        "write_paused",
    )

    def __init__(
        self,
        handler: Handler,
        refusal: Refusal,
        limits: ClientLimits,
        sweeper: Sweeper,
        on_open: Callable[[ClientConnection], bool],
        on_close: Callable[[ClientConnection], None],
        *,
        half_close: bool = False,
    ) -> None:
        self._handler = handler
        self._refusal = refusal
        self._sweeper = sweeper
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        self._task: asyncio.Task[None] | None = None
        self._header_bytes = 0
        self._body_size = 0
        self._parsing: Exchange | None = None
        self.limits = limits
        self.on_open = on_open
        self.on_close = on_close
        self.half_close = half_close
        self.current: Exchange | None = None
        self.deadline = inf
        self.write_paused = False
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.peername = ""

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peername = peer[0] if isinstance(peer, tuple) else ""
        self._sweeper.add(self)
        self.deadline = clock.now() + self.limits.header_timeout_s
        if not self.on_open(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; whatever is under way for it ends."""
        self._sweeper.discard(self)
        if self._task is not None:
            self._task.cancel()
        self._queue.clear()
        self.on_close(self)

    def eof_received(self) -> bool:
        """The client closed its sending side: gone, unless half-closed clients are to be honoured."""
        if self.half_close and (self.current is not None or self._queue):
            if self.current is not None:
                self.current.close = True
            return True
        return False

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading from the server, and start its clock."""
        self.write_paused = True
        self.deadline = clock.now() + self.limits.write_timeout_s
        if self.current is not None and self.current.upstream is not None:
            self.current.upstream.pause()

    def resume_writing(self) -> None:
        """It caught up."""
        self.write_paused = False
        self.deadline = inf
        if self.current is not None and self.current.upstream is not None:
            self.current.upstream.resume()

    def expired(self, now: float) -> None:
        """A receipt, idle or write deadline has passed."""
        if self.write_paused or self.transport.is_closing():
            self.transport.abort()  # what is left is not taken
        elif self.current is not None:
            return
        elif self._parsing is None:
            self.transport.close()  # idle keep-alive
        else:
            self._refuse(408, "the request was not received in time")

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._parsing is None or not self._parsing.head_complete:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(501, "protocol upgrades are not supported here")
        except httptools.HttpParserError as error:
            self._refuse(400, f"malformed HTTP request: {error}")
        else:
            parsing = self._parsing
            if parsing is not None and not parsing.head_complete:
                if self._header_bytes > self.limits.max_header_bytes:
                    self._too_long(parsing)
            elif len(self._queue) >= PIPELINED:
                self.transport.pause_reading()

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._parsing = Exchange(self)
        self._body_size = 0
        if self.current is None:
            self.deadline = clock.now() + self.limits.header_timeout_s

    def on_url(self, url: bytes) -> None:
        """A piece of its target."""
        assert self._parsing is not None
        self._parsing.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; those of a trailer are dropped."""
        parsing = self._parsing
        assert parsing is not None
        if not parsing.head_complete:
            parsing.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Its head is there: judge it before any of the body is taken."""
        parsing = self._parsing
        assert parsing is not None
        parsing.head_complete = True
        parsing.method = self._parser.get_method()
        version = self._parser.get_http_version()
        parsing.old = version == "1.0"
        parsing.close = not self._parser.should_keep_alive()
        self._header_bytes = 0
        size = len(parsing.target) + sum(len(k) + len(v) + 4 for k, v in parsing.headers)
        if size > self.limits.max_header_bytes or len(parsing.headers) > MAX_HEADERS:
            self._too_long(parsing)
            return
        self._judge(parsing, version)
        if parsing.refused is None and parsing.expects_continue and self.current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self.current is None:
            self.deadline = clock.now() + self.limits.body_timeout_s

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        parsing = self._parsing
        assert parsing is not None
        if parsing.refused is not None:
            return
        self._body_size += len(body)
        if self._body_size > self.limits.max_body_bytes:
            self._mark_refused(parsing, 413, f"the body is larger than {self.limits.max_body_bytes} bytes")
            return
        parsing.body_bytes.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        parsing, self._parsing = self._parsing, None
        if parsing is None or parsing.refused is not None:
            return
        pieces = parsing.body_bytes
        parsing.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        parsing.body_bytes = []
        if self.current is None:
            self._start(parsing)
        else:
            self._queue.append(parsing)

    # -- judgement ---------------------------------------------------------------------------------------------------

    def _judge(self, parsing: Exchange, version: str) -> None:
        hosts = sum(1 for key, _ in parsing.headers if key == b"host")
        if version not in ("1.1", "1.0"):
            self._mark_refused(parsing, 505, f"HTTP/{version} is not spoken here")
        elif hosts > 1 or (hosts == 0 and not parsing.old):
            self._mark_refused(parsing, 400, "exactly one Host header is required")
        coding = heads.find(parsing.headers, b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            self._mark_refused(parsing, 501, "only chunked transfer-encoding is supported")
        length = heads.find(parsing.headers, b"content-length")
        if length is not None and int(length) > self.limits.max_body_bytes:
            self._mark_refused(parsing, 413, f"the body is larger than {self.limits.max_body_bytes} bytes")
        expect = heads.find(parsing.headers, b"expect")
        if expect is not None:
            parsing.expects_continue = expect.lower() == b"100-continue" and not parsing.old
            if expect.lower() != b"100-continue":
                self._mark_refused(parsing, 417, "only 100-continue can be expected")

    def _mark_refused(self, parsing: Exchange, status: int, message: str) -> None:
        if parsing.refused is None:
            parsing.refused = (status, message)
            self._refuse(status, message)

    def _too_long(self, parsing: Exchange) -> None:
        long_target = len(parsing.target) > self.limits.max_header_bytes // 2
        self._mark_refused(
            parsing,
            414 if long_target else 431,
            f"the request head is larger than {self.limits.max_header_bytes} bytes",
        )

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be served and close; an answer that is under way is not disturbed, only cut after it."""
        self._queue.clear()
        if self.current is not None:
            self.current.close = True
            self.transport.pause_reading()
            return
        refused = self._parsing or Exchange(self)
        refused.refused = refused.refused or (status, message)
        refused.close = True
        content_type, body = self._refusal(refused, status, message)
        self._parsing = None
        self.current = refused
        self.respond(status, [(b"content-type", content_type)], body)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        self.deadline = inf
        exchange.started_at = clock.now()
        exchange.started_wall_ns = clock.wall_ns()
        self._task = asyncio.get_running_loop().create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        finally:
            # A handler answers every request; should a bug keep it from that, the client is not left hanging.
            if self.current is exchange:
                self.transport.abort()

    def write(self, data: bytes) -> None:
        """Write, unless the client is gone: what is under way for it ends a moment later, and data may still come."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def respond(self, status: int, headers: heads.Headers, body: bytes, added: bytes = b"") -> None:
        """Write a whole answer of our own; `added` are header lines of ours, which `headers` is cleared of."""
        exchange = self.current
        assert exchange is not None
        exchange.status = status
        framing = b"content-length: %d\r\n" % len(body) if status != 204 else b""
        head = heads.response_head(status, headers, added=added, framing=framing, close=exchange.close)
        self.write(head if exchange.method == b"HEAD" else head + body)
        self.finished()

    def finished(self) -> None:
        """The answer is written to its end: close, or go on with the next request."""
        exchange, self.current = self.current, None
        assert exchange is not None
        exchange.upstream = None
        self._task = None
        if exchange.close:
            self._queue.clear()
            self.transport.close()
        if exchange.close or self.write_paused:
            self.deadline = clock.now() + self.limits.write_timeout_s
        if exchange.close:
            return
        if self._queue:
            self._start(self._queue.popleft())
            self.transport.resume_reading()
        elif self._parsing is not None:
            self.deadline = clock.now() + self.limits.body_timeout_s
        elif not self.write_paused:
            self.deadline = clock.now() + self.limits.keepalive_timeout_s

    def drain(self) -> None:
        """No further request on this connection: an idle one is closed now, a busy one after its answer."""
        self._queue.clear()
        if self.current is not None:
            self.current.close = True
        elif self._parsing is None:
            self.transport.close()

    def end(self, message: str) -> None:
        """The grace is over: break what is under way, so that its handler ends it in the open."""
        if self.current is not None and self.current.upstream is not None:
            self.current.upstream.lost(message)
        elif self.current is not None and self._task is not None:
            self._task.cancel()
        else:
            self.transport.abort()

    def cut(self, last_words: bytes = b"") -> None:
        """End an answer that cannot be completed so that nobody takes it for complete: no final chunk, then close."""
        exchange, self.current = self.current, None
        self._task = None
        self._queue.clear()
        if exchange is None or self.write_paused:  # nobody reads last words
            self._reset()
            return
        if last_words:
            self.write(b"%x\r\n%b\r\n" % (len(last_words), last_words) if exchange.chunked else last_words)
        elif exchange.until_close:
            self._reset()
            return
        self.deadline = clock.now() + self.limits.write_timeout_s
        self.transport.close()

    def _reset(self) -> None:
        """Close with a reset, which is no end of anything; what was not sent yet is dropped."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(SOL_SOCKET, SO_LINGER, LINGER_NOT)
        self.transport.abort()
