from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.output_length import OutputLength


def taught_lengths(model: str, tenant: str, input_tokens: int, output: float, times: int) -> OutputLength:
    lengths = OutputLength()
    for _ in range(times):
        lengths.learn(model, tenant, input_tokens, output)
    return lengths


def test_before_anything_is_known_it_is_the_first_guess() -> None:
    assert OutputLength().expect("m", "", 100, None) == OutputLength.FIRST_GUESS


def test_expectation_is_capped_by_the_request_and_at_least_one_token() -> None:
    lengths = taught_lengths("m", "", 100, 400.0, 100)
    assert lengths.expect("m", "", 100, 50) == 50
    assert lengths.expect("m", "", 100, 5_000) == pytest.approx(400.0)
    assert taught_lengths("m", "", 100, 0.0, 100).expect("m", "", 100, None) == 1.0


def test_a_key_is_believed_the_more_the_more_it_has_seen() -> None:
    lengths = taught_lengths("m", "", 1_000, 900.0, 1_000)  # long prompts, long answers
    told = []
    for _ in range(300):
        lengths.learn("m", "", 10, 30.0)
        told.append(lengths.expect("m", "", 10, None))
    assert told[0] > 500.0 > told[30]  # first what is known of the model, then more and more its own
    assert told == sorted(told, reverse=True)
    assert told[-1] == pytest.approx(30.0, rel=0.1)
    assert lengths.expect("m", "", 1_000, None) == pytest.approx(900.0, rel=0.01)


def test_it_backs_off_from_tenant_to_bucket_to_model_to_everything() -> None:
    lengths = OutputLength()
    for tenant, input_tokens, output in [("t", 100, 10.0), ("u", 100, 20.0), ("u", 5_000, 600.0)]:
        for _ in range(200):
            lengths.learn("m", tenant, input_tokens, output)
    by_tenant = lengths.expect("m", "t", 100, None)
    by_bucket = lengths.expect("m", "unknown", 100, None)
    by_model = lengths.expect("m", "unknown", 30, None)
    assert by_tenant == pytest.approx(10.0, abs=1.0)
    assert 10.0 < by_bucket < 20.0
    assert 100.0 < by_model < 600.0
    for _ in range(2_000):
        lengths.learn("other", "", 100, 5.0)
    assert lengths.expect("new", "", 100, None) < by_model / 2  # of everything, and most of that is the other model's


def test_one_answer_of_a_model_is_believed_over_the_first_guess() -> None:
    assert taught_lengths("m", "", 100, 700.0, 1).expect("m", "", 9, None) == 700.0


def test_what_asks_with_prompts_of_its_own_length_has_answers_of_its_own_length() -> None:
    lengths = OutputLength()
    for _ in range(200):
        lengths.learn("m", "", 1_100, 900.0)
        lengths.learn("m", "", 1_900, 30.0)
    assert lengths.expect("m", "", 1_150, None) == pytest.approx(900.0, rel=0.05)
    assert lengths.expect("m", "", 1_950, None) == pytest.approx(30.0, rel=0.7)
    assert 400.0 < lengths.expect("m", "", 1_400, None) < 500.0  # not seen yet: as in its octave


def test_lengths_are_forgotten_over_some_five_hundred_answers() -> None:
    lengths = taught_lengths("m", "", 100, 1_000.0, 5_000)  # every key of it has forgotten all but as many
    for _ in range(OutputLength.MEMORY):
        lengths.learn("m", "", 100, 0.0)
    assert lengths.expect("m", "", 100, None) == pytest.approx(1_000.0 / exp(1), rel=0.01)


def test_names_that_clients_make_up_do_not_grow_it_without_bound() -> None:
    lengths = OutputLength(max_keys=100)
    for i in range(5_000):
        lengths.learn(f"model-{i}", f"tenant-{i}", i, 50.0)
    assert len(lengths._means) <= 100
    assert lengths.expect("m", "t", 77, None) == pytest.approx(50.0)  # the mean of everything stays


@given(st.text(max_size=5), st.text(max_size=5), st.integers(0, 10**7), st.none() | st.integers(1, 10**6))
def test_expectation_is_always_usable(model: str, tenant: str, input_tokens: int, cap: int | None) -> None:
    lengths = OutputLength()
    lengths.learn(model, tenant, input_tokens, 250.0)
    expected = lengths.expect(model, tenant, input_tokens, cap)
    assert 1.0 <= expected <= (cap or 250.0)
