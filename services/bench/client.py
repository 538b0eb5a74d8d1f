"""Sends requests and measures answers, light enough not to be what is measured.

One asyncio.Protocol a connection, httptools for the answer's framing, no task and no queue per request; keep-alive
connections are reused last in, first out. Nothing is ever sent twice: what a server or balancer does wrong is counted,
not repaired. What a request was and what its numbers mean is `replay.py`'s business.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from common import clock
from services.bench.exchange import Exchange
from services.bench.meters import BodyMeter

# Servers close idle connections after as little as 5 s (uvicorn, Node.js). A connection idle for longer than this is
# not used again, so that a request does not cross with its server's close and count as that server's failure.
IDLE_REUSE_S = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where a base URL leads; `prefix` is its path, without the /v1 that people give or leave out."""

    url: str
    host: str
    port: int
    prefix: str
    tls: bool

    @staticmethod
    def of(url: str) -> Target:
        """Raises ValueError where `url` is not http(s)://host[:port][/path]."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"target {url!r} is not http(s)://host:port")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ValueError(f"target {url!r}: {error}") from error
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Target(url.rstrip("/"), parts.hostname, port, prefix, parts.scheme == "https")

    @property
    def authority(self) -> str:
        """host:port as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Connection(asyncio.Protocol):
    """One connection to a target, carrying at most one exchange at a time."""

    def __init__(self, client: Client) -> None:
        self.idle_since_s = 0.0
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._framed = False
        self._now = 0.0

    def carry(self, exchange: Exchange) -> None:
        """Send `exchange` here and now."""
        assert self._exchange is None
        assert self._transport is not None
        self._exchange = exchange
        exchange.drop = self.abort
        self._transport.write(exchange.payload)
        exchange.payload = b""

    def abort(self) -> None:
        """Drop the connection without a goodbye, as a client that went away does."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        """asyncio: `data` came."""
        self._now = clock.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours in a callback below, not an answer that is wrong
        except httptools.HttpParserError:
            self._finish("bad_response")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: it is closed. The end of an answer without a length, else the end of whatever was under way."""
        self._client.forget(self)
        exchange = self._exchange
        if exchange is not None:
            whole = exc is None and exchange.meter is not None and not self._framed
            self._finish("" if whole else "reset" if exchange.status == 0 else "broken")

    def on_message_begin(self) -> None:
        """httptools: an answer begins."""
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        if self._exchange is not None:
            self._exchange.header(name, value)
        self._framed = self._framed or name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        """httptools: the head is there."""
        exchange, status = self._exchange, self._parser.get_status_code()
        if exchange is not None and status >= 200:
            exchange.status = status
            exchange.meter = exchange.meter or BodyMeter()

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        exchange = self._exchange
        if exchange is not None and exchange.meter is not None:
            exchange.body_bytes += len(body)
            exchange.meter.feed(body, self._now)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole; informational ones (1xx) are not the answer."""
        if self._parser.get_status_code() < 200:
            return
        exchange = self._exchange
        reusable = exchange is not None and exchange.end_s is None and self._parser.should_keep_alive()
        self._finish("")
        if reusable:
            self.idle_since_s = self._now
            self._client.park(self)
        else:
            self.abort()

    def _finish(self, error: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(error)


class Client:
    """The connections to one target."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for https targets; None: what the system trusts."""
        self.target = target
        self._tls = (tls or ssl.create_default_context()) if target.tls else None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def send(self, exchange: Exchange) -> None:
        """Send `exchange` over an idle connection, or a new one. Never waits; the exchange ends by itself."""
        horizon_s = clock.now() - IDLE_REUSE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= horizon_s:
                connection.carry(exchange)
                return
            connection.abort()
        task = asyncio.get_running_loop().create_task(self._connect(exchange))
        exchange.drop = task.cancel
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self), self.target.host, self.target.port, ssl=self._tls
            )
        except (OSError, UnicodeError):  # refused, unreachable, TLS not agreed; no such host, or no host's name
            exchange.end("connect")
            return
        self._open.add(connection)
        if exchange.end_s is None:
            connection.carry(exchange)
        else:  # its time ran out meanwhile
            connection.abort()

    def park(self, connection: Connection) -> None:
        """`connection` is free for another exchange."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """`connection` is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Drop every connection; what was under way ends as broken."""
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self._open):
            connection.abort()
