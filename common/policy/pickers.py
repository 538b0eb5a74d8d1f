"""From costs to one candidate. Ties are broken by the given `rng`, so equals share evenly and a seed repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

Picker = Callable[[Sequence[float], Random], int]
"""(costs, rng) -> index of the choice; costs has at least one finite entry."""


def lowest_cost(costs: Sequence[float], rng: Random) -> int:
    """The cheapest; among equals any."""
    best = min(costs)
    ties = [i for i, cost in enumerate(costs) if cost <= best]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


TIE_BAND = 0.05  # learned speeds of equal servers differ by this much: the difference is noise and must not decide


def near_lowest_cost(costs: Sequence[float], rng: Random) -> int:
    """Any of those within TIE_BAND of the cheapest."""
    limit = min(costs) * (1.0 + TIE_BAND)
    ties = [i for i, cost in enumerate(costs) if cost <= limit]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


def power_of_two(costs: Sequence[float], rng: Random) -> int:
    """The cheaper of two drawn without replacement (Mitzenmacher, *The Power of Two Choices*, 2001)."""
    if len(costs) == 1:
        return 0
    a, b = rng.sample(range(len(costs)), 2)
    return a if costs[a] <= costs[b] else b
