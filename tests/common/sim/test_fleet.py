from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from common.policy.prediction import class_speed
from common.sim.fleet import (
    FLEETS,
    capacity,
    known,
    machine,
    saturated_rate,
    saturated_rates,
    singles,
    uneven,
    weighted,
)
from common.sim.instance import as_fast_as
from common.sim.scenarios.traffic import drawn
from common.sim.traces import TraceRow

ROWS = drawn(3, 400)


def test_the_published_fleets() -> None:
    assert [(kind.gpu, kind.count) for kind in FLEETS["mixed16"]] == [("h100", 2), ("a100", 4), ("l4", 6), ("t4", 4)]
    assert [id_ for id_, _ in singles(FLEETS["ha8"])][3:5] == ["h100-3", "a100-0"]
    assert all(len(singles(fleet)) == int("".join(filter(str.isdigit, name))) for name, fleet in FLEETS.items())


def test_classes_have_the_ratios_of_the_published_comparison() -> None:
    rates = {gpu: saturated_rate(class_speed(gpu), ROWS) for gpu in ("h100", "a100", "l4", "t4")}
    assert rates["h100"] / rates["a100"] == pytest.approx(11.3 / 5.0, rel=0.1)
    assert rates["a100"] / rates["l4"] == pytest.approx(5.0 / 1.18, rel=0.15)
    assert rates["l4"] / rates["t4"] == pytest.approx(1.18 / 0.67, rel=0.15)


def test_capacity_grows_with_speed_and_is_known_where_it_can_be_computed() -> None:
    speed = class_speed("a100")
    assert saturated_rate(as_fast_as(speed, 2.0), ROWS) == pytest.approx(2.0 * saturated_rate(speed, ROWS), rel=1e-6)
    # One slot, one token each: every request is one chunk of 100 tokens read alone.
    alone = replace(speed, slots=1.0)
    per_request = speed.alpha_s + 100 / speed.prefill_tokens_per_s * (1 + 50 / speed.attention_tokens)
    assert saturated_rate(alone, [TraceRow(0.0, 100, 1)] * 50) == pytest.approx(1.0 / per_request, rel=1e-6)


def test_what_no_memory_can_hold_is_no_capacity() -> None:
    assert saturated_rate(class_speed("t4"), [TraceRow(0.0, 100_000, 1)] * 3) == 0.0


def test_a_short_trace_has_a_capacity_too() -> None:
    assert saturated_rate(class_speed("t4"), [TraceRow(0.0, 100, 10)]) > 0.0


def test_weights_are_the_measured_rates_unless_given() -> None:
    fleet = (machine("h100", 2), replace(machine("t4"), weight=7.0))
    rates = saturated_rates(fleet, ROWS)
    assert [kind.weight for kind in weighted(fleet, rates)] == [rates[fleet[0].speed], 7.0]
    assert capacity(fleet, rates) == 2 * rates[fleet[0].speed] + rates[fleet[1].speed]


def test_servers_that_differ_from_their_class_do_so_by_the_given_spread() -> None:
    made = uneven((machine("a100", 400),), 0.2, Random(1))
    alphas = [kind.speed.alpha_s / class_speed("a100").alpha_s for kind in made]
    assert fmean(alphas) == pytest.approx(1.02, abs=0.04)
    assert min(alphas) < 0.7
    assert max(alphas) > 1.4
    assert {kind.known for kind in made} == {None}
    assert known(made)[5].known == made[5].speed
