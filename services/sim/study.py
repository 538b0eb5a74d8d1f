"""A comparison: the same traffic through worlds that differ in their policy alone, over windows and seeds.

Every run is a world of its own, so runs go to as many processes as there are cores. What is measured of the fleet (its
capacity on each window) is measured first and is the same for all policies.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import ParamSpec, TypeVar

from common import clock
from common.policy.stages import PRICE_WEIGHT_S_PER_USD, policy_named
from common.sim.faults import Burst, Fault, compressed
from common.sim.fleet import FLEETS, Machine, capacity, known, saturated_rate, saturated_rates, uneven, weighted
from common.sim.lengths import lengths_named
from common.sim.measures import DEFAULT_SLO, WARM_UP, Measures, counted, mean_of, measure, quantile
from common.sim.records import LoadSeries, Record, RunRecord
from common.sim.workload import TraceRow, mean_rate, read_trace, scaled, spread, superposed, window
from common.sim.world import Network, Setup, simulate
from common.types import Slo, Speed, Tier

CURVE_SHARES = tuple(i / 100 for i in range(100)) + tuple(0.99 + i / 1000 for i in range(1, 11))
"""At these shares (0…1) of the requests a curve has a point; denser where the tail is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a policy, and whether requests ask it for the service level."""

    policy: str
    slo: bool = False

    @property
    def label(self) -> str:
        """As it is typed: `NAME` or `NAME+slo`."""
        return f"{self.policy}+slo" if self.slo else self.policy

    @staticmethod
    def parse(text: str) -> Case:
        """Read `NAME` or `NAME+slo`. Raises ValueError for a policy that there is not."""
        name, plus, option = text.strip().partition("+")
        if plus and option != "slo":
            raise ValueError(f"policy {text!r}: after + only slo is known")
        try:
            policy_named(name)
        except KeyError:
            raise ValueError(f"policy {text!r}: there is no such policy") from None
        return Case(name, bool(plus))


@dataclass(frozen=True, slots=True)
class Study:
    """Everything about a comparison but its traffic. Times are seconds, `load` is a fraction of measured capacity."""

    cases: tuple[Case, ...]
    fleet: tuple[Machine, ...] = FLEETS["mixed16"]
    load: float | None = 0.85  # None: the traffic's own rate, or `rate`
    rate: float | None = None  # requests per second
    seeds: int = 1
    slo: Slo = DEFAULT_SLO  # what goodput counts, and what a case with slo asks for
    lengths: str = "learned"
    tenants: bool = False  # lengths are learned by client too
    replicas: int = 1
    network: Network = field(default_factory=Network)
    faults: tuple[Fault, ...] = ()
    bursts: tuple[Burst, ...] = ()
    prefix_fraction: float = 0.0
    price_weight_s_per_usd: float = PRICE_WEIGHT_S_PER_USD
    speed_error: float = 0.0  # servers are faster or slower than their class by this much (σ of the log)
    speeds_known: bool = False  # and the balancers are told, for comparison with what they learn
    warm_up: float = WARM_UP


@dataclass(frozen=True, slots=True)
class Curves:
    """Of one run, what the picture shows: quantiles of latencies at CURVE_SHARES, and the load over time."""

    ttft_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    load: LoadSeries


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    case: Case
    window: int
    seed: int
    rate: float  # arrivals per second
    capacity: float  # arrivals per second that are load 1.0
    measures: Measures
    shares: dict[str, float]  # GPU class -> share of the requests
    curves: Curves | None  # of the first seed on the first window
    records: list[Record] | None  # where they were asked for


def read_windows(
    trace: Path,
    *,
    windows: int = 1,
    start_s: float = 0.0,
    limit: int | None = None,
    copies: int = 1,
    spread_s: float = 0.0,
    max_input: int = 32_000,
    max_output: int = 4_000,
) -> list[list[TraceRow]]:
    """The trace in `windows` parts of equal count, each of at most `limit` requests and beginning at 0 s.

    `spread_s`: arrivals are stamped no finer than this, and are spread within it. Prompts longer than `max_input` are
    left out and answers cut to `max_output` tokens: a server of the smallest class can then hold every request. Raises
    ValueError or OSError.
    """
    rows = [
        replace(row, output_tokens=min(row.output_tokens, max_output))
        for row in read_trace(trace)
        if row.input_tokens <= max_input
    ]
    if not rows:
        raise ValueError(f"{trace}: no request of at most {max_input} input tokens")
    if spread_s:
        rows = spread(rows, spread_s, Random(0))
    if copies > 1:
        rows = superposed(rows, copies, shift_s=(rows[-1].arrival_s - rows[0].arrival_s) / copies)
    rows = window(rows, start_s)
    each = len(rows) // windows
    if limit is not None:
        each = min(each, limit)
    if each < 1:
        raise ValueError(f"{trace}: nothing arrives after {start_s} s")
    step = len(rows) // windows
    return [window(rows[i * step : i * step + each]) for i in range(windows)]


def run_study(
    study: Study,
    windows: Sequence[Sequence[TraceRow]],
    *,
    jobs: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    records: bool = False,
) -> list[Result]:
    """All cases on all windows and seeds, in that order; `on_done(done, total)` after each run."""
    total = len(study.cases) * len(windows) * study.seeds
    results: list[Result] = []
    with _Workers(jobs, windows) as workers:
        rates = _measured(workers, study, len(windows))
        waiting = [
            workers.submit(_run, study, case, number, seed, rates[number], records)
            for case in study.cases
            for number in range(len(windows))
            for seed in range(study.seeds)
        ]
        for future in waiting:
            results.append(future.result())
            on_done(len(results), total)
    return results


def at_rate(study: Study, rows: Sequence[TraceRow]) -> Sequence[TraceRow]:
    """The traffic at the rate or load that is asked for."""
    full = capacity(study.fleet, saturated_rates(study.fleet, rows)) if study.load is not None else 0.0
    rate = study.rate if study.rate is not None else study.load * full if study.load is not None else None
    return scaled(rows, rate=rate) if rate else rows


def by_case(results: Sequence[Result]) -> dict[Case, list[Result]]:
    """The runs of each case, in order."""
    found: dict[Case, list[Result]] = {}
    for result in results:
        found.setdefault(result.case, []).append(result)
    return found


def means(results: Sequence[Result]) -> dict[Case, Measures]:
    """For each case the mean over windows and seeds."""
    return {case: mean_of([run.measures for run in runs]) for case, runs in by_case(results).items()}


# -- processes ---------------------------------------------------------------------------------------------------------

_windows: Sequence[Sequence[TraceRow]] = ()
"""The traffic, in each worker: sent once and not with every run."""


def _begin(windows: Sequence[Sequence[TraceRow]]) -> None:
    global _windows  # noqa: PLW0603 - a worker process has one study
    _windows = windows


P = ParamSpec("P")
R = TypeVar("R")


class _Workers:
    """Processes, or with one job this process itself."""

    def __init__(self, jobs: int | None, windows: Sequence[Sequence[TraceRow]]) -> None:
        jobs = jobs or os.cpu_count() or 1
        self._pool = ProcessPoolExecutor(jobs, initializer=_begin, initargs=(windows,)) if jobs > 1 else None
        _begin(windows)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have `call(*args)` run; without processes it runs now, and raises now."""
        if self._pool is not None:
            return self._pool.submit(call, *args, **kwargs)
        future: Future[R] = Future()
        future.set_result(call(*args, **kwargs))
        return future


def _measured(workers: _Workers, study: Study, windows: int) -> list[dict[Speed, float]]:
    """For each window what a server of each speed can finish per second of it."""
    speeds = list(dict.fromkeys(kind.speed for kind in study.fleet))
    waiting = [[workers.submit(_saturated_rate, speed, number) for speed in speeds] for number in range(windows)]
    return [{speed: f.result() for speed, f in zip(speeds, futures, strict=True)} for futures in waiting]


def _saturated_rate(speed: Speed, number: int) -> float:
    return saturated_rate(speed, _windows[number])


# -- one run -----------------------------------------------------------------------------------------------------------


def _run(study: Study, case: Case, number: int, seed: int, rates: dict[Speed, float], keep: bool) -> Result:
    full = capacity(study.fleet, rates)
    if full <= 0.0:
        raise ValueError("no server of this fleet can take any request of this trace")
    rows = _windows[number]
    rate = study.rate if study.rate is not None else study.load * full if study.load is not None else None
    if rate is not None and len(rows) > 1:
        rows = scaled(rows, rate=rate)
    rows = compressed(rows, study.bursts)
    run = simulate(_setup(study, case, seed, rates), rows, seed, clock.now)
    return Result(
        case,
        number,
        seed,
        mean_rate(rows),
        full,
        measure(run, study.slo, study.warm_up),
        _shares(run, study.warm_up),
        _curves(run, study.warm_up) if number == 0 and seed == 0 else None,
        run.records if keep else None,
    )


def _setup(study: Study, case: Case, seed: int, rates: dict[Speed, float]) -> Setup:
    fleet = weighted(study.fleet, rates)
    if study.speed_error:
        fleet = uneven(fleet, study.speed_error, Random(f"{seed}/speeds"))
    return Setup(
        known(fleet) if study.speeds_known else fleet,
        lambda path: policy_named(case.policy, study.price_weight_s_per_usd, Tier.of(path)),
        lengths_named(study.lengths, tenants=study.tenants),
        study.slo if case.slo else Slo(),
        study.replicas,
        study.network,
        faults=study.faults,
        prefix_fraction=study.prefix_fraction,
    )


def _shares(run: RunRecord, warm_up: float) -> dict[str, float]:
    records = counted(run, warm_up)
    found = Counter(record.instance.rpartition("-")[0] for record in records if record.instance)
    return {gpu: count / len(records) for gpu, count in sorted(found.items())}


def _curves(run: RunRecord, warm_up: float) -> Curves:
    well = [record for record in counted(run, warm_up) if record.complete]
    ttft = sorted(record.ttft_s for record in well if record.ttft_s is not None)
    e2e = sorted(record.e2e_s for record in well if record.e2e_s is not None)
    return Curves(_points(ttft), _points(e2e), run.load)


def _points(ordered: list[float]) -> tuple[float, ...]:
    return tuple(quantile(ordered, share) for share in CURVE_SHARES) if ordered else ()
