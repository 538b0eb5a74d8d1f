"""What a candidate costs this request: seconds for the predicting policy, their own unit for the classic loads.

A scorer sees all candidates at once and returns one number each, lower is better, or None where it is the same for all
(no round trip measured, nothing has a price); `balancer` adds the columns up by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, exp, inf
from typing import TYPE_CHECKING

from common.policy.prediction import backlog_cost, marginal_cost, slo_cost
from common.types import InferenceRequest

if TYPE_CHECKING:
    from common.policy.candidate import Candidate

Scorer = Callable[[InferenceRequest, "Sequence[Candidate]", float], "list[float] | None"]
"""(request, candidates, now) -> costs in the order of the candidates, or None: all the same."""


def completion(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Seconds by which this request makes everybody's completion later: its own and that of those already there.

    A candidate of several servers (a cluster, a region) costs what its cheapest one costs. Where one candidate has no
    fresh report, all are compared by what was sent from here alone, the signal they share.
    """
    if len(candidates) == 1:
        return None
    if candidates[0].depth == 2:
        if request.slo.ttft_s is None and request.slo.tpot_s is None and not candidates[0].pool.alike:
            return _instances(request, candidates)
        return [_full(request, c, now) for c in candidates]
    blind = any(not c.fresh(now) for c in candidates)
    return [c.cheapest(request, now, blind=blind)[0] for c in candidates]


def _instances(request: InferenceRequest, candidates: Sequence[Candidate]) -> list[float]:
    """`marginal_cost` of each instance, written out: this is the inner loop of every decision."""
    length, output, warm = request.input_tokens, request.output_tokens, request.warm
    tokens, context = length + output, length + 0.5 * output
    costs = []
    for c in candidates:
        spare, p, inv_room, step, c0, c1, c2, c3, c4, c5, c6, c7 = c.server.plain()
        if tokens > spare or warm:
            costs.append(marginal_cost(c.server, c.uncached_tokens(request), length, output).total)
            continue
        weight = c4 * context
        cost = c0 + length * (c1 + length * c2) + ceil((p + length) * inv_room) * step
        if output:
            cost += output * (c3 + weight) + c5 * (1.0 - exp(-output * c6)) * (c7 + weight)
        costs.append(cost)
    return costs


def _full(request: InferenceRequest, c: Candidate, now: float) -> float:
    """The marginal cost of one instance with service levels, and with the backlog where all are alike."""
    uncached = c.uncached_tokens(request)
    terms = marginal_cost(c.server, uncached, request.input_tokens, request.output_tokens)
    slo = request.slo
    if slo.ttft_s is not None or slo.tpot_s is not None:
        return slo_cost(terms, c.server, uncached, request.input_tokens, slo, now)
    return terms.total + backlog_cost(c.server.costs(), uncached, request.output_tokens)


def round_trip(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Seconds of network there and back, measured; 0 until the first measurement."""
    if not candidates[0].pool.measured:
        return None
    return [c.round_trip_s for c in candidates]


def price(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Dollars this request costs there: GPU time it takes at the price of the server it would land on."""
    if not candidates[0].pool.priced:
        return None
    return [c.price_usd(request, now) for c in candidates]


def in_flight(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Requests under way from here."""
    return [float(c.in_flight) for c in candidates]


def turn(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """How lately it had its turn: the least recent first."""
    return [float(c.last_turn) for c in candidates]


def weighted_in_flight(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Requests under way from here, this one included, over the endpoint's weight; a weight of 0 takes none.

    Counting this one sends the first to the strongest; it is LVS's shortest expected delay.
    """
    return [(c.in_flight + 1.0) / c.endpoint.weight if c.endpoint.weight > 0.0 else inf for c in candidates]


def work_left(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """GPU seconds of all that is under way there and of this request, on the server below it that has least."""
    return [_least_work(request, c) for c in candidates]


def _least_work(request: InferenceRequest, candidate: Candidate) -> float:
    uncached, output = candidate.uncached_tokens(request), request.output_tokens
    costs = [server.costs() for server in candidate.quoted or candidate.own]
    return min(c.backlog_s + uncached * c.seconds_per_prompt_token + output * c.backlog_per_token_s for c in costs)


class WeightedTurns:
    """Whose turn it is by weight, spread evenly: 0 for that one and 1 for the others; a weight of 0 has no turn.

    Source: nginx's smooth weighted round robin: each gains its weight a turn, the richest is taken and pays for all.
    The order is kept for the candidates there are; one that comes anew begins with nothing saved.
    """

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        """Take a turn: the next call is another request's."""
        weights = {c.endpoint.id: c.endpoint.weight for c in candidates if c.endpoint.weight > 0.0}
        if not weights:
            return [inf for _ in candidates]
        saved = {id_: self._saved.get(id_, 0.0) + weight for id_, weight in weights.items()}
        chosen = max(saved, key=lambda id_: saved[id_])
        saved[chosen] -= sum(weights.values())
        # Those left out of this choice (busy, or of another model) keep what they have saved, within a bound.
        kept = {} if len(self._saved) > MOST_TURNS else self._saved
        self._saved = kept | saved
        return [0.0 if c.endpoint.id == chosen else 1.0 if c.endpoint.weight > 0.0 else inf for c in candidates]


MOST_TURNS = 10_000  # endpoints whose savings are remembered; beyond that those that are gone are forgotten
