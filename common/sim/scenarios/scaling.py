"""Days of traffic that go up and down, with a burst, on a fleet that stays as it is or follows: goodput and GPU hours.

A day here is as short as one likes: it is the season a forecast learns. Times are seconds of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import pi, sin

from common.policy.balancer import Policy
from common.policy.scaling.desired import Rules
from common.sim.faults import Burst, compressed
from common.sim.measures import DEFAULT_SLO, is_good, quantile
from common.sim.records import RunRecord
from common.sim.scaling import Fixed, Predicted, Scalable, Scaler, Scaling, Threshold
from common.sim.traces import TraceRow
from common.sim.world import Setup, cluster
from common.types import Path, Slo

ScalerOf = Callable[[Sequence[Scalable]], Scaler]


@dataclass(frozen=True, slots=True)
class Day:
    """What one season of a run came to."""

    requests: int
    goodput: float  # fraction of the requests that arrived in it
    ttft_p99_s: float
    gpu_hours: float
    cost_usd: float
    most: int  # replicas asked for at a time


def days(rows: Sequence[TraceRow], season_s: float, count: int, bursts: Iterable[Burst] = ()) -> list[TraceRow]:
    """The same traffic day after day, each with the bursts; what does not end within its day is left out."""
    day = [row for row in compressed(rows, bursts) if row.arrival_s < season_s]
    return [replace(row, arrival_s=row.arrival_s + season_s * number) for number in range(count) for row in day]


def up_and_down(rows: Sequence[TraceRow], season_s: float, low: float) -> list[TraceRow]:
    """The same requests within `season_s`, the rate like a squared sine; at its ends it is `low` (0…1) of the peak."""
    if len(rows) < 2:
        return list(rows)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(rows)]
    # Each gap is as much shorter as the rate is higher where it lies.
    shares = [1.0 / (low + (1.0 - low) * sin(pi * (i + 0.5) / len(gaps)) ** 2) for i in range(len(gaps))]
    ends = list(accumulate(gap * share for gap, share in zip(gaps, shares, strict=True)))
    scale = season_s / (ends[-1] * (1.0 + 1.0 / len(gaps)))
    return [replace(row, arrival_s=at * scale) for row, at in zip(rows, [0.0, *ends], strict=True)]


def scaler_named(text: str, rules: Rules) -> ScalerOf:
    """`predicted`, `fixed` or `threshold:REQUESTS` (under way for each replica). Raises ValueError."""
    name, _, target = text.partition(":")
    if name == "predicted" and not target:
        return lambda groups: Predicted(groups, rules)
    if name == "fixed" and not target:
        return Fixed
    try:
        if name == "threshold" and float(target) > 0.0:
            return lambda groups: Threshold(groups[0], float(target))
    except ValueError:
        pass
    raise ValueError(f"scaler {text!r}: not one of predicted, fixed, threshold:REQUESTS")


def run(
    policy: Callable[[Path], Policy],
    rows: Sequence[TraceRow],
    groups: Sequence[Scalable],
    scaler: ScalerOf,
    season_s: float,
    seed: int = 0,
    slo: Slo = DEFAULT_SLO,
) -> list[Day]:
    """One run under the checkers, day by day. Raises CheckFailed."""
    world = cluster(Setup((), policy, slo=slo), seed)
    scaling = Scaling(world, groups, scaler(groups))
    record = world.run(rows, slo)
    count = 1 + int(rows[-1].arrival_s / season_s) if rows else 0
    return [_day(record, scaling, season_s * i, season_s * (i + 1), slo) for i in range(count)]


def _day(run: RunRecord, scaling: Scaling, start_s: float, end_s: float, slo: Slo) -> Day:
    records = [r for r in run.records if start_s <= r.at_s < end_s]
    ttft = sorted(r.ttft_s for r in records if r.ttft_s is not None)
    ledger = scaling.ledger
    return Day(
        len(records),
        sum(is_good(r, slo) for r in records) / max(1, len(records)),
        quantile(ttft, 0.99) if ttft else 0.0,
        sum(ledger.gpu_s(start_s, end_s).values()) / 3600.0,
        ledger.cost_usd(start_s, end_s),
        max((asked for at, asked, _ in ledger.counts if start_s <= at < end_s), default=0),
    )


def smallest_fixed(
    policy: Callable[[Path], Policy],
    rows: Sequence[TraceRow],
    group: Scalable,
    goodput: float,
    season_s: float,
    seed: int = 0,
) -> tuple[int, Day]:
    """The smallest fleet that stays as it is and reaches `goodput` on `rows`, one day; at most `group.most`."""
    low, high = 0, group.most
    best = run(policy, rows, [replace(group, start=high)], Fixed, season_s, seed)[0]
    while high - low > 1:
        middle = (low + high) // 2
        day = run(policy, rows, [replace(group, start=middle)], Fixed, season_s, seed)[0]
        if day.goodput >= goodput:
            high, best = middle, day
        else:
            low = middle
    return high, best
