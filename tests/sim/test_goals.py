"""The goals of scheduling on the public traces, in short form: fewer requests and looser than `bench/scheduling.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from common.sim.fleet import FLEETS
from common.sim.measures import Measures
from common.sim.world import Network
from services.sim.study import Case, Study, means, read_windows, run_study

TRACES = Path(__file__).parents[3] / "shared" / "traces"
OURS, SLO, WLC, LC, WRR = (
    Case("predicted_completion"),
    Case("predicted_completion", slo=True),
    Case("weighted_least_connections"),
    Case("least_connections"),
    Case("weighted_round_robin"),
)

pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here"),
]


@cache
def found(trace: str, fleet: str, load: float, cases: tuple[Case, ...], **settings: object) -> dict[Case, Measures]:
    rows = read_windows(TRACES / f"{trace}.csv.gz", limit=2_500, spread_s=3.0 if "mooncake" in trace else 0.0)
    return means(run_study(Study(cases, FLEETS[fleet], load, **settings), rows, jobs=1))  # type: ignore[arg-type]


def ratio(better: Measures, worse: Measures, name: str = "mean") -> float:
    return float(getattr(worse.e2e_s, name) / getattr(better.e2e_s, name))


def test_conversation_on_unlike_servers() -> None:
    m = found("azure2023_conv", "mixed16", 0.85, (OURS, SLO, WLC, LC, WRR))
    assert ratio(m[OURS], m[WLC]) > 1.3  # row 1
    assert ratio(m[OURS], m[LC]) > 1.8
    assert ratio(m[OURS], m[WRR]) > 1.3
    assert ratio(m[OURS], m[WLC], "p99") > 1.25  # row 2
    assert m[SLO].goodput > 0.99  # row 3
    assert (m[SLO].ttft_s.p99 or 9.0) < 1.7
    assert ratio(m[SLO], m[WLC]) > 1.08
    assert m[OURS].work_l_s < 1.3 < m[WLC].work_l_s  # row 13


def test_near_saturation() -> None:
    m = found("azure2023_conv", "mixed16", 0.95, (SLO, WLC))
    assert m[SLO].goodput > 0.9  # row 4
    assert m[SLO].goodput > m[WLC].goodput + 0.05


def test_long_prompts() -> None:
    m = found("mooncake_conversation", "mixed16", 0.8, (SLO, OURS, WLC))
    assert m[SLO].goodput > m[WLC].goodput + 0.08  # row 6
    assert m[OURS].goodput > m[WLC].goodput + 0.08


def test_long_answers() -> None:
    m = found("servegen_deepseek-r1_sampled", "mixed16", 0.75, (OURS, SLO, WLC))
    assert ratio(m[OURS], m[WLC]) > 1.2  # row 7
    assert ratio(m[SLO], m[WLC]) > 1.08


def test_like_servers() -> None:
    m = found("azure2023_conv", "homog8", 0.85, (OURS, SLO, LC))
    for case in (OURS, SLO):
        assert ratio(m[case], m[LC]) > 0.98  # row 8
    assert (m[LC].ttft_s.p99 or 0.0) > 1.15 * (m[SLO].ttft_s.p99 or 9.0)


def test_four_balancers() -> None:
    one = found("azure2023_conv", "mixed16", 0.85, (OURS, SLO, WLC, LC, WRR))[SLO].goodput
    exchange = found("azure2023_conv", "mixed16", 0.85, (SLO,), replicas=4, network=Network(exchange_s=0.03))
    assert exchange[SLO].goodput > one - 0.01  # row 10


def test_four_balancers_find_what_any_of_them_had_cached() -> None:
    cached = {"prefix_fraction": 0.9, "network": Network(exchange_s=0.03)}
    one = found("mooncake_conversation", "ha8", 0.75, (OURS,), **cached)[OURS]
    four = found("mooncake_conversation", "ha8", 0.75, (OURS,), replicas=4, **cached)[OURS]
    assert one.prefix_hit_rate > 0.15
    assert four.prefix_hit_rate > 0.93 * one.prefix_hit_rate
    assert ratio(four, one) > 0.93


def test_wrong_lengths_and_unknown_speeds() -> None:
    right = found("azure2023_conv", "mixed16", 0.85, (OURS,), lengths="oracle")[OURS]
    wrong = found("azure2023_conv", "mixed16", 0.85, (OURS,), lengths="noise:1")[OURS]
    assert ratio(right, wrong) < 1.08  # row 12
    told = found("azure2023_conv", "mixed16", 0.85, (OURS,), speed_error=0.2, speeds_known=True)[OURS]
    learned = found("azure2023_conv", "mixed16", 0.85, (OURS,), speed_error=0.2)[OURS]
    assert ratio(told, learned) < 1.05
