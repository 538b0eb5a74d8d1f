"""Scaling in virtual time: a fleet that follows the traffic, against one that does not and against a threshold."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.policy.balancer import Policy
from common.policy.scaling.desired import Rules
from common.policy.stages import policy_named
from common.sim.faults import Burst
from common.sim.fleet import machine
from common.sim.measures import DEFAULT_SLO
from common.sim.scaling import Scalable
from common.sim.scenarios.scaling import days, run, scaler_named, smallest_fixed, up_and_down
from common.sim.traces import TraceRow
from common.sim.workload import Conversations
from common.types import Path, Tier

SEASON_S = 300.0
A100 = Scalable("a100", machine("a100"), cold_start_s=20.0, most=16)
RULES = Rules(DEFAULT_SLO, least=1, seasons_s=(SEASON_S,), cool_down_s=60.0, panic_s=30.0, idle_s=60.0)


def policy(path: Path) -> Policy:
    return policy_named("predicted_completion", tier=Tier.of(path))


@pytest.fixture(scope="module")
def day() -> list[TraceRow]:
    return up_and_down(Conversations(Random(0)).rows(1_500), 0.9 * SEASON_S, 0.1)


def test_a_burst_that_was_foreseen_finds_its_servers_there(day: list[TraceRow]) -> None:
    burst = [Burst(0.25 * SEASON_S, 5.0, 8.0)]
    third = run(policy, days(day, SEASON_S, 3, burst), [A100], scaler_named("predicted", RULES), SEASON_S)[2]
    size, fixed = smallest_fixed(policy, days(day, SEASON_S, 1, burst), A100, 0.95, SEASON_S)
    assert size > 4
    assert third.goodput >= 0.95
    assert third.gpu_hours < fixed.gpu_hours


def test_a_threshold_that_is_as_cheap_loses_requests(day: list[TraceRow]) -> None:
    traffic = days(day, SEASON_S, 2)
    ours = run(policy, traffic, [A100], scaler_named("predicted", RULES), SEASON_S)[1]
    found = [run(policy, traffic, [A100], scaler_named(f"threshold:{n}", RULES), SEASON_S)[1] for n in (8, 24)]
    assert ours.goodput >= 0.98
    for theirs in found:
        assert ours.goodput > theirs.goodput + 0.02 or ours.gpu_hours < theirs.gpu_hours


def test_the_cheaper_class_carries_the_peak_and_the_bill_is_lower(day: list[TraceRow]) -> None:
    def priced(gpu: str, usd: float) -> Scalable:
        return Scalable(gpu, replace(machine(gpu), price_usd_per_hour=usd), 20.0, least=0, most=30, start=1)

    traffic = days(day, SEASON_S, 2)
    dear = priced("a100", 2.0)
    alone = run(policy, traffic, [dear], scaler_named("predicted", RULES), SEASON_S)[1]
    both = run(policy, traffic, [dear, priced("l4", 0.25)], scaler_named("predicted", RULES), SEASON_S)[1]
    assert min(alone.goodput, both.goodput) >= 0.95
    assert both.cost_usd < 0.9 * alone.cost_usd
