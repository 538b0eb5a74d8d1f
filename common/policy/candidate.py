"""One endpoint of a pool and all that is known of it here: load, health, distance, and how fast it is.

A candidate keeps two views of its load. `own` is what was sent from here and has not ended, exact. For a region or
cluster `quoted` is what its last report said, on which picks made since are replayed. Nothing is drained from a quote
by a guessed rate: over-charging spreads, under-charging herds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from common.policy.ewma import DecayingSum, Ewma
from common.policy.health import Breaker
from common.policy.prediction import UNFIT, Terms, class_speed, marginal_cost
from common.policy.prefix import PREFIX_BLOCK_TOKENS, Mirror
from common.policy.progress import Progress
from common.policy.server import Server, Told
from common.policy.speed import SpeedEstimate
from common.types import Endpoint, InferenceRequest, LoadReport, Path

if TYPE_CHECKING:
    from common.policy.placement import Needs

QUOTE_STALE_S = 5.0  # an older quote is not believed: it herds more than it helps
SENT_KEPT = 4096  # picks remembered for replay on the next quote; a quote comes several times a second
MIN_UNCACHED = 16.0  # tokens read even when all of the prompt is cached: the last block is always computed
FOREIGN_CONTEXT_TOKENS = 1000.0  # of a request that others sent: the mean of public conversation traffic,
FOREIGN_REST_TOKENS = 100.0  # and half of its output still to come
FRESH_REPORT_S = 5.0  # an instance's own report is not believed for longer
FAILING_S = 20.0  # half-life of what is remembered of failures: share comes back slowly
FAILING_STEP = 0.1  # how far one request moves the share
FORGIVEN = 0.005  # a share below this is none
FAILING_COST = 4.0  # at all failures a candidate costs five times as much
FULL_STEP = 0.25  # by how much a success raises what a full endpoint is given: one refusal for four answers
FULL_PAUSE_S = (0.1, 1.0)  # first and longest pause of an endpoint that refuses although it has nothing of ours
FULL_S = 5.0  # without a refusal for so long it is full no more
SAFE_SHARE = 0.9  # of a size that was too large is believed to fit: sizes are estimates
SAFE_FREE = 4.0  # free memory may change the size that is believed to fit by so many times, either way
FREE_S = 10.0  # half-life of the mean of free memory: a large request itself takes some
SAFE_DOUBLES_S = 600.0  # a size that was too large is taken for half as large as it may be after this
FOREIGN_LEAST = 0.5  # below half a request it is the delay of the report


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds a balancer keeps per candidate, from the configuration."""

    max_in_flight: int = 1024
    eject_after: int = 5
    cooldown_s: float = 2.0
    max_ejected_ratio: float = 1.0  # of a pool that failures may eject, counted with the one that is to be
    busy_s: float = 1.0  # how long an endpoint that refused for load is left alone, unless it says


class Full:
    """How much of one model an endpoint takes, learned from its refusals as TCP learns a window (RFC 5681, AIMD).

    What it held when it refused is what may be sent there; each success raises that a little. Where it held nothing of
    ours others fill it, and it is asked again after a pause that doubles.
    """

    __slots__ = ("admits", "in_flight", "pause_s", "refused_at", "until")

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.admits = 1.0
        self.pause_s = 0.0
        self.until = 0.0
        self.refused_at = 0.0

    def refused(self, now: float, *, pauses: bool) -> None:
        """It took no more than what is in flight. `pauses`: it does not say itself when to come back."""
        self.refused_at = now
        self.admits = max(1.0, float(self.in_flight))
        if pauses and not self.in_flight:
            self.pause_s = min(2.0 * self.pause_s, FULL_PAUSE_S[1]) if self.pause_s else FULL_PAUSE_S[0]
            self.until = now + self.pause_s

    def took(self) -> None:
        """It answered one."""
        self.pause_s = 0.0
        self.admits += FULL_STEP

    def has_room(self, now: float) -> bool:
        """Whether one more may be sent."""
        return self.in_flight < int(self.admits) and now >= self.until


class PoolFacts:
    """What is true of a whole pool, so that a decision need not look at each endpoint for it."""

    __slots__ = ("alike", "comparing", "measured", "needs", "priced", "weighted")

    def __init__(self, needs: Needs | None = None) -> None:
        self.comparing: object | None = None  # while one choice is made: several terms ask for the same cost
        self.needs = needs  # what requests need, where there are rules
        self.weighted = False  # weights are configured: they and not capability are what traffic is shared by
        self.alike = False  # all instances are about as fast as each other
        self.measured = False  # a round trip to one of them is known
        self.priced = False  # one of them has a price


class Candidate:
    """See the module. Mutable, and changed by its `Balancer` alone."""

    __slots__ = (
        "breaker",
        "busy_until",
        "compared",
        "depth",
        "endpoint",
        "estimates",
        "failing",
        "failing_at",
        "foreign",
        "foreign_seen",
        "free_bytes",
        "full",
        "handicap",
        "heard",
        "heard_read",
        "in_flight",
        "in_flight_reported",
        "largest",
        "last_turn",
        "learned_at",
        "limits",
        "max_in_flight",
        "own",
        "parent",
        "phase",
        "pool",
        "prefix",
        "progress",
        "quoted",
        "quotes_nothing",
        "recent",
        "report",
        "report_at",
        "response_s",
        "round_trip",
        "safe",
        "safe_at",
        "safe_free_bytes",
        "sent",
        "server",
        "started_at",
        "told_read",
        "weight",
    )

    def __init__(self, endpoint: Endpoint, parent: Path, limits: Limits, pool: PoolFacts) -> None:
        self.parent = parent
        self.depth = len(parent)
        self.breaker = Breaker(limits.eject_after, limits.cooldown_s)
        self.limits = limits
        self.max_in_flight = limits.max_in_flight
        self.in_flight = 0
        self.busy_until = 0.0
        self.full: dict[str, Full] = {}  # by model, of a region or cluster; "" of an instance, which has one queue
        self.last_turn = 0
        self.learned_at = 0.0  # when a finished request last taught its speed
        self.pool = pool
        self.progress = Progress()
        self.safe = inf  # tokens of the largest request that is believed to fit its memory
        self.safe_at = 0.0
        self.free_bytes = Ewma(FREE_S)  # of its GPUs' memory, as reported
        self.safe_free_bytes: float | None = None  # the same when it ran out
        self.largest = 0.0  # tokens of the largest request it answered
        self.round_trip = Ewma(half_life_s=30.0)
        self.report: LoadReport | None = None
        self.report_at = 0.0
        self.weight: float | None = None  # its capability, damped; None until it is first looked at
        self.response_s = Ewma(half_life_s=10.0)  # from dispatch to end, of what succeeded
        self.failing = 0.0  # share of requests that failed of late
        self.failing_at = 0.0
        self.handicap = 1.0  # what its costs are multiplied by for its failures
        self.in_flight_reported = 0  # of ours when its last report was made
        self.started_at = -inf  # when it joined a pool that was there already, or came back
        self.recent = DecayingSum(1.0)  # picks of the last second, while it is new
        self.compared: tuple[object, bool, tuple[float, Server, Terms, float]] | None = None  # see `cheapest`
        self.quoted: list[Server] = []
        self.quotes_nothing = False  # its last report said that no server below it takes work
        self.sent: deque[tuple[float, InferenceRequest]] = deque(maxlen=SENT_KEPT)
        self.foreign = Ewma(half_life_s=2.0)
        self.foreign_seen = 0.0
        self.heard: dict[str, Told] = {}  # other balancer of this cluster -> what it has under way there
        self.heard_read = 0.0  # prompt tokens that the others had read there
        self.told_read = 0.0  # of ours, when the others were last told
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
        self.server = self.own[0]
        self.heard = {}
        self.heard_read = self.told_read = 0.0
        self.prefix = Mirror(sum(s.speed.kv_tokens * s.count for s in self.own))
        self.foreign_seen = 0.0
        self.max_in_flight = self.limits.max_in_flight * max(1, sum(n for _, n in endpoint.fleet))

    def bounded(self, limits: Limits) -> None:
        """Other bounds from now on; what is under way or ejected stays so."""
        self.limits = limits
        self.max_in_flight = limits.max_in_flight * max(1, sum(n for _, n in self.endpoint.fleet))
        self.breaker.eject_after, self.breaker.cooldown_s = limits.eject_after, limits.cooldown_s

    def adopt(self, endpoint: Endpoint) -> None:
        """The pool's new word on this endpoint. Learned state stays, unless another process answers there now."""
        old, self.endpoint = self.endpoint, endpoint
        self.phase = endpoint.phase
        if old.boot != endpoint.boot and old.boot:
            self.breaker.close()  # what failed was another process
            self.progress = Progress()
        if (old.boot, old.gpu, old.capacity) != (endpoint.boot, endpoint.gpu, endpoint.capacity):
            self._restart(endpoint)
        elif old.fleet != endpoint.fleet:
            self._regroup(endpoint)

    def _regroup(self, endpoint: Endpoint) -> None:
        """Servers joined or left below a region or cluster: classes that were there keep what is under way on them."""
        kept = {s.gpu: (s, e) for s, e in zip(self.own, self.estimates, strict=True)}
        self._restart(endpoint)
        for i, fresh in enumerate(self.own):
            if fresh.gpu in kept:
                self.own[i], self.estimates[i] = kept[fresh.gpu]
                self.own[i].counts(fresh.count)
        self.server = self.own[0]

    # -- whether it has room -----------------------------------------------------------------------------------------

    def queue_of(self, model: str) -> str:
        """Which of its queues a request of that model goes to, as in `full`."""
        return model if self.depth < 2 else ""

    def has_room(self, request: InferenceRequest, now: float) -> bool:
        """Below its bound, not cooling off after a refusal, and not known to be full of what the request is for."""
        if self.in_flight >= self.max_in_flight or now < self.busy_until:
            return False
        full = self.full.get(self.queue_of(request.model)) if self.full else None
        return full is None or full.has_room(now)

    # -- what it costs -----------------------------------------------------------------------------------------------

    @property
    def round_trip_s(self) -> float:
        """Measured network round trip, 0 until there is one."""
        return self.round_trip.value or 0.0

    def fresh(self, now: float) -> bool:
        """Whether what is known of its load may be believed; of an instance our own count always is."""
        if self.depth == 2:
            return True
        return (bool(self.quoted) or self.quotes_nothing) and now - self.report_at < QUOTE_STALE_S

    def uncached_tokens(self, request: InferenceRequest) -> float:
        """Prompt tokens it would have to read: all but what is cached there, by its session or by its prefix."""
        warm, cached = request.warm, 0.0
        if len(warm) > self.depth and warm[: self.depth] == self.parent and warm[self.depth] == self.endpoint.id:
            cached = float(request.warm_tokens)
        if request.prefix_hashes:
            cached = max(cached, self.prefix.held(request.prefix_hashes) * PREFIX_BLOCK_TOKENS)
        return max(request.input_tokens - cached, MIN_UNCACHED) if cached else float(request.input_tokens)

    def cached_blocks(self, request: InferenceRequest) -> int:
        """Leading blocks of the prompt that are believed to be cached there."""
        return self.prefix.held(request.prefix_hashes)

    @property
    def share(self) -> float:
        """What the weighted policies share traffic by: the configured weight, or else the capability."""
        if self.pool.weighted or self.weight is None:
            return self.endpoint.weight
        return self.weight

    def cheapest(
        self, request: InferenceRequest, now: float, *, blind: bool = False
    ) -> tuple[float, Server, Terms, float]:
        """(seconds, server, terms, uncached tokens) of the server below it on which the request costs least.

        Found once for each choice (`PoolFacts.comparing`), during which nothing changes.
        """
        choice, known = self.pool.comparing, self.compared
        if choice is None:
            return self._cheapest(request, blind)
        if known is not None and known[0] is choice and known[1] is blind:
            return known[2]
        found = self._cheapest(request, blind)
        self.compared = choice, blind, found
        return found

    def _cheapest(self, request: InferenceRequest, blind: bool) -> tuple[float, Server, Terms, float]:
        uncached = self.uncached_tokens(request)
        if self.quotes_nothing and not blind:
            return (inf, self.server, UNFIT, uncached)
        servers = self.own if blind or self.depth == 2 or not self.quoted else self.quoted
        need = self.pool.needs.of(request) if self.pool.needs is not None else None
        best: tuple[float, Server, Terms, float] | None = None
        for s in servers:
            if s.models and request.model and request.model not in s.models:
                continue
            if need is not None and not need.takes_class(s.gpu):
                continue
            t = marginal_cost(s, uncached, request.input_tokens, request.output_tokens)
            cost = t.total
            if best is None or cost < best[0]:
                best = (cost, s, t, uncached)
        return best or (inf, servers[0], UNFIT, uncached)

    def offers(self, request: InferenceRequest) -> bool:
        """Whether a server below it, as last quoted, may serve it; a quote leaves out what takes no work."""
        servers = () if self.quotes_nothing else self.quoted or self.own
        need = self.pool.needs.of(request) if self.pool.needs is not None else None
        return any(
            (not s.models or not request.model or request.model in s.models)
            and (need is None or need.takes_class(s.gpu))
            for s in servers
        )

    def price_usd(self, request: InferenceRequest, now: float) -> float:
        """Dollars of GPU time this request takes there when the server is as busy as it should be."""
        if self.depth == 2:
            s, uncached = self.server, self.uncached_tokens(request)
        else:
            _, s, _, uncached = self.cheapest(request, now)
        if s.price_usd_per_hour <= 0.0:
            return 0.0
        v = s.speed
        busy_s = uncached / v.prefill_tokens_per_s + request.output_tokens * (v.alpha_s / v.slots + v.beta_s)
        return busy_s * s.price_usd_per_hour / 3600.0

    # -- its memory ----------------------------------------------------------------------------------------------

    def safe_tokens(self, now: float) -> float:
        """Requests of fewer tokens are believed to fit; what was learned is doubted more and more.

        It goes with the memory that is free on its GPUs: who else takes some there leaves less, and who leaves, more.
        """
        if self.safe == inf:
            return inf
        tokens: float = self.safe * 2.0 ** ((now - self.safe_at) / SAFE_DOUBLES_S)
        if self.safe_free_bytes and self.free_bytes.value is not None:
            tokens *= min(max(self.free_bytes.value / self.safe_free_bytes, 1.0 / SAFE_FREE), SAFE_FREE)
        if tokens > self.server.speed.kv_tokens:
            self.safe = inf
            return inf
        return tokens

    def fitted(self, tokens: float) -> None:
        """A request of this size was answered."""
        self.largest = max(self.largest, tokens)
        if tokens >= self.safe:
            self.safe = inf

    def ran_out(self, tokens: float, now: float) -> None:
        """A request of this size exhausted its memory."""
        self.safe, self.safe_at = min(SAFE_SHARE * tokens, self.safe_tokens(now)), now
        self.safe_free_bytes = self.free_bytes.value

    # -- what it is told ---------------------------------------------------------------------------------------------

    def told(self, report: LoadReport, now: float) -> None:
        """Take a report in, as of `now` minus its age, and replay what was sent since."""
        self.report, self.report_at = report, now - report.age_s
        self.in_flight_reported = self.in_flight
        if self.depth == 2:
            self.progress.told(report, self.report_at)
            if report.gpu_memory_free_bytes is not None:
                self.free_bytes.add(float(report.gpu_memory_free_bytes), now)
            if report.running is not None:
                self.breaker.may_be_back(now)
            self._count_foreign(report, now)
            return
        self.quotes_nothing = not report.servers
        self.pool.priced = self.pool.priced or any(load.price_usd_per_hour > 0.0 for load in report.servers)
        self.quoted = [Server.of(load, now) for load in report.servers]
        # A pick is in the quote if it arrived there before the quote was made: both ways of the network lie between.
        contained_until = self.report_at - self.round_trip_s
        while self.sent and self.sent[0][0] <= contained_until:
            self.sent.popleft()
        for _, request in self.sent if self.quoted else ():
            _, server, _, uncached = self.cheapest(request, now)
            server.dispatched(uncached, request.output_tokens, now, self.server.copies)

    def _count_foreign(self, report: LoadReport, now: float) -> None:
        """Requests on an instance that others sent: reported minus our own, smoothed, as decoding ones of mean size."""
        if report.running is None:
            return
        ours = self.in_flight * self.server.copies + sum(told[0] + told[1] for told in self.heard.values())
        self.foreign.add(report.running + (report.waiting or 0.0) - ours, now)
        seen = max(0.0, self.foreign.value or 0.0)
        self._add_foreign(-self.foreign_seen, now)
        self.foreign_seen = 0.0 if seen < FOREIGN_LEAST else seen
        self._add_foreign(self.foreign_seen, now)

    def _add_foreign(self, requests: float, now: float) -> None:
        if requests:
            context, rest = requests * FOREIGN_CONTEXT_TOKENS, requests * FOREIGN_REST_TOKENS
            self.server.others((requests, 0.0, 0.0, context, rest), now)

    def heard_of(self, replica: str, told: Told | None, now: float) -> None:
        """What another balancer of this cluster has under way there, in place of what it said before.

        None: nothing, and nothing was read since.
        """
        before = self.heard.get(replica)
        if told == before or (told is None and before is not None and not any(before[:5])):
            return  # most have nothing new, and what is known of the server's costs stays known
        if told is None:
            assert before is not None
            told = (0.0, 0.0, 0.0, 0.0, 0.0, before[5])
        n, w, p, k, r, read = (
            new - old for new, old in zip(told, before or (0.0, 0.0, 0.0, 0.0, 0.0, told[5]), strict=True)
        )
        self.server.others((n, w, p, k, r), now)
        read = max(read, 0.0)  # one that began anew counts from zero
        self.server.others_read(max(p + read, 0.0), read, now)
        self.heard_read += read
        self.heard[replica] = told

    def forgets(self, replica: str, now: float) -> None:
        """Nothing is known any more of what another balancer has under way there."""
        n, w, p, k, r, _ = self.heard.pop(replica)
        self.server.others((-n, -w, -p, -k, -r), now)

    def tells(self) -> Told | None:
        """What this balancer itself has under way there, for the others to count; None: nothing, as they know."""
        read = self.server.read_tokens - self.heard_read
        if not self.in_flight and read < self.told_read + 1.0:
            return None
        self.told_read = read
        n, w, p, k, r = self.server.sums
        for told in self.heard.values():
            n, w, p, k, r = n - told[0], w - told[1], p - told[2], k - told[3], r - told[4]
        f = self.foreign_seen
        return n - f, w, p, k - f * FOREIGN_CONTEXT_TOKENS, r - f * FOREIGN_REST_TOKENS, read

    def went(self, *, failed: bool, now: float) -> None:
        """A request ended well or in failure: failures make a candidate dearer for a while."""
        self.forgive(now)
        self.failing += FAILING_STEP * ((1.0 if failed else 0.0) - self.failing)
        self.handicap = 1.0 + FAILING_COST * self.failing

    def forgive(self, now: float) -> None:
        """Failures are forgotten with time, also by one that gets no requests to do better with."""
        self.failing *= 0.5 ** (max(0.0, now - self.failing_at) / FAILING_S)
        self.failing_at = now
        if self.failing < FORGIVEN:
            self.failing = 0.0
        self.handicap = 1.0 + FAILING_COST * self.failing

    def emptied(self, now: float) -> None:
        """Nothing of ours is under way here any more; what others sent still is."""
        for server in self.own:
            server.emptied(now)
        self._add_foreign(self.foreign_seen, now)
        for told in self.heard.values():
            self.server.others(told[:5], now)
