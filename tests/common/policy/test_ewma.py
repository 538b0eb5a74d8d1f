from __future__ import annotations

from math import e

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.ewma import DecayingSum, Ewma

samples = st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(-1e6, 1e6)), min_size=1, max_size=40)
"""(seconds since the one before, value)"""


def test_average_is_unknown_until_the_first_sample_and_then_that_sample() -> None:
    average = Ewma(half_life_s=10.0)
    assert average.value is None
    average.add(0.0, now=5.0)
    assert average.value == 0.0


def test_an_average_may_begin_with_a_value() -> None:
    average = Ewma(half_life_s=10.0, value=4.0, now=100.0)
    average.add(2.0, now=110.0)
    assert average.value == pytest.approx(3.0)


def test_what_was_known_counts_half_after_one_half_life_and_a_quarter_after_two() -> None:
    for half_lives, left in ((1, 0.5), (2, 0.25), (3, 0.125)):
        average = Ewma(half_life_s=10.0)
        average.add(1.0, now=0.0)
        average.add(0.0, now=10.0 * half_lives)
        assert average.value == pytest.approx(left)


def test_samples_at_one_instant_still_move_it_by_a_tenth_each() -> None:
    average = Ewma(half_life_s=10.0)
    average.add(0.0, now=7.0)
    average.add(1.0, now=7.0)
    assert average.value == pytest.approx(0.1)
    average.add(1.0, now=7.0)
    assert average.value == pytest.approx(0.19)


def test_an_old_sample_that_comes_late_does_not_turn_time_back() -> None:
    average = Ewma(half_life_s=10.0)
    average.add(0.0, now=100.0)
    average.add(1.0, now=90.0)
    assert average.value == pytest.approx(0.1)
    average.add(0.0, now=110.0)  # ten seconds after 100, not twenty after 90
    assert average.value == pytest.approx(0.05)


@given(samples)
def test_average_stays_within_its_samples(steps: list[tuple[float, float]]) -> None:
    average, now = Ewma(half_life_s=3.0), 0.0
    for gap, value in steps:
        now += gap
        average.add(value, now)
    values = [value for _, value in steps]
    slack = 1e-9 * max(abs(v) for v in values)
    assert average.value is not None
    assert min(values) - slack <= average.value <= max(values) + slack


@given(samples)
def test_average_forgets_everything_in_time(steps: list[tuple[float, float]]) -> None:
    average, now = Ewma(half_life_s=3.0), 0.0
    for gap, value in steps:
        now += gap
        average.add(value, now)
    average.add(42.0, now + 3.0 * 60)
    assert average.value == pytest.approx(42.0, abs=1e-6)


def test_sum_fades_to_one_over_e_in_its_time_constant() -> None:
    total = DecayingSum(time_constant_s=10.0)
    total.add(5.0, now=100.0)
    assert total.value_at(100.0) == 5.0
    assert total.value_at(110.0) == pytest.approx(5.0 / e)
    assert total.value_at(120.0) == pytest.approx(5.0 / e**2)


def test_looking_at_a_sum_does_not_change_it() -> None:
    total = DecayingSum(time_constant_s=10.0)
    total.add(5.0, now=0.0)
    total.value_at(1000.0)
    assert total.value_at(0.0) == 5.0


def test_a_sum_is_zero_before_anything_was_added_and_adds_up_at_one_instant() -> None:
    total = DecayingSum(time_constant_s=10.0)
    assert total.value_at(1e9) == 0.0
    total.add(1.0, now=3.0)
    total.add(2.0, now=3.0)
    assert total.value_at(3.0) == 3.0


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 100.0)), min_size=1, max_size=30))
def test_a_sum_never_exceeds_what_was_added_and_only_falls_by_itself(steps: list[tuple[float, float]]) -> None:
    total, now, added = DecayingSum(time_constant_s=10.0), 0.0, 0.0
    for gap, amount in steps:
        before = total.value_at(now)
        now += gap
        assert total.value_at(now) <= before
        total.add(amount, now)
        added += amount
    assert 0.0 <= total.value_at(now) <= added * (1 + 1e-12)
