"""The server's side of the relay: pooled connections, one request at a time on each, answers streamed to the client.

Bytes of a body are written to the client as they come, in the framing its HTTP version knows, with the two sockets'
backpressure joined: no task a chunk and no queue between. A connection that ends without a byte of an answer is told
apart by what is known (never connected, reused and closed at once, or accepted and lost), because only the first two
are surely safe to send again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from common import clock
from common.errors import ConnectFailed, FirstByteTimeout, ResetBeforeByte, Saturated, StreamBroken
from common.relay import heads
from common.relay.body import Observer
from common.relay.client import Exchange
from common.relay.delay import Delayed
from common.relay.sweeper import Sweeper

COLLECTED_BYTES = 65_536  # of an answer that is judged before it is passed on (errors); the rest of it is dropped
HELD_BYTES = 65_536  # a whole answer up to this size is passed on when it is complete, so that a break can be mended
IDLE_PER_ENDPOINT = 256  # idle connections kept to one address
KEEPALIVE_RACE_S = 0.5  # a reused connection lost this soon after a request was written was closing already


class UpstreamLimits(Protocol):
    """The bounds towards servers, from the configuration (`upstream:`); seconds and counts."""

    connect_timeout_s: float
    first_byte_timeout_s: float
    stall_timeout_s: float
    total_timeout_s: float
    idle_timeout_s: float
    max_connections: int


class Verdict(Enum):
    """What to do with an answer, judged by its head."""

    RELAY = "relay"  # pass it on to the client
    COLLECT = "collect"  # read it and decide: it may be tried elsewhere


@dataclass(slots=True)
class Answer:
    """How a request to a server ended. `body` has what was collected; a relayed answer is at the client already."""

    status: int
    headers: heads.Headers
    relayed: bool
    observer: Observer
    body: bytes = b""
    reused: bool = False


@dataclass(slots=True)
class Sending:
    """What is sent on one attempt, and who is told of its progress."""

    exchange: Exchange
    head: bytes
    body: bytes
    judge: Callable[[int, heads.Headers], Verdict]
    first_byte: Callable[[], None]
    added: bytes = b""  # header lines added to a relayed answer's head
    replaced: bytes | None = None  # prefix of the server's header names in whose stead `added` has others
    break_words: Callable[[Observer, str], bytes] = lambda observer, message: b""
    tries: int = 1  # servers that may be tried behind the address, one after the other
    slack_s: float = 0.0  # by how much every time-out is longer, so that a peer's own comes first


class UpstreamConnection(asyncio.Protocol):
    """One connection to a server; see the module."""

    __slots__ = (
        "_answer",
        "_answered",
        "_chunked",
        "_collected",
        "_done",
        "_future",
        "_headers",
        "_heard",
        "_held",
        "_keep",
        "_out",
        "_parser",
        "_pool",
        "_sending",
        "_total_deadline",
        "_until_close",
        "_written_at",
        "closed",
        "deadline",
        "idle_since",
        "reused",
        "transport",
    )

    def __init__(self, pool: AddressPool) -> None:
        self._pool = pool
        self._parser: httptools.HttpResponseParser | None = None
        self._sending: Sending | None = None
        self._future: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._headers: heads.Headers = []
        self._out: list[bytes] = []
        self._collected = 0
        self._chunked = self._done = self._keep = self._until_close = self._answered = self._held = False
        self._heard = False  # a byte came since the request was written
        self._written_at = 0.0
        self._total_deadline = inf
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.deadline = inf
        self.idle_since = 0.0
        self.reused = False
        self.closed = False

    # -- one request -------------------------------------------------------------------------------------------------

    def send(self, sending: Sending) -> asyncio.Future[Answer]:
        """Write a request; the future ends with an Answer or an UpstreamError."""
        loop = asyncio.get_running_loop()
        self._sending = sending
        self._future = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._answer = None
        self._answered = self._done = self._chunked = self._until_close = self._held = self._heard = False
        self._collected = 0
        self._written_at = now = clock.now()
        self._total_deadline = now + self._pool.limits.total_timeout_s + sending.slack_s
        self._arm(now, sending)
        sending.exchange.upstream = self
        if len(sending.body) > 16_384:
            self.transport.write(sending.head)
            self.transport.write(sending.body)
        else:
            self.transport.write(sending.head + sending.body)
        if sending.exchange.client.write_paused:
            self.pause()
        return self._future

    def pause(self) -> None:
        """The client cannot take more."""
        if not self.closed:
            self.transport.pause_reading()
            self.deadline = inf  # the client's own write deadline runs instead

    def resume(self) -> None:
        """The client takes more again."""
        if not self.closed:
            self.transport.resume_reading()
            if self._sending is not None:
                self._arm(clock.now(), self._sending)

    def put_back(self) -> None:
        """Keep a connection on which nothing was sent."""
        self._pool.put_back(self)

    def abandon(self) -> None:
        """Nobody waits for the answer any more: close at once, so that the server stops working on it."""
        self._sending = self._future = None
        self.transport.abort()

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        if self._parser is None or self._sending is None:
            self.transport.abort()  # a server that speaks unasked cannot be trusted with the next request
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.lost(f"the server's answer is not valid HTTP: {error}")
            self.transport.abort()
            return
        sending = self._sending
        if self._out and (self._done or not self._held):
            self._flush(sending)
        if self._done:
            self._finish()
        elif self._answered and not sending.exchange.client.write_paused:
            self._arm(clock.now(), sending)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self.closed = True
        self._pool.ended(self)
        if self._sending is None:
            return
        if self._until_close and exc is None:
            self._end_of_body()
            self._flush(self._sending)
            self._finish()
        else:
            self.lost("the server closed the connection")

    def expired(self, now: float) -> None:
        """A first byte, a next chunk, or the whole answer is overdue."""
        if self._sending is None:
            return
        if not self._answered:
            self._fail(FirstByteTimeout(f"no answer within {self._pool.limits.first_byte_timeout_s:g} s"))
        elif now >= self._total_deadline:
            self.lost(f"the answer was not complete within {self._pool.limits.total_timeout_s:g} s")
        else:
            self.lost(f"no byte for {self._pool.limits.stall_timeout_s:g} s")
        self.transport.abort()

    def _flush(self, sending: Sending) -> None:
        if self._out:
            sending.exchange.client.write(b"".join(self._out))
            self._out.clear()

    def _arm(self, now: float, sending: Sending) -> None:
        limits = self._pool.limits
        silence = limits.stall_timeout_s if self._answered else limits.first_byte_timeout_s * sending.tries
        self.deadline = min(now + silence + sending.slack_s, self._total_deadline)

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._done:
            raise httptools.HttpParserError("more than one answer")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer's are dropped."""
        if not self._answered:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of the answer: judge it, and begin to pass it on."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            return
        assert self._sending is not None
        sending, exchange = self._sending, self._sending.exchange
        self._answered = True
        self._keep = self._parser.should_keep_alive()
        observer = Observer((heads.find(self._headers, b"content-type") or b"").decode("latin-1"))
        relay = sending.judge(status, self._headers) is Verdict.RELAY
        self._answer = Answer(status, self._headers, relay, observer, reused=self.reused)
        length = heads.find(self._headers, b"content-length")
        coded = heads.find(self._headers, b"transfer-encoding") is not None
        body = heads.has_body(exchange.method, status)
        self._until_close = body and not coded and length is None
        if not body and exchange.method == b"HEAD":
            # llhttp does not know that this answers a HEAD and would wait for the body that its length announces.
            self._done, self._keep = True, False
        if relay:
            self._relay_head(sending, status, length if not coded else None, body=body)

    def _relay_head(self, sending: Sending, status: int, length: bytes | None, *, body: bool) -> None:
        exchange = sending.exchange
        self._chunked = body and length is None and not exchange.old
        if length is not None:
            framing = b"content-length: %b\r\n" % length
        elif self._chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing = b""
            exchange.close = exchange.close or body
            exchange.until_close = body
        exchange.status = status
        exchange.chunked = self._chunked
        self._held = length is not None and int(length) <= HELD_BYTES
        self._out.append(
            heads.response_head(
                status,
                self._headers,
                added=sending.added,
                framing=framing,
                close=exchange.close,
                replaced=sending.replaced,
            )
        )
        if not body:
            sending.first_byte()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        answer, sending = self._answer, self._sending
        assert answer is not None
        assert sending is not None
        if not answer.relayed:
            if self._collected < COLLECTED_BYTES:
                answer.body += body
            self._collected += len(body)
            return
        if not answer.observer.bytes:
            sending.first_byte()
        answer.observer.saw(body)
        if self._chunked:
            self._out += (b"%x\r\n" % len(body), body, b"\r\n")
        else:
            self._out.append(body)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._answered:
            self._end_of_body()

    def _end_of_body(self) -> None:
        if self._done:
            return
        self._done = True
        if self._chunked:
            self._out.append(b"0\r\n\r\n")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        sending, future, answer = self._sending, self._future, self._answer
        assert sending is not None
        assert future is not None
        assert answer is not None
        self._sending = self._future = self._parser = None
        self.deadline = inf
        if answer.relayed:
            sending.exchange.client.finished()
        if not self.closed:
            if self._keep and not self._until_close:
                self._pool.put_back(self)
            else:
                self.transport.abort()
        if not future.done():
            future.set_result(answer)

    def lost(self, message: str) -> None:
        """The answer cannot be completed: tell the client, and whoever waits for it."""
        if not self._answered:
            self._fail(ResetBeforeByte(message))
            return
        sending, answer = self._sending, self._answer
        assert sending is not None
        assert answer is not None
        if self._held:
            self._out.clear()
            sending.exchange.status = 0
            got = f"{answer.observer.bytes} of {(heads.find(self._headers, b'content-length') or b'').decode()} bytes"
            self._fail(ResetBeforeByte(f"{message} after {got} of the answer's declared length"))
            return
        if answer.relayed:
            self._flush(sending)
            sending.exchange.client.cut(sending.break_words(answer.observer, message))
        self._fail(StreamBroken(message))

    def _fail(self, error: ConnectFailed | ResetBeforeByte | FirstByteTimeout | StreamBroken) -> None:
        future, self._future = self._future, None
        self._sending = self._parser = None
        self.deadline = inf
        if future is not None and not future.done():
            future.set_exception(error)

    @property
    def lost_in_race(self) -> bool:
        """Whether this reused connection was closing already when the request was written on it."""
        return self.reused and not self._heard and clock.now() - self._written_at < KEEPALIVE_RACE_S


class AddressPool:
    """Connections to one address."""

    def __init__(self, url: str, limits: UpstreamLimits, sweeper: Sweeper, delay_s: float = 0.0) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.host_header = parts.netloc.rsplit("@", 1)[-1].encode()
        self.base = parts.path.rstrip("/").encode()
        self.limits = limits
        self.delay_s = delay_s
        self._open: set[UpstreamConnection] = set()  # dialling, busy or idle
        self._sweeper = sweeper
        self._idle: list[UpstreamConnection] = []

    async def connect(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection (unless `fresh`), or a new one. Raises ConnectFailed or Saturated."""
        now = clock.now()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.closed or connection.transport.is_closing():
                continue
            if now - connection.idle_since > self.limits.idle_timeout_s:
                connection.transport.abort()
                continue
            connection.reused = True
            return connection
        if len(self._open) >= self.limits.max_connections:
            raise Saturated(f"{self.limits.max_connections} connections to {self.host}:{self.port} are in use")
        return await self._dial()

    async def _dial(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        connection = UpstreamConnection(self)
        protocol: asyncio.Protocol = Delayed(connection, self.delay_s) if self.delay_s else connection
        self._open.add(connection)
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                await loop.create_connection(lambda: protocol, self.host, self.port)
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
        except (OSError, TimeoutError) as error:
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            self._drop(connection)
            raise ConnectFailed(f"cannot connect to {self.host}:{self.port}: {reason}") from error
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        if connection.closed:
            raise ConnectFailed(f"cannot connect to {self.host}:{self.port}: closed as soon as it was made")
        self._sweeper.add(connection)
        return connection

    def _drop(self, connection: UpstreamConnection) -> None:
        # A cancelled dial may have connected in the same instant; its socket must not outlive it unowned.
        self._open.discard(connection)
        if connection.transport is not None:
            connection.transport.abort()

    def put_back(self, connection: UpstreamConnection) -> None:
        """A request is over and its connection may serve another."""
        connection.idle_since = clock.now()
        if len(self._idle) < IDLE_PER_ENDPOINT:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def ended(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._sweeper.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def trim(self, now: float) -> None:
        """Close what has been idle for too long."""
        for connection in [c for c in self._idle if now - c.idle_since > self.limits.idle_timeout_s]:
            connection.transport.abort()

    def close(self) -> None:
        """Close all idle connections."""
        for connection in list(self._idle):
            connection.transport.abort()
