"""One request of a gateway, which is served like any other but for who carries it.

The gateway tells of the request on a stream, `serving` reads it, decides and reserves, and where the relay would send
it on, the gateway is told the server's address instead. What it tells of the answer is judged, counted and learned from
as if it had come through the relay. Nothing is tried elsewhere: once the address is told, the rest is the gateway's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

import structlog

from common import apis, clock
from common.errors import ConnectFailed
from common.relay import heads
from common.relay.body import Observer
from common.relay.client import ClientConnection
from common.relay.exchange import ClientLimits, Exchange
from common.relay.sending import Answer, Sending, Verdict
from common.relay.upstream import COLLECTED_BYTES
from common.types import Path
from services.instance_lb.picker import messages
from services.instance_lb.picker.addresses import Addresses
from services.instance_lb.picker.proto.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HeadersResponse,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from services.instance_lb.picker.proto.processing_mode_pb2 import ProcessingMode

log = structlog.get_logger()

# What a gateway keeps as it is, whatever becomes of the rest: its framing, its host, its own.
KEPT: Final = heads.HOP_BY_HOP | {b"host", b"content-length", b"content-encoding"}
GATEWAYS_OWN: Final = (b"x-envoy-", b"x-forwarded-", b"x-request-id", b"x-gateway-")
TOLD: Final = frozenset({b"traceparent", b"tracestate", b"via"})  # what a server is told besides
NEEDED: Final = (
    "this endpoint picker needs request_body_mode BUFFERED or FULL_DUPLEX_STREAMED, and response_body_mode STREAMED, "
    "BUFFERED or FULL_DUPLEX_STREAMED"
)

Write = Callable[[ProcessingResponse], Awaitable[None]]
Mode = ProcessingMode.BodySendMode


@dataclass(frozen=True, slots=True)
class Picked:
    """A server for the request: its address, and how the request's fields change on the way there."""

    address: str
    added: heads.Headers
    removed: frozenset[str]


@dataclass(slots=True)
class Gateway:
    """What stands where the client's connection does: what is answered here becomes the gateway's own answer."""

    limits: ClientLimits
    peername: str
    decided: asyncio.Future[Picked | ProcessingResponse]
    verified: bool = False

    def respond(self, status: int, headers: heads.Headers, body: bytes, added: bytes = b"") -> None:
        """As that of ClientConnection."""
        if not self.decided.done():  # else nobody waits for it any more
            self.decided.set_result(messages.immediate(status, [*headers, *_fields(added)], body, "headwater"))


class Stream:
    """One request and its answer, as the gateway tells of them."""

    def __init__(
        self,
        serve: Callable[[Exchange], Awaitable[None]],
        node: Path,
        instances: Callable[[], list[tuple[Path, str]]],
        addresses: Addresses,
        limits: ClientLimits,
        write: Write,
        peername: str,
    ) -> None:
        self.node = node  # where the stages of this request begin
        self.exclude: frozenset[Path] = frozenset()
        self._serve = serve
        self._instances = instances
        self._addresses = addresses
        self._limits = limits
        self._write = write
        self._decided: asyncio.Future[Picked | ProcessingResponse] = asyncio.get_running_loop().create_future()
        self._answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._exchange = Exchange(cast(ClientConnection, Gateway(limits, peername, self._decided)), carrier=self)
        self._request_mode: int = Mode.FULL_DUPLEX_STREAMED  # of gateways that are too old to say
        self._response_mode: int = Mode.FULL_DUPLEX_STREAMED
        self._came: frozenset[bytes] = frozenset()  # names of the request's fields as they came
        self._target = b""
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._sending: Sending | None = None
        self._answer: Answer | None = None
        self._first = True  # no byte of the answer's body has come
        self.over = False  # nothing more is to be said

    # -- what serving asks of a carrier ------------------------------------------------------------------------------

    async def forward(self, url: str, sending: Sending) -> Answer:
        """Have the gateway send it, and wait for the end of the answer."""
        address = await self._addresses.of(url)
        there = _fields(sending.head.partition(b"\r\n")[2])
        names = {key for key, _ in there} | KEPT
        gone = frozenset(k.decode("latin-1") for k in self._came - names if not k.startswith(GATEWAYS_OWN))
        added = [(key, value) for key, value in there if key in TOLD]
        if self._exchange.target != self._target:
            added.append((b":path", self._exchange.target))
        if self._decided.done():
            raise asyncio.CancelledError  # the gateway has ended the stream
        self._sending = sending
        self._exchange.committed = True
        self._decided.set_result(Picked(address, added, gone))
        return await self._answered

    # -- what the gateway tells --------------------------------------------------------------------------------------

    async def on(self, message: ProcessingRequest) -> None:
        """One message; all that is to be said to it is written."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            await self._on_request(message)
        elif kind == "request_body":
            await self._on_request_body(message.request_body)
        elif kind == "request_trailers":
            if self._request_mode == Mode.FULL_DUPLEX_STREAMED and self._task is None:
                await self._decide(ends=False)
            await self._write(messages.REQUEST_TRAILERS)
        elif kind == "response_headers":
            await self._on_response(message)
        elif kind == "response_body":
            await self._on_response_body(message.response_body)
        elif kind == "response_trailers":
            self._ended()
            await self._write(messages.RESPONSE_TRAILERS)

    async def end(self) -> None:
        """The gateway has ended the stream: a request that has no answer by now has lost its client."""
        self._decided.cancel()
        if self._task is None:
            return
        if not (self.over or self._answered.done()):
            self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _on_request(self, message: ProcessingRequest) -> None:
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        exchange, ends = self._exchange, message.request_headers.end_of_stream
        pseudo, exchange.headers = messages.read(message.request_headers.headers)
        exchange.method, exchange.target = pseudo.get("method", b"GET"), pseudo.get("path", b"/")
        self._came, self._target = frozenset(key for key, _ in exchange.headers), exchange.target
        exchange.started_at, exchange.started_wall_ns = clock.now(), clock.wall_ns()
        wanted = messages.subset(message.metadata_context)
        if wanted is not None:
            self.exclude = frozenset([p for p, url in self._instances() if await self._address(url) not in wanted])
        body_read = ends or self._request_mode in (Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED)
        body_seen = self._response_mode in (Mode.STREAMED, Mode.BUFFERED, Mode.FULL_DUPLEX_STREAMED)
        if not body_read or not body_seen:
            log.error("gateway_misconfigured", needed=NEEDED)
            await self._refuse(500, NEEDED)
        elif ends:
            await self._decide(ends=True)
        elif self._request_mode == Mode.BUFFERED:
            await self._write(messages.REQUEST_HEADERS)

    async def _address(self, url: str) -> str:
        try:
            return await self._addresses.of(url)
        except ConnectFailed:
            return ""

    async def _on_request_body(self, sent: HttpBody) -> None:
        if self._task is not None:
            return
        self._body += sent.body
        if len(self._body) > self._limits.max_body_bytes:
            await self._refuse(413, f"the request is larger than {self._limits.max_body_bytes} bytes")
        elif sent.end_of_stream or self._request_mode == Mode.BUFFERED:
            await self._decide(ends=sent.end_of_stream)

    async def _refuse(self, status: int, message: str) -> None:
        body = apis.error_body(apis.family_of(self._exchange.path), (status, message))
        await self._write(messages.immediate(status, [(b"content-type", b"application/json")], body, "headwater"))
        self.over = True

    # -- what it is told ---------------------------------------------------------------------------------------------

    async def _decide(self, *, ends: bool) -> None:
        """Have it served, and tell what was decided."""
        self._exchange.body = bytes(self._body)
        self._task = asyncio.ensure_future(self._serve(self._exchange))
        self._task.add_done_callback(self._served)
        decided = await self._decided
        if isinstance(decided, ProcessingResponse):
            await self._write(decided)
            self.over = True
            return
        added = [(messages.DESTINATION.encode(), decided.address.encode()), *decided.added]
        told = CommonResponse(header_mutation=messages.changes(added, decided.removed), clear_route_cache=True)
        where = messages.destination(decided.address)
        buffered = self._request_mode == Mode.BUFFERED and self._body
        if buffered:
            await self._write(ProcessingResponse(request_body=BodyResponse(response=told), dynamic_metadata=where))
            return
        await self._write(ProcessingResponse(request_headers=HeadersResponse(response=told), dynamic_metadata=where))
        if self._body or not ends:
            for piece in messages.pieces(bytes(self._body), ends=ends):
                await self._write(ProcessingResponse(request_body=messages.streamed(piece)))

    def _served(self, task: asyncio.Task[None]) -> None:
        if not self._decided.done():
            problem = None if task.cancelled() else task.exception()
            self._decided.set_exception(problem or RuntimeError("the request was served without an answer"))

    # -- the answer --------------------------------------------------------------------------------------------------

    async def _on_response(self, message: ProcessingRequest) -> None:
        sending, sent = self._sending, message.response_headers
        details = messages.details(message)
        if sending is not None and details not in ("", messages.FROM_SERVER) and not self._answered.done():
            self._answered.set_exception(ConnectFailed(f"the gateway had no answer: {details}"))
            sending = None
        if sending is None:
            await self._write(ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse())))
            return
        pseudo, headers = messages.read(sent.headers)
        status = int(pseudo.get("status", b"0"))
        content_type = (heads.find(headers, b"content-type") or b"").decode("latin-1")
        observer = sending.observer = Observer(content_type, coded=heads.find(headers, b"content-encoding") is not None)
        judged = sending.judge(sending, status, headers)
        self._answer = Answer(status, headers, relayed=True, observer=observer)
        self._exchange.status = status
        replaced = sending.replaced if judged is Verdict.RELAY else None
        gone = {k for k, _ in headers if heads.not_ours_to_pass(k) or (replaced and k.startswith(replaced))}
        changed = messages.changes(_fields(sending.added), {key.decode("latin-1") for key in gone})
        if sent.end_of_stream:
            self._ended()
        told = HeadersResponse(response=CommonResponse(header_mutation=changed))
        await self._write(ProcessingResponse(response_headers=told))

    async def _on_response_body(self, sent: HttpBody) -> None:
        answer, sending = self._answer, self._sending
        if answer is not None and sending is not None:
            if self._first and sent.body:
                self._first = False
                sending.first_byte()
            answer.observer.saw(sent.body)
            if answer.status >= 400:
                answer.body += sent.body[: COLLECTED_BYTES - len(answer.body)]
        if sent.end_of_stream:
            self._ended()
        if self._response_mode == Mode.FULL_DUPLEX_STREAMED:
            for piece in messages.pieces(sent.body, ends=sent.end_of_stream):
                await self._write(ProcessingResponse(response_body=messages.streamed(piece)))
        else:
            await self._write(messages.RESPONSE_BODY)

    def _ended(self) -> None:
        if self._answer is not None and not self._answered.done():
            self._answered.set_result(self._answer)


def _fields(lines: bytes) -> heads.Headers:
    """Header lines as fields, names in lower case."""
    fields = []
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            fields.append((name.strip().lower(), value.strip()))
    return fields
