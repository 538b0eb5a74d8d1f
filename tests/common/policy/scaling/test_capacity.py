from math import inf

import pytest

from common.policy.prediction import class_speed
from common.policy.scaling.capacity import Mix, occupancy, sustainable_rate, work_s
from common.sim.fleet import saturated_rate
from common.sim.traces import TraceRow
from common.types import Slo

CHAT = Mix(1000.0, 200.0)


@pytest.mark.parametrize("gpu", ["h100", "a100", "l4", "t4"])
def test_without_a_service_level_a_server_bears_about_what_the_engine_does_when_it_is_kept_full(gpu: str) -> None:
    speed = class_speed(gpu)
    measured = saturated_rate(speed, [TraceRow(float(i), 1000, 200) for i in range(200)])
    assert sustainable_rate(speed, CHAT, Slo()) == pytest.approx(measured, rel=0.2)


def test_a_stricter_service_level_leaves_less() -> None:
    speed = class_speed("l4")
    rates = [sustainable_rate(speed, CHAT, Slo(2.0, tpot)) for tpot in (0.2, 0.1, 0.06)]
    assert rates[0] >= rates[1] > rates[2] > 0.0


def test_a_level_below_what_an_idle_server_takes_is_kept_for_nobody() -> None:
    assert sustainable_rate(class_speed("l4"), CHAT, Slo(2.0, 0.01)) == 0.0


def test_what_does_not_fit_into_memory_is_borne_by_none() -> None:
    assert sustainable_rate(class_speed("t4"), Mix(60_000.0, 100.0), Slo()) == 0.0


def test_more_load_means_slower_steps_until_it_falls_behind() -> None:
    speed = class_speed("a100")
    full = 1.0 / work_s(speed, CHAT)
    steps = [occupancy(speed, CHAT, share * full).step_s for share in (0.1, 0.5, 0.9)]
    assert steps == sorted(steps)
    assert steps[0] > speed.alpha_s
    assert occupancy(speed, CHAT, full).step_s == inf
