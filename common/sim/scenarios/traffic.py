"""Traffic for scenarios: drawn with the statistics of public conversation traffic, or given; at a load of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from common.sim.fleet import Machine, capacity, saturated_rates, weighted
from common.sim.traces import TraceRow
from common.sim.workload import Conversations, scaled

CAPACITY_ROWS = 1_000  # of generated traffic that a fleet's capacity is measured on


@lru_cache(maxsize=32)
def drawn(seed: int, count: int) -> tuple[TraceRow, ...]:
    """So many generated requests, ten a second."""
    return tuple(Conversations(Random(f"{seed}/traffic")).rows(count))


@lru_cache(maxsize=32)
def sized(fleet: tuple[Machine, ...], rows: Sequence[TraceRow] | None = None) -> tuple[tuple[Machine, ...], float]:
    """The fleet with its measured weights, and the requests per second it can bear."""
    rates = saturated_rates(fleet, rows or drawn(0, CAPACITY_ROWS))
    return weighted(fleet, rates), capacity(fleet, rates)


def at_load(
    fleet: tuple[Machine, ...], load: float, seconds: float, seed: int, rows: Sequence[TraceRow] | None = None
) -> tuple[tuple[Machine, ...], list[TraceRow]]:
    """The fleet with weights, and traffic that asks `load` (a fraction) of it for so many seconds."""
    strong, full = sized(fleet, tuple(rows) if rows is not None else None)
    rate = load * full
    count = max(2, round(rate * seconds))
    taken = list(rows)[:count] if rows is not None else list(drawn(seed, count))
    return strong, scaled(taken, rate=rate)
