"""One stage's choice among the endpoints of one pool: update, report, pick, first_token, release.

The same object serves all three tiers; a policy (`stages.POLICIES`) says by what. It is synchronous, so between two
awaits a pick with its reservation is one step and concurrent picks never see the same free place. What depends on the
pool is computed when the pool changes, what depends on the request in `pick`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp, inf, log
from random import Random
from statistics import median

from common.policy.candidate import FULL_S, Candidate, Full, Limits, PoolFacts
from common.policy.ewma import DecayingSum
from common.policy.filters import Filter, residency, serves_model
from common.policy.health import State
from common.policy.pickers import Picker
from common.policy.placement import ADAPTER_LOAD_S, Needs, adapters, having_loaded, kinds_of, memory_gb
from common.policy.prediction import UNFIT, Terms, alike, class_speed, marginal_cost, prefill_steps
from common.policy.prefix import Prompts, SentPrompts
from common.policy.progress import LONGEST_S, NO_SIGNS, Signs
from common.policy.quote import QUOTE_INSTANCES, class_means
from common.policy.scorers import Scorer
from common.policy.server import Server, Told
from common.policy.speed import NOISE, SpeedEstimate, off_by
from common.policy.weights import Coefficients, Weights
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
    Removed,
    Reservation,
    ServerLoad,
    Shed,
    Speed,
)

UNKNOWN = Terms(0.0, 0.0, 0.0)  # of the only child of a node, which is not compared with anything
LEARN_EVERY_S = 0.05  # a server that is known well is not taught more often than this
KNOWN_SAMPLES = 100
ENOUGH_TOKENS = 8.0  # an answer this long says something of the time per token
TTFT_NOISE = 0.5  # relative deviation of a first-token time from its model: it has the queue and the network in it
MODELS_CACHED = 256  # models whose candidates are remembered between two changes of the pool
COMPARED = 128  # a pool up to this size is compared as a whole,
SAMPLED = 64  # of a larger one a random part, and whoever has the prompt cached
PROMPTS_REMEMBERED = 65_536  # of a pool that is too large to look at each mirror: where a prompt went last
TRIAL_EVERY = 32  # one pick of so many may go to an instance that is not known yet,
TRIAL_COST = 4.0  # if it is not predicted to cost more than so many times the cheapest
TRIAL_SAMPLES = 3  # answers after which an instance is known
CLASS_LEAST = 3  # answers after which a class goes by its own
OFF_BY_KEPT = 31  # latest answers that say by how much the priors are off


@dataclass(frozen=True, slots=True)
class Policy:
    """How a stage chooses: who qualifies, what each costs, and which one is taken.

    The first filter must depend on the pool, the request's model (or API) and what `needs` makes of the request alone:
    its answer is remembered.
    """

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[str, float, Scorer], ...]  # (term, weight, scorer)
    picker: Picker
    weighted: bool = False  # shares traffic by capability or response times, which are then kept up to date
    learns: bool = False  # goes by speeds that are learned: an instance that never gets a request stays unknown
    in_seconds: bool = False  # totals are seconds, so that preferences can be added to them
    needs: Needs | None = None  # see `placement.placed`
    compares: bool = False  # a filter after the first compares endpoints with each other,
    bounds: bool = False  # or has bounds of its own for each: then all filters are asked each time
    adapter_load_s: float = ADAPTER_LOAD_S


class _Held:
    """What a reservation holds, until it is released."""

    __slots__ = (
        "ahead",
        "at",
        "candidate",
        "context",
        "decoding",
        "estimate",
        "first_at",
        "length",
        "mark",
        "model",
        "output",
        "prompt",
        "read",
        "server",
        "steps",
        "stream",
        "terms",
        "trial",
    )

    def __init__(
        self, candidate: Candidate, server: Server, request: InferenceRequest, uncached: float, terms: Terms, now: float
    ) -> None:
        self.candidate = candidate
        self.model = request.model
        self.server = server
        self.estimate = candidate.estimates[0] if len(candidate.own) == 1 else None
        self.stream = request.stream
        self.length = float(request.input_tokens)
        self.prompt = uncached
        self.read = uncached * (1.0 + 0.5 * request.input_tokens / server.speed.attention_tokens)
        self.output = request.output_tokens
        self.ahead = server.p  # prompt tokens waiting there before it
        self.steps = prefill_steps(server.costs(), uncached)
        self.context = request.input_tokens + 0.5 * request.output_tokens
        self.at = now
        self.terms = terms
        self.first_at: float | None = None  # when its first token was seen
        self.decoding = False  # counted as past its first token
        self.mark = (0.0, 0.0, 0.0, 0.0)  # the server's integrals when it began to decode
        self.trial = False  # of a half-open breaker


class Balancer:
    """Chooses among the endpoints of one pool."""

    def __init__(
        self, parent: Path, policy: Policy, limits: Limits | None = None, coefficients: Coefficients | None = None
    ) -> None:
        self.parent = parent
        self.policy = policy
        self.limits = limits or Limits()
        self.candidates: dict[str, Candidate] = {}
        self.revision = -1
        self._met_at: float | None = None  # when the first pool came
        self.stale = False
        self.ejections = 0  # times that a breaker opened
        self._needs = policy.needs if policy.needs is not None and policy.needs.hard else None
        self._pool = PoolFacts(self._needs)
        self._scorers = policy.scorers  # and one more where adapters have to be loaded
        self._loads = False  # some endpoint would load a LoRA adapter that it does not have
        self._weights = Weights(coefficients)
        self._arrivals = DecayingSum(1.0)  # of the last second, while somebody is new
        self._new: set[str] = set()  # endpoints in slow start
        self._failing: set[str] = set()  # endpoints with a handicap
        self._replicas: frozenset[str] = frozenset()  # other balancers of this node
        self._heard_at: dict[str, float] = {}  # of those that tell what they have under way
        self._looked_at = 0.0
        self._gone: dict[str, Candidate] = {}  # left the pool with requests still running
        self._classes: dict[Class, SpeedEstimate] = {}  # what all instances alike have taught
        self._off_by: dict[frozenset[str], deque[float]] = {}  # models -> logs of how far off the priors were of late
        self._taught = 0  # samples of all classes
        self._unknown: set[str] = set()  # instances whose speed few answers have told of yet
        self._looks = False  # every filter is asked for every request
        self._held: dict[int, _Held] = {}
        self._passed: dict[
            int, tuple[Candidate, str]
        ] = {}  # reservations of an only child, which are no more than a number
        self._only_child = False  # the pool has one region or cluster
        self._next = 0
        self._turn = 0
        self._unseen: list[tuple[float, int]] = []  # (when to take it for begun, reservation) of answers in one piece
        self._serving: dict[Key, list[Candidate]] = {}  # model -> whoever serves it
        self._qualified: dict[Key, tuple[list[Candidate], tuple[str, ...]]] = {}  # the same, where all are plain
        self._went: OrderedDict[int, str] = OrderedDict()  # last block of a prompt -> where it went
        self._prompts = SentPrompts()

    # -- what is told ------------------------------------------------------------------------------------------------

    def update(self, pool: Pool, now: float) -> None:
        """Reconcile with the pool: survivors keep what was learned, newcomers start, the gone run out."""
        assert pool.parent == self.parent
        before, self.candidates = self.candidates, {}
        if self._met_at is None:
            self._met_at = now
        for endpoint in pool.endpoints:
            kept = before.pop(endpoint.id, None) or self._gone.pop(endpoint.id, None)
            if kept is None:
                kept = Candidate(endpoint, self.parent, self.limits, self._pool)
                kept.last_turn = self._turn
                if now - self._met_at >= MEETING_S:  # those met before are new to this process, and not in themselves
                    self._starts(kept, now)
            else:
                restarted = kept.endpoint.boot != endpoint.boot
                began = kept.phase is not Phase.SERVING and endpoint.phase is Phase.SERVING
                kept.adopt(endpoint)
                if restarted or began:
                    self._starts(kept, now)
            self.candidates[endpoint.id] = kept
            if self.policy.learns and kept.depth == 2 and kept.estimates[0].samples < TRIAL_SAMPLES:
                self._unknown.add(endpoint.id)
                self._share_class(kept)
        for id_, candidate in before.items():
            if candidate.in_flight:
                self._gone[id_] = candidate
        self.revision, self.stale = pool.revision, pool.stale
        self._pool_changed()
        self._count_copies(now)

    def _starts(self, c: Candidate, now: float) -> None:
        """It is new, or back: its share is bounded for a while, although it is idle and looks cheap."""
        c.started_at = now
        self._new.add(c.endpoint.id)
        self._qualified.clear()

    def _share_class(self, c: Candidate) -> None:
        """One with hardly an answer of its own is taken for as fast as its like, or its class for as far off as all."""
        if c.estimates[0].samples >= TRIAL_SAMPLES:
            return
        known = self._classes.get(_class_of(c.endpoint))
        prior = _as_fast_as(known.speed, c.server.speed) if known is not None else self._prior(c)
        if prior != c.estimates[0].prior:
            c.estimates[0].begin_from(prior)
            c.server.runs_at(c.estimates[0].speed)

    def _prior(self, c: Candidate) -> Speed:
        """The prior of its class, as many times slower as answers of this model were than theirs."""
        prior = c.endpoint.capacity or class_speed(c.endpoint.gpu)
        seen = self._off_by.get(c.endpoint.models)
        return _scaled(prior, exp(median(seen))) if seen else prior

    def _pool_changed(self) -> None:
        self._qualified.clear()
        self._serving.clear()
        self._only_child = len(self.parent) < 2 and len(self.candidates) == 1
        self._unknown &= self.candidates.keys()
        candidates = self.candidates.values()
        alive = {_class_of(c.endpoint) for c in candidates}
        for gone in self._classes.keys() - alive:
            del self._classes[gone]
        for models in self._off_by.keys() - {models for _, models in alive}:
            del self._off_by[models]
        self._looks = self.policy.bounds or (self.policy.compares and len(candidates) > 1)
        self._pool.weighted = any(c.endpoint.weight != 1.0 for c in candidates)
        self._loads = any(c.endpoint.loadable for c in candidates)
        self._scorers = self.policy.scorers
        if self._loads and self.policy.in_seconds:
            self._scorers += (("adapter_s", 1.0, adapters(self.policy.adapter_load_s)),)
        self._pool.alike = len(self.parent) == 2 and len(candidates) > 1 and alike([c.server.speed for c in candidates])
        self._pool.priced = any(
            c.endpoint.price_usd_per_hour > 0.0 or any(s.price_usd_per_hour > 0.0 for s in c.quoted) for c in candidates
        )

    def reconfigure(self, policy: Policy, limits: Limits) -> None:
        """Choose by another policy and within other bounds; what was learned stays."""
        self.policy, self.limits = policy, limits
        self._needs = self._pool.needs = policy.needs if policy.needs is not None and policy.needs.hard else None
        for c in (*self.candidates.values(), *self._gone.values()):
            c.bounded(limits)
            if policy.learns and c.depth == 2 and c.estimates[0].samples < TRIAL_SAMPLES:
                self._unknown.add(c.endpoint.id)
        self._pool_changed()

    def report(self, report: LoadReport, now: float) -> None:
        """Take an endpoint's report in; one of an endpoint that is not in the pool is dropped."""
        candidate = self.candidates.get(report.endpoint)
        if candidate is not None:
            candidate.told(report, now)

    def answered_with(self, endpoint: str, said: LoadReport, now: float) -> None:
        """What an instance said of its load beside an answer: newer than its report, but not all that a report has."""
        candidate = self.candidates.get(endpoint)
        if candidate is None:
            return
        known = candidate.report or LoadReport(endpoint)
        if said.running is not None:
            candidate.told(replace(known, age_s=0.0, running=said.running, waiting=said.waiting), now)
        if said.kv_utilization is not None:
            candidate.report = replace(candidate.report or known, kv_utilization=said.kv_utilization)

    def hear(self, replica: str, told: Mapping[str, Told], now: float) -> None:
        """What another balancer of this node has under way, by endpoint: all of it, each time."""
        self._heard_at[replica] = now
        for id_, c in self.candidates.items():
            c.heard_of(replica, told.get(id_), now)
        self._count_copies(now)

    def tell(self, now: float) -> dict[str, Told]:
        """What this balancer has under way, for the other ones of its node."""
        self._settle(now)
        return {id_: told for id_, c in self.candidates.items() if (told := c.tells()) is not None}

    def tell_prompts(self, now: float) -> Prompts:
        """What this balancer sent of late, for the other ones of its node: there its servers have it cached."""
        return self._prompts.tell(now)

    def hear_prompts(self, replica: str, told: Prompts) -> None:
        """Which prompts another balancer of this node sent where; those that were heard before change nothing."""
        for id_, hashes in self._prompts.news(replica, told):
            c = self.candidates.get(id_)
            if c is not None:
                self._cached(c, hashes)

    def _cached(self, c: Candidate, hashes: tuple[int, ...]) -> None:
        """It has read a prompt, or is about to."""
        c.prefix.insert(hashes)
        if len(self.candidates) > COMPARED:
            self._went[hashes[-1]] = c.endpoint.id
            self._went.move_to_end(hashes[-1])
            if len(self._went) > PROMPTS_REMEMBERED:
                self._went.popitem(last=False)

    def replicas(self, ids: Iterable[str], now: float) -> None:
        """The other balancers of this node that are alive."""
        self._replicas = frozenset(ids)
        self._prompts.keep(self._replicas)
        for replica in self._heard_at.keys() - self._replicas:
            self._forget(replica, now)
        self._count_copies(now)

    def _forget(self, replica: str, now: float) -> None:
        del self._heard_at[replica]
        for c in self.candidates.values():
            if replica in c.heard:
                c.forgets(replica, now)

    def _count_copies(self, now: float) -> None:
        """Those that live and tell nothing are taken to send as much as this one does."""
        silent = len(self._replicas.difference(self._heard_at))
        for c in self.candidates.values():
            c.server.copied(1.0 + silent)

    def round_trip(self, endpoint: str, seconds: float, now: float) -> None:
        """A measured network round trip to an endpoint's balancer."""
        candidate = self.candidates.get(endpoint)
        if candidate is not None:
            candidate.round_trip.add(seconds, now)
            self._pool.measured = True

    # -- what is decided ---------------------------------------------------------------------------------------------

    def pick(self, request: InferenceRequest, now: float, rng: Random, exclude: Iterable[str] = ()) -> Decision:
        """Choose and reserve in one step. Costs O(candidates)."""
        if self._unseen:
            self._settle(now)
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look(now)
        self._arrived(now)
        if request.owner or request.sticky:
            bound = self._bound(request, exclude, now, rng)
            if bound is not None:
                return bound
        need: str | tuple[str, int] = request.model or request.api
        if self._needs is not None:
            need = self._needs.key(request)
        key: Key = (need, request.version) if request.version else need
        looks = self._looks or request.deadline_s is not None or bool(request.only) or bool(request.never)
        if not exclude and not looks:
            plain = self._qualified.get(key)
            if plain is not None:
                return (
                    self._pass(plain[0][0], plain[1], request.model)
                    if self._only_child
                    else self._take(request, plain[0], plain[1], (), now, rng)
                )
        serving = self._serving.get(key)
        if serving is None:
            serving = self._who_serves(key, request, now, rng)
        if not serving:
            return self._nobody_serves(request, now)
        if len(serving) > COMPARED:
            decision = self._filtered(request, self._some(request, serving, now, rng), exclude, now, rng)
            return decision if isinstance(decision, Pick) else self._filtered(request, serving, exclude, now, rng)
        if not exclude and not looks and not self._new and all(_plain(c, now) for c in serving):
            ids = tuple(c.endpoint.id for c in serving)
            self._qualified[key] = (serving, ids)
            return self._take(request, serving, ids, (), now, rng)
        return self._filtered(request, serving, exclude, now, rng)

    def _arrived(self, now: float) -> None:
        if self.policy.weighted:
            self._weights.arrived(now)
        if self._new:
            self._arrivals.add(1.0, now)

    def _bound(self, request: InferenceRequest, exclude: Iterable[str], now: float, rng: Random) -> Decision | None:
        """The one candidate that a request is bound to; None when it is not, or no longer.

        The owner of what it builds on is asked even while that drains, and nobody else ever is.
        """
        path = request.owner or request.warm
        if len(path) <= len(self.parent) or path[: len(self.parent)] != self.parent:
            return Shed("owner_gone") if request.owner else None
        c = self.candidates.get(path[len(self.parent)])
        if request.owner:
            if c is None:
                return Shed("owner_gone")
            if c.endpoint.id in exclude or c.phase is Phase.LOADING or not c.breaker.ready(now):
                return Shed("owner_unavailable", 1.0)
            if not residency(request, [c], now):
                return Shed("residency")
        elif c is None or c.endpoint.id in exclude or not all(keep(request, [c], now) for keep in self.policy.filters):
            return None
        return self._take(request, [c], (c.endpoint.id,), (), now, rng)

    def _pass(self, c: Candidate, ids: tuple[str, ...], model: str) -> Pick:
        """The only child of a node: it is compared with nothing, so nothing is predicted and it is only counted."""
        c.in_flight += 1
        if c.in_flight >= c.max_in_flight:
            self._qualified.clear()
        self._next += 1
        self._passed[self._next] = c, model
        return Pick(c.endpoint, Reservation(self._next, c.endpoint.id, self.parent), self.policy.name, ids, (0.0,), ())

    def _who_serves(self, key: Key, request: InferenceRequest, now: float, rng: Random) -> list[Candidate]:
        """Those the first filter leaves, remembered until the pool changes; of many in random order."""
        serving = self.policy.filters[0](request, list(self.candidates.values()), now)
        if len(serving) > COMPARED:
            rng.shuffle(serving)
        if len(self._serving) >= MODELS_CACHED:
            self._serving.clear()
            self._qualified.clear()
        self._serving[key] = serving
        return serving

    def _nobody_serves(self, request: InferenceRequest, now: float) -> Shed:
        if not self.candidates:
            return Shed("no_endpoints", 1.0)
        everyone, needs = list(self.candidates.values()), self._needs
        serving = serves_model(request, everyone, now) if needs is not None else []
        if serving and needs is not None:
            return Shed("no_placement", None, (_removed(needs.meets_need, serving),))
        return Shed("model_not_found", None, (_removed(serves_model, everyone),))

    def _some(
        self, request: InferenceRequest, serving: Sequence[Candidate], now: float, rng: Random
    ) -> list[Candidate]:
        """A random run of a large pool, with those that have the session or the prompt's beginning cached.

        The cheapest of 64 at random is on average among the best 1.5 % of the pool, at the cost of a small one.
        """
        at = rng.randrange(len(serving))
        some = [*serving[at : at + SAMPLED], *serving[: max(0, at + SAMPLED - len(serving))]]
        warm = request.warm[len(self.parent)] if len(request.warm) > len(self.parent) else None
        for id_ in (warm, next((w for h in reversed(request.prefix_hashes) if (w := self._went.get(h))), None)):
            known = self.candidates.get(id_) if id_ is not None else None
            if known is not None and known not in some and self.policy.filters[0](request, [known], now):
                some.append(known)
        return some

    def _filtered(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        exclude: Iterable[str],
        now: float,
        rng: Random,
    ) -> Decision:
        """Choose among those that every filter leaves."""
        among = len(candidates)
        if exclude:
            skip = set(exclude)
            candidates = [c for c in candidates if c.endpoint.id not in skip]
            if not candidates:
                return Shed("no_endpoints", 1.0)
        removed: list[Removed] = []
        for keep in self.policy.filters[1:]:
            left = keep(request, candidates, now)
            if len(left) < len(candidates):
                removed.append(_removed(keep, candidates, left))
                if not left:
                    return self._shed(keep.__name__, candidates, tuple(removed), now)
                candidates = left
        if self._new and len(self._new) < len(self.candidates):
            candidates = self._not_flooded(candidates, among, now)
        ids = tuple(c.endpoint.id for c in candidates)
        return self._take(request, candidates, ids, tuple(removed), now, rng)

    def _look(self, now: float) -> None:
        """What changes with time and not with an event: newcomers settle, failures are forgiven, weights move."""
        self._looked_at = now
        for replica in [r for r, at in self._heard_at.items() if now - at > HEARD_S]:
            self._forget(replica, now)
            self._count_copies(now)
        for id_ in [i for i in self._new if i not in self.candidates]:
            self._new.discard(id_)
        for id_ in list(self._new):
            if now - self.candidates[id_].started_at >= SLOW_START_S:
                self._new.discard(id_)
                self._qualified.clear()
        for id_ in list(self._failing):
            c = self.candidates.get(id_)
            if c is not None:
                c.forgive(now)
            if c is None or not c.failing:
                self._failing.discard(id_)
        if self.policy.weighted:
            self._weights.step(self.candidates.values(), now)

    def _take(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        ids: tuple[str, ...],
        removed: tuple[Removed, ...],
        now: float,
        rng: Random,
    ) -> Decision:
        if (self._loads or self.policy.needs is not None) and not self.policy.in_seconds:
            candidates, ids = self._narrowed(request, candidates)
        self._pool.comparing = object() if len(self.parent) < 2 else None
        columns = []
        totals: Sequence[float] | None = None
        for term, weight, scorer in self._scorers:
            column = scorer(request, candidates, now)
            if column is None:
                continue
            columns.append((term, column))
            if totals is None:
                totals = column if weight == 1.0 else [weight * x for x in column]
            elif weight:
                totals = [t + weight * x for t, x in zip(totals, column, strict=True)]
        chosen = candidates[0]
        if totals is None:
            totals = (0.0,) * len(candidates)
        elif min(totals) == inf:
            self._pool.comparing = None
            return self._unfit(request, candidates)
        if len(candidates) > 1:
            chosen = candidates[self.policy.picker(candidates, totals, rng)]
            if self._unknown and not request.warm and self._turn % TRIAL_EVERY == TRIAL_EVERY - 1:
                chosen = self._on_trial(candidates, totals) or chosen
        terms, reservation = self._reserve(chosen, request, now)
        self._pool.comparing = None
        if terms is UNFIT and len(candidates) == 1:
            self.release(reservation, Outcome.IGNORED, now)
            return self._unfit(request, candidates)
        ttft, total = None, None
        if terms is not UNKNOWN:
            ttft = chosen.round_trip_s + terms.ttft
            total = ttft + terms.decode
        return Pick(chosen.endpoint, reservation, self.policy.name, ids, totals, tuple(columns), ttft, total, removed)

    def _narrowed(
        self, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[Candidate], tuple[str, ...]]:
        """Those that are preferred, where the policy does not count in seconds, with their ids."""
        if self._loads:
            candidates = having_loaded(request, candidates)
        if self.policy.needs is not None:
            candidates = self.policy.needs.narrowed(request, candidates)
        return candidates, tuple(c.endpoint.id for c in candidates)

    def _on_trial(self, candidates: Sequence[Candidate], totals: Sequence[float]) -> Candidate | None:
        """The cheapest idle instance whose speed is hardly known, unless it is predicted to be far too dear.

        No session is moved for that.

        A prior that is too slow would else never be put right: what gets no requests teaches nothing.
        """
        limit = TRIAL_COST * min(totals)
        unknown = [
            (total, c.last_turn, i)
            for i, (c, total) in enumerate(zip(candidates, totals, strict=True))
            if total <= limit and not c.in_flight and c.endpoint.id in self._unknown
        ]
        return candidates[min(unknown)[2]] if unknown else None

    def _not_flooded(self, candidates: Sequence[Candidate], among: int, now: float) -> Sequence[Candidate]:
        """Without newcomers that have had more than their share of the last second allows, unless nobody else is left.

        A newcomer that honestly reports no load would get everything until its queue is as long as the others'.
        `among` is how many were looked at; of a large pool they see their part of the arrivals.
        """
        rates = {c.endpoint.id: sum(s.speed.prefill_tokens_per_s * s.count for s in c.own) for c in candidates}
        total = sum(rates.values())
        arrivals = self._arrivals.value_at(now) * min(1.0, among / len(self.candidates))

        def fair(c: Candidate) -> bool:
            share = rates[c.endpoint.id] / total
            return c.recent.value_at(now) + 1.0 <= max(1.0, SLOW_START_SHARE * share * arrivals)

        left = [c for c in candidates if c.endpoint.id not in self._new or fair(c)]
        return left or candidates

    @staticmethod
    def _unfit(request: InferenceRequest, candidates: Sequence[Candidate]) -> Shed:
        return Shed("too_large") if any(c.offers(request) for c in candidates) else Shed("no_endpoints", 1.0)

    def _reserve(self, c: Candidate, request: InferenceRequest, now: float) -> tuple[Terms, Reservation]:
        self._turn += 1
        c.last_turn = self._turn
        c.in_flight += 1
        if self._looks or (self._new and c.endpoint.id in self._new):
            c.recent.add(1.0, now)
        if c.in_flight >= c.max_in_flight:
            self._qualified.clear()
        if c.full and (full := c.full.get(c.queue_of(request.model))) is not None:
            full.in_flight += 1
        if c.depth == 2:
            server, uncached = c.server, c.uncached_tokens(request)
            terms = marginal_cost(server, uncached, request.input_tokens, request.output_tokens)
        elif len(self.candidates) == 1 and len(c.own) == 1:
            server, uncached, terms = c.server, float(request.input_tokens), UNKNOWN
        else:
            _, server, terms, uncached = c.cheapest(request, now)
            if c.quoted:
                server.dispatched(uncached, request.output_tokens, now, c.server.copies)
                c.sent.append((now, request))
                server = c.own[0] if len(c.own) == 1 else c.cheapest(request, now, blind=True)[1]
        self._next += 1
        held = self._held[self._next] = _Held(c, server, request, uncached, terms, now)
        server.dispatched(uncached, request.output_tokens, now)
        if request.prefix_hashes:
            self._cached(c, request.prefix_hashes)  # at once: of prompts that come together all but the first find it
            if self._replicas:
                self._prompts.add(c.endpoint.id, request.prefix_hashes, now)
        if c.breaker.state is not State.CLOSED:
            held.trial = c.breaker.picked()
        if not request.stream and request.output_tokens > 0.0 and terms.ttft < inf:
            heappush(self._unseen, (now + terms.ttft, self._next))
        return terms, Reservation(self._next, c.endpoint.id, self.parent)

    def _settle(self, now: float) -> None:
        """Take answers that come in one piece for begun when their first token was due: nobody sees it come."""
        while self._unseen and self._unseen[0][0] <= now:
            at, id_ = heappop(self._unseen)
            held = self._held.get(id_)
            if held is not None and not held.decoding:
                self._begun(held, at)

    @staticmethod
    def _begun(held: _Held, now: float) -> None:
        s = held.server
        held.decoding = True
        s.first_token(held.prompt, held.context, held.read, now)
        held.mark = (s.decoding_s, s.context_s, s.read_tokens, now)

    def _shed(self, by: str, candidates: Sequence[Candidate], removed: tuple[Removed, ...], now: float) -> Shed:
        if by == "residency":
            return Shed("residency", None, removed)
        if by == "in_time":
            return Shed("deadline_exceeded", None, removed)
        if by in ("has_capacity", "below_limit"):
            wait = min((c.busy_until - now for c in candidates), default=0.0)
            return Shed("saturated", max(wait, self.limits.busy_s), removed)
        if by == "not_loading":
            return Shed("loading", LOADING_S, removed)
        wait = min((c.breaker.retry_at - now for c in candidates), default=1.0) if by == "not_ejected" else 1.0
        return Shed("no_endpoints", max(wait, 1.0), removed)

    # -- how it went -------------------------------------------------------------------------------------------------

    def first_token(self, reservation: Reservation, now: float) -> None:
        """The first byte of the answer came; a second call for the same reservation changes nothing."""
        held = self._held.get(reservation.id)
        if held is None:
            assert reservation.id in self._passed
            return
        if held.first_at is not None:
            return
        held.first_at = now
        if not held.decoding:
            self._begun(held, now)

    def release(
        self,
        reservation: Reservation,
        outcome: Outcome,
        now: float,
        *,
        output_tokens: float | None = None,
        cached_tokens: float | None = None,
        unreachable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        """Give back what a pick holds; exactly once (a second time is a bug and raises KeyError).

        `output_tokens` is what came back, `cached_tokens` how much of the prompt the server had; None if unknown.
        `unreachable`: no connection could be made. `retry_after_s`: the endpoint refused for load and asked for this
        long a pause.
        """
        if self._unseen:
            self._settle(now)
        held = self._held.pop(reservation.id, None)
        c, model = self._passed.pop(reservation.id) if held is None else (held.candidate, held.model)
        if c.in_flight >= c.max_in_flight:
            self._qualified.clear()
        c.in_flight -= 1
        assert c.in_flight >= 0
        if held is not None:
            held.server.ended(held.prompt, held.output, held.context, now, decoding=held.decoding)
            if outcome is Outcome.SUCCESS:
                c.fitted(held.length + held.output)
                self._learn(held, now, output_tokens)
                if cached_tokens is not None:
                    c.prefix.corrected(held.length - held.prompt, cached_tokens)
                if self.policy.weighted:
                    c.response_s.add(now - held.at, now)
        if not c.in_flight:
            c.emptied(now)
            if self._gone.get(c.endpoint.id) is c:
                del self._gone[c.endpoint.id]
        if not self._held:
            self._unseen.clear()
        self._judge(c, outcome, now, unreachable=unreachable, trial=held is not None and held.trial)
        if c.full or outcome is Outcome.OVERLOADED:
            self._filled(c, c.queue_of(model), outcome, now)
        if outcome is Outcome.OVERLOADED:
            if c.depth == 2:  # of a region or cluster others that it holds may have room
                c.busy_until = now + (retry_after_s if retry_after_s is not None else self.limits.busy_s)
            self._qualified.clear()

    def _filled(self, c: Candidate, key: str, outcome: Outcome, now: float) -> None:
        """Keep what its refusals tell of how much it takes of what goes to one of its queues."""
        full = c.full.get(key)
        if full is not None:
            full.in_flight -= 1
        elif outcome is Outcome.OVERLOADED and len(c.full) < MODELS_CACHED:
            held = [(h.candidate, h.model) for h in self._held.values()]
            held_there = sum(o is c and c.queue_of(m) == key for o, m in (*held, *self._passed.values()))
            full = c.full[key] = Full(held_there)
        if full is None:
            return
        if outcome is Outcome.OVERLOADED:
            full.refused(now, pauses=c.depth < 2)
        elif outcome is Outcome.SUCCESS:
            full.took()
        if now - full.refused_at > FULL_S:
            del c.full[key]

    def _judge(self, c: Candidate, outcome: Outcome, now: float, *, unreachable: bool, trial: bool) -> None:
        """What the outcome says of its health."""
        if outcome is Outcome.FAILED or (c.failing and outcome is Outcome.SUCCESS):
            c.went(failed=outcome is Outcome.FAILED, now=now)
            self._failing.add(c.endpoint.id)
        breaker = c.breaker
        if outcome is Outcome.FAILED and not unreachable and breaker.would_open() and not self._may_eject():
            return  # it fails; so do too many others, and spreading over all serves best
        if outcome is not Outcome.SUCCESS or breaker.failures or breaker.state is not State.CLOSED:
            before, was_open = breaker.failures, breaker.state is not State.CLOSED
            breaker.ended(outcome, now, unreachable=unreachable, trial=trial)
            if was_open or breaker.failures != before or breaker.state is not State.CLOSED:
                self._qualified.clear()
            if was_open and breaker.state is State.CLOSED:
                self._starts(c, now)
            self.ejections += not was_open and breaker.state is State.OPEN

    def ran_out(self, id_: str, request: InferenceRequest, now: float, *, certain: bool) -> frozenset[str]:
        """An instance's memory was too small for a request; not `certain`: it died over it, for whatever reason.

        Returns those that are no larger, if any is larger.
        """
        c = self.candidates.get(id_)
        if c is None:
            return frozenset()
        tokens = request.input_tokens + request.output_tokens
        if certain or tokens > c.largest:
            c.ran_out(tokens, now)
            self._qualified.clear()
        size = _size(c)
        others = {i: _size(o) for i, o in self.candidates.items() if o.endpoint.serves(request.model)}
        if not any(_larger(other, size) for other in others.values()):
            return frozenset()
        return frozenset(i for i, other in others.items() if not _larger(other, size))

    def _may_eject(self) -> bool:
        """Whether one more may be left alone for its failures."""
        if len(self.candidates) == 1:
            return True  # nobody else would be hurt, and who asks is told at once
        ejected = sum(c.breaker.state is not State.CLOSED for c in self.candidates.values())
        return ejected + 1 <= self.limits.max_ejected_ratio * len(self.candidates) + 1e-9

    def hung(self, signs: Mapping[str, Signs], now: float, stall_s: float) -> list[tuple[str, bool]]:
        """Instances found to hang just now, which are left alone from here on; of each whether its counters tell so.

        `signs`: what came from those with work. One that goes on is taken back. The last one left is never suspected.
        """
        due: dict[str, list[tuple[float, float]]] = {}
        for held in self._held.values():
            due.setdefault(held.candidate.endpoint.id, []).append(_due(held))
        found = []
        for id_ in signs:
            c = self.candidates.get(id_)
            if c is None:
                continue
            came = signs.get(id_, NO_SIGNS)
            if c.breaker.hung and max(came.moved_at, c.progress.counted_at) > c.breaker.opened_at:
                c.breaker.close()
                self._starts(c, now)
            if id_ not in due or c.breaker.state is State.OPEN:
                c.progress.idle()
            elif c.progress.hangs(came, due[id_], now, stall_s) and self._others_serve(c):
                c.breaker.hangs(now)
                self._qualified.clear()
                found.append((id_, c.progress.counts(now)))
        return found

    def _others_serve(self, c: Candidate) -> bool:
        """Whether somebody else is well who has one of its models."""
        models = c.endpoint.models
        return any(
            o is not c
            and o.phase is Phase.SERVING
            and o.breaker.state is State.CLOSED
            and (not models or not o.endpoint.models or models & o.endpoint.models)
            for o in self.candidates.values()
        )

    def _learn(self, held: _Held, now: float, output_tokens: float | None) -> None:
        """Teach the server's speed by a finished request, if it was seen well enough."""
        c, estimate = held.candidate, held.estimate
        if c.depth != 2 or estimate is None or (held.output > 0.0 and not held.decoding):
            return
        if estimate.samples > KNOWN_SAMPLES and now - c.learned_at < LEARN_EVERY_S:
            return
        c.learned_at = now
        s = held.server
        decoding_s, context_s, read_tokens, at = held.mark
        took = now - at
        samples = estimate.samples
        sample: tuple[float, float, float, float, float, float] | None = None
        if held.output <= 0.0:
            # What does not generate is done when all input sent before it, and its own, was read.
            sample = (now - held.at, held.steps, s.n, s.k, held.read + held.ahead, TTFT_NOISE)
        elif output_tokens is not None and output_tokens >= ENOUGH_TOKENS and took > 0.0:
            n, k = (s.decoding_s - decoding_s) / took, (s.context_s - context_s) / took
            sample = (took, output_tokens - 1.0, n, k, s.read_tokens - read_tokens, NOISE)
        elif held.first_at is not None and 0.0 < held.terms.ttft < inf:
            # A short answer tells of reading prompts: its first token is one step after its prompt was read.
            estimate.learn(held.first_at - held.at, 1.0, s.n, s.k, held.read, TTFT_NOISE)
        if sample is not None:
            estimate.learn(*sample)
            self._teach_class(c, *sample)
        if estimate.samples != samples:
            s.runs_at(estimate.speed)
            if estimate.samples == TRIAL_SAMPLES:
                self._unknown.discard(c.endpoint.id)

    def _teach_class(self, c: Candidate, *sample: float) -> None:
        """Until a class is known well, each of its instances' answers teach those that have none yet.

        Priors are of one size of model, so the first thing answers say is by how much all of them are off. It goes to
        all classes at once: whoever answers first would else look slow beside those that have not answered, and these
        be flooded.
        """
        alike = _class_of(c.endpoint)
        known = self._classes.get(alike)
        if known is not None and known.samples >= CLASS_SAMPLES:
            return
        seen = self._off_by.setdefault(c.endpoint.models, deque(maxlen=OFF_BY_KEPT))
        if (ratio := off_by(c.endpoint.capacity or class_speed(c.endpoint.gpu), *sample[:5])) > 0.0:
            seen.append(log(ratio))
        prior = self._prior(c)
        if known is None:
            known = self._classes[alike] = SpeedEstimate(prior)
        elif known.samples < CLASS_LEAST:
            known.begin_from(prior)
        known.learn(*sample)
        self._taught += 1
        if known.samples & (known.samples - 1) and self._taught & (self._taught - 1):
            return  # told at powers of two: enough to follow, and cheap in a pool of thousands
        for id_ in self._unknown:
            other = self.candidates.get(id_)
            if other is not None:
                self._share_class(other)

    # -- what is told to the tier above ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Reservations held."""
        return len(self._held) + len(self._passed)

    def remaining_s(self, id_: str, now: float) -> float:
        """Seconds until the last of what is under way from here at an endpoint is predicted to end; 0: nothing is.

        What is late by so many seconds is taken to need as many more. Requests that are only counted (a node's only
        child) are not predicted here, but by the tier below.
        """
        ends = [_ends_at(held) for held in self._held.values() if held.candidate.endpoint.id == id_]
        return max((min(abs(end - now), LONGEST_S) for end in ends), default=0.0)

    def quote(self, now: float) -> tuple[ServerLoad, ...]:
        """The servers below this pool that take work, each with what is under way on it."""
        self._settle(now)
        loads: list[ServerLoad] = []
        for c in self.candidates.values():
            if c.phase is not Phase.SERVING or not c.breaker.ready(now):
                continue
            servers = c.quoted if c.depth < 2 and c.fresh(now) else c.own
            loads += [replace(s.load(now), models=s.models or c.endpoint.offers) for s in servers]
        return tuple(loads) if len(loads) <= QUOTE_INSTANCES else class_means(loads)


LOADING_S = 5.0  # a client is told to come back after so long while a model loads
LOOK_EVERY_S = 0.5
HEARD_S = 2.0  # what another balancer told is believed for so long
SLOW_START_S = (
    20.0  # a newcomer's share is bounded for so long: then it is as busy as the others, and not flooded at the end
)
MEETING_S = 2.0  # after a process has begun, within which it hears of what has long been there
SLOW_START_SHARE = 1.5  # of its fair share, in a fading sum over a second, which keeps it under twice in any one
CLASS_SAMPLES = 200  # of a class; newcomers start from what these said


Key = str | tuple[str, int] | tuple[str | tuple[str, int], str]
"""What the list of those that serve a request is remembered by: its model or API, number of its need, version."""

Class = tuple[str, frozenset[str]]
"""(GPU class, models): instances that agree in both are as fast as each other until they prove otherwise."""


def _class_of(endpoint: Endpoint) -> Class:
    return endpoint.gpu, endpoint.models


def _scaled(speed: Speed, times: float) -> Speed:
    """So many times slower."""
    return replace(
        speed,
        alpha_s=speed.alpha_s * times,
        beta_s=speed.beta_s * times,
        gamma_s=speed.gamma_s * times,
        prefill_tokens_per_s=speed.prefill_tokens_per_s / times,
    )


def _size(c: Candidate) -> tuple[float, float]:
    """(memory in GB, 0 unknown; KV memory in tokens) of an instance."""
    kind = kinds_of(c.endpoint)[0]
    return memory_gb(kind), c.server.speed.kv_tokens


def _larger(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the one has more memory, or else more room for keys and values, by more than a rounding."""
    if one[0] and other[0] and one[0] != other[0]:
        return one[0] > LARGER * other[0]
    return one[1] > LARGER * other[1]


LARGER = 1.05


def _due(held: _Held) -> tuple[float, float]:
    """(since when, for how many seconds) an instance may be silent on a request."""
    if held.first_at is not None:
        return held.first_at, held.server.p / held.server.speed.prefill_tokens_per_s
    silence = held.terms.ttft + (0.0 if held.stream else held.terms.decode)
    return held.at, silence if silence < inf else LONGEST_S


def _ends_at(held: _Held) -> float:
    """When a request was predicted to end, as of its first token or else of its choice."""
    first_at = held.first_at if held.first_at is not None else held.at + held.terms.ttft
    return first_at + held.terms.decode


NAMED = 16  # of those a filter removed, so many are named


def _removed(by: Filter, candidates: Sequence[Candidate], left: Sequence[Candidate] = ()) -> Removed:
    stay = {c.endpoint.id for c in left}
    gone = [c.endpoint.id for c in candidates if c.endpoint.id not in stay]
    return Removed(by.__name__, len(gone), tuple(gone[:NAMED]))


def _as_fast_as(speed: Speed, limits: Speed) -> Speed:
    """The constants of `speed` with the limits (slots, KV memory, chunk) of another."""
    return replace(
        limits,
        alpha_s=speed.alpha_s,
        beta_s=speed.beta_s,
        gamma_s=speed.gamma_s,
        prefill_tokens_per_s=speed.prefill_tokens_per_s,
    )


def _plain(c: Candidate, now: float) -> bool:
    """Nothing is the matter with it, so that only the model can rule it out."""
    return (
        c.phase is Phase.SERVING
        and c.breaker.state is State.CLOSED
        and c.in_flight < c.max_in_flight
        and c.busy_until <= now
        and not c.full
        and c.safe == inf
    )
