"""What the outside is told of requests: metrics, the access log, recent requests, and spans for a collector.

A decision is noted when it is made; all else is derived from a `RequestRecord` when its request ends, off the path of
its bytes. A label is never a client's text unless somebody serves a model of that name.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from random import Random
from threading import Thread
from typing import Any, Protocol

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from common import clock, logs, tracecontext
from common.explain.notes import Notes
from common.history import History
from common.metrics import Counts, Level, Scrape, Spread
from common.policy.balancer import Balancer
from common.policy.stages import Hop
from common.recent import RecentRequests
from common.records import Ending, RequestRecord, StageRecord
from common.types import InferenceRequest, Path, Pick, Shed, Tier

log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
TOTAL_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
TOKEN_BUCKETS = tuple(4.0**n for n in range(11))  # 1 … 1,048,576
WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)  # seen ÷ predicted
MODEL_LABELS = 200  # distinct model labels; further ones are counted as "other"
LOG_FLUSH_S = 0.2  # access-log lines are written together this often
LOG_CLOSE_S = 1.0  # a log that is not read is left behind after this
LOG_PENDING = 10_000  # lines kept while the log cannot be written; older ones are dropped and counted
RECENT_BYTES = 32 * 1024 * 1024  # of remembered requests, whatever their number
SLOW_TTFT_S, SLOW_TPOT_S = 2.0, 0.1  # a request without a service level of its own is slow above these


class AccessLog:
    """One JSON line a request, written in batches by a thread: a log that is read slowly holds no request up.

    `line`: what a request's line says; as the access log has it, unless told otherwise.
    """

    def __init__(self, fd: int, line: Callable[[RequestRecord], Any] | None = None) -> None:
        self._fd = fd
        self._line = line or access_line
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: Thread | None = None
        self.dropped = 0

    def write(self, record: RequestRecord) -> None:
        """Queue the line of a finished request."""
        if len(self._lines) >= LOG_PENDING:
            self.dropped += 1
            return
        self._lines.append(_encode(self._line(record)))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_FLUSH_S, self._flush_behind)

    def _flush_behind(self) -> None:
        self._timer = None
        if self._writing is None or not self._writing.is_alive():
            self._hand_over()
        elif self._lines:
            self._timer = asyncio.get_running_loop().call_later(LOG_FLUSH_S, self._flush_behind)

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            # A daemon, so that a process can leave although nobody reads its log.
            self._writing = Thread(target=self._write, args=(lines,), name="access-log", daemon=True)
            self._writing.start()

    def _write(self, lines: list[bytes]) -> None:
        try:
            os.write(self._fd, b"\n".join(lines) + b"\n")
        except OSError:
            self.dropped += len(lines)  # a full or closed log must not end requests; the counter tells

    def flush(self) -> None:
        """Write what is queued, waiting for at most LOG_CLOSE_S."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hand_over()
        if self._writing is not None:
            self._writing.join(LOG_CLOSE_S)


class AccessLine(msgspec.Struct):
    """A finished request as the access log has it; seconds rounded to microseconds."""

    event: str
    time: float  # it began, seconds since the epoch
    trace_id: str
    process: str
    method: str
    path: str
    tenant: str | None
    model: str
    stream: bool
    status: int
    ending: str
    error: str | None
    served_by: str | None
    from_peer: bool
    shadow_of: str | None
    attempts: int
    input_tokens: int
    output_tokens: float | None
    queued_s: float
    ttft_s: float | None
    total_s: float


def access_line(r: RequestRecord) -> AccessLine:
    """What the access log says of a finished request."""
    ttft = r.ttft_s
    return AccessLine(
        "request",
        r.started_wall_ns // 1000 / 1e6,
        r.id,
        r.process,
        r.method,
        r.path,
        r.tenant or None,
        r.model[:200],
        r.stream,
        r.status,
        r.ending.value,
        r.error or None,
        r.served_by or None,
        r.from_peer,
        r.shadow_of or None,
        len(r.attempts),
        r.input_tokens,
        r.output_tokens,
        round(r.queued_s, 6),
        None if ttft is None else round(ttft, 6),
        round(r.ended_at - r.started_at, 6),
    )


class DecisionSink(Protocol):
    """Where decision records go besides the ring: `write` queues one and waits for nothing."""

    def write(self, record: RequestRecord) -> None:
        """Queue what a finished request says."""

    def flush(self) -> None:
        """Write what is queued, as far as that takes no waiting for others."""


class Telemetry:
    """Takes decisions and finished requests in, and offers what they add up to."""

    def __init__(
        self,
        *,
        recent: int,
        recent_s: float = 0.0,
        known_model: Callable[[str], bool],
        recent_bytes: int = RECENT_BYTES,
        access_log: bool = True,
        decisions: Sequence[DecisionSink] = (),
        export: Callable[[RequestRecord], None] | None = None,
        slow_ttft_s: float = SLOW_TTFT_S,
        slow_tpot_s: float = SLOW_TPOT_S,
    ) -> None:
        self.registry = CollectorRegistry()
        self.log = AccessLog(sys.stdout.fileno()) if access_log else None
        self.decisions = decisions
        self.recent = RecentRequests(recent, recent_bytes, recent_s, self._notable)
        self.history = History()
        self.notes = Notes()
        self._known_model = known_model
        self._export = export
        self._slow_ttft_s = slow_ttft_s
        self._slow_tpot_s = slow_tpot_s
        self._models: set[str] = set()
        self.picks: dict[tuple[Path, str], float] = {}  # (pool, endpoint) -> how often it was chosen
        self.taken_over: dict[Path, tuple[float, float]] = {}  # node -> how often its stage was run here, last when
        self._make_metrics()

    def _make_metrics(self) -> None:
        request = ("operation", "model")
        genai = ("gen_ai_operation_name", "gen_ai_request_model")  # OpenTelemetry's names for the same
        self.in_flight = Level("headwater_in_flight_requests", "Requests under way in this process")
        self.queued = Level("headwater_queued_requests", "Requests that wait for a server with room")
        self._requests = Counts("headwater_requests", "Finished requests", (*request, "status", "ending"))
        self._ttft = Spread(
            "headwater_time_to_first_token_seconds",
            "From the request's last byte to the first of a streamed answer",
            request,
            TTFT_BUCKETS,
            ("gen_ai_server_time_to_first_token_seconds", genai),
        )
        self._tpot = Spread(
            "headwater_time_per_output_token_seconds",
            "Of streamed answers, after the first token",
            request,
            TPOT_BUCKETS,
            ("gen_ai_server_time_per_output_token_seconds", genai),
        )
        self._total = Spread(
            "headwater_request_duration_seconds",
            "From the request's last byte to the answer's last byte",
            request,
            TOTAL_BUCKETS,
            ("gen_ai_server_request_duration_seconds", genai),
        )
        self._tokens = Spread(
            "gen_ai_client_token_usage",
            "Tokens of one request, read and written",
            (*genai, "gen_ai_token_type"),
            TOKEN_BUCKETS,
        )
        self._queue_wait = Spread(
            "headwater_queue_wait_seconds", "In the waiting room, of those that had to wait", (), WAIT_BUCKETS
        )
        self._ratio = Spread(
            "headwater_prediction_ratio",
            "Seen over predicted, by the stage that predicted: 1 is right, 2 took twice as long",
            ("stage", "quantity"),
            RATIO_BUCKETS,
        )
        self._decision_s = Spread(
            "headwater_decision_seconds",
            "What choosing took, by the stage it began with: that stage and those below it that were run here",
            ("stage",),
            DECISION_BUCKETS,
        )
        self._decisions = Counts("headwater_decisions", "Choices made", ("stage", "policy", "reason"))
        self._sheds = Counts("headwater_sheds", "Requests that no endpoint could take", ("reason",))
        self._attempts = Counts("headwater_attempts", "Tries at a peer or an instance", ("to", "error"))
        self._retries = Counts("headwater_retries", "Tries after the first of a request", ("after",))
        self._takeovers = Counts("headwater_takeovers", "Stages run here because their own tier was gone", ("stage",))
        self._affinity = Counts("headwater_affinity", "Requests of sessions, by where they went", ("result",))
        shadow = ("operation", "model", "version")
        self._shadows = Counts(
            "headwater_shadow_requests", "Copies of requests whose answers nobody gets", (*shadow, "status", "ending")
        )
        self._shadows_dropped = Counts(
            "headwater_shadow_dropped", "Copies that were not made, for too many were under way", ("model",)
        )
        self._shadow_total = Spread(
            "headwater_shadow_duration_seconds", "From a copy's request to its answer's end", shadow, TOTAL_BUCKETS
        )
        self._shadow_ttft = Spread(
            "headwater_shadow_time_to_first_token_seconds", "Of copies whose answers are streamed", shadow, TTFT_BUCKETS
        )
        self.registry.register(
            Scrape(
                self.in_flight,
                self.queued,
                self._requests,
                self._ttft,
                self._tpot,
                self._total,
                self._tokens,
                self._queue_wait,
                self._ratio,
                self._decision_s,
                self._decisions,
                self._sheds,
                self._attempts,
                self._retries,
                self._takeovers,
                self._affinity,
                self._shadows,
                self._shadows_dropped,
                self._shadow_total,
                self._shadow_ttft,
            )
        )

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decided(
        self,
        record: RequestRecord,
        request: InferenceRequest,
        hops: Sequence[Hop],
        balancers: Mapping[Path, Balancer],
        rng: Random,
    ) -> None:
        """A route was chosen just now, whose attempt comes next."""
        now, attempt = clock.now(), len(record.attempts)
        record.request = request
        for hop in hops:
            span_id = tracecontext.new_span_id(rng)
            record.stages.append(self.notes.stage(hop, balancers[hop.path], attempt, now, span_id))
            tier = Tier.of(hop.path).value
            picked = (hop.path, hop.pick.endpoint.id)
            self.picks[picked] = self.picks.get(picked, 0.0) + 1.0
            self._decisions.add((tier, hop.pick.policy, _reason(hop.path, hop.pick, request)))
            if hop.takeover:
                self._takeovers.add((tier,))
                self.taken_over[hop.path] = (self.taken_over.get(hop.path, (0.0, 0.0))[0] + 1.0, now)
        if logs.level() == "debug":
            route = "/".join((*hops[-1].path, hops[-1].pick.endpoint.id)) if hops else ""
            log.debug("decided", trace_id=record.id, route=route, attempt=attempt, model=request.model[:200])

    def chose(self, start: Path, seconds: float) -> None:
        """Stages from a node down were run, whatever came of it."""
        self._decision_s.see((Tier.of(start).value,), seconds)

    def shed(self, record: RequestRecord, request: InferenceRequest, shed: Shed) -> None:
        """No endpoint could take it, or no further one."""
        record.request, record.shed = request, shed
        self._sheds.add((shed.reason,))
        if logs.level() == "debug":
            log.debug("shed", trace_id=record.id, reason=shed.reason, model=request.model[:200])

    def keep_only(self, pools: frozenset[Path]) -> None:
        """Let go of what is remembered of nodes that are gone."""
        self.notes.keep_only(pools)
        for path in self.taken_over.keys() - pools:
            del self.taken_over[path]

    # -- requests ----------------------------------------------------------------------------------------------------

    def began(self, record: RequestRecord) -> None:
        """A request was understood and is on its way."""
        if record.shadow_of:
            return
        self.in_flight.value += 1
        record.counted = True

    def ended(self, record: RequestRecord) -> None:
        """A request ended, in whatever way."""
        if record.counted:
            self.in_flight.value -= 1
        if record.shadow_of:
            self._shadow_ended(record)
        else:
            self._client_ended(record)
        self.recent.add(record)
        if self.log is not None:
            self.log.write(record)
        if self._export is not None and (record.sampled or record.status >= 500 or self._troubled(record)):
            self._export(record)

    def _troubled(self, record: RequestRecord) -> bool:
        """Whether it did not end as it should, or not in time."""
        return record.ending is not Ending.COMPLETE or self.slow(record)

    def _notable(self, record: RequestRecord) -> bool:
        """Whether somebody may well ask for it."""
        tried_again = len(record.attempts) > 1 or record.queued_at is not None
        return record.sampled or record.status >= 400 or tried_again or self._troubled(record)

    def _client_ended(self, record: RequestRecord) -> None:
        model = self._model_label(record.model)
        status = str(record.status or 499)  # 499, as nginx has it: the client left before an answer began
        self._requests.add((record.operation, model, status, record.ending.value))
        if record.went_well:
            self._see(record, (record.operation, model))
        for number, attempt in enumerate(record.attempts):
            self._attempts.add(("peer" if attempt.peer else "instance", attempt.error))
            if number:
                before = record.attempts[number - 1]
                self._retries.add((before.error or f"status_{before.status}",))
        if record.queued_at is not None:
            self._queue_wait.see((), record.queued_s)
        if not record.from_peer:
            self.history.see(record)
        for sink in self.decisions:
            sink.write(record)

    def shadow_dropped(self, record: RequestRecord) -> None:
        """A request was not copied, for too many copies are under way."""
        self._shadows_dropped.add((self._model_label(record.model),))

    def _shadow_ended(self, record: RequestRecord) -> None:
        """A copy of a client's request ended: counted apart, for no client had anything of it."""
        labels = (record.operation, self._model_label(record.model), record.version)
        self._shadows.add((*labels, str(record.status or 499), record.ending.value))
        if record.went_well:
            self._shadow_total.see(labels, record.total_s)
            if record.stream and record.ttft_s is not None:
                self._shadow_ttft.see(labels, record.ttft_s)

    def _see(self, record: RequestRecord, labels: tuple[str, str]) -> None:
        """What a request that went well says of times, tokens, predictions and sessions."""
        ttft, tpot, tokens, request = record.ttft_s, record.tpot_s, record.output_tokens, record.request
        self._total.see(labels, record.ended_at - record.started_at)
        if record.stream:
            if ttft is not None:
                self._ttft.see(labels, ttft)
            if tpot is not None:
                self._tpot.see(labels, tpot)
        self._tokens.see((*labels, "input"), record.input_tokens)
        if tokens is not None:
            self._tokens.see((*labels, "output"), tokens)
            if record.predicted_output_tokens and not record.from_peer:
                self._ratio.see(("request", "output_tokens"), tokens / record.predicted_output_tokens)
        for stage in record.answered_stages:
            self._compare(record, stage)
        if request is not None and request.session and not record.from_peer:
            self._affinity.add((_affinity(request, record.served_by),))

    def _compare(self, record: RequestRecord, stage: StageRecord) -> None:
        pick, tier = stage.pick, Tier.of(stage.path).value
        ttft, total = pick.predicted_ttft_s, pick.predicted_total_s
        began_at = record.last_began_at
        if record.stream and began_at is not None and ttft and isfinite(ttft):
            self._ratio.see((tier, "ttft"), (began_at - stage.at) / ttft)
        if total and isfinite(total):
            self._ratio.see((tier, "total"), (record.ended_at - stage.at) / total)

    def slow(self, record: RequestRecord) -> bool:
        """Whether it missed its service level, or what is expected of a request that has none."""
        slo = record.request.slo if record.request is not None else None
        ttft, tpot = record.ttft_s, record.tpot_s
        if record.stream and ttft is not None and ttft > ((slo and slo.ttft_s) or self._slow_ttft_s):
            return True
        return tpot is not None and tpot > ((slo and slo.tpot_s) or self._slow_tpot_s)

    def _model_label(self, model: str) -> str:
        if model in self._models:
            return model
        if not model or not self._known_model(model) or len(self._models) >= MODEL_LABELS:
            return "other"
        self._models.add(model)
        return model

    def close(self) -> None:
        """Write what is still queued."""
        for sink in (self.log, *self.decisions):
            if sink is not None:
                sink.flush()


def _reason(path: Path, pick: Pick, request: InferenceRequest) -> str:
    """Why this one, as a label: there was no other, the session was served there last, or it cost least."""
    if len(pick.candidates) == 1:
        return "only_candidate"
    warm = request.warm
    if len(warm) > len(path) and warm[len(path)] == pick.endpoint.id and warm[: len(path)] == path:
        return "session"
    return "lowest_cost"


def _affinity(request: InferenceRequest, served_by: str) -> str:
    if not request.warm:
        return "new"
    return "returned" if "/".join(request.warm) == served_by else "moved"
