"""One stage's choice among the endpoints of one pool: update, report, pick, first_token, release.

The same object serves all three tiers; a policy (`stages.POLICIES`) says by what. It is synchronous, so between two
awaits a pick with its reservation is one step and concurrent picks never see the same free place. What depends on the
pool is computed in `update`, what depends on the request in `pick`.

A candidate keeps two views of its load: `own`, what was sent from here and has not ended, kept exactly; and for a
region or cluster `quoted`, what its last report said, on which picks made since are replayed. Nothing is drained from a
quote by a guessed rate: over-charging spreads, under-charging herds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from common.policy.ewma import Ewma
from common.policy.filters import Filter
from common.policy.health import Breaker
from common.policy.pickers import Picker
from common.policy.prediction import Server, SpeedEstimate, Terms, class_speed, marginal_cost
from common.policy.scorers import Scorer
from common.types import (
    Decision,
    Endpoint,
    InferenceRequest,
    LoadReport,
    Outcome,
    Path,
    Phase,
    Pick,
    Pool,
    Reservation,
    Score,
    ServerLoad,
    Shed,
)

QUOTE_STALE_S = 5.0  # an older quote is not believed: it herds more than it helps
QUOTE_INSTANCES = 16  # up to here a quote lists instances one by one, beyond it the mean of each GPU class
SENT_KEPT = 4096  # picks remembered for replay on the next quote; a quote comes several times a second
ENOUGH_TOKENS = 8.0  # an answer this long says something of the time per token
MIN_UNCACHED = 16.0  # tokens read even when all of the prompt is cached: the last block is always computed


@dataclass(frozen=True, slots=True)
class Policy:
    """How a stage chooses: who qualifies, what each costs, and which one is taken."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[str, float, Scorer], ...]  # (term, weight, scorer)
    picker: Picker


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds a balancer keeps per candidate, from the configuration."""

    max_in_flight: int = 1024
    eject_after: int = 5
    cooldown_s: float = 2.0
    busy_s: float = 1.0  # how long an endpoint that refused for load is left alone, unless it says


class Candidate:
    """One endpoint of the pool and all that is known of it here."""

    __slots__ = (
        "breaker",
        "busy_until",
        "depth",
        "endpoint",
        "estimates",
        "foreign",
        "foreign_seen",
        "in_flight",
        "last_turn",
        "limits",
        "max_in_flight",
        "own",
        "parent",
        "phase",
        "quoted",
        "report",
        "report_at",
        "round_trip",
        "sent",
    )

    def __init__(self, endpoint: Endpoint, parent: Path, limits: Limits, now: float) -> None:
        self.parent = parent
        self.depth = len(parent)
        self.breaker = Breaker(limits.eject_after, limits.cooldown_s)
        self.limits = limits
        self.max_in_flight = limits.max_in_flight
        self.in_flight = 0
        self.busy_until = 0.0
        self.last_turn = 0
        self.round_trip = Ewma(half_life_s=30.0)
        self.report: LoadReport | None = None
        self.report_at = 0.0
        self.quoted: list[Server] = []
        self.sent: deque[tuple[float, float, float, InferenceRequest]] = deque(maxlen=SENT_KEPT)
        self.foreign = Ewma(half_life_s=2.0)
        self.foreign_seen = 0.0
        self.own: list[Server] = []
        self.estimates: list[SpeedEstimate] = []
        self.endpoint = endpoint
        self.phase = endpoint.phase
        self._restart(endpoint)

    def _restart(self, endpoint: Endpoint) -> None:
        fleet = endpoint.fleet or ((endpoint.gpu, 1),)
        self.estimates = [SpeedEstimate(endpoint.capacity or class_speed(gpu)) for gpu, _ in fleet]
        self.own = [
            Server(e.speed, gpu, max(1, count), endpoint.price_usd_per_hour)
            for e, (gpu, count) in zip(self.estimates, fleet, strict=True)
        ]
        self.foreign_seen = 0.0
        self.max_in_flight = self.limits.max_in_flight * max(1, sum(n for _, n in endpoint.fleet))

    def adopt(self, endpoint: Endpoint) -> None:
        """The pool's new word on this endpoint. Learned state stays, unless another process answers there now."""
        old, self.endpoint = self.endpoint, endpoint
        self.phase = endpoint.phase
        if (old.boot, old.gpu, old.fleet, old.capacity) != (
            endpoint.boot,
            endpoint.gpu,
            endpoint.fleet,
            endpoint.capacity,
        ):
            self._restart(endpoint)

    @property
    def round_trip_s(self) -> float:
        """Measured network round trip, 0 until there is one."""
        return self.round_trip.value or 0.0

    def fresh(self, now: float) -> bool:
        """Whether what is known of its load may be believed; of an instance our own count always is."""
        return self.depth == 2 or (bool(self.quoted) and now - self.report_at < QUOTE_STALE_S)

    def uncached_tokens(self, request: InferenceRequest) -> float:
        """Prompt tokens it would have to read: all but what the session left there."""
        warm = request.warm
        if len(warm) > self.depth and warm[: self.depth] == self.parent and warm[self.depth] == self.endpoint.id:
            return max(request.input_tokens - request.warm_tokens, MIN_UNCACHED)
        return float(request.input_tokens)

    def cheapest(
        self, request: InferenceRequest, now: float, *, blind: bool = False
    ) -> tuple[float, Server, Terms, float]:
        """(seconds, server, terms, uncached tokens) of the server below it on which the request costs least."""
        servers = self.own if blind or self.depth == 2 or not self.quoted else self.quoted
        uncached = self.uncached_tokens(request)
        best: tuple[float, Server, Terms, float] | None = None
        for s in servers:
            if s.models and request.model and request.model not in s.models:
                continue
            t = marginal_cost(s, uncached, request.input_tokens, request.output_tokens)
            cost = t.ttft + t.decode + t.others
            if best is None or cost < best[0]:
                best = (cost, s, t, uncached)
        if best is None:
            return (float("inf"), servers[0], Terms(float("inf"), 0.0, 0.0), uncached)
        return best

    def offers(self, request: InferenceRequest) -> bool:
        """Whether a server below it, as last quoted, has the model; a quote leaves out what takes no work."""
        servers = self.quoted or self.own
        return any(not s.models or not request.model or request.model in s.models for s in servers)

    def price_usd(self, request: InferenceRequest, now: float) -> float:
        """Dollars of GPU time this request takes there when the server is as busy as it should be."""
        _, s, _, uncached = self.cheapest(request, now)
        if s.price_usd_per_hour <= 0.0:
            return 0.0
        v = s.speed
        busy_s = uncached / v.prefill_tokens_per_s + request.output_tokens * (v.alpha_s / v.slots + v.beta_s)
        return busy_s * s.price_usd_per_hour / 3600.0

    def told(self, report: LoadReport, now: float) -> None:
        """Take a report in, as of `now` minus its age, and replay what was sent since."""
        self.report, self.report_at = report, now - report.age_s
        if self.depth == 2:
            self._count_foreign(report, now)
            return
        if not report.servers:
            return
        self.quoted = [Server.of(load, now) for load in report.servers]
        # A pick is in the quote if it arrived there before the quote was made: both ways of the network lie between.
        contained_until = self.report_at - self.round_trip_s
        while self.sent and self.sent[0][0] <= contained_until:
            self.sent.popleft()
        for _, _, _, request in self.sent:
            _, server, _, uncached = self.cheapest(request, now)
            server.dispatched(uncached, request.output_tokens, now)

    def _count_foreign(self, report: LoadReport, now: float) -> None:
        """Requests on an instance that others sent: reported minus our own, smoothed, as decoding ones of mean size."""
        if report.running is None:
            return
        self.foreign.add(report.running + (report.waiting or 0.0) - self.in_flight, now)
        seen = max(0.0, self.foreign.value or 0.0)
        self._add_foreign(-self.foreign_seen)
        self.foreign_seen = 0.0 if seen < 0.5 else seen  # below half a request it is the delay of the report
        self._add_foreign(self.foreign_seen)

    def _add_foreign(self, requests: float) -> None:
        s = self.own[0]
        s.n += requests
        s.k += requests * FOREIGN_CONTEXT_TOKENS
        s.r += requests * FOREIGN_REST_TOKENS

    def emptied(self) -> None:
        """Nothing of ours is under way here any more."""
        for server in self.own:
            server.emptied()
        self._add_foreign(self.foreign_seen)


FOREIGN_CONTEXT_TOKENS = 1000.0  # of a request that others sent: the mean of public conversation traffic,
FOREIGN_REST_TOKENS = 100.0  # and half of its output still to come


@dataclass(slots=True)
class _Held:
    """What a reservation holds, until it is released."""

    candidate: Candidate
    server: Server
    estimate: SpeedEstimate
    prompt: float
    output: float
    context: float
    at: float
    terms: Terms
    first_at: float | None = None  # when its first token was seen
    decoding: bool = False  # counted as past its first token
    trial: bool = False  # of a half-open breaker


class Balancer:
    """Chooses among the endpoints of one pool."""

    def __init__(self, parent: Path, policy: Policy, limits: Limits | None = None) -> None:
        self.parent = parent
        self.policy = policy
        self.limits = limits or Limits()
        self.candidates: dict[str, Candidate] = {}
        self.revision = -1
        self.stale = False
        self._gone: dict[str, Candidate] = {}  # left the pool with requests still running
        self._held: dict[int, _Held] = {}
        self._next = 0
        self._turn = 0
        self._unseen: list[tuple[float, int]] = []  # (when to take it for begun, reservation) of answers in one piece

    # -- what is told ------------------------------------------------------------------------------------------------

    def update(self, pool: Pool, now: float) -> None:
        """Reconcile with the pool: survivors keep what was learned, newcomers start, the gone run out."""
        assert pool.parent == self.parent
        before, self.candidates = self.candidates, {}
        for endpoint in pool.endpoints:
            kept = before.pop(endpoint.id, None) or self._gone.pop(endpoint.id, None)
            if kept is None:
                kept = Candidate(endpoint, self.parent, self.limits, now)
                kept.last_turn = self._turn
            else:
                kept.adopt(endpoint)
            self.candidates[endpoint.id] = kept
        for id_, candidate in before.items():
            if candidate.in_flight:
                self._gone[id_] = candidate
        self.revision, self.stale = pool.revision, pool.stale

    def report(self, report: LoadReport, now: float) -> None:
        """Take an endpoint's report in; one of an endpoint that is not in the pool is dropped."""
        candidate = self.candidates.get(report.endpoint)
        if candidate is not None:
            candidate.told(report, now)

    def round_trip(self, endpoint: str, seconds: float, now: float) -> None:
        """A measured network round trip to an endpoint's balancer."""
        candidate = self.candidates.get(endpoint)
        if candidate is not None:
            candidate.round_trip.add(seconds, now)

    # -- what is decided ---------------------------------------------------------------------------------------------

    def pick(self, request: InferenceRequest, now: float, rng: Random, exclude: Iterable[str] = ()) -> Decision:
        """Choose and reserve in one step. Costs O(candidates)."""
        self._settle(now)
        candidates: list[Candidate] = list(self.candidates.values())
        if exclude:
            skip = set(exclude)
            candidates = [c for c in candidates if c.endpoint.id not in skip]
        if not candidates:
            return Shed("no_endpoints", 1.0)
        removed: list[tuple[str, int]] = []
        for keep in self.policy.filters:
            left = keep(request, candidates, now)
            if len(left) < len(candidates):
                removed.append((keep.__name__, len(candidates) - len(left)))
            if not left:
                return self._shed(keep.__name__, candidates, tuple(removed), now)
            candidates = left
        return self._take(request, candidates, now, rng)

    def _take(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float, rng: Random) -> Decision:
        columns = [scorer(request, candidates, now) for _, _, scorer in self.policy.scorers]
        weights = [weight for _, weight, _ in self.policy.scorers]
        totals = [sum(w * x for w, x in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
        if min(totals) == float("inf"):
            return Shed("too_large") if any(c.offers(request) for c in candidates) else Shed("no_endpoints", 1.0)
        chosen = candidates[self.policy.picker(totals, rng)]
        scores = tuple(
            Score(c.endpoint.id, total, terms)
            for c, total, terms in zip(candidates, totals, zip(*columns, strict=True), strict=True)
        )
        terms, reservation = self._reserve(chosen, request, now)
        return Pick(
            chosen.endpoint,
            reservation,
            self.policy.name,
            tuple(name for name, _, _ in self.policy.scorers),
            scores,
            chosen.round_trip_s + terms.ttft,
            chosen.round_trip_s + terms.ttft + terms.decode,
        )

    def _reserve(self, c: Candidate, request: InferenceRequest, now: float) -> tuple[Terms, Reservation]:
        self._turn += 1
        c.last_turn = self._turn
        c.in_flight += 1
        trial = c.breaker.picked()
        _, server, terms, uncached = c.cheapest(request, now)
        if c.quoted and c.depth < 2:
            server.dispatched(uncached, request.output_tokens, now)
            c.sent.append((now, uncached, request.output_tokens, request))
            _, server, _, _ = c.cheapest(request, now, blind=True)
        server.dispatched(uncached, request.output_tokens, now)
        self._next += 1
        self._held[self._next] = _Held(
            c,
            server,
            c.estimates[c.own.index(server)],
            uncached,
            request.output_tokens,
            request.input_tokens + 0.5 * request.output_tokens,
            now,
            terms,
            trial=trial,
        )
        if not request.stream and request.output_tokens > 0.0 and terms.ttft < float("inf"):
            heappush(self._unseen, (now + terms.ttft, self._next))
        return terms, Reservation(self._next, c.endpoint.id, self.parent)

    def _settle(self, now: float) -> None:
        """Take answers that come in one piece for begun when their first token was due: nobody sees it come."""
        while self._unseen and self._unseen[0][0] <= now:
            _, id_ = heappop(self._unseen)
            held = self._held.get(id_)
            if held is not None and held.first_at is None:
                self._begun(held)

    def _begun(self, held: _Held) -> None:
        held.decoding = True
        held.server.first_token(held.prompt, held.context)

    def _shed(self, by: str, candidates: Sequence[Candidate], removed: tuple[tuple[str, int], ...], now: float) -> Shed:
        if by == "has_capacity":
            wait = min((c.busy_until - now for c in candidates), default=0.0)
            return Shed("saturated", max(wait, self.limits.busy_s), removed)
        if by == "serves_model":
            return Shed("model_not_found", None, removed)
        wait = min((c.breaker.retry_at - now for c in candidates), default=1.0) if by == "not_ejected" else 1.0
        return Shed("no_endpoints", max(wait, 1.0), removed)

    # -- how it went -------------------------------------------------------------------------------------------------

    def first_token(self, reservation: Reservation, now: float) -> None:
        """The first byte of the answer came; a second call for the same reservation changes nothing."""
        held = self._held[reservation.id]
        if held.first_at is not None:
            return
        held.first_at = now
        if not held.decoding:
            self._begun(held)

    def release(
        self,
        reservation: Reservation,
        outcome: Outcome,
        now: float,
        *,
        output_tokens: float | None = None,
        unreachable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        """Give back what a pick holds; exactly once (a second time is a bug and raises KeyError).

        `output_tokens` is what came back, None if unknown. `unreachable`: no connection could be made.
        `retry_after_s`: the endpoint refused for load and asked for this long a pause.
        """
        held = self._held.pop(reservation.id)
        c, s = held.candidate, held.server
        c.in_flight -= 1
        assert c.in_flight >= 0
        s.ended(held.prompt, held.output, held.context, decoding=held.decoding)
        if not c.in_flight:
            c.emptied()
            if self._gone.get(c.endpoint.id) is c:
                del self._gone[c.endpoint.id]
        if not self._held:
            self._unseen.clear()
        c.breaker.ended(outcome, now, unreachable=unreachable, trial=held.trial)
        if outcome is Outcome.OVERLOADED:
            c.busy_until = now + (retry_after_s if retry_after_s is not None else self.limits.busy_s)
        elif outcome is Outcome.SUCCESS:
            self._learn(held, now, output_tokens)

    def _learn(self, held: _Held, now: float, output_tokens: float | None) -> None:
        terms = held.terms
        if terms.ttft in (0.0, float("inf")):
            return
        ttft = None if held.first_at is None else (held.first_at - held.at) / terms.ttft
        began = held.first_at if held.first_at is not None else held.at + terms.ttft
        decode = None
        if output_tokens is not None and output_tokens >= ENOUGH_TOKENS and held.output > 0.0 and terms.decode > 0.0:
            decode = (now - began) / (terms.decode * output_tokens / held.output)
        held.estimate.learn(ttft, decode)
        held.server.speed = held.estimate.speed

    # -- what is told to the tier above ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Reservations held."""
        return len(self._held)

    def quote(self, now: float) -> tuple[ServerLoad, ...]:
        """The servers below this pool that take work, each with what is under way on it."""
        self._settle(now)
        loads: list[ServerLoad] = []
        for c in self.candidates.values():
            if c.phase is not Phase.SERVING or not c.breaker.ready(now):
                continue
            servers = c.quoted if c.depth < 2 and c.fresh(now) else c.own
            loads += [replace(s.load(now), models=s.models or c.endpoint.models) for s in servers]
        return tuple(loads) if len(loads) <= QUOTE_INSTANCES else class_means(loads)


def class_means(loads: Sequence[ServerLoad]) -> tuple[ServerLoad, ...]:
    """One mean server per (GPU class, models), counted: what a quote of many servers shrinks to."""
    groups: dict[tuple[str, frozenset[str]], list[ServerLoad]] = {}
    for load in loads:
        groups.setdefault((load.gpu, load.models), []).append(load)
    return tuple(_mean(group) for group in groups.values())


def _mean(group: Sequence[ServerLoad]) -> ServerLoad:
    count = sum(load.count for load in group)

    def mean(value: Callable[[ServerLoad], float]) -> float:
        return sum(value(load) * load.count for load in group) / count

    first = group[0]
    speed = replace(
        first.speed,
        alpha_s=mean(lambda x: x.speed.alpha_s),
        beta_s=mean(lambda x: x.speed.beta_s),
        gamma_s=mean(lambda x: x.speed.gamma_s),
        prefill_tokens_per_s=mean(lambda x: x.speed.prefill_tokens_per_s),
        slots=mean(lambda x: x.speed.slots),
        kv_tokens=mean(lambda x: x.speed.kv_tokens),
    )
    return ServerLoad(
        speed,
        first.gpu,
        count,
        mean(lambda x: x.decoding),
        mean(lambda x: x.waiting),
        mean(lambda x: x.prompt_tokens),
        mean(lambda x: x.context_tokens),
        mean(lambda x: x.remaining_tokens),
        mean(lambda x: x.prefill_share),
        mean(lambda x: x.price_usd_per_hour),
        first.models,
    )
