"""What a candidate costs this request in seconds and dollars: the terms of the predicting policy.

A scorer sees all candidates at once and returns one number each, lower is better, or None where it is the same for all
(no round trip measured, nothing has a price); `balancer` adds the columns up by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, exp
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
        if request.slo.ttft_s is None and request.slo.tpot_s is None:
            return _instances(request, candidates, alike=candidates[0].pool.alike)
        return [_by_slo(request, c, now) for c in candidates]
    blind = any(not c.fresh(now) for c in candidates)
    return [c.cheapest(request, now, blind=blind)[0] for c in candidates]


def _instances(request: InferenceRequest, candidates: Sequence[Candidate], *, alike: bool) -> list[float]:
    """`marginal_cost` of each instance, written out: this is the inner loop of every decision.

    `alike`: with the backlog, as where all are alike.
    """
    length, output, warm = request.input_tokens, request.output_tokens, request.warm
    tokens, context = length + output, length + 0.5 * output
    first_block = request.prefix_hashes[0] if request.prefix_hashes else NO_BLOCK
    costs = []
    for c in candidates:
        spare, p, inv_room, step, c0, c1, c2, c3, c4, c5, c6, c7 = c.server.plain_alike() if alike else c.server.plain()
        if tokens > spare or warm or first_block in c.prefix:
            costs.append(_one(request, c, alike=alike))
            continue
        weight = c4 * context
        cost = c0 + length * (c1 + length * c2) + ceil((p + length) * inv_room) * step
        if output:
            cost += output * (c3 + weight) + c5 * (1.0 - exp(-output * c6)) * (c7 + weight)
        costs.append(cost * c.handicap)
    return costs


NO_BLOCK = -1  # no hash is negative


def _one(request: InferenceRequest, c: Candidate, *, alike: bool) -> float:
    """The same of one that has to wait, or has some of the prompt cached."""
    uncached = c.uncached_tokens(request)
    cost = marginal_cost(c.server, uncached, request.input_tokens, request.output_tokens).total
    if alike:
        cost += backlog_cost(c.server.costs(), uncached, request.output_tokens)
    return cost * c.handicap


def _by_slo(request: InferenceRequest, c: Candidate, now: float) -> float:
    """The marginal cost of one instance with predicted misses of service levels."""
    uncached = c.uncached_tokens(request)
    terms = marginal_cost(c.server, uncached, request.input_tokens, request.output_tokens)
    return slo_cost(terms, c.server, uncached, request.input_tokens, request.slo, now) * c.handicap


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
