from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.pickers import TIE_BAND, Picker, lowest_cost, near_lowest_cost, power_of_two

costs = st.lists(st.floats(0.0, 1e6) | st.just(float("inf")), min_size=1, max_size=20).filter(
    lambda c: min(c) < float("inf")
)


@given(costs, st.integers(0, 2**32))
def test_lowest_cost_takes_one_of_the_cheapest(given_costs: list[float], seed: int) -> None:
    assert given_costs[lowest_cost([], given_costs, Random(seed))] == min(given_costs)


def test_lowest_cost_shares_evenly_among_equals_wherever_they_stand() -> None:
    rng = Random(7)
    shares = Counter(lowest_cost([], [2.0, 1.0, 3.0, 1.0, 1.0], rng) for _ in range(3_000))
    assert shares.keys() == {1, 3, 4}
    assert all(900 <= n <= 1_100 for n in shares.values())


def test_lowest_cost_never_takes_what_costs_infinity() -> None:
    inf = float("inf")
    assert {lowest_cost([], [inf, 5.0, inf], Random(seed)) for seed in range(50)} == {1}


def test_power_of_two_takes_the_cheaper_of_its_two_and_the_only_one_there_is() -> None:
    assert power_of_two([], [9.0], Random(1)) == 0
    assert {power_of_two([], [2.0, 1.0], Random(seed)) for seed in range(50)} == {1}


def test_power_of_two_never_takes_the_dearest_and_each_other_one_by_its_rank() -> None:
    rng = Random(7)
    shares = Counter(power_of_two([], [3.0, 0.0, 2.0, 1.0], rng) for _ in range(6_000))
    # Of the six pairs the cheapest wins three, the next two, the third one, the dearest none.
    assert shares.keys() == {1, 2, 3}
    assert abs(shares[1] - 3_000) < 200
    assert abs(shares[3] - 2_000) < 200
    assert abs(shares[2] - 1_000) < 200


def test_power_of_two_shares_evenly_among_equals() -> None:
    rng = Random(7)
    shares = Counter(power_of_two([], [1.0] * 4, rng) for _ in range(4_000))
    assert all(900 <= n <= 1_100 for n in shares.values())


@pytest.mark.parametrize("picker", [lowest_cost, power_of_two])
def test_same_seed_same_choices(picker: Picker) -> None:
    def choices() -> list[int]:
        rng = Random(3)
        return [picker([], [1.0, 1.0, 1.0, 2.0], rng) for _ in range(100)]

    assert choices() == choices()
    assert len(set(choices())) > 1


def turns(*last: int) -> Any:
    return [SimpleNamespace(last_turn=turn) for turn in last]


def test_near_lowest_cost_gives_what_costs_about_the_same_its_turn() -> None:
    rng = Random(1)
    assert near_lowest_cost(turns(5, 4, 1), [1.0, 1.0 + 0.9 * TIE_BAND, 1.0 + 1.1 * TIE_BAND], rng) == 1
    assert near_lowest_cost(turns(3, 4, 1), [1.0, 1.0 + 0.9 * TIE_BAND, 1.0 + 1.1 * TIE_BAND], rng) == 0
    shares = Counter(near_lowest_cost(turns(0, 0, 0), [1.0, 1.0, 9.0], rng) for _ in range(1_000))
    assert shares.keys() == {0, 1}
    assert all(400 <= n <= 600 for n in shares.values())
