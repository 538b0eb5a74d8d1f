from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.input_length import LEAST, MOST, MOST_PER_ITEM, TOKENS_PER_ITEM, InputLength


def test_before_anything_is_known_four_bytes_are_a_token() -> None:
    lengths = InputLength()
    assert lengths.expect("m", 4_000) == 1_000
    assert lengths.expect("m", 0) == 1
    assert lengths.expect("m", 400, items=2) == 100 + 2 * TOKENS_PER_ITEM


def test_a_models_ratio_is_learned_and_is_its_own() -> None:
    lengths = InputLength()
    for _ in range(200):
        lengths.learn("chinese", 3_000, 0, 1_200.0)
    assert lengths.expect("chinese", 3_000) == pytest.approx(1_200, rel=0.02)
    assert lengths.expect("other", 3_000) == 750


def test_it_follows_when_the_traffic_changes() -> None:
    lengths = InputLength()
    for bytes_per_token in (4, 2):
        for _ in range(2_000):
            lengths.learn("m", 1_000 * bytes_per_token, 0, 1_000.0)
    assert lengths.expect("m", 2_000) == pytest.approx(1_000, rel=0.05)


def test_what_an_image_is_worth_is_learned_beside_its_text() -> None:
    lengths = InputLength()
    for _ in range(200):
        lengths.learn("vision", 400, 0, 100.0)
        lengths.learn("vision", 400, 2, 100.0 + 2 * 1_500.0)
    assert lengths.expect("vision", 400, items=1) == pytest.approx(1_600, rel=0.03)
    assert lengths.expect("vision", 400) == pytest.approx(100, rel=0.03)


def test_the_model_taught_longest_ago_is_forgotten_first() -> None:
    lengths = InputLength(max_models=2)
    for model in ("a", "b", "a", "c"):
        for _ in range(100):
            lengths.learn(model, 2_000, 0, 1_000.0)
    assert [lengths.expect(m, 2_000) for m in "abc"] == [
        pytest.approx(1_000, rel=0.02),
        500,
        pytest.approx(1_000, rel=0.02),
    ]


@given(st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 50), st.floats(-10.0, 1e9))))
def test_whatever_servers_say_it_stays_within_bounds(samples: list[tuple[int, int, float]]) -> None:
    lengths = InputLength()
    for size, items, tokens in samples:
        lengths.learn("m", size, items, tokens)
    assert 1_000_000 / MOST - 1 <= lengths.expect("m", 1_000_000) <= 1_000_000 / LEAST + 1
    assert lengths.expect("m", 0, items=1) <= MOST_PER_ITEM
