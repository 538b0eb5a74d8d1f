"""Regions in virtual time, in short form: fewer requests and looser than `bench/regions.py`."""

from __future__ import annotations

from functools import cache

import pytest

from common.policy.balancer import Policy
from common.policy.stages import policy_named
from common.sim.regions import Outage, RegionsRun, RegionsWorld
from common.sim.traces import TraceRow, read_trace
from common.types import Slo, Tier
from services.sim.regions import BACK_S, CHOICES, LOST_S, TPOT_S, TTFT_S, Row, figures
from tests.sim.test_goals import TRACES

OURS, LATENCY = "predicted, 1e4 s/$", "predicted, latency only"
LOAD = 0.75

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here"),
]


def world(name: str, rows: list[TraceRow], load: float = LOAD) -> RegionsWorld:
    choice, weight = CHOICES[name]

    def below(tier: Tier) -> Policy:
        return policy_named("predicted_completion", weight, tier)

    return RegionsWorld(choice, below, rows, load=load)


@cache
def rows(count: int) -> list[TraceRow]:
    return read_trace(TRACES / "azure2023_conv.csv.gz")[:count]


@cache
def found(name: str, count: int = 4000) -> Row:
    return figures(name, world(name, rows(count)).run(Slo(TTFT_S, TPOT_S)), None)


def test_it_is_as_good_as_a_correct_split_with_less_traffic_abroad() -> None:
    ours, split, nearest = found(OURS), found("weighted by capacity"), found("nearest")
    assert ours.goodput > 0.985
    assert ours.goodput > split.goodput - 0.01
    assert ours.goodput > nearest.goodput + 0.1
    assert ours.e2e_s < 1.02 * split.e2e_s
    assert ours.abroad < 0.9 * split.abroad
    assert ours.ttft_p99_s < TTFT_S
    assert ours.swings < 0.1


def test_what_is_cheaper_costs_no_goodput() -> None:
    ours, latency = found(OURS), found(LATENCY)
    print(f"{100 * (1 - ours.usd_per_million / latency.usd_per_million):.1f} % saved")
    assert ours.usd_per_million < latency.usd_per_million
    assert ours.goodput > latency.goodput - 0.01


def test_a_lost_region_breaks_what_ran_there_and_no_more() -> None:
    made = world(OURS, rows(4000), load=0.55)
    lasts_s = 4000 / (0.55 * sum(made.capacity.values()))
    outage = Outage("us-east", LOST_S * lasts_s, BACK_S * lasts_s)
    made.lose(outage)
    run = made.run(Slo(TTFT_S, TPOT_S))
    during = [s for r, s in zip(run.records, run.served, strict=True) if outage.at_s + 6.0 < r.at_s < outage.back_s]
    assert set(during) - {""} == {"eu-west", "ap-south"}
    assert during.count("") == 0  # what is left takes all that comes
    assert all(r.complete for r in run.records if r.at_s > outage.back_s + 10.0)
    after = [s for r, s in zip(run.records, run.served, strict=True) if r.at_s > outage.back_s + 2.0]
    assert "us-east" in after


def test_the_same_seed_gives_the_same_run() -> None:
    def served() -> RegionsRun:
        return world(OURS, rows(400)).run()

    one, other = served(), served()
    assert one.served == other.served
    assert one.usd == other.usd
