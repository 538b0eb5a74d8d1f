"""The client's side of the relay: one connection, its requests one after the other, their answers written back.

Parses with llhttp in its strict mode (whatever is ambiguous is refused there), bounds the head, the body and the time
to receive either, and starts the handler when a request is complete. While an answer is under way it keeps reading, so
that a client who leaves is noticed at once; what a pipelining client sends ahead is bounded by pausing its socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from math import inf
from socket import IPPROTO_TCP, SO_LINGER, SOL_SOCKET, TCP_INFO, TCP_NOTSENT_LOWAT
from struct import pack
from typing import TYPE_CHECKING, Any, NoReturn, cast

import httptools

from common import clock
from common.relay import framing, heads
from common.relay.exchange import Exchange

if TYPE_CHECKING:
    from common.relay.listener import Listener

LINGER_NOT = pack("ii", 1, 0)
LINGER_S = 1.0  # a refusal is left this long to be read while its client may still be sending
PIPELINED = 16  # complete requests held behind the one under way; beyond that the socket is not read
CHUNK_HEAD_BYTES = 8  # of framing that a chunk may cost beside what `max_header_bytes` allows for all that is no body
UNSENT_BYTES = 131_072  # that the kernel takes ahead of what it may send; its own bound is some megabytes a client
LOOK_S = 0.5  # a client that half-closed is looked at this often: nothing else tells that it is gone
TCP_CLOSED = 7  # the kernel's state of a connection that was reset
ROUTE = heads.INTERNAL_PREFIX + b"route"
GETS = frozenset((b"GET", b"HEAD", b"OPTIONS"))
PREFACE = b"PRI * HTTP/2"


class _Stop(Exception):  # noqa: N818 - no error: the parser is to call back no more
    """The request is refused."""


class _Deaf:
    """A parser for what is not listened to any more."""

    def feed_data(self, data: bytes) -> None:
        """Drop it."""


class ClientConnection(asyncio.Protocol):
    """One client's connection; see the module."""

    __slots__ = (
        "_body_size",
        "_eof",
        "_lingering",
        "_listener",
        "_overhead",
        "_parser",
        "_parsing",
        "_queue",
        "_reading",
        "_task",
        "_unsent",
        "_upgrade",
        "current",
        "deadline",
        "limits",
        "peername",
        "rested_at",
        "transport",
        "verified",
        "write_paused",
    )

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._parser: Any = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        self._task: asyncio.Task[None] | None = None
        self._reading = 0  # bytes of the read that is being parsed
        self._overhead = 0  # bytes of the request that are no body
        self._body_size = 0
        self._parsing: Exchange | None = None
        self._eof = self._lingering = self._upgrade = False
        self._unsent = 0  # bytes that the client has not taken, when that was last looked at
        self.limits = listener.limits
        self.current: Exchange | None = None
        self.deadline = inf
        self.rested_at = 0.0  # when its last answer was over, or it came
        self.write_paused = False
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.peername = ""
        self.verified = False  # it showed a certificate that our authority signed

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peername = peer[0] if isinstance(peer, tuple) else ""
        self.verified = bool(transport.get_extra_info("peercert"))
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self.rested_at = clock.now()
        self.deadline = self.rested_at + self.limits.header_timeout_s
        self._listener.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; whatever is under way for it ends."""
        if self._task is not None:
            self._task.cancel()
        self._queue.clear()
        self._parser = _Deaf()  # the real one refers to us: freed at once and not by the collector
        self._listener.closed(self)

    def eof_received(self) -> bool:
        """The client closed its sending side: gone, unless half-closed clients are to be honoured.

        A request that costs no server's work (a GET) is answered in any case; health checkers half-close.
        """
        if self.current is None or self._lingering:
            return False
        peer = heads.find(self.current.headers, ROUTE) is not None  # which closes both sides or none
        if (peer or not self._listener.half_close) and (self.current.method not in GETS or self._queue):
            return False
        self._eof = True
        (self._queue[-1] if self._queue else self.current).close = True
        if not self.write_paused:
            self.deadline = clock.now() + LOOK_S
        return True

    def pause_writing(self) -> None:
        """The client reads too slowly: stop reading from the server, and start its clock."""
        self.write_paused = True
        self._await_reader(clock.now())
        if self.current is not None and self.current.upstream is not None:
            self.current.upstream.pause()

    def resume_writing(self) -> None:
        """It caught up."""
        self.write_paused = False
        self.deadline = clock.now() + LOOK_S if self._eof else inf
        if self.current is None:
            self._rest()
        elif self.current.upstream is not None:
            self.current.upstream.resume()

    def expired(self, now: float) -> None:
        """A receipt, idle or write deadline has passed."""
        if (self.write_paused or self.transport.is_closing()) and self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader(now)  # it takes some, slowly
        elif self.write_paused or self._lingering or self.transport.is_closing():
            self.transport.abort()  # what is left is not taken
        elif self.current is not None:
            self._look(now)
        elif self._parsing is None:
            self.close()  # idle keep-alive
        else:
            self._refuse(408, "the request was not received in time")

    def _look(self, now: float) -> None:
        """Whether a client that half-closed has reset the connection since; no event tells of that."""
        if self._eof:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.getsockopt(IPPROTO_TCP, TCP_INFO, 1)[0] == TCP_CLOSED:
                self.transport.abort()
            else:
                self.deadline = now + LOOK_S

    def close(self) -> None:
        """Close when what is written has been taken, or the write time-out is over."""
        self.transport.close()
        self._await_reader(clock.now())

    def _await_reader(self, now: float) -> None:
        """The client has to take some of what is written within the write time-out, or it is dropped."""
        self._unsent = self.transport.get_write_buffer_size()
        self.deadline = now + self.limits.write_timeout_s

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        while data:  # once, but for requests that offer another protocol: one pass more for each
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Have the parser read this; what it is to read after it has stopped at the offer of another protocol."""
        self._reading = len(data)
        self._overhead += self._reading
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as pause:
            return self._upgraded(data[pause.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Stop):
                raise  # a bug of ours
            return b""
        except httptools.HttpParserError as error:
            if data.startswith(PREFACE):
                self._refuse(505, "HTTP/2 is not spoken here")
            else:
                self._refuse(400, f"malformed HTTP request: {error}")
            return b""
        parsing = self._parsing
        if parsing is None:
            if len(self._queue) >= PIPELINED:
                self.transport.pause_reading()
        elif self._overhead > self.limits.max_header_bytes:
            if not parsing.head_complete:
                self._refuse(*framing.too_long(parsing, self.limits))
            else:
                self._refuse(400, "the body's framing and trailers are larger than a head may be")
        return b""

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._parsing = Exchange(self)
        self._body_size = 0
        self._upgrade = False
        if self.current is None:
            self._overhead = self._reading
            self.deadline = clock.now() + self.limits.header_timeout_s
        else:
            self._overhead = 0  # at most one read of it is not counted here, and counted at the end of the head

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
        parsing, parser = self._parsing, self._parser
        assert parsing is not None
        parsing.head_complete = True
        parsing.method = parser.get_method()
        parsing.fields = dict(reversed(parsing.headers))
        version = parser.get_http_version()
        parsing.old = version == "1.0"
        parsing.close = not parser.should_keep_alive()
        if (self._overhead > self.limits.max_header_bytes or self.current is not None) and (
            framing.head_bytes(parsing) > self.limits.max_header_bytes
        ):
            self._refused(*framing.too_long(parsing, self.limits))
        if len(parsing.headers) > framing.MAX_HEADERS:
            self._refused(431, f"the request has more than {framing.MAX_HEADERS} header fields")
        self._overhead = 0
        refused = framing.judge(parsing, version, self.limits)
        if refused is not None:
            self._refused(*refused)
        if parser.should_upgrade():
            self._upgrade = True
            return
        if parsing.target[:1] != b"/":
            parsing.target = framing.origin_form(parsing.target)
        if self.current is None:
            if parsing.expects_continue:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.deadline = clock.now() + self.limits.body_timeout_s

    def on_chunk_header(self) -> None:
        """A chunk's size was read; its framing is paid for."""
        self._overhead -= CHUNK_HEAD_BYTES

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        parsing = self._parsing
        assert parsing is not None
        size = len(body)
        self._overhead -= size
        self._body_size += size
        if self._body_size > self.limits.max_body_bytes:
            self._refused(413, f"the body is larger than {self.limits.max_body_bytes} bytes")
        parsing.pieces.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._upgrade:
            return
        parsing, self._parsing = self._parsing, None
        assert parsing is not None
        pieces = parsing.pieces
        parsing.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        parsing.pieces = []
        if self.current is None:
            self._start(parsing)
        else:
            self._queue.append(parsing)

    # -- what is refused ---------------------------------------------------------------------------------------------

    def _upgraded(self, rest: bytes) -> bytes:
        """The parser has stopped after a head that offers another protocol: refuse it, or have it read without."""
        parsing = self._parsing
        assert parsing is not None
        refused = framing.upgrade_refused(parsing)
        if refused is not None:
            self._refuse(*refused)
            return b""
        self._parsing = None
        self._parser = httptools.HttpRequestParser(self)
        return framing.without_upgrade(parsing) + rest

    def _refused(self, status: int, message: str) -> NoReturn:
        """Refuse what is being parsed, and have the parser stop."""
        self._refuse(status, message)
        raise _Stop

    def _refuse(self, status: int, message: str) -> None:
        """Answer what cannot be served and close; an answer that is under way is not disturbed, only cut after it."""
        refused = self._parsing or Exchange(self)
        refused.refused = status, message
        refused.close = True
        self._parser = _Deaf()
        self._parsing = None
        if self.current is None:
            self._answer_refused(refused)
        else:
            self._queue.append(refused)  # after those before it

    def _answer_refused(self, refused: Exchange) -> None:
        assert refused.refused is not None
        self.current = refused
        status, message = refused.refused
        content_type, body = self._listener.refusal(refused, status, message)
        self.respond(status, [(b"content-type", content_type)], body)

    def _linger(self) -> None:
        """Close without a reset that would take the answer from a client that is still sending (RFC 9112 9.6)."""
        self._lingering = True
        self._queue.clear()
        self.deadline = clock.now() + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()

    # -- answers -----------------------------------------------------------------------------------------------------

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        self.deadline = inf
        if self._listener.leaving:
            exchange.close = True
        exchange.started_at = clock.now()
        exchange.started_wall_ns = clock.wall_ns()
        self._task = asyncio.get_running_loop().create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._listener.handler(exchange)
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
        exchange.committed = True
        framing_line = b"content-length: %d\r\n" % len(body) if status != 204 else b""
        head = heads.response_head(status, headers, added + framing_line + exchange.connection_line)
        self.write(head if exchange.method == b"HEAD" else head + body)
        self.finished()

    def finished(self) -> None:
        """The answer is written to its end: close, or go on with the next request."""
        exchange, self.current = self.current, None
        assert exchange is not None
        exchange.upstream = None
        self._task = None
        if exchange.refused is not None:
            self._linger()
        elif exchange.close:
            self._queue.clear()
            self.close()
        elif self._queue:
            self._next()
        elif not self.write_paused:
            self._rest()

    def _next(self) -> None:
        following = self._queue.popleft()
        if following.refused is not None:
            self._answer_refused(following)
            return
        self._start(following)
        self.transport.resume_reading()

    def _rest(self) -> None:
        """Nothing is under way: wait for the next request, or for the rest of it."""
        parsing = self._parsing
        if parsing is None:
            self.rested_at = clock.now()
            self.deadline = self.rested_at + self.limits.keepalive_timeout_s
            return
        limits = self.limits
        self.deadline = clock.now() + (limits.body_timeout_s if parsing.head_complete else limits.header_timeout_s)
        if parsing.expects_continue and parsing.head_complete and not self._body_size:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    @property
    def idle_since(self) -> float | None:
        """Since when it has neither a request under way nor a part of one; None if it has."""
        if self.current is not None or self._parsing is not None or self._lingering or self.transport.is_closing():
            return None
        return self.rested_at

    def last(self) -> None:
        """The request under way is the last one here: its answer says so, if its head is not written yet."""
        if self.current is not None:
            self.current.close = True

    def end(self, message: str) -> None:
        """The grace is over: end what is under way in the open."""
        self._queue.clear()
        exchange, task = self.current, self._task
        if exchange is None or task is None:
            self.transport.abort()
            return
        exchange.close = exchange.ended = True
        if exchange.committed:
            if exchange.upstream is not None:
                exchange.upstream.lost(message)
            if self.current is exchange:  # its stream broke, and was to be carried on by another server
                self.cut()
                task.cancel()
        elif exchange.status:  # nothing but keep-alive comments
            self.cut()
            task.cancel()
        else:
            content_type, body = self._listener.refusal(exchange, 503, message)
            self.respond(503, [(b"content-type", content_type), (b"retry-after", b"1")], body)
            task.cancel()

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
        self.close()

    def _reset(self) -> None:
        """Close with a reset, which is no end of anything; what was not sent yet is dropped."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and not self.transport.is_closing():
            sock.setsockopt(SOL_SOCKET, SO_LINGER, LINGER_NOT)
        self.transport.abort()
