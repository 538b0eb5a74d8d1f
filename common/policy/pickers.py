"""From costs to one candidate. What is equal shares evenly, and the same seed gives the same choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.policy.candidate import Candidate

Picker = Callable[["Sequence[Candidate]", Sequence[float], Random], int]
"""(candidates, their costs, rng) -> index of the choice; at least one cost is finite."""


def lowest_cost(candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> int:
    """The cheapest; among equals any."""
    best = min(costs)
    ties = [i for i, cost in enumerate(costs) if cost <= best]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


TIE_BAND = 0.05  # learned speeds of equal servers differ by this much: the difference is noise and must not decide


def near_lowest_cost(candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> int:
    """Of those within TIE_BAND of the cheapest the one whose last turn is longest ago; among equals any."""
    limit = min(costs) * (1.0 + TIE_BAND)
    ties = [i for i, cost in enumerate(costs) if cost <= limit]
    if len(ties) == 1:
        return ties[0]
    oldest = min(candidates[i].last_turn for i in ties)
    ties = [i for i in ties if candidates[i].last_turn == oldest]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


def power_of_two(candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> int:
    """The cheaper of two drawn without replacement (Mitzenmacher, *The Power of Two Choices*, 2001)."""
    if len(costs) == 1:
        return 0
    a, b = rng.sample(range(len(costs)), 2)
    return a if costs[a] <= costs[b] else b
