"""Sums samples up: what users felt (TTFT, time per token, end to end), how much of it was good, what went wrong.

Goodput counts the requests that met their service level, as DistServe (OSDI'24) does: TTFT and time per output token
both within it. A request that does not stream met it if it ended within TTFT + tokens x time per token, which is when a
stream that keeps the level ends.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, floor
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Column, Table

from common.types import Slo
from services.bench.samples import Sample

DEFAULT_SLO = Slo(ttft_s=2.0, tpot_s=0.1)
GROUPINGS = ("region", "cluster", "instance", "target", "client")


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one measure, in seconds; all None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread:
        """Of the values that are not None."""
        known = sorted(value for value in values if value is not None)
        if not known:
            return Spread()
        return Spread(fmean(known), *(quantile(known, share) for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of samples amounts to. Latencies are those of requests that ended well."""

    requests: int
    ok: int
    rejected: int
    failed: int
    good: int  # ended well and within the service level
    span_s: float  # from the first request sent to the last one ended
    requests_per_s: float  # sent
    goodput_per_s: float  # good
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    late_p99_s: float  # how late the client itself was; more than some ms means that it, or its bound, was the limit
    errors: dict[str, int]  # kind -> requests, most frequent first


def quantile(ordered: Sequence[float], share: float) -> float:
    """The `share` (0…1) quantile of a sorted, non-empty sequence, linear between neighbours."""
    at = share * (len(ordered) - 1)
    low, high = ordered[floor(at)], ordered[ceil(at)]
    return low + (high - low) * (at - floor(at))


def is_good(sample: Sample, slo: Slo) -> bool:
    """Whether `sample` ended well and within `slo`; a level of None is always met."""
    ttft_s = float("inf") if slo.ttft_s is None else slo.ttft_s
    tpot_s = float("inf") if slo.tpot_s is None else slo.tpot_s
    if not sample.ok:
        return False
    if sample.ttft_s is None:
        return sample.e2e_s <= ttft_s + tpot_s * max(sample.output_tokens - 1, 1)
    return sample.ttft_s <= ttft_s and (sample.tpot_s is None or sample.tpot_s <= tpot_s)


def summarize(samples: Sequence[Sample], slo: Slo = DEFAULT_SLO) -> Summary:
    """The summary of `samples`, whatever their order; of none, zeros."""
    ok = [sample for sample in samples if sample.ok]
    good = sum(is_good(sample, slo) for sample in ok)
    sent_s = [sample.due_s + sample.late_s for sample in samples]
    ended_s = [start_s + sample.e2e_s for start_s, sample in zip(sent_s, samples, strict=True)]
    span_s = max(ended_s) - min(sent_s) if samples else 0.0
    per_s = 1.0 / span_s if span_s > 0.0 else 0.0
    return Summary(
        requests=len(samples),
        ok=len(ok),
        rejected=sum(sample.rejected for sample in samples),
        failed=sum(sample.failed for sample in samples),
        good=good,
        span_s=span_s,
        requests_per_s=len(samples) * per_s,
        goodput_per_s=good * per_s,
        input_tokens_per_s=sum(sample.input_tokens for sample in ok) * per_s,
        output_tokens_per_s=sum(sample.output_tokens for sample in samples) * per_s,
        ttft_s=Spread.of(sample.ttft_s for sample in ok),
        tpot_s=Spread.of(sample.tpot_s for sample in ok),
        e2e_s=Spread.of(sample.e2e_s for sample in ok),
        late_p99_s=max(0.0, quantile(sorted(sample.late_s for sample in samples), 0.99)) if samples else 0.0,
        errors=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
    )


def group_of(sample: Sample, by: str) -> str:
    """Which group of grouping `by` (one of GROUPINGS) the sample is in; "-" if nobody said."""
    if by in {"target", "client"}:
        return (sample.target if by == "target" else sample.client) or "-"
    depth = 1 + ("region", "cluster", "instance").index(by)
    parts = [part for part in sample.served_by.split("/") if part]
    return "/".join(parts[:depth]) or "-"


def grouped(samples: Iterable[Sample], by: str, slo: Slo = DEFAULT_SLO) -> dict[str, Summary]:
    """A summary for each group of grouping `by`, in the order of their names."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(group_of(sample, by), []).append(sample)
    return {name: summarize(groups[name], slo) for name in sorted(groups)}


def render(summary: Summary, slo: Slo = DEFAULT_SLO, groups: dict[str, Summary] | None = None, by: str = "") -> Group:
    """What `rich` prints: counts, latencies, and a line for each of `groups`, which are `by` something."""
    parts: list[Any] = [_counts(summary, slo), _latencies(summary)]
    if groups:
        parts.append(_groups(groups, by))
    for kind, count in summary.errors.items():
        parts.append(f"  {count:>6} x {escape(kind)}")
    if summary.late_p99_s > 0.05:
        parts.append(f"note: requests left up to {_ms(summary.late_p99_s)} ms late (p99): this client was the limit")
    return Group(*parts)


def _counts(summary: Summary, slo: Slo) -> str:
    share = summary.good / summary.requests if summary.requests else 0.0
    level = f"TTFT < {slo.ttft_s} s, time per token < {slo.tpot_s} s"
    return (
        f"{summary.requests} requests in {summary.span_s:.1f} s ({summary.requests_per_s:.2f}/s): "
        f"{summary.ok} ok, {summary.rejected} rejected, {summary.failed} failed\n"
        f"goodput {summary.goodput_per_s:.2f}/s, {share:.1%} of requests within {level}\n"
        f"{summary.input_tokens_per_s:,.0f} input and {summary.output_tokens_per_s:,.0f} output tokens/s"
    )


def _latencies(summary: Summary) -> Table:
    table = Table("milliseconds", *_numbers("mean", "p50", "p95", "p99"), box=box.SIMPLE)
    spreads = (("TTFT", summary.ttft_s), ("time per token", summary.tpot_s), ("end to end", summary.e2e_s))
    for name, spread in spreads:
        table.add_row(name, *(_ms(value) for value in (spread.mean, spread.p50, spread.p95, spread.p99)))
    return table


def _groups(groups: dict[str, Summary], by: str) -> Table:
    counted = _numbers("sent", "ok", "rejected", "failed", "good")
    timed = _numbers("TTFT\np50 ms", "\np95", "per token\np50 ms", "\np95")
    table = Table(Column(by, overflow="fold"), *counted, *timed, box=box.SIMPLE, padding=(0, 0, 0, 1))
    for name, one in groups.items():
        counts = (one.requests, one.ok, one.rejected, one.failed, one.good)
        times = (one.ttft_s.p50, one.ttft_s.p95, one.tpot_s.p50, one.tpot_s.p95)
        table.add_row(escape(name), *(str(count) for count in counts), *(_ms(value) for value in times))
    return table


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right", no_wrap=True) for name in names]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000.0:,.1f}"


def write_json(path: Path, summary: Summary, groups: dict[str, Summary], slo: Slo, settings: dict[str, Any]) -> None:
    """The report as one JSON object: summary, groups, and what it was measured with. Raises OSError."""
    report = {
        "settings": settings,
        "slo": asdict(slo),
        "summary": asdict(summary),
        "groups": {name: asdict(one) for name, one in groups.items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, samples: Iterable[Sample]) -> None:
    """One line a request, with every field of Sample as a column. Raises OSError."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Sample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in sorted(samples, key=lambda sample: sample.index))
