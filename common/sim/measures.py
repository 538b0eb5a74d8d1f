"""What a run amounts to: latencies, goodput, how evenly the load lay, how much of the fleet was used.

Definitions, so that figures can be compared with others':

    TTFT          arrival at the first balancer to first token          E2E   arrival to last token
    time a token  (E2E - TTFT) / (output tokens - 1); "per token" alone is E2E / output tokens
    goodput       share of all requests offered that ended well with TTFT and time a token within the service level
    L             load-balance degree: time average of the standard deviation over instances of in flight ÷ slots
                  (occupancy), or of the GPU seconds still to come on each (work); 0 is even
    U             utilisation: time average of in flight ÷ slots over the fleet, at most 1 an instance; `busy` is the
                  share of instances that compute at all

Requests that arrive in the first `warm_up` of a run, and what drains after the last arrival, are left out.
Source: goodput after DistServe (OSDI'24); L and U as in load-balancing surveys of clouds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import ceil, floor, inf, log
from statistics import fmean, pstdev
from typing import Any, TypeVar

from common.sim.records import Ending, Record, RunRecord
from common.types import Slo

WARM_UP = 0.05  # of the requests: the world begins empty, and what is learned begins with nothing
DEFAULT_SLO = Slo(ttft_s=2.0, tpot_s=0.1)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one measure; all None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread:
        """Of the values that are not None."""
        found = sorted(value for value in values if value is not None)
        if not found:
            return Spread()
        return Spread(fmean(found), *(quantile(found, share) for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Measures:
    """One run, or the mean of several. Latencies (seconds) are those of requests that ended well."""

    requests: float = 0.0
    complete: float = 0.0
    rejected: float = 0.0
    broken: float = 0.0
    goodput: float = 0.0  # fraction of `requests`
    ttft_s: Spread = Spread()
    e2e_s: Spread = Spread()
    tpot_s: Spread = Spread()
    s_per_token: Spread = Spread()
    occupancy_l: float = 0.0
    work_l_s: float = 0.0
    utilization: float = 0.0
    busy: float = 0.0
    decision_s: Spread = Spread()  # host time: length guess, choice and reservation
    learning_s: Spread = Spread()  # host time: taking a first token or an end in
    prefix_hit_rate: float = 0.0  # of prompt tokens
    ttft_error: float | None = None  # median of |ln(seen ÷ predicted)|
    e2e_error: float | None = None


def quantile(ordered: Sequence[float], share: float) -> float:
    """The `share` (0…1) quantile of a sorted, non-empty sequence, linear between neighbours."""
    at = share * (len(ordered) - 1)
    low, high = ordered[floor(at)], ordered[ceil(at)]
    return low + (high - low) * (at - floor(at))


def is_good(record: Record, slo: Slo) -> bool:
    """Whether a request ended well and within `slo`; a level of None is always met."""
    if not record.complete:
        return False
    ttft = record.e2e_s if record.ttft_s is None else record.ttft_s
    assert ttft is not None
    tpot = record.tpot_s
    return ttft < (slo.ttft_s or inf) and (tpot is None or tpot < (slo.tpot_s or inf))


def counted(run: RunRecord, warm_up: float = WARM_UP) -> list[Record]:
    """The requests that count, in order of arrival."""
    return run.records[int(warm_up * len(run.records)) :]


def measure(run: RunRecord, slo: Slo = DEFAULT_SLO, warm_up: float = WARM_UP) -> Measures:
    """Everything of one run."""
    records = counted(run, warm_up)
    well = [record for record in records if record.complete]
    begin_s = records[0].at_s if records else 0.0
    occupancy_l, work_l, used, busy = _load(run, begin_s)
    return Measures(
        requests=len(records),
        complete=len(well),
        rejected=sum(record.ending is Ending.REJECTED for record in records),
        broken=sum(record.ending is Ending.BROKEN for record in records),
        goodput=sum(is_good(record, slo) for record in well) / len(records) if records else 0.0,
        ttft_s=Spread.of(record.ttft_s for record in well),
        e2e_s=Spread.of(record.e2e_s for record in well),
        tpot_s=Spread.of(record.tpot_s for record in well),
        s_per_token=Spread.of(record.s_per_token for record in well),
        occupancy_l=occupancy_l,
        work_l_s=work_l,
        utilization=used,
        busy=busy,
        decision_s=Spread.of(run.decision_s),
        learning_s=Spread.of(run.learning_s),
        prefix_hit_rate=run.prefix_hits / run.prefix_queries if run.prefix_queries else 0.0,
        ttft_error=_error([(record.ttft_s, record.predicted_ttft_s) for record in well]),
        e2e_error=_error([(record.e2e_s, record.predicted_e2e_s) for record in well]),
    )


def _load(run: RunRecord, begin_s: float) -> tuple[float, float, float, float]:
    """Time averages since `begin_s`: L of occupancy, L of work, U, busy."""
    load = run.load
    rows = [i for i, at_s in enumerate(load.times_s) if at_s >= begin_s]
    if not rows:
        return 0.0, 0.0, 0.0, 0.0
    occupancy = [[x for x in load.occupancy[i] if x is not None] for i in rows]
    work = [[x for x in load.work_s[i] if x is not None] for i in rows]
    return (
        fmean(pstdev(row) if row else 0.0 for row in occupancy),
        fmean(pstdev(row) if row else 0.0 for row in work),
        fmean(fmean(min(x, 1.0) for x in row) if row else 0.0 for row in occupancy),
        fmean(load.busy[i] for i in rows),
    )


def _error(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Median of how far predictions were off, as |ln(seen ÷ predicted)|; None where nothing was predicted."""
    found = sorted(abs(log(seen / told)) for seen, told in pairs if seen and told and told < inf)
    return quantile(found, 0.5) if found else None


T = TypeVar("T", Spread, Measures)


def mean_of(several: Sequence[T]) -> T:
    """The mean of measures of several runs, field by field; what is None in one is left out."""
    first = several[0]
    made: dict[str, Any] = {}
    for field in fields(first):
        values = [value for value in (getattr(one, field.name) for one in several) if value is not None]
        if not values:
            made[field.name] = None
        elif is_dataclass(values[0]):
            made[field.name] = mean_of(values)
        else:
            made[field.name] = fmean(values)
    return type(first)(**made)
