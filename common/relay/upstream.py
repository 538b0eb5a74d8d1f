"""The server's side of the relay: one connection, one request at a time, its answer streamed to the client.

Bytes of a body are written to the client as they come, in the framing its HTTP version knows, with the two sockets'
backpressure joined: no task a chunk and no queue between. Nothing is written before there is something of the body to
write, so that a server that breaks before that can be replaced; servers send the head of a stream long before its first
token. A connection that ends without a byte of a body is told apart by what is known (never connected, reused and
closed at once, or accepted and lost), because only the first two are surely safe to send again.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any, cast

import httptools

from common import clock
from common.errors import FirstByteTimeout, ResetBeforeByte, StreamBroken, UpstreamError
from common.relay import heads
from common.relay.body import EventHold, Observer
from common.relay.exchange import Exchange
from common.relay.sending import Answer, Sending, Verdict

if TYPE_CHECKING:
    from common.relay.pool import AddressPool

COLLECTED_BYTES = 65_536  # of an answer that is judged before it is passed on (errors); the rest of it is dropped
HELD_BYTES = 65_536  # a whole answer up to this size is passed on when it is complete, so that a break can be mended
HEAD_BYTES = 262_144  # of a server's answer before its body; no server sends a tenth of it
KEEPALIVE_RACE_S = 0.5  # a reused connection lost this soon after a request was written was closing already
APART_BYTES = 16_384  # a request's body above this is written apart from its head, rather than copied behind it


class UpstreamConnection(asyncio.Protocol):
    """One connection to a server; see the module."""

    __slots__ = (
        "_chunked",
        "_collected",
        "_done",
        "_future",
        "_head_bytes",
        "_headers",
        "_heard",
        "_hold",
        "_keep",
        "_length",
        "_moved_at",
        "_out",
        "_parser",
        "_pool",
        "_sending",
        "_started",
        "_total_deadline",
        "_until_close",
        "_whole",
        "_written_at",
        "answer",
        "began_at",
        "closed",
        "deadline",
        "idle_since",
        "moved_at",
        "reused",
        "transport",
    )

    def __init__(self, pool: AddressPool) -> None:
        self._pool = pool
        # One for all answers: making one costs as much as parsing.
        self._parser: Any = httptools.HttpResponseParser(self)
        self._sending: Sending | None = None
        self._future: asyncio.Future[Answer] | None = None
        self._headers: heads.Headers = []
        self._length: bytes | None = None  # the answer's content-length
        self._out: list[bytes] = []
        self._hold: EventHold | None = None
        self._collected = self._head_bytes = 0
        self._chunked = self._done = self._keep = self._until_close = False
        self._heard = False  # a byte came since the request was written
        self._started = False  # a byte of the body came
        self._whole = False  # it is passed on when it is complete
        self._written_at = 0.0
        self._moved_at = 0.0  # when something of the body came last
        self._total_deadline = inf
        self.answer: Answer | None = None  # since its head is there
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.began_at = self.moved_at = 0.0  # first and latest byte of the body of the answer under way
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
        self.answer = self._hold = None
        self._done = self._chunked = self._until_close = self._whole = self._heard = self._started = False
        self._collected = self._head_bytes = 0
        self._written_at = now = clock.now()
        self.began_at = 0.0
        self._total_deadline = now + self._pool.limits.total_timeout_s + sending.slack_s
        self._arm(now, sending)
        sending.exchange.upstream = self
        if len(sending.body) > APART_BYTES:
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
            self.deadline = self._total_deadline  # and the client's own write deadline runs

    def resume(self) -> None:
        """The client takes more again."""
        if not self.closed:
            self.transport.resume_reading()
            if self._sending is not None:
                self._moved_at = clock.now()
                self._arm(self._moved_at, self._sending)

    def abandon(self) -> None:
        """Nobody waits for the answer any more: close at once, so that the server stops working on it."""
        self._sending = self._future = None
        self.transport.abort()

    @property
    def unanswered(self) -> bool:
        """Whether a request was written and nothing of its answer came."""
        return self._sending is not None and not self._heard

    @property
    def uncommitted(self) -> bool:
        """Whether a request was written and its client has nothing of an answer yet."""
        return self._sending is not None and not self._sending.exchange.committed

    @property
    def patient(self) -> bool:
        """Whether nothing is to be heard of its request before the answer is whole."""
        return self._sending is not None and self._sending.patient

    @property
    def streams(self) -> bool:
        """Whether a stream is under way and has begun."""
        return self._started and self._sending is not None and not self._sending.patient

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        sending = self._sending
        if sending is None:
            self.transport.abort()  # a server that speaks unasked cannot be trusted with the next request
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep = False  # what follows a whole answer is not ours to understand
            if not self._done:
                self.lost(f"the server's answer is not valid HTTP: {error}")
                return
        if self._started or self._done:
            self._moved(clock.now())
        if self._done:
            self._finish(sending)
            return
        if self._out and not self._whole:
            self._flush(sending)
        if self._started:
            self._moved_at = clock.now()
        elif self.answer is None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.lost(f"the server's answer has no end of its head within {HEAD_BYTES} bytes")

    def _moved(self, now: float) -> None:
        """Something of the body came, or its end."""
        pool = self._pool
        self.moved_at = pool.moved_at = now
        if not self.began_at:
            self.began_at = now
        if self._done:
            pool.completed_at = now

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended."""
        self.closed = True
        self._parser = None  # it refers to us: freed at once and not by the collector
        self._pool.ended(self)
        if self._sending is None:
            return
        if self._until_close and exc is None:
            self._done = True
            self._finish(self._sending)
        else:
            self.lost("the server closed the connection")

    def expired(self, now: float) -> None:
        """A first byte, a next chunk, or the whole answer is overdue."""
        sending, limits = self._sending, self._pool.limits
        if sending is None:
            return
        if sending.exchange.client.write_paused:
            sending.exchange.client.transport.abort()  # the whole time is over, and it is not the server's doing
            return
        if self._started:  # what has come since is not told by setting the deadline anew at every chunk
            due = min(self._moved_at + limits.stall_timeout_s + sending.slack_s, self._total_deadline)
            if now < due:
                self.deadline = due
                return
        if now >= self._total_deadline and self._started:
            self.lost(f"the answer was not complete within {limits.total_timeout_s:g} s")
        elif self._started:
            self.lost(f"no byte for {limits.stall_timeout_s:g} s")
        else:
            waited = min(limits.first_byte_timeout_s, limits.total_timeout_s)
            self.give_up(FirstByteTimeout(f"no answer within {waited:g} s"))

    def _arm(self, now: float, sending: Sending) -> None:
        limits = self._pool.limits
        if self._started:
            due = now + limits.stall_timeout_s
        else:  # counted from the request: a head alone is no progress, servers send it before they begin
            due = self._written_at + limits.first_byte_timeout_s * sending.tries
        self.deadline = min(due + sending.slack_s, self._total_deadline)

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins, or another one after it, which nobody asked for."""
        if self._done:
            self._keep = False
        else:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer's are dropped."""
        if self.answer is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head of the answer: judge it."""
        status = self._parser.get_status_code()
        if status < 200 or self._done:
            return
        assert self._sending is not None
        sending, exchange, headers = self._sending, self._sending.exchange, self._headers
        self._keep = self._parser.should_keep_alive()
        fields = dict(reversed(headers))
        content_type = fields.get(b"content-type", b"").decode("latin-1")
        observer = sending.observer = Observer(content_type, coded=b"content-encoding" in fields)
        relay = sending.judge(sending, status, headers) is Verdict.RELAY
        self.answer = Answer(status, headers, relay, observer)
        self._length = length = fields.get(b"content-length")
        coded = b"transfer-encoding" in fields
        self._chunked = exchange.committed and exchange.chunked  # where it carries an answer on, that is framed already
        body = heads.has_body(exchange.method, status)
        self._until_close = body and not coded and length is None
        if not body:
            # llhttp does not know that this answers a HEAD and would wait for the body that its length announces.
            self._done = True
            self._keep = self._keep and exchange.method != b"HEAD"
        self._whole = length is not None and int(length) <= HELD_BYTES
        if relay and observer.ends is not None:
            self._hold = EventHold(observer.ends)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        answer, sending = self.answer, self._sending
        if answer is None or sending is None or self._done:
            return  # of an answer that nobody asked for
        if not self._started:
            self._started = True
            self._moved_at = clock.now()
            if not sending.exchange.client.write_paused:
                self._arm(self._moved_at, sending)
            if answer.relayed:
                sending.first_byte()
        if not answer.relayed or answer.status >= 400:
            self._collect(answer, body)
            if not answer.relayed:
                return
        if self._hold is not None:
            body = self._hold.whole(body)
            if not body:
                return
        body = self._passed(answer, sending, body)
        if not body:
            return
        if self._chunked:  # known once the head is written; what is here by then is framed there
            self._out += (b"%x\r\n" % len(body), body, b"\r\n")
        else:
            self._out.append(body)

    @staticmethod
    def _passed(answer: Answer, sending: Sending, body: bytes) -> bytes:
        """A piece of the body as the client is to have it."""
        answer.observer.saw(body)
        if sending.saw is not None:
            sending.saw(body)
        return body if sending.edit is None else sending.edit(body)

    def _collect(self, answer: Answer, body: bytes) -> None:
        room = COLLECTED_BYTES - len(answer.body)
        answer.body += body[:room]
        answer.cut = answer.cut or len(body) > room

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self.answer is not None:
            self._done = True

    # -- what goes to the client -------------------------------------------------------------------------------------

    def _flush(self, sending: Sending) -> None:
        if not sending.exchange.committed:
            self._commit(sending)
        sending.exchange.client.write(b"".join(self._out))
        self._out.clear()

    def _commit(self, sending: Sending) -> None:
        """Write the head: from here on there is no way back, and the request's body is not needed any more."""
        exchange, answer = sending.exchange, self.answer
        assert answer is not None
        exchange.committed = True
        exchange.body = sending.body = b""
        body = heads.has_body(exchange.method, answer.status)
        ahead = exchange.status != 0  # keep-alive comments have begun the answer, with a head of our own
        if ahead:
            self._chunked = exchange.chunked
        else:
            added = sending.added + self._framing(exchange, answer, body=body)
            head = heads.response_head(answer.status, answer.headers, added, sending.replaced)
        exchange.status = answer.status
        if self._chunked:
            self._out = [piece for body_ in self._out for piece in (b"%x\r\n" % len(body_), body_, b"\r\n")]
        if not ahead:
            self._out.insert(0, head)

    def _framing(self, exchange: Exchange, answer: Answer, *, body: bool) -> bytes:
        """The lines of the head that frame the body for this client."""
        if self._length is not None and heads.find(answer.headers, b"transfer-encoding") is None:
            return b"content-length: %b\r\n%b" % (self._length, exchange.connection_line)
        if not body:
            return exchange.connection_line
        if not exchange.old:
            self._chunked = exchange.chunked = True
            return b"transfer-encoding: chunked\r\n" + exchange.connection_line
        exchange.close = exchange.until_close = True
        return exchange.connection_line

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, sending: Sending) -> None:
        future, answer = self._future, self.answer
        assert future is not None
        assert answer is not None
        if answer.relayed:
            self._last_bytes(sending)
        self._sending = self._future = None
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

    def _last_bytes(self, sending: Sending) -> None:
        exchange, answer = sending.exchange, self.answer
        assert answer is not None
        if not self._started:
            sending.first_byte()
        if self._hold is not None and self._hold.held:
            rest = self._passed(answer, sending, self._hold.rest())
            if rest:
                self._out.append(b"%x\r\n%b\r\n" % (len(rest), rest) if self._chunked else rest)
        if not exchange.committed:
            self._commit(sending)
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        if self._out:
            self._flush(sending)

    def lost(self, message: str) -> None:
        """The answer cannot be completed: tell the client, and whoever waits for it."""
        sending, answer = self._sending, self.answer
        if sending is None:
            return
        if answer is not None and not answer.relayed:  # it has refused, which its body only explains
            answer.cut = True
            future, self._future, self._sending = self._future, None, None
            if future is not None and not future.done():
                future.set_result(answer)
        elif not sending.exchange.committed or not self._started:
            if answer is not None and self._whole:
                declared = (self._length or b"").decode()
                message += f" after {answer.observer.bytes} of {declared} bytes of the answer's declared length"
            self._fail(ResetBeforeByte(message))
        else:
            assert answer is not None
            if self._out:
                self._flush(sending)
            if not sending.goes_on():
                sending.exchange.client.cut(sending.break_words(answer.observer, message))
            self._fail(StreamBroken(message))
        self.transport.abort()

    def give_up(self, error: UpstreamError) -> None:
        """The server has a request and will not answer, as is known by other means."""
        self._fail(error)
        self.transport.abort()

    def _fail(self, error: UpstreamError) -> None:
        future, self._future = self._future, None
        self._sending = None
        self.deadline = inf
        self._out.clear()
        if future is not None and not future.done():
            future.set_exception(error)

    @property
    def lost_in_race(self) -> bool:
        """Whether this reused connection was closing already when the request was written on it."""
        return self.reused and not self._heard and clock.now() - self._written_at < KEEPALIVE_RACE_S
