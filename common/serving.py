"""The life of one request: read, route, forward, learn, release. Start here to understand a tier.

The first tier that gets a request reads its body; the ones below are told by the signed route header. `descend` picks
down to a live peer or an instance, the relay carries the bytes, and whatever way it ends, every pick is released once
and one record is written. Before the first byte a failure may be tried elsewhere, within one budget for the whole path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from common import apis, clock, tracecontext
from common.affinity import Affinity
from common.balancing import Balancing
from common.errors import (
    BadRequest,
    ConnectFailed,
    FirstByteTimeout,
    LBError,
    ModelNotFound,
    NoEndpoints,
    RejectedError,
    ResetBeforeByte,
    Saturated,
    StreamBroken,
    UpstreamError,
)
from common.policy.admission import RetryBudget
from common.policy.output_length import OutputLength
from common.policy.stages import Route
from common.records import AttemptRecord, Ending, RequestRecord, StageRecord
from common.relay import cors, heads
from common.relay.body import Observer
from common.relay.client import Exchange
from common.relay.coding import decoded
from common.relay.relay import Relay
from common.relay.upstream import Answer, Sending, Verdict
from common.route import HEADER, MAX_HOPS, RouteSigner
from common.route import Route as RouteHeader
from common.store.base import Placement
from common.telemetry import Telemetry
from common.types import InferenceRequest, Outcome, Path, Shed

REJECTED = b"x-headwater-rejected"  # a peer dispatched nothing: the tier above may try a sibling
SERVED_BY = b"x-headwater-served-by"
DECISION = b"x-headwater-decision"
ATTEMPTS = b"x-headwater-attempts"
MAX_TRIES = 8  # hops tried for one request, refused connections and rejections included
PEER_SLACK_S = 1.0  # by how much a tier waits longer than the one below it
MAX_RETRY_AFTER_S = 60.0  # a server may ask for no longer a pause
OVERLOAD = (429, 503, 529)
DECODED_HERE_BYTES = 65_536  # compressed bodies above this are decoded by a thread


@dataclass(slots=True)
class _Carried:
    """One request on its way through this process."""

    exchange: Exchange
    api: apis.Api
    request: InferenceRequest
    node: Path
    record: RequestRecord
    context: tracecontext.TraceContext
    headers: bytes  # the client's, as they go on
    visited: tuple[str, ...]
    exclude: set[Path]
    peers_lost: int = 0


class Serving:
    """Serves what the relay's listener receives."""

    def __init__(
        self,
        process_id: str,
        node: Path,
        balancing: Balancing,
        affinity: Affinity,
        telemetry: Telemetry,
        signer: RouteSigner,
        local: Callable[[Exchange, heads.Headers], Awaitable[None]],
        *,
        attempts: int,
        budget_ratio: float,
        sample_ratio: float,
        allowed_origins: tuple[str, ...] = (),
        rng: Random,
    ) -> None:
        self.process_id = process_id
        self.node = node
        self.balancing = balancing
        self.affinity = affinity
        self.telemetry = telemetry
        self.signer = signer
        self.lengths = OutputLength()
        self.relay: Relay
        self.cors = cors.Cors(allowed_origins)
        self._local = local
        self._attempts = attempts
        self._budget = RetryBudget(budget_ratio)
        self._sample_ratio = sample_ratio
        self._rng = rng

    # -- one request -------------------------------------------------------------------------------------------------

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        matched = apis.match(exchange.method.decode("latin-1"), exchange.path)
        if matched is None:
            await self._answer_locally(exchange)
            return
        api = matched.api
        context = tracecontext.read(exchange.headers, self._rng, self._sample_ratio)
        record = self._open(exchange, api, context)
        try:
            carried = await self._read(exchange, matched, record, context)
            self.telemetry.began(record)
            await self._carry(carried)
        except LBError as error:
            self._answer_error(exchange, api, record, error)
        except asyncio.CancelledError:
            record.ending = Ending.CLIENT_LEFT
            raise
        finally:
            record.ended_at = clock.now()
            record.status = record.status or exchange.status
            self.telemetry.ended(record)

    def _open(self, exchange: Exchange, api: apis.Api, context: tracecontext.TraceContext) -> RequestRecord:
        return RequestRecord(
            context.trace_id,
            tracecontext.new_span_id(self._rng),
            context.parent_id,
            context.sampled,
            self.process_id,
            self.node,
            exchange.method.decode(),
            exchange.path,
            exchange.started_at,
            exchange.started_wall_ns,
            operation=api.operation,
        )

    async def _answer_locally(self, exchange: Exchange) -> None:
        """A preflight, or what the application beside the relay answers."""
        if exchange.method == b"OPTIONS" and heads.find(exchange.headers, b"origin") is not None:
            fields = self.cors.preflight(exchange.headers)
            if fields is not None:
                exchange.client.respond(204, fields, b"")
                return
            family = apis.family_of(exchange.path)
            body = apis.error_body(family, (403, "this origin may not call here; see cors.allowed_origins"))
            exchange.client.respond(403, [(b"content-type", b"application/json")], body)
            return
        await self._local(exchange, self.cors.answer(exchange.headers))

    async def _read(
        self, exchange: Exchange, matched: apis.Match, record: RequestRecord, context: tracecontext.TraceContext
    ) -> _Carried:
        """What policy needs to know: from the peer's header, or from the body when the request begins here."""
        header = heads.find(exchange.headers, HEADER)
        told = self.signer.verify(header) if header is not None else None
        if told is not None and len(told.visited) >= MAX_HOPS:
            raise NoEndpoints("the request has passed too many tiers")
        record.from_peer = told is not None
        record.executions = told.attempts if told is not None else 0
        request = told.request if told is not None else await self._understand(exchange, matched, record, context)
        record.model, record.stream, record.tenant = request.model, request.stream, request.tenant
        record.input_tokens, record.has_session = request.input_tokens, bool(request.session)
        record.predicted_output_tokens = request.output_tokens
        return _Carried(
            exchange,
            matched.api,
            request,
            told.node if told is not None else (),
            record,
            context,
            heads.passed_on(exchange.headers),
            (*(told.visited if told is not None else ()), self.process_id),
            set(),
        )

    async def _understand(
        self, exchange: Exchange, matched: apis.Match, record: RequestRecord, context: tracecontext.TraceContext
    ) -> InferenceRequest:
        coding = exchange.header(b"content-encoding")
        if coding is not None:
            await self._decode(exchange, coding)
        api, ask = matched.api, apis.understand(matched, exchange.header, exchange.body)
        model = record.model = ask.model
        if self.balancing.empty:
            raise NoEndpoints("no instance is registered yet", retry_after_s=1.0)
        if not api.model_optional and not self.balancing.known(model) and not self.balancing.any_model():
            raise ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")
        input_tokens = max(1, round(ask.size / apis.BYTES_PER_TOKEN))
        request = InferenceRequest(
            context.trace_id,
            model,
            api.family.value,
            ask.stream,
            input_tokens,
            ask.cap,
            self.lengths.expect(model, "", input_tokens, ask.cap) if api.generates else 0.0,
            ask.prefix_hashes,
            ask.session,
        )
        placement = await self.affinity.lookup(ask.session) if ask.session else None
        if placement is None:
            return request
        return replace(request, warm=placement.path, warm_tokens=placement.tokens)

    async def _decode(self, exchange: Exchange, codings: str) -> None:
        """Take a request's content codings off: routing has to read the body, and few servers could."""
        limit = exchange.client.limits.max_body_bytes
        if len(exchange.body) > DECODED_HERE_BYTES:
            exchange.body = await asyncio.to_thread(decoded, exchange.body, codings, limit)
        else:
            exchange.body = decoded(exchange.body, codings, limit)
        exchange.headers = [(k, v) for k, v in exchange.headers if k != b"content-encoding"]

    async def _carry(self, c: _Carried) -> None:
        """Try routes until one answers, or the budget says stop."""
        self._budget.request(clock.now())
        refusal: Answer | None = None
        failure: LBError | None = None
        for _ in range(MAX_TRIES):
            route = self.balancing.route(c.request, c.node, frozenset(c.exclude))
            if isinstance(route, Shed):
                nothing_left = self._shed(c, route)
                # What failed here and may be tried again is for the tier above to go on with: a rejection invites it.
                if failure is None or (c.record.from_peer and isinstance(nothing_left, RejectedError)):
                    failure = nothing_left
                break
            self._note_stages(c, route)
            try:
                answer = await self._attempt(c, route)
            except UpstreamError as error:
                failure = error
                if not await self._again_after(c, route, error):
                    break
            except RejectedError as error:
                failure = error
                c.exclude.add(route.target)
            else:
                if answer.relayed:
                    return
                refusal = answer
                c.exclude.add(route.target)
                if not self._may_retry(c):
                    break
        if refusal is not None:
            self._pass_refusal(c, refusal)
            return
        if isinstance(failure, ConnectFailed):  # none of those that were tried has seen it
            raise NoEndpoints(f"no server can be reached: {failure}", retry_after_s=1.0)
        raise failure or NoEndpoints()

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, c: _Carried, route: Route) -> Answer:
        """Send it along one route; whatever happens, the route's reservations are released here, once."""
        attempt = AttemptRecord(
            route.target,
            route.peer.id if route.peer else "",
            route.url,
            clock.now(),
            tracecontext.new_span_id(self._rng),
        )
        c.record.attempts.append(attempt)
        outcome, answer, unreachable = Outcome.IGNORED, None, False
        retry_after_s: float | None = None
        if route.peer:
            self.balancing.peer_sent(route.peer.id)
        else:
            c.record.executions += 1
        try:
            answer = await self.relay.forward(route.url, self._sending(c, route, attempt))
            outcome, retry_after_s = self._judged(c, route, answer)
            return answer
        except UpstreamError as error:
            attempt.error = error.code
            unreachable = isinstance(error, ConnectFailed)
            if unreachable and not route.peer:
                c.record.executions -= 1  # it never saw the request
            outcome = Outcome.IGNORED if route.peer else Outcome.FAILED
            if isinstance(error, StreamBroken) and c.exchange.status:
                c.record.ending, c.record.error = Ending.BROKE_AFTER, error.code
            raise
        finally:
            attempt.ended_at = clock.now()
            if route.peer:
                self.balancing.peer_done(route.peer.id, reached=answer is not None)
            self.balancing.release(
                route,
                outcome,
                output_tokens=c.record.output_tokens,
                unreachable=unreachable,
                retry_after_s=retry_after_s,
            )

    def _sending(self, c: _Carried, route: Route, attempt: AttemptRecord) -> Sending:
        pool = self.relay.pool(route.url)
        added = c.context.header(attempt.span_id)
        if route.peer:
            told = RouteHeader(c.request, route.target, c.record.executions, c.visited)
            added += b"%b: %b\r\n" % (HEADER, self.signer.sign(told))
        exchange = c.exchange
        has_body = exchange.method not in (b"GET", b"HEAD") or bool(exchange.body)
        head = heads.request_head(
            exchange.method,
            pool.base + exchange.target,
            pool.host_header,
            c.headers,
            added,
            len(exchange.body) if has_body else None,
        )

        def judge(status: int, headers: heads.Headers) -> Verdict:
            attempt.status = status
            if route.peer:
                c.record.executions = max(c.record.executions, _int(heads.find(headers, ATTEMPTS)))
            if heads.find(headers, REJECTED) is not None if route.peer else status in OVERLOAD:
                return Verdict.COLLECT
            sending.added = self._response_headers(c, route, headers)
            if self.cors and not c.record.from_peer:
                sending.added += heads.lines(self.cors.answer(exchange.headers))
                sending.replaced = cors.PREFIX
            return Verdict.RELAY

        def first_byte() -> None:
            attempt.first_byte_at = clock.now()
            if c.record.first_byte_at is None:
                c.record.first_byte_at = attempt.first_byte_at
            if c.request.stream:
                self.balancing.first_token(route)

        def break_words(observer: Observer, message: str) -> bytes:
            event = apis.error_event(c.api.family, observer.content_type, message)
            return observer.event_end + event if event and not observer.told_of_error else b""

        sending = Sending(exchange, head, exchange.body, judge, first_byte, break_words=break_words)
        if route.peer:  # the tier next to the server gives up first: it alone knows whom to blame, and where to go on
            sending.tries, sending.slack_s = self._attempts, PEER_SLACK_S * (3 - len(route.target))
        return sending

    def _response_headers(self, c: _Carried, route: Route, headers: heads.Headers) -> bytes:
        served_by = heads.find(headers, SERVED_BY) if route.peer else "/".join(route.target).encode()
        c.record.served_by = (served_by or b"").decode("latin-1")
        added = [(DECISION, c.request.id.encode())]
        if served_by:
            added.append((SERVED_BY, served_by))
        if c.record.from_peer:
            added.append((ATTEMPTS, b"%d" % c.record.executions))
        return heads.lines(added)

    def _judged(self, c: _Carried, route: Route, answer: Answer) -> tuple[Outcome, float | None]:
        """What an answer says of the endpoint, and for how long it wants to be left alone."""
        c.record.status = answer.status
        if not answer.relayed:
            if route.peer and (heads.find(answer.headers, REJECTED) or b"") != b"saturated":
                return Outcome.IGNORED, None
            return Outcome.OVERLOADED, _retry_after(answer.headers)
        c.record.ending = Ending.COMPLETE
        if answer.status >= 500:
            return (Outcome.IGNORED if route.peer else Outcome.FAILED), None
        if answer.status >= 400:
            return Outcome.IGNORED, None
        self._learn(c, answer)
        return Outcome.SUCCESS, None

    def _learn(self, c: _Carried, answer: Answer) -> None:
        if not c.api.generates:
            return
        tokens = answer.observer.output_tokens()
        c.record.output_tokens = tokens
        if tokens is not None:
            self.lengths.learn(c.request.model, c.request.tenant, c.request.input_tokens, tokens)
        served_by = tuple(c.record.served_by.split("/"))
        if c.request.session and not c.record.from_peer and len(served_by) == 3:
            self.affinity.remember(
                c.request.session, Placement(served_by, c.request.input_tokens + round(tokens or 0.0))
            )

    # -- whether to try again ----------------------------------------------------------------------------------------

    def _may_retry(self, c: _Carried) -> bool:
        return c.record.executions < self._attempts and self._budget.take(clock.now())

    async def _again_after(self, c: _Carried, route: Route, error: UpstreamError) -> bool:
        """Whether a failure may be tried elsewhere; excludes what failed."""
        if c.exchange.status:
            return False  # bytes of an answer are with the client
        if route.peer is not None:
            # A peer that is gone closed its own connections, so what it had sent on was given up by the server.
            self.balancing.peer_lost(route.peer.id)
            if isinstance(error, FirstByteTimeout):  # it hangs, and a server may be at work for it
                c.record.executions += 1
                return self._may_retry(c)
            c.peers_lost += 1
            return c.peers_lost <= self._attempts + 1
        c.exclude.add(route.target)
        if isinstance(error, ConnectFailed):
            return self._budget.take(clock.now())
        if isinstance(error, ResetBeforeByte) and not await self.relay.refuses(route.url):
            return False  # the server is alive and may have executed it: never twice
        return self._may_retry(c)

    # -- answers of our own ------------------------------------------------------------------------------------------

    def _shed(self, c: _Carried, shed: Shed) -> LBError:
        if shed.reason == "saturated":
            return Saturated("all instances that serve this model are at their limit", retry_after_s=shed.retry_after_s)
        if shed.reason == "too_large":
            return BadRequest("the prompt is larger than any instance of this model can hold", param="messages")
        return NoEndpoints(
            f"no instance of the model `{c.request.model[:200]}` is available", retry_after_s=shed.retry_after_s
        )

    def _pass_refusal(self, c: _Carried, answer: Answer) -> None:
        """All refused for load: the client gets the last server's own words."""
        kept = [(key, value) for key, value in answer.headers if key not in heads.OURS and not heads.internal(key)]
        added = [(DECISION, c.request.id.encode())]
        if c.record.from_peer:
            # By those that were tried, which says nothing of this node: its other endpoints may be free.
            added += [(REJECTED, b"refused"), (ATTEMPTS, b"%d" % c.record.executions)]
        c.record.ending, c.record.error = Ending.REFUSED, "overloaded"
        c.exchange.client.respond(answer.status, kept, answer.body, heads.lines(added))

    def _answer_error(self, exchange: Exchange, api: apis.Api, record: RequestRecord, error: LBError) -> None:
        record.error = error.code
        if exchange.status:
            return  # the relay has ended it in the open already
        record.status = error.status
        record.ending = Ending.BROKE_BEFORE if isinstance(error, UpstreamError) else Ending.REFUSED
        headers = [(b"content-type", b"application/json"), *self.cors.answer(exchange.headers)]
        added = [(DECISION, record.id.encode())]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
        if record.from_peer:
            added.append((ATTEMPTS, b"%d" % record.executions))
            if isinstance(error, RejectedError):
                added.append((REJECTED, error.code.encode()))
        exchange.client.respond(error.status, headers, apis.error_body(api.family, error), heads.lines(added))

    def _note_stages(self, c: _Carried, route: Route) -> None:
        now = clock.now()
        for hop in route.hops:
            pick = hop.pick
            c.record.stages.append(
                StageRecord(
                    hop.path,
                    pick.endpoint.id,
                    pick.policy,
                    pick.terms,
                    pick.scores,
                    hop.takeover,
                    now,
                    tracecontext.new_span_id(self._rng),
                    pick.predicted_ttft_s,
                    pick.predicted_total_s,
                )
            )


def _int(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _retry_after(headers: heads.Headers) -> float | None:
    """Seconds a server asks to be left alone, bounded; None when it does not say or makes no sense."""
    value = heads.find(headers, b"retry-after")
    if value is None or not value.strip().isdigit():
        return None
    return min(float(value), MAX_RETRY_AFTER_S)
