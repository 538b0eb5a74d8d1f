"""Which servers a world has, and how much traffic of a kind they can bear.

A server's capacity is measured, not looked up: one engine of its speed is kept full with the very requests of the trace
window, and what it finishes per second is its saturated throughput. Load 1.0 is the sum of these over the fleet, and
their ratios are the weights that the weighted policies get: the best static ones there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from random import Random

from common.policy.prediction import CLASS_SPEED, class_speed
from common.sim.engine import EngineModel, EventKind
from common.sim.instance import as_fast_as
from common.sim.sequence import Refusal
from common.sim.traces import TraceRow
from common.types import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """One or more like servers. `speed` is the truth; balancers begin with the prior of `gpu`, or with `known`."""

    gpu: str
    speed: Speed
    count: int = 1
    weight: float | None = None  # None: the measured saturated throughput
    price_usd_per_hour: float = 0.0
    known: Speed | None = None  # what an agent tells of it beforehand: its limits; None: nothing
    models: frozenset[str] = frozenset()


def machine(gpu: str, count: int = 1, factor: float = 1.0) -> Machine:
    """Servers of a class, at `factor` of its speed."""
    return Machine(gpu, as_fast_as(class_speed(gpu), factor), count)


FLEETS: dict[str, tuple[Machine, ...]] = {
    "mixed16": (machine("h100", 2), machine("a100", 4), machine("l4", 6), machine("t4", 4)),
    "ha8": (machine("h100", 4), machine("a100", 4)),
    "homog8": (machine("a100", 8),),
    "homog64": (machine("a100", 64),),
    "mixed64": (machine("h100", 8), machine("a100", 16), machine("l4", 24), machine("t4", 16)),
}
"""The fleets of the published comparisons, and two to measure the cost of a decision on."""


def singles(fleet: Iterable[Machine]) -> list[tuple[str, Machine]]:
    """Every server with an id of its own: its class and a number."""
    numbers: dict[str, int] = {}
    made = []
    for kind in fleet:
        for _ in range(kind.count):
            number = numbers.get(kind.gpu, 0)
            numbers[kind.gpu] = number + 1
            made.append((f"{kind.gpu or 'gpu'}-{number}", replace(kind, count=1)))
    return made


def saturated_rate(speed: Speed, rows: Sequence[TraceRow]) -> float:
    """Requests per second that an engine finishes when it never lacks any: `rows` go round, and one round is timed.

    What can never fit into its memory is left out; 0.0 if that is everything. Costs about 60 us a row.
    """
    engine = EngineModel(speed, max_queue=2 * len(rows), prefix_fraction=0.0)
    fitting = [row for row in rows if row.input_tokens + row.output_tokens <= engine.kv_capacity]
    if not fitting:
        return 0.0
    for number, row in enumerate((*fitting, *fitting)):
        taken = engine.submit(str(number), row.input_tokens, row.output_tokens)
        assert not isinstance(taken, Refusal)
    # One round, begun and ended while the engine is full: each request counts once, and no tail runs dry.
    count, begin = len(fitting), max(1, len(fitting) // 4)
    ends: list[float] = []
    while len(ends) < begin + count and engine.next_event_s < inf:
        ends += [e.at_s for e in engine.run_until(engine.next_event_s) if e.kind is EventKind.FINISHED]
    first, last = ends[begin - 1], ends[min(begin + count, len(ends)) - 1]
    return count / (last - first) if last > first else count / last


def saturated_rates(fleet: Iterable[Machine], rows: Sequence[TraceRow]) -> dict[Speed, float]:
    """Measured once for each speed in the fleet."""
    return {speed: saturated_rate(speed, rows) for speed in dict.fromkeys(m.speed for m in fleet)}


def capacity(fleet: Iterable[Machine], rates: dict[Speed, float]) -> float:
    """Requests per second at load 1.0."""
    return sum(kind.count * rates[kind.speed] for kind in fleet)


def weighted(fleet: Iterable[Machine], rates: dict[Speed, float]) -> tuple[Machine, ...]:
    """The fleet with its measured rates as weights, where none are given."""
    return tuple(kind if kind.weight is not None else replace(kind, weight=rates[kind.speed]) for kind in fleet)


def uneven(fleet: Iterable[Machine], sigma: float, rng: Random) -> tuple[Machine, ...]:
    """Each server faster or slower than its class by exp(sigma·z), z normal, steps and prompts by a factor each."""
    made = []
    for _, one in singles(fleet):
        step, prompt = exp(sigma * rng.gauss(0.0, 1.0)), exp(sigma * rng.gauss(0.0, 1.0))
        speed = as_fast_as(one.speed, step)
        made.append(replace(one, speed=replace(speed, prefill_tokens_per_s=one.speed.prefill_tokens_per_s * prompt)))
    return tuple(made)


def known(fleet: Iterable[Machine]) -> tuple[Machine, ...]:
    """The same, with the balancers told every constant beforehand; for comparison with what they learn."""
    return tuple(replace(kind, known=kind.speed) for kind in fleet)


def classes() -> tuple[str, ...]:
    """GPU classes with a prior."""
    return tuple(CLASS_SPEED)
