"""Tables, JSON and CSV of a comparison. What each measure is says `common.sim.measures`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table

from common.sim.measures import Measures, Spread
from common.sim.records import Record
from common.types import Slo
from services.sim.study import Case, Result, by_case, means


def render(results: Sequence[Result], baseline: Case, slo: Slo) -> Group:
    """What `rich` prints: traffic, latencies, load, and everything relative to `baseline`."""
    found = means(results)
    parts: list[Any] = [_traffic(results), _latencies(found), _loads(found, by_case(results), slo)]
    if len(found) > 1:
        parts.append(_ratios(results, baseline))
    return Group(*parts)


def _traffic(results: Sequence[Result]) -> str:
    windows = {run.window: run for run in results}
    loads = ", ".join(
        f"{run.rate:.2f}/s = {run.rate / run.capacity:.3f} of {run.capacity:.2f}/s" for run in windows.values()
    )
    first = results[0].measures
    seeds = len({run.seed for run in results})
    return f"{first.requests:.0f} requests counted a run; {len(windows)} windows x {seeds} seeds; load {loads}"


def _latencies(found: Mapping[Case, Measures]) -> Table:
    table = _table(
        "seconds",
        ("TTFT\nmean", "\np50", "\np95", "\np99"),
        ("E2E\nmean", "\np50", "\np95", "\np99"),
        ("ms per\ntoken", "\np99", "TPOT\np99 ms"),
    )
    for case, m in found.items():
        cells = [*_spread(m.ttft_s), *_spread(m.e2e_s)]
        cells += [_ms(m.s_per_token.mean), _ms(m.s_per_token.p99), _ms(m.tpot_s.p99)]
        table.add_row(escape(case.label), *cells)
    return table


def _loads(found: Mapping[Case, Measures], runs: Mapping[Case, Sequence[Result]], slo: Slo) -> Table:
    table = _table(
        f"TTFT < {slo.ttft_s:g} s, TPOT < {1000.0 * (slo.tpot_s or 0.0):g} ms" if slo.ttft_s and slo.tpot_s else "load",
        ("goodput\n%", "L\nslots", "L\nwork s", "U\n%", "busy\n%"),
        ("rejected\n", "broken\n"),
        ("decision\np50 µs", "\np99"),
        ("requests by class, %\n",),
    )
    for case, m in found.items():
        table.add_row(
            escape(case.label),
            f"{100.0 * m.goodput:.1f}",
            f"{m.occupancy_l:.3f}",
            f"{m.work_l_s:.2f}",
            f"{100.0 * m.utilization:.0f}",
            f"{100.0 * m.busy:.0f}",
            f"{m.rejected:.0f}",
            f"{m.broken:.0f}",
            _us(m.decision_s.p50),
            _us(m.decision_s.p99),
            _shares(runs[case]),
        )
    return table


def _shares(runs: Sequence[Result]) -> str:
    gpus = sorted({gpu for run in runs for gpu in run.shares})
    return " ".join(f"{gpu} {100.0 * sum(run.shares.get(gpu, 0.0) for run in runs) / len(runs):.0f}" for gpu in gpus)


RATIOS = ("ttft_mean", "ttft_p99", "e2e_mean", "e2e_p99", "per_token_mean")


def ratios(results: Sequence[Result], baseline: Case) -> dict[Case, dict[str, list[float]]]:
    """For each case, run by run: baseline ÷ case of five latencies (above 1: better), and goodput points gained."""
    base = {(run.window, run.seed): run.measures for run in by_case(results)[baseline]}
    made: dict[Case, dict[str, list[float]]] = {}
    for case, runs in by_case(results).items():
        columns: dict[str, list[float]] = {name: [] for name in (*RATIOS, "goodput_points")}
        for run in runs:
            mine, theirs = run.measures, base[run.window, run.seed]
            for name, (a, b) in zip(RATIOS, zip(_compared(theirs), _compared(mine), strict=True), strict=True):
                if a and b:
                    columns[name].append(a / b)
            columns["goodput_points"].append(100.0 * (mine.goodput - theirs.goodput))
        made[case] = columns
    return made


def _compared(m: Measures) -> tuple[float | None, ...]:
    return (m.ttft_s.mean, m.ttft_s.p99, m.e2e_s.mean, m.e2e_s.p99, m.s_per_token.mean)


def _ratios(results: Sequence[Result], baseline: Case) -> Table:
    table = _table(
        f"{baseline.label} ÷",
        ("TTFT\nmean", "\np99"),
        ("E2E\nmean", "\np99"),
        ("per token\nmean", "goodput\npoints"),
        title="over runs: mean, and least to most",
    )
    for case, columns in ratios(results, baseline).items():
        cells = [_range(columns[name], "{:.2f}") for name in RATIOS]
        table.add_row(escape(case.label), *cells, _range(columns["goodput_points"], "{:+.1f}"))
    return table


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    text = form.format(sum(values) / len(values))
    if len(values) > 1 and form.format(min(values)) != form.format(max(values)):
        text += f" ({form.format(min(values))}…{form.format(max(values))})"
    return text


def _table(first: str, *groups: tuple[str, ...], title: str | None = None) -> Table:
    columns = [Column(name, justify="right", no_wrap=True) for group in groups for name in group]
    head = Column(first, overflow="fold")
    return Table(head, *columns, box=box.SIMPLE, padding=(0, 0, 0, 1), title=title, title_justify="left")


def _spread(spread: Spread) -> tuple[str, str, str, str]:
    return (_s(spread.mean), _s(spread.p50), _s(spread.p95), _s(spread.p99))


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.0f}"


# -- files -------------------------------------------------------------------------------------------------------------


def write_json(path: Path, results: Sequence[Result], baseline: Case, settings: Mapping[str, Any]) -> None:
    """All of it as one JSON object: settings, means, ratios, and every run. Raises OSError."""
    report = {
        "settings": dict(settings),
        "baseline": baseline.label,
        "means": {case.label: asdict(m) for case, m in means(results).items()},
        "ratios": {case.label: columns for case, columns in ratios(results, baseline).items()},
        "runs": [
            {
                "policy": run.case.label,
                "window": run.window,
                "seed": run.seed,
                "rate": run.rate,
                "capacity": run.capacity,
                "load": run.rate / run.capacity,
                "shares": run.shares,
                "measures": asdict(run.measures),
            }
            for run in results
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One line a run, every measure a column (`ttft_s.p99`, …). Raises OSError."""
    lines = [
        {"policy": run.case.label, "window": run.window, "seed": run.seed, "rate": run.rate, "capacity": run.capacity}
        | dict(_flat(run.measures))
        for run in results
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _flat(values: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    for column in fields(values):
        value = getattr(values, column.name)
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{column.name}.")
        else:
            yield prefix + column.name, value


def write_requests(path: Path, results: Sequence[Result]) -> None:
    """One line a request of every run that kept them. Raises OSError."""
    names = [column.name for column in fields(Record)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("policy", "window", "seed", *names))
        for run in results:
            for record in run.records or ():
                ending = record.ending.value if record.ending is not None else ""
                cells = [ending if name == "ending" else getattr(record, name) for name in names]
                writer.writerow((run.case.label, run.window, run.seed, *cells))
