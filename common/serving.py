"""The life of one request: read, route, forward, learn, release. Start here to understand a tier.

The first tier that gets a request reads its body; the ones below are told by the signed route header. `descend` picks
down to a live peer or an instance, the relay carries the bytes, and whatever way it ends, every pick is released once
and one record is written. Before the first byte a failure may be tried elsewhere, within one budget for the whole path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from math import ceil
from random import Random

import structlog

from common import answers, apis, clock, orca, tracecontext
from common.affinity import Affinity
from common.answers import Meaning
from common.balancing import NOBODY, Balancing
from common.errors import (
    AccessError,
    BadRequest,
    ConnectFailed,
    DeadlineExceeded,
    FirstByteTimeout,
    LBError,
    Loading,
    NoEndpoints,
    RejectedError,
    ResetBeforeByte,
    Saturated,
    StreamBroken,
    Unowned,
    UpstreamError,
)
from common.hook import Hook
from common.intake import Intake
from common.policy.admission import RetryBudget
from common.policy.output_length import OutputLength
from common.policy.quarantine import STRIKES, Quarantine
from common.policy.stages import Route
from common.policy.versions import Versions, version_of
from common.policy.waiting import Bounds
from common.queueing import WAITABLE, Queue, error_of
from common.records import AttemptRecord, Ending, RequestRecord
from common.relay import cors, heads
from common.relay.body import Observer
from common.relay.exchange import Exchange
from common.relay.keepalive import Pings
from common.relay.relay import Relay
from common.relay.sending import Answer, Sending, Verdict
from common.replies import ATTEMPTS, CONTINUATION, DECISION, OVERLOAD, REJECTED, SERVED_BY, STRUCK, Replies
from common.route import HEADER, RouteSigner
from common.route import Route as RouteHeader
from common.shadowing import Shadows, asked_of, copied
from common.store.base import Placement
from common.telemetry import Telemetry
from common.tenancy.directory import Tenant
from common.tenancy.gate import Admission, Gate, Used
from common.types import InferenceRequest, Outcome, Path, Shed, Slo

log = structlog.get_logger()

MOST_READ = 65_536  # bytes of an answer that is read before it is passed on; larger ones are no errors' words
MAX_TRIES = 8  # hops tried for one request, refused connections and rejections included
MAX_WAITS = 64  # times that a request waits for tiers that refused it for load, on top of the bounds of the room
PEER_SLACK_S = 1.0  # by how much a tier waits longer than the one below it
RATE_LIMITS = b"x-ratelimit-"  # a server's own say nothing of the tenant's
ORCA_REQUEST = heads.lines([orca.REQUEST])
SPOILED = (Meaning.OOM, Meaning.DEAD)  # failures over one request that say nothing of the next
DEAD_S = 10.0  # a server that has just died is dead for this long: who comes later has not killed it
DEATHS_REMEMBERED = 1024
OUTCOMES = {  # of what a server's answer means; what is not here is a failure
    Meaning.FINE: Outcome.SUCCESS,
    Meaning.OVERLOAD: Outcome.OVERLOADED,
    Meaning.LOADING: Outcome.OVERLOADED,
    Meaning.CLIENT: Outcome.IGNORED,
    Meaning.NO_MODEL: Outcome.IGNORED,
}
ELSEWHERE = (Meaning.OVERLOAD, Meaning.LOADING, Meaning.NO_MODEL, *SPOILED)


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
    exclude: set[Path]  # failed it
    limits: heads.Headers  # of its tenant, for the answer
    full: set[Path] = field(default_factory=set)  # refused it for load: asked again after it has waited
    waits: int = 0  # for those that refused it
    peers_lost: int = 0
    meaning: Meaning = Meaning.FINE  # of the last answer that was read here
    continuation: apis.Continuation | None = None  # of a stream that may be carried on by another server
    broken: bool = False  # it broke, and its client waits for that server


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
        local: Callable[[Exchange, heads.Headers, Tenant | None], Awaitable[None]],
        *,
        attempts: int,
        budget_ratio: float,
        continue_streams: frozenset[str],
        sample_ratio: float,
        rng: Random,
        queue: Bounds,
        slo: Slo,
        quarantine_s: float = 0.0,
        versions: Versions | None = None,
        hook: Hook | None = None,
        allowed_origins: tuple[str, ...] = (),
        dropped_headers: frozenset[bytes] = frozenset(),
        comment_s: float = 0.0,
        verified_peers: bool = False,
        gate: Gate | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self.process_id = process_id
        self.node = node
        self.balancing = balancing
        self.affinity = affinity
        self.telemetry = telemetry
        self.signer = signer
        self.lengths = OutputLength()
        self.relay: Relay
        self.intake = Intake(
            balancing,
            affinity,
            signer,
            self.lengths,
            versions or Versions({}, {}),
            slo=slo,
            verified_peers=verified_peers,
            gate=gate,
        )
        self.replies = Replies(allowed_origins)
        self.queue = Queue(queue, lambda route: balancing.release(route, Outcome.IGNORED))
        self.quarantine = Quarantine(quarantine_s)
        self._hook = hook or Hook("")
        self.shadows = shadows or Shadows({}, 0, 0)
        self._deaths: dict[Path, float] = {}  # when a server was last seen to die
        self.on_versioned: Callable[[RequestRecord], None] = lambda record: None  # a request of a split ended
        self.on_arrival: Callable[[InferenceRequest], None] = lambda request: None  # one was understood
        self._local = local
        self._gate = gate
        self._attempts = attempts
        self._budget = RetryBudget(budget_ratio)
        self._continue_streams = continue_streams
        self._sample_ratio = sample_ratio
        self._dropped = dropped_headers
        self._comment_s = comment_s
        self._via = b"via: 1.1 %b\r\n" % self.intake.pseudonym
        self._rng = rng

    def reconfigure(
        self,
        *,
        attempts: int,
        budget_ratio: float,
        continue_streams: frozenset[str],
        sample_ratio: float,
        allowed_origins: tuple[str, ...],
        dropped_headers: frozenset[bytes],
        comment_s: float,
    ) -> None:
        """Other settings for the requests that come from now on."""
        self._attempts, self._budget.ratio, self._sample_ratio = attempts, budget_ratio, sample_ratio
        self._continue_streams = continue_streams
        self.replies = Replies(allowed_origins)
        self._dropped, self._comment_s = dropped_headers, comment_s

    # -- one request -------------------------------------------------------------------------------------------------

    async def serve(self, exchange: Exchange) -> None:
        """Answer one request."""
        path = exchange.path
        matched = apis.match(exchange.method.decode("latin-1"), path)
        if exchange.method == b"OPTIONS" and self.replies.preflight(exchange):
            return
        if matched is None:
            await self._answer_here(exchange)
            return
        api = matched.api
        if b"traceparent" in exchange.fields:
            context = tracecontext.read(exchange.headers, self._rng, self._sample_ratio)
        else:
            context = tracecontext.fresh(self._rng, self._sample_ratio)
        record = self._open(exchange, api, context, path)
        admission: Admission | None = None
        try:
            told, admission = await self.intake.read(exchange, matched, record)
            self.on_arrival(told.request)
            self.telemetry.began(record)
            self._refuse_quarantined(told.request)
            if self.shadows.rules and not record.from_peer:
                self._shadow(exchange, matched, record, told)
            await self._carry(self._carried(exchange, api, record, context, told, admission))
        except LBError as error:
            self.replies.error(exchange, api, record, error)
        except asyncio.CancelledError:
            record.ending = Ending.REFUSED if exchange.ended else Ending.CLIENT_LEFT
            raise
        finally:
            record.ended_at = clock.now()
            record.status = record.status or exchange.status
            if exchange.pings is not None:
                exchange.pings.stop()
            if admission is not None:
                admission.end(_used(api, record))
            self.telemetry.ended(record)
            if record.version and not record.shadow_of:
                self.on_versioned(record)

    # -- its shadow --------------------------------------------------------------------------------------------------

    def _shadow(self, exchange: Exchange, matched: apis.Match, record: RequestRecord, told: RouteHeader) -> None:
        """Have a copy of an admitted request sent elsewhere, if that is asked for; nothing of it comes back here."""
        rule = self.shadows.wanted((record.alias, record.model), exchange, self._rng)
        if rule is None or not record.model or told.request.owner:  # what builds on a server's memory is there only
            return
        if not self.shadows.takes(len(exchange.body)):
            self.telemetry.shadow_dropped(record)
            return
        context = tracecontext.fresh(self._rng, 1.0 if record.sampled else 0.0)
        copy = copied(exchange)
        shade = self._open(copy, matched.api, context, record.path)
        shade.tenant, shade.input_tokens, shade.stream = record.tenant, record.input_tokens, record.stream
        shade.model, shade.version, shade.shadow_of = rule.model or record.model, rule.version, record.id
        told = RouteHeader(asked_of(told.request, shade.id, shade.model, rule.version), told.node)
        self.shadows.run(self._carry_shadow(copy, matched.api, context, shade, told, record.model), len(exchange.body))

    async def _carry_shadow(
        self,
        exchange: Exchange,
        api: apis.Api,
        context: tracecontext.TraceContext,
        record: RequestRecord,
        told: RouteHeader,
        model: str,
    ) -> None:
        try:
            if record.model != model:
                exchange.body = apis.renamed(exchange.body, model, record.model, api.kind)
            await self._carry(self._carried(exchange, api, record, context, told, None))
        except LBError as error:
            record.status, record.error = error.status, error.code
        finally:
            record.ended_at = clock.now()
            record.status = record.status or exchange.status
            self.telemetry.ended(record)

    # -- one request -------------------------------------------------------------------------------------------------

    async def _answer_here(self, exchange: Exchange) -> None:
        """What is not relayed; whether this process lives, anybody may ask."""
        tenant = None
        if exchange.path not in apis.HEALTH:
            try:
                self.intake.count(exchange)
                if self._gate is not None:
                    tenant = self._gate.identify(exchange.headers).tenant
            except AccessError as error:
                self.replies.denial(exchange, error)
                return
        await self._local(exchange, self.replies.cors.answer(exchange.headers), tenant)

    def _open(self, exchange: Exchange, api: apis.Api, context: tracecontext.TraceContext, path: str) -> RequestRecord:
        return RequestRecord(
            context.trace_id,
            tracecontext.new_span_id(self._rng),
            context.parent_id,
            context.sampled,
            self.process_id,
            self.node,
            exchange.method.decode(),
            path,
            exchange.started_at,
            exchange.started_wall_ns,
            operation=api.operation,
        )

    def _carried(
        self,
        exchange: Exchange,
        api: apis.Api,
        record: RequestRecord,
        context: tracecontext.TraceContext,
        told: RouteHeader,
        admission: Admission | None,
    ) -> _Carried:
        request = told.request
        limits = admission.headers if admission is not None else []
        # A client's stream may be kept up with comments here; what comes from a peer is kept up by that peer.
        ours = not record.from_peer and not record.shadow_of and exchange.carrier is None
        if self._comment_s and request.stream and ours and api.family is not apis.Family.OLLAMA:
            added = heads.lines([(DECISION, record.id.encode()), *self.replies.cors.answer(exchange.headers), *limits])
            exchange.pings = Pings(exchange, self._comment_s, added)
        dropped = frozenset() if record.from_peer else self._dropped
        return _Carried(
            exchange,
            api,
            request,
            told.node,
            record,
            context,
            heads.passed_on(exchange.headers, dropped),
            (*told.visited, self.process_id),
            set(exchange.carrier.exclude) if exchange.carrier is not None else set(),
            limits,
        )

    async def _carry(self, c: _Carried) -> None:
        """Try routes until one answers, or the budget says stop."""
        self._budget.request(clock.now())
        refusal: Answer | None = None
        failure: LBError | None = None
        tries = 0
        while tries < MAX_TRIES:
            tries += 1
            route = await self._next(c)
            if isinstance(route, Shed):
                self.telemetry.shed(c.record, c.request, route)
                nothing_left = self._shed(c, route)
                failure = failure or nothing_left
                failure.elsewhere = nothing_left.elsewhere  # what failed here may be tried on by the tier above
                break
            self.telemetry.decided(c.record, c.request, route.hops, self.balancing.balancers, self._rng)
            try:
                answer = await self._attempt(c, route)
            except UpstreamError as error:
                failure = error
                if not await self._again_after(c, route, error) or c.request.shadow_of:
                    break
            except RejectedError as error:
                failure = error
                c.exclude.add(route.target)
            else:
                if answer.relayed:
                    return
                full = _full(answer)
                if full is not None:  # nothing was dispatched: a sibling may have room, and else it waits
                    failure = error_of(full)
                    c.full.add(route.target)
                    tries -= 1
                    continue
                refusal = _sooner(refusal, answer)
                c.exclude.add(route.target)
                if not self._moves(c, route, answer) or not self._may_retry(c):
                    break
        if c.broken:
            self._cut_off(c)
        if refusal is not None:
            moves = heads.find(refusal.headers, REJECTED) is not None or c.meaning in ELSEWHERE
            self.replies.refusal(c.exchange, c.api, c.record, refusal, final=not moves)
            return
        raise _at_last(c, failure)

    async def _next(self, c: _Carried) -> Route | Shed:
        """Where it may go now. Where all that could take it are full, it waits for its turn in the tier it entered."""
        asked = clock.now()
        route = self.balancing.route(c.request, c.node, frozenset(c.exclude | c.full))
        self.telemetry.chose(c.node, clock.now() - asked)
        fixed = c.broken or c.request.shadow_of
        if isinstance(route, Shed) and c.request.version and route.reason in NOBODY and not fixed:
            c.request = replace(c.request, version="")  # rather another version than none
            route = self.balancing.route(c.request, c.node, frozenset(c.exclude | c.full))
        if isinstance(route, Route) or c.record.from_peer or c.request.shadow_of:
            return route
        shed = Shed("saturated", None, route.removed) if c.full else route
        if not self.queue.takes(shed):
            return route
        if c.full:
            c.full.clear()
            c.waits += 1
            if c.waits > MAX_WAITS:
                return route
        began = clock.now()
        if c.record.queued_at is None:
            c.record.queued_at = began
        self.telemetry.queued.value += 1
        try:
            return await self.queue.route(
                c.request,
                lambda: self.balancing.route(c.request, c.node, frozenset(c.exclude)),
                shed,
                c.record.queued_at,
            )
        finally:
            self.telemetry.queued.value -= 1
            c.record.queued_s += clock.now() - began

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, c: _Carried, route: Route) -> Answer:
        """Send it along one route; whatever happens, the route's reservations are released here, once."""
        attempt = AttemptRecord(
            route.target,
            route.peer.id if route.peer else "",
            route.url,
            clock.now(),
            tracecontext.new_span_id(self._rng),
            continues=c.broken,
        )
        c.record.attempts.append(attempt)
        outcome, answer, unreachable = Outcome.IGNORED, None, False
        retry_after_s: float | None = None
        if route.peer:
            self.balancing.peer_sent(route.peer.id)
        else:
            c.record.executions += 1
        sending: Sending | None = None
        try:
            sending = self._sending(c, route, attempt)
            carrier = c.exchange.carrier or self.relay
            answer = await carrier.forward(route.url, sending)
            self._note_usage(c, attempt, sending)
            outcome, retry_after_s = self._judged(c, route, answer)
            unreachable = c.meaning is Meaning.DEAD  # what answers for it is no server any more
            return answer
        except UpstreamError as error:
            attempt.error = error.code
            unreachable = isinstance(error, ConnectFailed)
            if unreachable and not route.peer:
                c.record.executions -= 1  # it never saw the request
            outcome = Outcome.IGNORED if route.peer or c.exchange.ended else Outcome.FAILED
            if isinstance(error, StreamBroken) and c.exchange.committed and not c.broken:
                c.record.ending, c.record.error = Ending.BROKE_AFTER, error.code
            raise
        except RejectedError as error:
            attempt.error = error.code
            if not route.peer:
                c.record.executions -= 1
            raise
        finally:
            attempt.ended_at = clock.now()
            if answer is None:  # it broke, or its client left
                self._note_usage(c, attempt, sending)
            counts = answer is not None and answer.relayed and c.api.generates and not route.peer
            cached = c.record.used_cached_tokens if counts and attempt.status < 400 else None
            if route.peer:
                self.balancing.peer_done(route.peer.id, reached=answer is not None)
            self.balancing.release(
                route,
                outcome,
                output_tokens=None if attempt.continues else c.record.output_tokens,
                cached_tokens=cached,
                unreachable=unreachable,
                retry_after_s=retry_after_s,
            )
            self.queue.wake()

    def _sending(self, c: _Carried, route: Route, attempt: AttemptRecord) -> Sending:
        pool = self.relay.pool(route.url)
        added = c.context.header(attempt.span_id) + self._request_headers(c, route)
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

        def judge(sending: Sending, status: int, headers: heads.Headers) -> Verdict:
            attempt.status = status
            if route.peer:
                c.record.executions = max(c.record.executions, _int(heads.find(headers, ATTEMPTS)))
                self._heard_of_strikes(c, _int(heads.find(headers, STRUCK)))
            if heads.find(headers, REJECTED) is not None if route.peer else _is_read(route, status, headers):
                return Verdict.COLLECT
            if exchange.status and not _continues_events(status, headers):
                return Verdict.COLLECT  # keep-alive comments have begun another answer than this one
            if c.broken or (self._continue_streams and exchange.path in self._continue_streams):
                self._may_continue(c, route, sending, status, headers)
            sending.added = self._response_headers(c, route, headers)
            self._add_for_client(c, sending)
            if not route.peer and (load := heads.find(headers, orca.HEADER)) is not None:
                self.balancing.engine_load(route, orca.parse(load))
                if heads.find(exchange.headers, orca.REQUEST[0]) is None:  # it is we who asked
                    sending.replaced += (orca.HEADER,)
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
        if c.api.creates and not c.record.from_peer and not c.request.shadow_of and self.affinity.rules.held_timeout_s:
            sending.saw = apis.FirstId(lambda id_: self._held_there(c, id_)).saw
        sending.patient = not c.request.stream
        if route.peer:  # the tier next to the server gives up first: it alone knows whom to blame, and where to go on
            sending.tries, sending.slack_s = self._attempts, PEER_SLACK_S * (3 - len(route.target))
        return sending

    def _add_for_client(self, c: _Carried, sending: Sending) -> None:
        """What stands in an answer for whoever called this system, in the stead of a server's own."""
        if self.replies.cors and not c.record.from_peer:
            sending.added += heads.lines(self.replies.cors.answer(c.exchange.headers))
            sending.replaced += (cors.PREFIX,)
        if c.limits:
            sending.added += heads.lines(c.limits)
            sending.replaced += (RATE_LIMITS,)

    def _heard_of_strikes(self, c: _Carried, struck: int) -> None:
        """What the tiers below have seen a prompt do to servers."""
        for _ in range(min(struck, STRIKES) - c.record.struck):
            c.record.struck += 1
            self.quarantine.struck(c.request.fingerprint, clock.now(), certain=False)

    def _request_headers(self, c: _Carried, route: Route) -> bytes:
        if route.peer:
            request = c.request
            if request.deadline_s is not None:  # what is left of it
                waited_s = clock.now() - c.exchange.started_at
                request = replace(request, deadline_s=max(0.0, request.deadline_s - waited_s))
            told = RouteHeader(request, route.target, c.record.executions, c.visited)
            return b"%b: %b\r\n" % (HEADER, self.signer.sign(told))
        if route.endpoint.engine in orca.ENGINES and heads.find(c.exchange.headers, orca.REQUEST[0]) is None:
            return self._via + ORCA_REQUEST
        return self._via

    def _response_headers(self, c: _Carried, route: Route, headers: heads.Headers) -> bytes:
        served_by = heads.find(headers, SERVED_BY) if route.peer else "/".join(route.target).encode()
        c.record.served_by = (served_by or b"").decode("latin-1")
        added = [(DECISION, c.request.id.encode())]
        if served_by:
            added.append((SERVED_BY, served_by))
        if c.continuation is not None or (route.peer and heads.find(headers, CONTINUATION) is not None):
            added.append((CONTINUATION, b"on"))
        if c.record.from_peer:
            added.append((ATTEMPTS, b"%d" % c.record.executions))
            if c.record.struck:
                added.append((STRUCK, b"%d" % c.record.struck))
        return heads.lines(added)

    def _judged(self, c: _Carried, route: Route, answer: Answer) -> tuple[Outcome, float | None]:
        """What an answer says of the endpoint, and for how long it wants to be left alone."""
        c.record.status = answer.status
        c.meaning = Meaning.FINE
        if answer.relayed:
            c.record.ending = Ending.COMPLETE
        if route.peer:  # its own tier has judged the server; what it refuses as full counts for its node
            if answer.status < 400:
                if answer.relayed:
                    self._succeeded(c)
                return Outcome.SUCCESS, None
            full = not answer.relayed and heads.find(answer.headers, REJECTED) == b"saturated"
            return (Outcome.OVERLOADED, answers.retry_after(answer.headers)) if full else (Outcome.IGNORED, None)
        engine = route.endpoint.engine
        said = answer.body if answer.status >= 400 else answer.observer.suspect()
        if answer.status >= 400 or said:
            reading = answers.classify(engine, answer.status, answer.headers, said)
            c.meaning, retry_after_s = reading.cause, reading.retry_after_s
            if answer.status == 503 and c.meaning is Meaning.FAILED and engine not in answers.TELLS_BUSY:
                c.meaning = Meaning.OVERLOAD
            if c.meaning is not Meaning.FINE:
                c.record.error = c.meaning.value if answer.status < 400 else c.record.error
                return OUTCOMES.get(c.meaning, Outcome.FAILED), retry_after_s
        if answer.relayed and answer.status < 400:
            self._succeeded(c)
        return Outcome.SUCCESS, None

    @staticmethod
    def _note_usage(c: _Carried, attempt: AttemptRecord, sending: Sending | None) -> None:
        """What an answer has used as far as it came, whether or not its client stayed to the end."""
        observer = sending.observer if sending is not None else None
        if observer is None or not observer.bytes or attempt.status >= 400:
            return
        c.record.used_input_tokens, c.record.used_cached_tokens = observer.input_tokens(), observer.cached_tokens()
        if c.api.generates:
            c.record.output_tokens = observer.output_tokens()
        if attempt.continues and c.continuation is not None:  # the prompt had in it what others wrote
            c.record.used_input_tokens = None
            if c.record.output_tokens is not None:
                c.record.output_tokens += c.continuation.before

    def _succeeded(self, c: _Carried) -> None:
        if not c.request.shadow_of:
            self.quarantine.answered(c.request.fingerprint, clock.now())
            self._learn(c)

    def _learn(self, c: _Carried) -> None:
        """From what a server counted; of a stream that two have written nobody counted all."""
        if c.record.used_input_tokens is not None and not c.record.from_peer and not c.broken:
            self.intake.learn(c.record, c.record.used_input_tokens)
        if not c.api.generates:
            return
        tokens = c.record.output_tokens
        if tokens is not None and not c.broken:
            self.lengths.learn(c.request.model, c.request.tenant, c.request.input_tokens, tokens)
        served_by = tuple(c.record.served_by.split("/"))
        if c.request.session and not c.record.from_peer and len(served_by) == 3:
            mode, timeout_s = self.affinity.sticks(c.exchange.path, c.request.model)
            if mode != "off":
                placement = Placement(served_by, c.request.input_tokens + round(tokens or 0.0))
                self.affinity.remember(c.request.session, placement, timeout_s)

    def _held_there(self, c: _Carried, id_: str) -> None:
        """An answer that begins has this id: what comes back to it has to come to the server that gives it."""
        served_by = tuple(c.record.served_by.split("/"))
        if c.exchange.status < 300 and len(served_by) == 3:
            self.affinity.remember(apis.held_key(id_), Placement(served_by, 0), self.affinity.rules.held_timeout_s)

    # -- a stream that is carried on -----------------------------------------------------------------------------------

    def _may_continue(self, c: _Carried, route: Route, sending: Sending, status: int, headers: heads.Headers) -> None:
        """Keep what it takes to carry a stream on, where that is asked for and can be done, and listen to it."""
        if c.broken and c.continuation is not None:
            c.continuation.follows("/".join(route.target))
        elif not route.peer and c.exchange.carrier is None and _continues_events(status, headers):
            c.continuation = apis.Continuation.of(c.exchange.path, route.endpoint.engine, c.exchange.body)
        if c.continuation is not None:
            sending.edit = c.continuation.edited
            sending.goes_on = lambda: self._goes_on(c, route)

    def _goes_on(self, c: _Carried, route: Route) -> bool:
        """Whether a stream that broke is carried on by another server; its request is what that one is asked then."""
        assert c.continuation is not None
        asked = None if c.exchange.ended else c.continuation.request()
        c.broken = asked is not None and self._may_retry(c)
        if c.broken and asked is not None:
            written = c.continuation.tokens
            c.exchange.body = asked
            c.request = replace(
                c.request,
                input_tokens=c.request.input_tokens + written,
                output_tokens=max(1.0, c.request.output_tokens - written),
                version=version_of(route.endpoint.labels),  # no other one's words
            )
        return c.broken

    def _follows(self, c: _Carried, route: Route, error: UpstreamError) -> bool:
        """Whether another server is tried although bytes of an answer are with the client."""
        c.exclude.add(route.target)
        return c.broken and not c.exchange.ended and (isinstance(error, StreamBroken) or self._may_retry(c))

    @staticmethod
    def _cut_off(c: _Carried) -> None:
        """A stream broke and nobody carries it on."""
        error = StreamBroken("the stream broke, and no other server could carry it on")
        c.record.ending, c.record.status = Ending.BROKE_AFTER, c.exchange.status
        c.exchange.client.cut(apis.error_event(c.api.family, "text/event-stream", str(error)))
        raise error

    # -- whether to try again ----------------------------------------------------------------------------------------

    def _moves(self, c: _Carried, route: Route, answer: Answer) -> bool:
        """Whether what was answered is a reason to try elsewhere."""
        if route.peer:
            return heads.find(answer.headers, REJECTED) is not None and c.record.struck < STRIKES
        if c.meaning in SPOILED:
            return self._spoiled(c, route, certain=c.meaning is Meaning.OOM)
        if c.meaning not in ELSEWHERE:
            c.record.served_by = "/".join(route.target)
        return c.meaning in ELSEWHERE

    def _may_retry(self, c: _Carried) -> bool:
        if c.request.shadow_of:
            return False
        return c.record.executions < self._attempts and self._budget.take(clock.now())

    async def _again_after(self, c: _Carried, route: Route, error: UpstreamError) -> bool:
        """Whether a failure may be tried elsewhere; excludes what failed."""
        if c.exchange.committed or c.exchange.ended:
            return self._follows(c, route, error)
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
        if isinstance(error, ResetBeforeByte):
            # A server that is alive may have executed it, and that never twice; one that died may have died of it.
            gone = await self.relay.refuses(route.url)
            return gone and self._spoiled(c, route, certain=False) and self._may_retry(c)
        return self._may_retry(c)

    def _spoiled(self, c: _Carried, route: Route, *, certain: bool) -> bool:
        """A server ran out of memory over a request, or died over it. Whether it may be tried elsewhere: once."""
        now, request = clock.now(), c.request
        died_at = self._deaths.setdefault(route.target, now)
        if not certain and c.record.attempts[-1].at > died_at > now - DEAD_S:
            return True  # it was dead when the request came
        self._deaths[route.target] = now
        if len(self._deaths) > DEATHS_REMEMBERED:
            del self._deaths[next(iter(self._deaths))]
        c.record.struck += 1
        self.quarantine.struck(request.fingerprint, now, certain=certain)
        c.exclude |= self.balancing.ran_out(route, request, certain=certain)
        event = "instance_out_of_memory" if certain else "instance_died_over_a_prompt"
        facts = {
            "instance": "/".join(route.target),
            "url": route.url,
            "engine": route.endpoint.engine,
            "tokens": round(request.input_tokens + request.output_tokens),
            "trace_id": c.record.id,
        }
        log.warning(event, **facts)
        self._hook.tell(event, **facts)
        return c.record.struck < STRIKES and not self.quarantine.refused_for_s(request.fingerprint, now)

    def _refuse_quarantined(self, request: InferenceRequest) -> None:
        for_s = self.quarantine.refused_for_s(request.fingerprint, clock.now())
        if for_s:
            message = (
                f"servers have run out of memory, or died, over this prompt {STRIKES} times; "
                f"it is refused for another {ceil(for_s)} s"
            )
            raise BadRequest(message, status=413, code="prompt_quarantined")

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _shed(self, c: _Carried, shed: Shed) -> LBError:
        model = c.request.model[:200]
        refused: LBError
        match shed.reason:
            case "saturated":
                words = "all instances that serve this model are at their limit"
                refused = Saturated(words, retry_after_s=shed.retry_after_s)
            case "loading":
                refused = Loading(f"the model `{model}` is being loaded", retry_after_s=shed.retry_after_s)
            case "owner_gone" | "owner_unavailable":
                refused = Unowned("/".join(c.request.owner), gone=shed.reason == "owner_gone")
            case "too_large":
                refused = BadRequest("the prompt is larger than any instance of this model can hold", param="messages")
            case "deadline_exceeded":
                refused = DeadlineExceeded("no server is predicted to be done with it before its deadline")
            case "residency":
                refused = NoEndpoints("no region that the rules of residency allow for this request serves it now")
            case "no_placement":
                refused = NoEndpoints("no instance has what the rules of placement ask for this request")
            case _:
                what = f"of the model `{model}`" if model else "that speaks this API"
                words = f"no instance {what} is available"
                refused = NoEndpoints(words, retry_after_s=shed.retry_after_s)
        return refused


def _used(api: apis.Api, r: RequestRecord) -> Used:
    """A finished request as its tenant is charged for it."""
    left = r.ending is Ending.CLIENT_LEFT and bool(r.attempts)  # and leaves the work to whoever pays for it
    output = 0 if not api.generates else None if r.output_tokens is None else round(r.output_tokens)
    return Used(
        r.used_input_tokens if r.used_input_tokens is not None or not left else r.input_tokens,
        r.used_cached_tokens,
        output,
        r.status,
        r.ending.value,
        r.served_by,
        r.operation,
        r.started_wall_ns,
        r.total_s,
    )


def _is_read(route: Route, status: int, headers: heads.Headers) -> bool:
    """Whether a server's answer is read before it is passed on, since it may be tried elsewhere; not if it is large."""
    if status in OVERLOAD:
        return True
    return answers.may_move(route.endpoint.engine, status) and _int(heads.find(headers, b"content-length")) <= MOST_READ


def _at_last(c: _Carried, failure: LBError | None) -> LBError:
    """What a client is told when nothing more is tried."""
    if isinstance(failure, ConnectFailed):  # none of those that were tried has seen it
        if c.request.owner:
            return Unowned("/".join(c.request.owner), gone=False)
        return NoEndpoints(f"no server can be reached: {failure}", retry_after_s=1.0)
    return failure or NoEndpoints()


def _int(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0


def _continues_events(status: int, headers: heads.Headers) -> bool:
    """Whether an answer can go on where our own comments have begun one."""
    kind = heads.find(headers, b"content-type") or b""
    coded = heads.find(headers, b"content-encoding") is not None
    return status == 200 and kind.startswith(b"text/event-stream") and not coded


def _full(answer: Answer) -> Shed | None:
    """What a tier below says when it has room for nothing of this kind, in the words of its own stage."""
    code = heads.find(answer.headers, REJECTED)
    if code is None or (reason := code.decode("latin-1")) not in WAITABLE:
        return None
    return Shed(reason, answers.retry_after(answer.headers))


def _sooner(one: Answer | None, other: Answer) -> Answer:
    """Of two refusals the one that may be tried again sooner; the later one where neither says."""
    if one is None:
        return other
    pauses = (answers.retry_after(one.headers), answers.retry_after(other.headers))
    return one if pauses[0] is not None and (pauses[1] is None or pauses[0] <= pauses[1]) else other
