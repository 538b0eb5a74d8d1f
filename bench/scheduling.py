"""Measures the goals of scheduling with the production policy and what it learns, in virtual time.

    python bench/scheduling.py                        all rows, two seeds
    python bench/scheduling.py --rows 3,10 --seeds 3  some of them
    python bench/scheduling.py --write docs/scheduling.md    and put the table into the page
    python bench/scheduling.py --quick                what must hold on every change; without the traces too

The rows are the goals in docs/scheduling.md, on the public traces named there (`--traces`: the folder they are in); R
is recovery from change, S a fleet that follows its traffic; what a decision costs (11) is measured by
`bench/decision.py`.

The loads of the published baselines cannot be had exactly: how it was measured what a server can bear is not said to
the last per cent, and the figures are steep in it. So each row is run at the load at which its baseline has the figure
published for it, found by bisection; seconds and goodput can then be compared with the published ones. "Windows" are
the four quarters of the conversation trace at the plain load, measured on each of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File
from random import Random

from rich.console import Console
from rich.table import Table

from common import clock
from common.policy.balancer import Policy
from common.policy.scaling.desired import Rules
from common.policy.stages import policy_named
from common.sim.faults import Burst
from common.sim.fleet import FLEETS, machine
from common.sim.measures import DEFAULT_SLO, Measures
from common.sim.scaling import Scalable
from common.sim.scenarios import recovery
from common.sim.scenarios.scaling import Day, days, scaler_named, smallest_fixed, up_and_down
from common.sim.scenarios.scaling import run as run_scaled
from common.sim.traces import TraceRow
from common.sim.workload import Conversations
from common.sim.world import Network
from common.types import Path, Slo, Tier
from services.sim.study import Case, Result, Study, by_case, means, read_windows, run_study

OURS = "predicted_completion"
LATENCY, SERVICE = Case(OURS), Case(OURS, slo=True)  # the two modes: with and without service levels asked for
WLC, WRR, LC, RR, LWL, AFFINITY = (
    Case(name)
    for name in (
        "weighted_least_connections",
        "weighted_round_robin",
        "least_connections",
        "round_robin",
        "least_work_left",
        "prefix_affinity",
    )
)
CONV, MOONCAKE, R1 = "azure2023_conv", "mooncake_conversation", "servegen_deepseek-r1_sampled"
SPREAD_S = {MOONCAKE: 3.0}  # its clock ticks every three seconds
WINDOWS = 4  # of the conversation trace
FIRST = 5_000  # requests, where one window is enough
STEPS = 7  # of a bisection
RECOVERY_SEEDS = 3
QUICK = 2_500  # requests with --quick
RAMP = "aibrix_8min_up_down"
RAMP_DAY_S = 600.0  # the trace and a pause
COLD_START_S = 20.0
THRESHOLDS = (4, 8, 16)  # requests under way for each replica
SHORT = 1_500  # requests of a window with --short, which is for trying the script out


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table."""

    row: str
    setting: str
    measure: str
    goal: str
    reached: str
    baseline: str
    windows: str  # the same over other windows or seeds
    met: bool


Measure = Callable[[Measures], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """A trace on a fleet at a published load: where `base` has `figure` by `measure`."""

    trace: str
    fleet: str
    published_load: float
    base: Case
    measure: Measure
    figure: float
    prefix_fraction: float = 0.0

    @property
    def label(self) -> str:
        """How the table calls it."""
        trace = {CONV: "conv", MOONCAKE: "Mooncake", R1: "DeepSeek-R1"}[self.trace]
        return f"{trace}, {self.fleet}, {self.published_load:g}"


class Bench:
    """Runs studies, each once, and remembers them."""

    def __init__(self, traces: File, seeds: int, jobs: int | None, short: bool, say: Callable[[str], None]) -> None:
        self.traces = traces
        self.seeds = seeds
        self.jobs = jobs
        self.short = short
        self.say = say
        self.simulated = 0.0
        self._done: dict[tuple[str, int, Study], list[Result]] = {}
        self._read: dict[tuple[str, int], list[list[TraceRow]]] = {}
        self._loads: dict[Setting, float] = {}

    def windows(self, trace: str, count: int) -> list[list[TraceRow]]:
        """A trace in `count` parts; 0: its first requests."""
        key = (trace, count)
        if key not in self._read:
            limit = SHORT if self.short else FIRST if count == 0 else None
            file = self.traces / f"{trace}.csv.gz"
            self._read[key] = read_windows(file, windows=count or 1, limit=limit, spread_s=SPREAD_S.get(trace, 0.0))
        return self._read[key]

    def run(self, trace: str, count: int, study: Study) -> list[Result]:
        """The study on those windows."""
        key = (trace, count, study)
        if key not in self._done:
            self.say(f"{trace}: {', '.join(case.label for case in study.cases)} at {study.load or 0:.3f}")
            results = run_study(study, self.windows(trace, count), jobs=self.jobs)
            self.simulated += sum(run.measures.requests for run in results)
            self._done[key] = results
        return self._done[key]

    def load(self, at: Setting) -> float:
        """The load at which the setting's baseline has its published figure, within half a per cent; bisection."""
        if at not in self._loads:
            low, high = 0.4, 1.1
            for _ in range(STEPS):
                middle = 0.5 * (low + high)
                study = Study((at.base,), FLEETS[at.fleet], middle, prefix_fraction=at.prefix_fraction)
                seen = at.measure(means(self.run(at.trace, 0, study))[at.base])
                # Latencies grow with the load, goodput falls.
                heavier = (seen < at.figure) != (at.measure is _goodput)
                low, high = (middle, high) if heavier else (low, middle)
            self._loads[at] = 0.5 * (low + high)
        return self._loads[at]

    def at(self, at: Setting, cases: Sequence[Case], **settings: object) -> dict[Case, Measures]:
        """Means over seeds at a published setting."""
        study = Study(
            tuple(cases), FLEETS[at.fleet], self.load(at), seeds=self.seeds, prefix_fraction=at.prefix_fraction
        )
        return means(self.run(at.trace, 0, replace(study, **settings)))  # type: ignore[arg-type]

    def quarters(self, cases: Sequence[Case], load: float, **settings: object) -> list[Result]:
        """The four windows of the conversation trace, at measured capacity."""
        study = Study(tuple(cases), load=load, seeds=self.seeds)
        return self.run(CONV, WINDOWS, replace(study, **settings))  # type: ignore[arg-type]


# -- words -------------------------------------------------------------------------------------------------------------


def _e2e_mean(m: Measures) -> float:
    return m.e2e_s.mean or 0.0


def _e2e_p99(m: Measures) -> float:
    return m.e2e_s.p99 or 0.0


def _ttft_p99(m: Measures) -> float:
    return m.ttft_s.p99 or 0.0


def _goodput(m: Measures) -> float:
    return 100.0 * m.goodput


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _against(results: Sequence[Result], case: Case, base: Case, measure: Measure) -> str:
    """The mean over windows and seeds, and base ÷ case from the worst window to the best."""
    found = by_case(results)
    ratios = [measure(b.measures) / measure(a.measures) for a, b in zip(found[case], found[base], strict=True)]
    mean = sum(measure(run.measures) for run in found[case]) / len(found[case])
    return f"{mean:.2f} s; {sum(ratios) / len(ratios):.2f}x ({min(ratios):.2f}…{max(ratios):.2f})"


def _each(results: Sequence[Result], case: Case, measure: Measure, form: str = "{:.1f}") -> str:
    """One figure a window: the mean over its seeds."""
    windows: dict[int, list[float]] = {}
    for run in by_case(results)[case]:
        windows.setdefault(run.window, []).append(measure(run.measures))
    return " · ".join(form.format(sum(values) / len(values)) for values in windows.values())


# -- rows --------------------------------------------------------------------------------------------------------------


def conv(load: float) -> Setting:
    """The conversation trace on the mixed fleet, as published for this load."""
    if load == 0.95:
        return Setting(CONV, "mixed16", load, WLC, _goodput, 67.0)
    return Setting(CONV, "mixed16", load, WLC, _e2e_mean, {0.7: 8.01, 0.85: 12.15}[load])


def latency(bench: Bench) -> Iterator[Goal]:
    """Rows 1 and 2: mean and p99 of the latency mode."""
    for load, mean_s, p99_s in ((0.7, 6.0, 14.0), (0.85, 8.5, 20.0)):
        cases = (LATENCY, SERVICE, WLC, LC, WRR, RR)
        found = bench.at(conv(load), cases)
        windows = bench.quarters(cases, load)
        for row, name, limit, measure in (("1", "mean E2E", mean_s, _e2e_mean), ("2", "p99 E2E", p99_s, _e2e_p99)):
            reached = measure(found[LATENCY])
            others = ", ".join(f"{n} {measure(found[c]):.1f}" for n, c in (("LC", LC), ("WRR", WRR), ("RR", RR)))
            yield Goal(
                row,
                f"{conv(load).label}, latency mode",
                name,
                f"≤ {limit:g} s",
                _seconds(reached),
                f"WLC {measure(found[WLC]):.1f}, {others} s",
                _against(windows, LATENCY, WLC, measure) + " over WLC",
                reached <= limit,
            )


def service(bench: Bench) -> Iterator[Goal]:
    """Rows 3 and 4: with service levels."""
    cases = (LATENCY, SERVICE, WLC, LC, WRR, RR)
    found, windows = bench.at(conv(0.85), cases), bench.quarters(cases, 0.85)
    for name, limit, measure, more in (
        ("goodput", 99.5, _goodput, True),
        ("p99 TTFT", 1.5, _ttft_p99, False),
        ("mean E2E", 10.5, _e2e_mean, False),
    ):
        reached, form = measure(found[SERVICE]), _percent if more else _seconds
        yield Goal(
            "3",
            f"{conv(0.85).label}, SLO mode",
            name,
            f"{'≥' if more else '≤'} {limit:g} {'%' if more else 's'}",
            form(reached),
            f"WLC {form(measure(found[WLC]))}",
            f"{_each(windows, SERVICE, measure, '{:.2f}')}; WLC {_each(windows, WLC, measure, '{:.2f}')}",
            reached >= limit if more else reached <= limit,
        )
    few = (SERVICE, LATENCY, WLC, LC, WRR)
    found, windows = bench.at(conv(0.95), few), bench.quarters(few, 0.95)
    reached = _goodput(found[SERVICE])
    yield Goal(
        "4",
        f"{conv(0.95).label}, SLO mode",
        "goodput",
        "≥ 92 %",
        _percent(reached),
        ", ".join(f"{n} {_goodput(found[c]):.1f}" for n, c in (("WLC", WLC), ("LC", LC), ("WRR", WRR))) + " %",
        f"{_each(windows, SERVICE, _goodput)}; WLC {_each(windows, WLC, _goodput)}",
        reached >= 92.0,
    )


def slo_capacity(bench: Bench) -> Iterator[Goal]:
    """Row 5: the highest load at which so much of the traffic is served within the service level."""
    for target, over_wlc, over_wrr in ((99.0, 1.06, 1.3), (95.0, 1.0, 1.0)):
        loads = {case: _highest_load(bench, case, target) for case in (SERVICE, WLC, WRR)}
        yield Goal(
            "5",
            f"conv, mixed16, SLO mode: load at {target:g} % goodput",
            "load",
            f"≥ {over_wlc:g} x WLC, ≥ {over_wrr:g} x WRR",
            f"{loads[SERVICE]:.3f}",
            f"WLC {loads[WLC]:.3f}, WRR {loads[WRR]:.3f}",
            f"{loads[SERVICE] / loads[WLC]:.2f}x, {loads[SERVICE] / loads[WRR]:.2f}x",
            loads[SERVICE] >= over_wlc * loads[WLC] and loads[SERVICE] >= over_wrr * loads[WRR],
        )


def _highest_load(bench: Bench, case: Case, target: float) -> float:
    """By bisection, to within 0.01."""
    low, high = 0.4, 1.1
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        held = _goodput(means(bench.run(CONV, 0, Study((case,), load=middle, seeds=bench.seeds)))[case]) >= target
        low, high = (middle, high) if held else (low, middle)
    return low


def mooncake(bench: Bench) -> Iterator[Goal]:
    """Row 6: long prompts."""
    for load, figure, limit in ((0.7, 75.2, 87.0), (0.95, 29.4, 63.0)):
        at = Setting(MOONCAKE, "mixed16", load, WLC, _goodput, figure)
        found = bench.at(at, (SERVICE, LATENCY, WLC, WRR))
        reached = _goodput(found[SERVICE])
        yield Goal(
            "6",
            f"{at.label}, SLO mode",
            "goodput",
            f"≥ {limit:g} %",
            _percent(reached),
            f"WLC {_percent(_goodput(found[WLC]))}, WRR {_percent(_goodput(found[WRR]))}",
            f"latency mode {_percent(_goodput(found[LATENCY]))}; "
            f"mean E2E {', '.join(f'{_e2e_mean(found[case]):.1f}' for case in (SERVICE, LATENCY, WLC))} s",
            reached >= limit,
        )


def reasoning(bench: Bench) -> Iterator[Goal]:
    """Row 7: long answers with a heavy tail."""
    at = Setting(R1, "mixed16", 0.85, WLC, _e2e_mean, 25.2)
    found = bench.at(at, (LATENCY, SERVICE, WLC, WRR))
    shown = {case: (_e2e_mean(found[case]), _e2e_p99(found[case])) for case in (LATENCY, SERVICE, WLC)}
    yield Goal(
        "7",
        at.label,
        "mean; p99 E2E",
        "≤ 19; ≤ 75 s in one mode",
        "; ".join(f"{name} {a:.1f}, {b:.1f}" for name, (a, b) in zip(("latency", "SLO"), shown.values(), strict=False)),
        f"WLC {shown[WLC][0]:.1f}, {shown[WLC][1]:.1f} s",
        f"goodput {_goodput(found[LATENCY]):.1f}, {_goodput(found[SERVICE]):.1f}; WLC {_goodput(found[WLC]):.1f} %",
        any(shown[case][0] <= 19.0 and shown[case][1] <= 75.0 for case in (LATENCY, SERVICE)),
    )


def alike(bench: Bench) -> Iterator[Goal]:
    """Row 8: a pool of like servers."""
    for at, least in (
        (Setting(CONV, "homog8", 0.85, LC, _e2e_mean, 11.96), 0.0),
        (Setting(MOONCAKE, "homog8", 0.85, LC, _goodput, 51.8), 65.0),
    ):
        found = bench.at(at, (LATENCY, SERVICE, LC, LWL))
        for case, mode in ((LATENCY, "latency"), (SERVICE, "SLO")):
            mine, base = found[case], found[LC]
            mean, p99 = _e2e_mean(mine) / _e2e_mean(base), _e2e_p99(mine) / _e2e_p99(base)
            ttft = _ttft_p99(base) / _ttft_p99(mine)
            yield Goal(
                "8",
                f"{at.label}, {mode} mode",
                "mean, p99 E2E; p99 TTFT; goodput",
                "E2E ≤ 1.02 x LC, TTFT ≥ 1.4x" + (f", ≥ {least:g} %" if least else ""),
                _three(mine),
                _three(base),
                f"E2E {mean:.2f}, {p99:.2f}; TTFT {ttft:.2f}x; LWL {_three(found[LWL])}",
                max(mean, p99) <= 1.02 and ttft >= 1.4 and _goodput(mine) >= least,
            )


def _three(m: Measures) -> str:
    return f"{_e2e_mean(m):.2f}, {_e2e_p99(m):.1f} s; {_ttft_p99(m):.2f} s; {_percent(_goodput(m))}"


def prefixes(bench: Bench) -> Iterator[Goal]:
    """Row 9: prompts that begin alike, on servers that cache them."""
    at = Setting(MOONCAKE, "ha8", 1.0, WLC, _e2e_mean, 21.7, prefix_fraction=0.9)
    found = bench.at(at, (LATENCY, SERVICE, WLC, AFFINITY))
    mean, good = _e2e_mean(found[LATENCY]), _goodput(found[SERVICE])
    hits = {case: found[case].prefix_hit_rate for case in found}
    yield Goal(
        "9",
        f"{at.label}, prefix cache",
        "mean E2E; goodput; hit rate",
        "≤ 12 s or ≥ 93 %; ≥ 0.20",
        f"latency {mean:.1f} s, {hits[LATENCY]:.2f}; SLO {good:.1f} %, {hits[SERVICE]:.2f}",
        f"WLC {_e2e_mean(found[WLC]):.1f} s, {_goodput(found[WLC]):.1f} %, {hits[WLC]:.2f}",
        f"prefix_affinity {_e2e_mean(found[AFFINITY]):.1f} s, {_goodput(found[AFFINITY]):.1f} %, {hits[AFFINITY]:.2f}",
        (mean <= 12.0 and hits[LATENCY] >= 0.2) or (good >= 93.0 and hits[SERVICE] >= 0.2),
    )


def replicas(bench: Bench) -> Iterator[Goal]:
    """Row 10: several balancers of one cluster."""
    one = _goodput(bench.at(conv(0.85), (SERVICE, WLC))[SERVICE])
    ways = (
        ("exchange every 30 ms", Network(exchange_s=0.03), 0.5),
        ("exchange every second", Network(exchange_s=1.0), 1.0),
        ("no exchange, agents' reports", Network(), 1.0),
        ("no exchange, no reports", Network(look_s=None), 1.0),
    )
    for name, network, within in ways:
        found = bench.at(conv(0.85), (SERVICE, WLC), replicas=4, network=network)
        many = _goodput(found[SERVICE])
        yield Goal(
            "10",
            f"{conv(0.85).label}, SLO mode, 4 replicas: {name}",
            "goodput",
            f"within {within:g} of one ({one:.1f} %)",
            _percent(many),
            f"WLC {_percent(_goodput(found[WLC]))}",
            f"E2E {_e2e_mean(found[SERVICE]):.2f} s",
            many >= one - within,
        )
    at = Setting(MOONCAKE, "ha8", 1.0, WLC, _e2e_mean, 21.7, prefix_fraction=0.9)
    alone = bench.at(at, (LATENCY,))[LATENCY]
    shared = bench.at(at, (LATENCY,), replicas=4, network=Network(exchange_s=0.03))[LATENCY]
    yield Goal(
        "10",
        f"{at.label}, prefix cache, latency mode, 4 replicas",
        "hit rate; mean E2E",
        f"within 5 % of one ({alone.prefix_hit_rate:.3f})",
        f"{shared.prefix_hit_rate:.3f}; {_e2e_mean(shared):.2f} s",
        f"one: {_e2e_mean(alone):.2f} s",
        "-",
        shared.prefix_hit_rate >= 0.95 * alone.prefix_hit_rate,
    )


def robustness(bench: Bench) -> Iterator[Goal]:
    """Row 12: wrong lengths and wrong speeds."""
    few = (LATENCY, LWL)
    right, wrong = bench.at(conv(0.85), few, lengths="oracle"), bench.at(conv(0.85), few, lengths="noise:1")
    worse = {case: _e2e_mean(wrong[case]) / _e2e_mean(right[case]) - 1.0 for case in few}
    yield Goal(
        "12",
        f"{conv(0.85).label}: lengths off by σ = 1",
        "mean E2E",
        "≤ +5 %",
        f"{100.0 * worse[LATENCY]:+.1f} %",
        f"LWL {100.0 * worse[LWL]:+.1f} %",
        f"{_e2e_mean(right[LATENCY]):.2f} to {_e2e_mean(wrong[LATENCY]):.2f} s",
        worse[LATENCY] <= 0.05,
    )
    for sigma, limit in ((0.2, 0.02), (0.4, 0.07)):
        told = bench.quarters((LATENCY,), 0.85, speed_error=sigma, speeds_known=True)
        learned = bench.quarters((LATENCY,), 0.85, speed_error=sigma)
        change = _e2e_mean(means(learned)[LATENCY]) / _e2e_mean(means(told)[LATENCY]) - 1.0
        yield Goal(
            "12",
            f"conv, mixed16, 0.85: servers off their class by σ = {sigma}, learned against told",
            "mean E2E",
            f"≤ +{100.0 * limit:.0f} %",
            f"{100.0 * change:+.1f} %",
            "-",
            f"told {_each(told, LATENCY, _e2e_mean, '{:.2f}')}; learned {_each(learned, LATENCY, _e2e_mean, '{:.2f}')}",
            change <= limit,
        )


def balance(bench: Bench) -> Iterator[Goal]:
    """Row 13: how far the work on instances differs, which is reported and not optimised."""
    cases = (LATENCY, SERVICE, WLC, LC, WRR, RR)
    found, windows = bench.at(conv(0.85), cases), bench.quarters(cases, 0.85)
    reached = found[LATENCY].work_l_s
    yield Goal(
        "13",
        f"{conv(0.85).label}, latency mode",
        "L work",
        "≤ 1.2 s",
        _seconds(reached),
        ", ".join(f"{n} {found[c].work_l_s:.1f}" for n, c in (("WLC", WLC), ("LC", LC), ("WRR", WRR))) + " s",
        f"SLO mode {found[SERVICE].work_l_s:.2f}; windows {_each(windows, LATENCY, lambda m: m.work_l_s, '{:.2f}')}",
        reached <= 1.2,
    )


def recoveries(bench: Bench, seeds: int = RECOVERY_SEEDS) -> Iterator[Goal]:
    """Recovery from change, on generated traffic."""

    def ours(path: Path) -> Policy:
        return policy_named(OURS, tier=Tier.of(path))

    numbers = range(1 if bench.short else seeds)
    for slo, mode in ((Slo(), "latency"), (Slo(2.0, 0.1), "SLO")):
        bench.say(f"recovery, {mode} mode")
        slowed = [recovery.slowed(ours, seed, slo=slo).ratio for seed in numbers]
        yield Goal(
            "R",
            f"two servers drop to half speed, {mode} mode",
            "mean E2E 30 to 60 s later, over the steady state",
            "≤ 1.10",
            f"{sum(slowed) / len(slowed):.2f}",
            "-",
            f"{min(slowed):.2f}…{max(slowed):.2f}",
            max(slowed) <= 1.10,
        )
        spread = [recovery.burst(ours, seed, slo=slo) for seed in numbers]
        within = [one.within_5_s for one in spread]
        yield Goal(
            "R",
            f"arrivals x 5, {mode} mode",
            "distance of shares by class from the steady ones, 5 to 10 s later",
            "≤ 0.10",
            f"{sum(within) / len(within):.3f}",
            f"noise {sum(one.noise for one in spread) / len(spread):.3f}",
            f"{min(within):.3f}…{max(within):.3f}; first 5 s {max(one.pieces[0] for one in spread):.3f}",
            max(within) <= 0.10,
        )
        for restarted, what in ((False, "a new a100 joins"), (True, "an a100 restarts empty")):
            fresh = [recovery.fresh(ours, seed, slo=slo, restarted=restarted) for seed in numbers]
            worst = max(one.worst for one in fresh)
            yield Goal(
                "R",
                f"{what} under load 0.85, {mode} mode",
                "most in a second, fair shares",
                "≤ 2",
                f"{worst:.1f}",
                "-",
                f"first minute {sum(one.first_minute for one in fresh) / len(fresh):.2f}",
                worst <= 2.0,
            )


def scaled(bench: Bench, copies: int = 4, thresholds: Sequence[int] = THRESHOLDS) -> Iterator[Goal]:
    """A fleet that follows the ramp trace, day after day with a burst, against fleets that do not foresee it."""
    file = bench.traces / f"{RAMP}.csv.gz"
    rows = read_windows(file, copies=copies)[0] if file.is_file() else Conversations(Random(0)).rows(copies * 1000)
    ramp = rows if file.is_file() else up_and_down(rows, 0.8 * RAMP_DAY_S, 0.1)
    group = Scalable("l4", machine("l4"), COLD_START_S, most=40)
    rules = Rules(DEFAULT_SLO, least=1, seasons_s=(RAMP_DAY_S,), cool_down_s=60.0, panic_s=30.0, idle_s=60.0)
    bursts = [Burst(120.0, 5.0, 10.0)]
    bench.say(f"scaling: {len(rows)} requests a day of {'the ramp trace' if file.is_file() else 'generated traffic'}")

    def policy(path: Path) -> Policy:
        return policy_named(OURS, tier=Tier.of(path))

    def third(scaler: str) -> Day:
        traffic = days(ramp, RAMP_DAY_S, 3, bursts)
        return run_scaled(policy, traffic, [group], scaler_named(scaler, rules), RAMP_DAY_S)[2]

    size, fixed = smallest_fixed(policy, days(ramp, RAMP_DAY_S, 1, bursts), replace(group, most=24), 0.95, RAMP_DAY_S)
    ours = third("predicted")
    theirs = [(target, third(f"threshold:{target}")) for target in thresholds]
    yield Goal(
        "S",
        f"{'ramp' if file.is_file() else 'generated ramp'} x {copies}, l4, burst x 5, 20 s cold start, third day",
        "goodput; GPU hours",
        f"≥ 95 %; < the smallest fixed fleet that has it ({size})",
        f"{_percent(100.0 * ours.goodput)}; {ours.gpu_hours:.2f}",
        f"fixed {_percent(100.0 * fixed.goodput)}; {fixed.gpu_hours:.2f}",
        ", ".join(f"threshold {n}: {_percent(100.0 * d.goodput)}; {d.gpu_hours:.2f}" for n, d in theirs) or "-",
        ours.goodput >= 0.95 and ours.gpu_hours < fixed.gpu_hours,
    )


def quick(bench: Bench) -> Iterator[Goal]:
    """Goals loose enough for a short run, on generated traffic where the conversation trace is not at hand."""
    real = (bench.traces / f"{CONV}.csv.gz").is_file()
    traffic = bench.windows(CONV, 0) if real else [Conversations(Random(0)).rows(QUICK)]
    study = Study((LATENCY, SERVICE, WLC, LC))
    bench.say(f"{QUICK} requests of {CONV if real else 'generated traffic'}, and recovery on generated traffic")
    began = clock.now()
    results = run_study(study, [traffic[0][:QUICK]], jobs=bench.jobs)
    a_minute = 60.0 * len(study.cases) * len(traffic[0][:QUICK]) / (clock.now() - began)
    bench.say(f"{a_minute:,.0f} simulated requests a minute, capacity measured included")
    shared = replace(study, cases=(SERVICE,), replicas=4, network=Network(exchange_s=0.03))
    replicas = run_study(shared, [traffic[0][:QUICK]], jobs=1)
    bench.simulated += sum(run.measures.requests for run in (*results, *replicas))
    found, many = means(results), _goodput(means(replicas)[SERVICE])
    ours, slo = found[LATENCY], found[SERVICE]
    setting = f"{'conv' if real else 'generated'}, mixed16, 0.85"
    for base, name, least in ((WLC, "WLC", 1.2), (LC, "LC", 1.5)):
        ratio = _e2e_mean(found[base]) / _e2e_mean(ours)
        reached, baseline = _seconds(_e2e_mean(ours)), f"{name} {_seconds(_e2e_mean(found[base]))}"
        yield Goal("1", setting, "mean E2E", f"{name} ≥ {least:g}x", reached, baseline, f"{ratio:.2f}x", ratio >= least)
    good, wlc = _goodput(slo), _goodput(found[WLC])
    goal = "≥ 97 %, ≥ WLC - 0.5"
    yield Goal("3", setting, "goodput", goal, _percent(good), f"WLC {_percent(wlc)}", "-", good >= max(97.0, wlc - 0.5))
    yield Goal(
        "10",
        f"{setting}, 4 replicas",
        "goodput",
        "within 1 of one",
        _percent(many),
        _percent(good),
        "-",
        many >= good - 1.0,
    )
    work, theirs = ours.work_l_s, found[LC].work_l_s
    yield Goal("13", setting, "L work", "≤ LC ÷ 3", _seconds(work), f"LC {_seconds(theirs)}", "-", work <= theirs / 3.0)
    yield from recoveries(bench, seeds=1)
    yield from scaled(bench, thresholds=())


ROWS: dict[str, Callable[[Bench], Iterator[Goal]]] = {
    "1": latency,
    "3": service,
    "5": slo_capacity,
    "6": mooncake,
    "7": reasoning,
    "8": alike,
    "9": prefixes,
    "10": replicas,
    "12": robustness,
    "13": balance,
    "R": recoveries,
    "S": scaled,
}
"""Row of the goals (1 stands for 1 and 2, 3 for 3 and 4) -> what measures it."""

COLUMNS = ("#", "setting", "measure", "goal", "reached", "baseline", "windows, seeds", "met")
BEGIN, END = "<!-- goals: written by bench/scheduling.py -->", "<!-- end of goals -->"


def _cells(goal: Goal) -> tuple[str, ...]:
    met = "yes" if goal.met else "**no**"
    return (goal.row, goal.setting, goal.measure, goal.goal, goal.reached, goal.baseline, goal.windows, met)


def markdown(goals: Sequence[Goal]) -> str:
    """The table as the page has it."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_cells(goal))} |" for goal in goals]
    return "\n".join(lines)


def write(page: File, goals: Sequence[Goal]) -> None:
    """Put the table between its marks in a page. Raises ValueError where it has none."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{page}: no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{markdown(goals)}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Measure and print; with --strict the exit status is 1 where a goal is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--short", action="store_true", help=f"{SHORT} requests a window: to try the script out")
    parser.add_argument("--quick", action="store_true", help="looser goals on little traffic; implies --strict")
    parser.add_argument("--strict", action="store_true", help="end with 1 where a goal is not met")
    parser.add_argument("--traces", type=File, default=File(__file__).parents[2] / "shared" / "traces")
    parser.add_argument("--write", type=File, default=None, metavar="PAGE", help="a page with marks for the table")
    asked = parser.parse_args()
    rows = asked.rows.split(",")
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}")
    errors = Console(stderr=True)
    bench = Bench(asked.traces, asked.seeds, asked.jobs, asked.short, errors.print)
    began = clock.now()
    goals = list(quick(bench)) if asked.quick else [goal for row in rows for goal in ROWS[row](bench)]
    table = Table(*COLUMNS, show_lines=True)
    for goal in sorted(goals, key=lambda goal: (not goal.row.isdigit(), int(goal.row) if goal.row.isdigit() else 0)):
        table.add_row(*_cells(goal))
    console = Console()
    console.width = max(console.width, 180)
    console.print(table)
    took_s = clock.now() - began
    console.print(
        f"{bench.simulated:,.0f} requests of studies in {took_s:.0f} s, with all that was simulated beside them"
    )
    if asked.write is not None and not asked.quick:
        write(asked.write, goals)
    return 1 if (asked.strict or asked.quick) and not all(goal.met for goal in goals) else 0


if __name__ == "__main__":
    sys.exit(main())
