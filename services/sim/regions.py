"""Compares ways to choose a region in virtual time: seconds, goodput, traffic abroad, dollars.

Three regions of two clusters of eight servers each, day and night a third of a day apart (`common/sim/regions.py`). The
traffic gives lengths only. Every request asks for the service level that goodput is counted by. Clusters and servers
are chosen by the product's policy in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group
from rich.table import Table

from common.policy import pickers, scorers
from common.policy.balancer import Policy
from common.policy.regions import Regions, regional
from common.policy.stages import QUALIFIES, policy_named, predicted_completion
from common.sim.measures import quantile
from common.sim.regions import Outage, RegionsRun, RegionsWorld
from common.sim.traces import TraceRow
from common.types import Slo, Tier

TTFT_S, TPOT_S = 2.0, 0.1  # goodput: the first token within this, and each one after it
WARM_UP = 0.06  # share of the requests that do not count
LOST_S, BACK_S = 0.3, 0.6  # an outage, as parts of the run
AFTER_S = 5.0

Choice = Callable[[], Policy]


def nearest() -> Policy:
    """The least round trip."""
    return Policy("nearest", QUALIFIES, (("round_trip_s", 1.0, scorers.round_trip),), pickers.lowest_cost)


def cheapest() -> Policy:
    """The least price."""
    return Policy("cheapest", QUALIFIES, (("price_usd", 1.0, scorers.price),), pickers.lowest_cost)


def ours(weight: float, share_cap: float = 1.3) -> Choice:
    """The product's policy at so many seconds a dollar."""
    return lambda: regional(predicted_completion(weight, Tier.GLOBAL), Regions(share_cap=share_cap), weight)


CHOICES: dict[str, tuple[Choice, float]] = {
    "nearest": (nearest, 0.0),
    "cheapest": (cheapest, 0.0),
    "round robin": (lambda: policy_named("round_robin"), 0.0),
    "weighted by capacity": (lambda: policy_named("weighted_round_robin"), 0.0),
    "least outstanding per capacity": (lambda: policy_named("weighted_least_connections"), 0.0),
    "latency feedback": (lambda: policy_named("weighted_response_time"), 0.0),
    "predicted, latency only": (ours(0.0), 0.0),
    "predicted, 1e4 s/$": (ours(1e4), 1e4),
    "predicted, 3e4 s/$": (ours(3e4), 3e4),
    "predicted, 1e4 s/$, no share cap": (ours(1e4, 0.0), 1e4),
}
"""Name -> policy of the region stage, and seconds a dollar in the stages below."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ttft_s: float
    ttft_p99_s: float
    e2e_s: float
    goodput: float
    abroad: float
    usd_per_million: float
    swings: float
    lost: str = ""


def figures(name: str, run: RegionsRun, outage: Outage | None) -> Row:
    """What a run comes to."""
    skip = int(WARM_UP * len(run.records))
    some = list(zip(run.records, run.home, run.served, run.usd, strict=True))[skip:]
    done = [(r, home, served, usd) for r, home, served, usd in some if r.complete]
    ttft = sorted(r.ttft_s or 0.0 for r, *_ in done)
    good = [_good(r.ttft_s, r.tpot_s) for r, *_ in done]
    tokens = sum(r.output_tokens for r, *_ in done)
    return Row(
        name,
        sum(ttft) / len(ttft),
        quantile(ttft, 0.99),
        sum(r.e2e_s or 0.0 for r, *_ in done) / len(done),
        sum(good) / len(some),
        sum(home != served for _, home, served, _ in done) / len(done),
        1e6 * sum(usd for *_, usd in done) / tokens,
        _swings(run, skip),
        _around(run, outage) if outage is not None else "",
    )


def _good(ttft_s: float | None, tpot_s: float | None) -> bool:
    return ttft_s is not None and ttft_s < TTFT_S and (tpot_s is None or tpot_s < TPOT_S)


def _swings(run: RegionsRun, skip: int) -> float:
    """Standard deviation of the first region's share between successive seconds."""
    first = min(set(run.home))
    seconds: dict[int, list[bool]] = {}
    for r, served in zip(run.records[skip:], run.served[skip:], strict=True):
        if served:
            seconds.setdefault(int(r.at_s), []).append(served == first)
    shares = [sum(s) / len(s) for _, s in sorted(seconds.items())]
    steps = [b - a for a, b in pairwise(shares)]
    return float((sum(x * x for x in steps) / max(1, len(steps))) ** 0.5)


def _around(run: RegionsRun, outage: Outage) -> str:
    """Goodput just after a region is lost, in the rest of the outage, and just after it is back."""

    def between(begin_s: float, end_s: float) -> str:
        good = [_good(r.ttft_s, r.tpot_s) and r.complete for r in run.records if begin_s <= r.at_s < end_s]
        return f"{100 * sum(good) / max(1, len(good)):.0f}"

    parts = (
        (outage.at_s, outage.at_s + AFTER_S),
        (outage.at_s + AFTER_S, outage.back_s),
        (outage.back_s, outage.back_s + 20.0),
    )
    return " / ".join(between(*part) for part in parts)


@dataclass(frozen=True, slots=True)
class RegionsStudy:
    """What is compared, on which load (of all capacity); `outage`: us-east is lost for the middle third."""

    choices: tuple[str, ...] = tuple(CHOICES)
    load: float = 0.75
    seed: int = 0
    quote_s: float = 0.2
    outage: bool = False


def compare(study: RegionsStudy, rows: Sequence[TraceRow], on_done: Callable[[int, int], None]) -> list[Row]:
    """One row a choice; `on_done` is told how many of how many there are."""
    found = []
    for name in study.choices:
        choice, weight = CHOICES[name]

        def below(tier: Tier, weight: float = weight) -> Policy:
            return policy_named("predicted_completion", weight, tier)

        world = RegionsWorld(choice, below, rows, load=study.load, seed=study.seed, quote_s=study.quote_s)
        outage = None
        if study.outage:
            lasts_s = len(rows) / (study.load * sum(world.capacity.values()))
            outage = Outage("us-east", LOST_S * lasts_s, BACK_S * lasts_s)
            world.lose(outage)
        found.append(figures(name, world.run(Slo(TTFT_S, TPOT_S)), outage))
        on_done(len(found), len(study.choices))
    return found


def render(rows: Sequence[Row]) -> Group:
    """The table, and what the price saved."""
    table = Table("region chosen by", "TTFT mean / p99, s", "E2E mean, s", "goodput, %", "abroad, %", "$/M", "swings")
    if any(r.lost for r in rows):
        table.add_column("goodput after the loss / until the return / after it")
    for r in rows:
        cells = [r.name, f"{r.ttft_s:.2f} / {r.ttft_p99_s:.2f}", f"{r.e2e_s:.2f}", f"{100 * r.goodput:.1f}"]
        cells += [f"{100 * r.abroad:.0f}", f"{r.usd_per_million:.3f}", f"{r.swings:.3f}", *([r.lost] if r.lost else [])]
        table.add_row(*cells)
    named = {r.name: r for r in rows}
    latency, cost = named.get("predicted, latency only"), named.get("predicted, 1e4 s/$")
    if latency is None or cost is None:
        return Group(table)
    saved = 1.0 - cost.usd_per_million / latency.usd_per_million
    return Group(
        table,
        f"cost-aware saves {100 * saved:.1f} % of {latency.usd_per_million:.3f} $/M at "
        f"{100 * (cost.goodput - latency.goodput):+.1f} points of goodput and "
        f"{cost.e2e_s - latency.e2e_s:+.2f} s of the mean",
    )
