"""What a candidate costs this request: seconds for the predicting policy, their own unit for the classic loads.

A scorer sees all candidates at once and returns one number each, lower is better; `balancer` adds them up by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.types import InferenceRequest

if TYPE_CHECKING:
    from common.policy.balancer import Candidate

Scorer = Callable[[InferenceRequest, "Sequence[Candidate]", float], "list[float]"]
"""(request, candidates, now) -> costs, in the order of the candidates."""


def completion(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float]:
    """Seconds by which this request makes everybody's completion later: its own and that of those already there.

    A candidate of several servers (a cluster, a region) costs what its cheapest one costs. Where one candidate has no
    fresh report, all are compared by what was sent from here alone, the signal they share.
    """
    blind = any(not c.fresh(now) for c in candidates)
    return [c.cheapest(request, now, blind=blind)[0] for c in candidates]


def round_trip(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float]:
    """Seconds of network there and back, measured; 0 until the first measurement."""
    return [c.round_trip_s for c in candidates]


def price(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float]:
    """Dollars this request costs there: GPU time it takes at the price of the server it would land on."""
    return [c.price_usd(request, now) for c in candidates]


def in_flight(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float]:
    """Requests under way from here."""
    return [float(c.in_flight) for c in candidates]


def turn(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float]:
    """How lately it had its turn: the least recent first."""
    return [float(c.last_turn) for c in candidates]
