"""A finished request's decisions as values that leave the process: for the admin API, the console and `explain`.

Made from a `RequestRecord` when somebody asks. Seconds are from the request's last byte unless a name says otherwise;
`None` is not known. Costs are in the policy's own unit, which for the predicting policies is seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite

import msgspec

from common.explain.causes import Finding, findings_of
from common.policy.balancer import COMPARED, SLOW_START_S, Balancer
from common.records import AttemptRecord, Ending, RequestRecord, StageRecord
from common.types import InferenceRequest, Path, Tier

IN_SECONDS = ("predicted_completion", "earliest_completion")  # policies whose costs are seconds

WHY_LEFT_OUT = {
    "serves_model": "does not serve the model",
    "serves_and_fits": "does not serve the model, or placement keeps it away",
    "not_draining": "is draining",
    "not_loading": "is still loading its model",
    "not_ejected": "is left alone after failures",
    "has_capacity": "has no free place, or asked for a pause",
    "tried_already": "was tried for this request before",
    "slow_start": "is new and has had its share of the last second",
    "not_drawn": "was not among those that were compared",
    "unknown": "has joined since, or could not take it below",
}


class CandidateView(msgspec.Struct, omit_defaults=True):
    """What one candidate cost. `cost` None: it could never hold the request."""

    id: str
    cost: float | None
    terms: dict[str, float] = {}  # as computed: seconds, dollars, …
    adds: dict[str, float] = {}  # what each term adds to the cost
    chosen: bool = False


class LeftOut(msgspec.Struct):
    """Endpoints that could not be chosen, and why; of many only some are named."""

    by: str
    why: str
    count: int
    endpoints: list[str]


class StageView(msgspec.Struct, omit_defaults=True):
    """One stage's decision."""

    node: str
    tier: str
    chooses: str
    policy: str
    unit: str  # of the costs: "s", or "" where the policy has a unit of its own
    chosen: str
    why: str
    at_s: float
    attempt: int
    pool_size: int
    candidates: list[CandidateView]
    cost: float | None = None
    runner_up: str = ""
    margin: float | None = None  # what the runner-up would have cost more; negative: it was cheaper and not taken
    takeover: bool = False
    left_out: list[LeftOut] = []
    unheard: list[str] = []
    pool_stale: bool = False
    predicted_ttft_s: float | None = None  # from the decision on, as are the next three
    predicted_total_s: float | None = None
    seen_ttft_s: float | None = None
    seen_total_s: float | None = None


class AttemptView(msgspec.Struct, omit_defaults=True):
    """One try at the next hop."""

    target: str
    at_s: float
    took_s: float
    peer: str = ""
    first_byte_s: float | None = None
    status: int = 0
    error: str = ""


class Features(msgspec.Struct, omit_defaults=True):
    """What the stages knew of the request."""

    input_tokens: int
    output_tokens: float  # expected
    max_output_tokens: int | None = None
    stream: bool = False
    session: bool = False
    warm: str = ""  # where its session was served last
    warm_tokens: int = 0
    prefix_blocks: int = 0
    priority: str = "standard"
    deadline_s: float | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


class Outcome(msgspec.Struct, omit_defaults=True):
    """How it ended."""

    status: int
    ending: str
    total_s: float
    error: str = ""
    served_by: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: float | None = None
    queued_s: float = 0.0


class Decision(msgspec.Struct, omit_defaults=True):
    """One request in one process: what was asked, what was decided and why, what was tried, how it ended."""

    id: str
    span_id: str
    time: float  # seconds since the epoch
    process: str
    tier: str
    node: str
    operation: str
    path: str
    model: str
    outcome: Outcome
    tenant: str = ""
    from_peer: bool = False
    shadow_of: str = ""
    features: Features | None = None
    stages: list[StageView] = []
    attempts: list[AttemptView] = []
    shed: str = ""
    findings: list[Finding] = []


def decision_of(record: RequestRecord, balancers: Mapping[Path, Balancer]) -> Decision:
    """The decisions of one request; `balancers` are asked for what the record leaves out. O(candidates)."""
    return Decision(
        id=record.id,
        span_id=record.span_id,
        time=record.started_wall_ns / 1e9,
        process=record.process,
        tier=Tier.of(record.node).value,
        node="/".join(record.node),
        operation=record.operation,
        path=record.path,
        model=record.model[:200],
        outcome=_outcome(record),
        tenant=record.tenant,
        from_peer=record.from_peer,
        shadow_of=record.shadow_of,
        features=None if record.request is None else features_of(record.request),
        stages=[_stage(record, stage, balancers.get(stage.path)) for stage in record.stages],
        attempts=[_attempt(record, attempt) for attempt in record.attempts],
        shed=record.shed.reason if record.shed is not None else "",
        findings=findings_of(record, balancers),
    )


def features_of(r: InferenceRequest) -> Features:
    """What the stages know of a request."""
    return Features(
        r.input_tokens,
        _rounded(r.output_tokens) or 0.0,
        r.max_output_tokens,
        r.stream,
        bool(r.session),
        "/".join(r.warm),
        r.warm_tokens,
        len(r.prefix_hashes),
        r.priority.name.lower(),
        r.deadline_s,
        r.slo.ttft_s,
        r.slo.tpot_s,
    )


def _outcome(r: RequestRecord) -> Outcome:
    return Outcome(
        r.status,
        r.ending.value,
        round(r.total_s, 6),
        r.error,
        r.served_by,
        _rounded(r.ttft_s),
        _rounded(r.tpot_s),
        r.output_tokens,
        round(r.queued_s, 6),
    )


def _attempt(r: RequestRecord, a: AttemptRecord) -> AttemptView:
    ended = r.ended_at if a.ended_at is None else a.ended_at
    first = None if a.first_byte_at is None else round(a.first_byte_at - a.at, 6)
    return AttemptView(
        "/".join(a.target), round(a.at - r.started_at, 6), round(ended - a.at, 6), a.peer, first, a.status, a.error
    )


def _stage(record: RequestRecord, stage: StageRecord, balancer: Balancer | None) -> StageView:
    """One stage with what came of it."""
    view = stage_view(stage, record.request)
    view.at_s = round(stage.at - record.started_at, 6)
    view.left_out = left_out_of(record, stage, balancer)
    if stage.attempt == len(record.attempts) - 1:
        if record.last_began_at is not None and record.stream:
            view.seen_ttft_s = _rounded(record.last_began_at - stage.at)
        if record.ending is Ending.COMPLETE:
            view.seen_total_s = _rounded(record.ended_at - stage.at)
    return view


def stage_view(stage: StageRecord, request: InferenceRequest | None) -> StageView:
    """One stage's decision by itself."""
    tier = Tier.of(stage.path)
    candidates = candidates_of(stage)
    chosen = next(c for c in candidates if c.chosen)
    second = next((c for c in candidates if not c.chosen and c.cost is not None), None)
    margin = None
    if second is not None and second.cost is not None and chosen.cost is not None:
        margin = round(second.cost - chosen.cost, 6)
    return StageView(
        node="/".join(stage.path),
        tier=tier.value,
        chooses=tier.child,
        policy=stage.policy,
        unit="s" if stage.policy in IN_SECONDS else "",
        chosen=stage.chosen,
        why=_why(request, stage, margin),
        at_s=0.0,
        attempt=stage.attempt,
        pool_size=stage.pool_size,
        candidates=candidates,
        cost=chosen.cost,
        runner_up=second.id if second is not None else "",
        margin=margin,
        takeover=stage.takeover,
        left_out=[_left_out(r.filter, r.endpoints, r.number) for r in stage.pick.removed],
        unheard=list(stage.unheard[:COMPARED]),
        pool_stale=stage.pool_stale,
        predicted_ttft_s=_rounded(stage.predicted_ttft_s),
        predicted_total_s=_rounded(stage.predicted_total_s),
    )


def candidates_of(stage: StageRecord) -> list[CandidateView]:
    """What each cost, the cheapest first."""
    weights, views = stage.weights, []
    for score in stage.scores:
        terms = {t: round(v, 9) for t, v in zip(stage.terms, score.terms, strict=True) if isfinite(v)}
        adds = {t: round(weights.get(t, 1.0) * v, 6) for t, v in terms.items()}
        views.append(CandidateView(score.endpoint, _rounded(score.total), terms, adds, score.endpoint == stage.chosen))
    return sorted(views, key=lambda c: (c.cost is None, c.cost, not c.chosen, c.id))


def _why(request: InferenceRequest | None, stage: StageRecord, margin: float | None) -> str:
    if len(stage.pick.candidates) == 1:
        return "only_candidate"
    path = (*stage.path, stage.chosen)
    if margin is not None and margin < 0.0:
        return "about_equal"
    return "session" if request is not None and request.warm[: len(path)] == path else "lowest_cost"


def left_out_of(record: RequestRecord, stage: StageRecord, balancer: Balancer | None) -> list[LeftOut]:
    """Who could not be chosen: by the filters as noted then, the rest from what is known of them now."""
    found = [_left_out(r.filter, r.endpoints, r.number) for r in stage.pick.removed]
    tried = {a.target[-1] for a in record.attempts[: stage.attempt] if a.target[:-1] == stage.path}
    known = {*stage.pick.candidates, *(id_ for r in stage.pick.removed for id_ in r.endpoints)}
    if tried - known:
        found.append(_left_out("tried_already", sorted(tried - known)))
    rest = stage.pool_size - len(stage.pick.candidates) - sum(left.count for left in found)
    if rest <= 0:
        return found
    if stage.pool_size > COMPARED:
        return [*found, LeftOut("not_drawn", WHY_LEFT_OUT["not_drawn"], rest, [])]
    others: dict[str, list[str]] = {}
    for id_, c in balancer.candidates.items() if balancer is not None else ():
        if id_ in known or id_ in tried:
            continue
        if not c.endpoint.serves(record.model):
            others.setdefault("serves_model", []).append(id_)
        elif stage.at - c.started_at < SLOW_START_S:
            others.setdefault("slow_start", []).append(id_)
    found += [_left_out(by, ids[:rest]) for by, ids in others.items()]
    rest -= sum(len(ids) for ids in others.values())
    return found if rest <= 0 else [*found, LeftOut("unknown", WHY_LEFT_OUT["unknown"], rest, [])]


def _left_out(by: str, endpoints: Iterable[str], count: int | None = None) -> LeftOut:
    names = list(endpoints)
    return LeftOut(by, WHY_LEFT_OUT.get(by, by.replace("_", " ")), len(names) if count is None else count, names)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None or not isfinite(seconds) else round(seconds, 6)
