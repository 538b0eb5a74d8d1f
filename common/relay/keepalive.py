"""Keep-alive comments for streams whose servers are silent for long: `: ping` lines, which clients skip.

Proxies in front give up a connection on which nothing moves for a minute, and a long prompt or a thinking model takes
longer than that. Written only into streams of server-sent events, only between two events, and only when nothing else
was written for a while. Comments that come before the answer begin it, with 200 and a head of our own, so an error
that follows can be told in an event alone.
Source: the HTML standard, section 9.2.7: "authors can include a comment line every 15 seconds or so".
"""

from __future__ import annotations

import asyncio

from common.relay import heads
from common.relay.body import SSE_ENDS
from common.relay.exchange import Exchange
from common.relay.sending import Answer

PING = b": ping\n\n"


def takes_comments(answer: Answer) -> bool:
    """Whether an answer is a stream of events that can be read and written into."""
    return answer.relayed and answer.status == 200 and answer.observer.ends == SSE_ENDS


class Pings:
    """The keep-alive comments of one answer. `added`: header lines for a head of our own."""

    def __init__(self, exchange: Exchange, interval_s: float, added: bytes) -> None:
        self._exchange = exchange
        self._added = added
        self._half_s = interval_s / 2.0
        self._seen = 0  # bytes of the answer at the last look
        self._waits = True  # a comment was written, or the request came, less than an interval ago
        self._timer = asyncio.get_running_loop().call_later(self._half_s, self._look)

    def stop(self) -> None:
        """The request is over."""
        self._timer.cancel()

    def _look(self) -> None:
        """Twice an interval, so that no silence is longer than one."""
        self._timer = asyncio.get_running_loop().call_later(self._half_s, self._look)
        exchange = self._exchange
        answer = exchange.upstream.answer if exchange.upstream is not None else None
        moved = answer is not None and answer.observer.bytes != self._seen
        self._seen = answer.observer.bytes if answer is not None else 0
        if moved or self._waits:
            self._waits = False
        elif not exchange.client.write_paused and self._may(answer):
            self._waits = True
            self._write()

    def _may(self, answer: Answer | None) -> bool:
        exchange = self._exchange
        if not exchange.committed:
            return answer is None or not answer.relayed or takes_comments(answer)
        framed = exchange.chunked or exchange.until_close
        return answer is not None and framed and takes_comments(answer) and answer.observer.between_events

    def _write(self) -> None:
        exchange = self._exchange
        if not exchange.status:
            self._begin()
        exchange.client.write(b"%x\r\n%b\r\n" % (len(PING), PING) if exchange.chunked else PING)

    def _begin(self) -> None:
        exchange = self._exchange
        exchange.status = 200
        if exchange.old:
            exchange.close = exchange.until_close = True
        else:
            exchange.chunked = True
        framing = b"transfer-encoding: chunked\r\n" if exchange.chunked else b""
        fields = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        exchange.client.write(heads.response_head(200, fields, self._added + framing + exchange.connection_line))
