"""HTTP/1.1, as much of it as an inference server needs: one asyncio.Protocol a connection, parsed by llhttp.

Requests are handled in the order they came; answers are written by whoever handles them, whole (`respond`) or in pieces
(`begin`, `write`, `end`). A client that closes its side is gone, as for vLLM's uvicorn. What is bounded: the body, the
header, pipelined requests (then the socket is not read), and what is written (`paused` asks the writer to stop).
"""

from __future__ import annotations

import socket
import struct
from asyncio import BaseTransport, Protocol, Transport, get_running_loop
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol as Interface
from typing import cast

import httptools

from common import clock

MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED = 8  # requests read ahead of the one that is answered
WRITE_BUFFER_BYTES = 64 * 1024  # unsent bytes beyond which the writer must stop
LINGER_NOT = struct.pack("ii", 1, 0)  # close sends a reset
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


@dataclass(slots=True)
class Request:
    """One request, whole. Header names are lower case; of a repeated one the last counts."""

    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True
    chunks_allowed: bool = True  # the client speaks HTTP/1.1


class Answer(Interface):
    """An answer under way, as its connection sees it."""

    def gone(self) -> None:
        """The client left before the answer ended."""

    def resume(self) -> None:
        """There is room to write again."""


class Handler(Interface):
    """Who answers the requests of a listener."""

    connections: set[Connection]
    max_body_bytes: int
    max_connections: int
    draining: bool

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer `request` on `connection`, now or later."""


class Connection(Protocol):
    """One client connection. `reply` is whoever answers over time, and hears of pauses and of the client leaving."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_busy",
        "_error",
        "_handler",
        "_header_bytes",
        "_headers",
        "_parser",
        "_reading",
        "_receiving",
        "_request",
        "_requests",
        "_transport",
        "_url",
        "idle_since_s",
        "paused",
        "reply",
    )

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()  # bounded by MAX_PIPELINED and what one read holds
        self._request: Request | None = None  # the one that is answered
        self._busy = False
        self._reading = True
        self._receiving = False  # in the middle of a request
        self._error: tuple[int, str] | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._header_bytes = 0
        self.reply: Answer | None = None
        self.paused = False
        self.idle_since_s = clock.now()

    # --- the transport's side ---

    def connection_made(self, transport: BaseTransport) -> None:
        """Adopt a new connection, or close it when there are too many."""
        self._transport = cast(Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self._handler.connections) >= self._handler.max_connections:
            self._transport.abort()
            return
        self._handler.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is answering that nobody listens any more."""
        self._handler.connections.discard(self)
        self._requests.clear()
        reply, self.reply = self.reply, None
        if reply is not None:
            reply.gone()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        self.paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self.paused = False
        if self.reply is not None:
            self.reply.resume()

    def data_received(self, data: bytes) -> None:
        """Parse what came and answer what is complete."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._error = (400, "Unsupported upgrade request.")
        except httptools.HttpParserError:
            self._error = self._error or (400, "Invalid HTTP request received.")
        self._next()

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        """A request line begins."""
        self._receiving = True
        self._url = b""
        self._headers = {}
        self._body = []
        self._body_bytes = self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        self._headers[name.lower()] = value
        self._count_header(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Refuse what announces too large a body; let a client that asks first go on."""
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._handler.max_body_bytes:
            self._refuse(413, "Request body is too large.")
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > self._handler.max_body_bytes:
            self._refuse(413, "Request body is too large.")

    def on_message_complete(self) -> None:
        """The request is whole: put it in line."""
        self._receiving = False
        self._requests.append(
            Request(
                self._parser.get_method().decode(),
                self._url.partition(b"?")[0].decode("latin-1"),
                self._headers,
                self._body[0] if len(self._body) == 1 else b"".join(self._body),
                self._parser.should_keep_alive(),
                self._parser.get_http_version() != "1.0",
            )
        )
        self._body = []

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "Request header is too large.")

    def _refuse(self, status: int, message: str) -> None:
        self._error = (status, message)
        raise ValueError(message)  # stops the parser

    def _next(self) -> None:
        while self._requests and not self._busy:
            self._busy = True
            self._request = self._requests.popleft()
            self._handler.handle(self._request, self)
        if self._error is not None and not self._busy and not self._transport.is_closing():
            status, message = self._error
            self._request = Request(keep_alive=False)
            self.respond(status, message.encode(), b"text/plain; charset=utf-8")
        full = len(self._requests) >= MAX_PIPELINED
        if full == self._reading and not self._transport.is_closing():
            self._reading = not full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # --- the answerer's side ---

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self._busy or self._receiving

    @property
    def unsent_bytes(self) -> int:
        """What was written and has not left this process."""
        return self._transport.get_write_buffer_size()

    @property
    def chunked(self) -> bool:
        """Whether pieces are framed as chunks; else the body ends with the connection."""
        return self._request is not None and self._request.chunks_allowed

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", more: bytes = b"") -> None:
        """The whole answer. `more`: further header lines, each with its line end."""
        assert self._request is not None
        if self._handler.draining:
            self._request.keep_alive = False
        head = b"%bcontent-length: %d\r\n%b%b%b\r\n" % (
            _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status,
            len(body),
            b"content-type: %b\r\n" % content_type if body else b"",
            b"" if self._request.keep_alive else b"connection: close\r\n",
            more,
        )
        self._transport.write(head if self._request.method == "HEAD" else head + body)
        self.end()

    def begin(self, content_type: bytes, more: bytes = b"") -> None:
        """The head of an answer whose body comes in pieces."""
        assert self._request is not None
        if not self.chunked:
            self._request.keep_alive = False
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b%b%b\r\n"
            % (
                content_type,
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                b"" if self._request.keep_alive else b"connection: close\r\n",
                more,
            )
        )

    def write(self, piece: bytes, last: bool = False) -> None:
        """One piece of the body, not empty; `last` ends the answer."""
        if self.chunked:
            piece = b"%x\r\n%b\r\n%b" % (len(piece), piece, b"0\r\n\r\n" if last else b"")
        self._transport.write(piece)
        if last:
            self.end()

    def finish(self) -> None:
        """End an answer that was written in pieces."""
        if self.chunked:
            self._transport.write(b"0\r\n\r\n")
        self.end()

    def end(self) -> None:
        """The answer is written: on to the next request, or close."""
        self.reply = None
        self._busy = False
        self.idle_since_s = clock.now()
        if (self._request is not None and not self._request.keep_alive) or self._handler.draining:
            self._transport.close()
        elif self._requests or self._error or not self._reading:
            get_running_loop().call_soon(self._next)  # not now: the caller may be in the middle of an engine's tick

    def close(self) -> None:
        """Close in order, without a word."""
        self._transport.close()

    def reset(self) -> None:
        """Break the connection as a process that dies does."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        self._transport.abort()
