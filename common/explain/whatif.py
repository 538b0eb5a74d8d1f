"""The same question asked again: where a request would go now, and what other policies would have done of late.

Both run the production policies and touch nothing that decides: the first weighs the candidates as they stand without
reserving, the second gives the last requests, in their order and at their times, to balancers of its own that start
from the speeds learned so far. What those foresee is the answer: seconds as predicted, not as measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random

import msgspec

from common.explain.decisions import Features, StageView, features_of, stage_view
from common.policy.balancer import Balancer, Policy
from common.policy.candidate import Candidate
from common.policy.filters import serves_model
from common.policy.prediction import UNFIT, Terms
from common.policy.stages import POLICIES, policy_named
from common.records import RequestRecord, StageRecord
from common.types import (
    Endpoint,
    InferenceRequest,
    Outcome,
    Path,
    Peer,
    Pick,
    Pool,
    Removed,
    Reservation,
    Shed,
    Speed,
    Tier,
)

# -- where would it go now ---------------------------------------------------------------------------------------------


class DryRun(msgspec.Struct, omit_defaults=True):
    """Where a request would go, by the stages that this process would run. `shed`: nobody could take it, and why.

    `handed_to`: the balancer whose stage comes next, as `target` says; "" when `target` is the instance itself.
    """

    features: Features
    stages: list[StageView]
    target: str = ""
    handed_to: str = ""
    shed: str = ""


def dry_run(
    request: InferenceRequest,
    start: Path,
    balancers: Mapping[Path, Balancer],
    serves: Callable[[Path], bool],
    peers_of: Callable[[Path, Endpoint], Sequence[Peer]],
    now: float,
) -> tuple[DryRun, Peer | None]:
    """Weigh the candidates from the node `start` down and change nothing; the peer is who would be handed it.

    Every endpoint of a pool is weighed, also of one so large that a real decision would look at a sample.
    """
    answer = DryRun(features_of(request), [])
    node = start
    while True:
        balancer = balancers.get(node)
        decision = Shed("no_endpoints") if balancer is None else weigh(balancer, request, now)
        if isinstance(decision, Shed):
            answer.shed = decision.reason
            return answer, None
        assert balancer is not None
        stage = StageRecord(
            node,
            decision,
            not serves(node),
            now,
            "",
            pool_size=len(balancer.candidates),
            scorers=balancer.policy.scorers,
            pool_stale=balancer.stale,
        )
        answer.stages.append(stage_view(stage, request))
        node = (*node, decision.endpoint.id)
        answer.target = "/".join(node)
        if len(node) == 3:
            return answer, None
        peers = peers_of(node, decision.endpoint)
        if peers:
            answer.handed_to = peers[0].id
            return answer, peers[0]


def weigh(balancer: Balancer, request: InferenceRequest, now: float) -> Pick | Shed:
    """What `Balancer.pick` would say, but for a newcomer's bounded share; holds nothing and counts nothing."""
    candidates = list(balancer.candidates.values())
    removed: list[Removed] = []
    for keep in balancer.policy.filters:
        left = keep(request, candidates, now)
        stay = {c.endpoint.id for c in left}
        gone = [c.endpoint.id for c in candidates if c.endpoint.id not in stay]
        if gone:
            removed.append(Removed(keep.__name__, len(gone), tuple(gone)))
        candidates = left
    if not candidates:
        return Shed(_reason(balancer, request, removed, now), None, tuple(removed))
    columns: list[tuple[str, Sequence[float]]] = []
    totals = [0.0] * len(candidates)
    for term, weight, scorer in balancer.policy.scorers:
        # Some scorers count turns; a copy of one takes a turn that nobody else notices.
        column = deepcopy(scorer)(request, candidates, now)
        if column is not None:
            columns.append((term, column))
            totals = [t + weight * x if weight else t for t, x in zip(totals, column, strict=True)]
    if min(totals) == inf:
        return Shed("too_large", None, tuple(removed))
    chosen = candidates[balancer.policy.picker(candidates, totals, Random(0)) if len(candidates) > 1 else 0]
    terms = chosen.cheapest(request, now)[2]
    if terms is UNFIT and len(candidates) == 1:  # which was not compared with anything
        return Shed("too_large", None, tuple(removed))
    ttft = chosen.round_trip_s + terms.ttft
    return Pick(
        chosen.endpoint,
        Reservation(0, chosen.endpoint.id, balancer.parent),
        balancer.policy.name,
        tuple(c.endpoint.id for c in candidates),
        totals,
        tuple(columns),
        ttft,
        ttft + terms.decode,
        tuple(removed),
    )


def _reason(balancer: Balancer, request: InferenceRequest, removed: Sequence[Removed], now: float) -> str:
    """Why nobody is left, by the filter that took the last."""
    by = removed[-1].filter if removed else ""
    if by and by == balancer.policy.filters[0].__name__:  # the model's own, with its placement where there are rules
        serving = serves_model(request, list(balancer.candidates.values()), now)
        return "no_placement" if serving else "model_not_found"
    return {"has_capacity": "saturated", "not_loading": "loading"}.get(by, "no_endpoints")


# -- what would others have done ---------------------------------------------------------------------------------------

MOST_REQUESTS = 1000
MOST_WORK = 1_000_000  # requests × candidates × policies of one replay: about two seconds of a core
SLICE = 25  # requests between two pauses in which others get the processor
WARM_UP = 0.1  # of the requests: the replay begins with idle servers, which the real ones were not


class PolicyResult(msgspec.Struct, omit_defaults=True):
    """What one policy would have done with the requests of one pool. Seconds as predicted, means over the requests."""

    policy: str
    requests: int = 0
    elsewhere: int = 0  # that it would have sent to another instance than they went to
    refused: int = 0
    ttft_s: float = 0.0
    ttft_p95_s: float = 0.0
    completion_s: float = 0.0  # its own, from the decision on
    cost_s: float = 0.0  # its own and the delay it brings to those already there
    shares: dict[str, float] = {}  # of the requests, by instance


class Counterfactual(msgspec.Struct, omit_defaults=True):
    """One pool's last requests under every policy, the one that cost least first."""

    node: str
    requests: int
    in_force: str
    seen_ttft_s: float | None = None  # what the requests really took, means
    seen_completion_s: float | None = None
    policies: list[PolicyResult] = []


def together(pools: Sequence[Counterfactual]) -> Counterfactual:
    """Those of several clusters as one: means over all their requests; of 95th percentiles the mean."""
    requests = sum(pool.requests for pool in pools)
    names = ", ".join(pool.node for pool in pools) if len(pools) < 3 else f"{len(pools)} clusters"
    answer = Counterfactual(names, requests, pools[0].in_force if len({p.in_force for p in pools}) == 1 else "")
    answer.seen_ttft_s = _weighted([(pool.seen_ttft_s, pool.requests) for pool in pools])
    answer.seen_completion_s = _weighted([(pool.seen_completion_s, pool.requests) for pool in pools])
    by_policy: dict[str, list[PolicyResult]] = {}
    for pool in pools:
        for result in pool.policies:
            by_policy.setdefault(result.policy, []).append(result)
    for name, results in by_policy.items():
        served = [(r, r.requests - r.refused) for r in results]
        answer.policies.append(
            PolicyResult(
                name,
                sum(r.requests for r in results),
                sum(r.elsewhere for r in results),
                sum(r.refused for r in results),
                _weighted([(r.ttft_s, n) for r, n in served]) or 0.0,
                _weighted([(r.ttft_p95_s, n) for r, n in served]) or 0.0,
                _weighted([(r.completion_s, n) for r, n in served]) or 0.0,
                _weighted([(r.cost_s, n) for r, n in served]) or 0.0,
            )
        )
    answer.policies.sort(key=lambda p: (p.refused, p.cost_s, p.policy))
    return answer


def _weighted(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, count) for value, count in values if value is not None and count]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


@dataclass(slots=True)
class Case:
    """One request of the past."""

    at: float
    request: InferenceRequest
    went_to: str
    output_tokens: float  # seen, else expected
    ttft_s: float | None
    completion_s: float | None


def cases_of(records: Iterable[RequestRecord], node: Path) -> list[Case]:
    """The requests that this process sent to an instance of the cluster `node`, in the order of their decisions."""
    cases = []
    for record in records:
        for stage in record.answered_stages:
            if stage.path == node and record.request is not None:
                expected = record.request.output_tokens
                first, well = record.first_byte_at, record.ending.value == "complete" and record.status < 400
                cases.append(
                    Case(
                        stage.at,
                        record.request,
                        stage.chosen,
                        expected if record.output_tokens is None else record.output_tokens,
                        first - stage.at if first is not None and record.stream and well else None,
                        record.ended_at - stage.at if well else None,
                    )
                )
    return sorted(cases, key=lambda case: case.at)


def counterfactual(
    balancer: Balancer,
    cases: Sequence[Case],
    policies: Sequence[str] = tuple(POLICIES),
    price_weight_s_per_usd: float = 0.0,
) -> Iterator[Counterfactual | None]:
    """Replay `cases` under each policy. Yields None now and then, for others to run, and the answer at the end."""
    size = max(1, len(balancer.candidates))
    bound = min(MOST_REQUESTS, MOST_WORK // (size * max(1, len(policies))))
    cases = cases[-bound:] if bound else []
    answer = Counterfactual("/".join(balancer.parent), len(cases), balancer.policy.name)
    answer.seen_ttft_s = _mean([c.ttft_s for c in cases if c.ttft_s is not None])
    answer.seen_completion_s = _mean([c.completion_s for c in cases if c.completion_s is not None])
    for name in policies:
        replay = _Replay(balancer, policy_named(name, price_weight_s_per_usd, Tier.INSTANCE))
        for number, case in enumerate(cases):
            if number % SLICE == 0:
                yield None
            replay.take(case, counts=number >= WARM_UP * len(cases))
        answer.policies.append(replay.result())
    answer.policies.sort(key=lambda p: (p.refused, p.cost_s, p.policy))
    yield answer


class _Replay:
    """One policy, and its own idea of what is under way."""

    def __init__(self, model: Balancer, policy: Policy) -> None:
        # What is not learned anew needs no trials of the unknown.
        self._balancer = Balancer(model.parent, replace(policy, learns=False), model.limits)
        endpoints = tuple(replace(c.endpoint, capacity=_speed(c)) for c in model.candidates.values())
        self._balancer.update(Pool(model.parent, endpoints), 0.0)
        self._policy = policy
        self._rng = Random(1)
        self._ends: list[tuple[float, int, Reservation]] = []
        self._sessions: dict[str, Path] = {}
        self._ttfts: list[float] = []
        self._completion_s = self._cost_s = 0.0
        self._went: Counter[str] = Counter()
        self._elsewhere = self._refused = 0

    def take(self, case: Case, *, counts: bool) -> None:
        """Decide one request, and let it end when it is predicted to."""
        now = case.at
        while self._ends and self._ends[0][0] <= now:
            ended_at, _, reservation = heappop(self._ends)
            self._balancer.release(reservation, Outcome.SUCCESS, ended_at)
        request = self._as_it_would_be(case.request)
        weighed = {c.endpoint.id: c.cheapest(request, now)[2] for c in self._balancer.candidates.values()}
        decision = self._balancer.pick(request, now, self._rng)
        if isinstance(decision, Shed):
            self._refused += counts
            return
        chosen = decision.endpoint.id
        terms = weighed[chosen]
        if terms is UNFIT:
            terms = Terms(0.0, 0.0, 0.0)
        longer = case.output_tokens / request.output_tokens if request.output_tokens > 0.0 else 1.0
        ends_at = now + terms.ttft + terms.decode * longer
        heappush(self._ends, (ends_at, decision.reservation.id, decision.reservation))
        if request.session:
            self._sessions[request.session] = (*self._balancer.parent, chosen)
        if not counts:
            return
        self._ttfts.append(terms.ttft)
        self._completion_s += terms.ttft + terms.decode * longer
        self._cost_s += terms.ttft + terms.decode * longer + terms.others
        self._went[chosen] += 1
        self._elsewhere += chosen != case.went_to

    def _as_it_would_be(self, request: InferenceRequest) -> InferenceRequest:
        """In one piece, so that its first token is taken for come when it is due; its session where it went here."""
        warm = self._sessions.get(request.session, request.warm) if request.session else request.warm
        return replace(request, stream=False, warm=warm)

    def result(self) -> PolicyResult:
        """The sums so far."""
        done = len(self._ttfts)
        ordered = sorted(self._ttfts)
        return PolicyResult(
            self._policy.name,
            done + self._refused,
            self._elsewhere,
            self._refused,
            round(_mean(ordered) or 0.0, 6),
            round(ordered[min(done - 1, int(0.95 * done))], 6) if done else 0.0,
            round(self._completion_s / done, 6) if done else 0.0,
            round(self._cost_s / done, 6) if done else 0.0,
            {id_: round(count / done, 4) for id_, count in sorted(self._went.items())},
        )


def _speed(c: Candidate) -> Speed:
    return c.estimates[0].speed


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
