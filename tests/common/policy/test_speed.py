from __future__ import annotations

from math import inf, isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.speed import FACTOR, FIRST, SCALE, SpeedEstimate
from common.types import Speed
from tests.common.policy.build import ROUND


def slower(by: float, speed: Speed = ROUND) -> Speed:
    return Speed(
        speed.alpha_s * by,
        speed.beta_s * by,
        speed.gamma_s * by,
        speed.prefill_tokens_per_s / by,
        speed.attention_tokens,
        speed.chunk_tokens,
        speed.slots,
        speed.kv_tokens,
    )


def taught(estimate: SpeedEstimate, true: Speed, samples: int, rng: Random, noise: float = 0.05) -> None:
    """Let it see spans on a server of the `true` speed under changing load."""
    for _ in range(samples):
        tokens, n = rng.randint(20, 400), rng.randint(0, 60)
        k, prompt = n * rng.randint(200, 2000), rng.randint(0, 40) * 500.0
        seconds = tokens * (true.alpha_s + n * true.beta_s + k * true.gamma_s) + prompt / true.prefill_tokens_per_s
        estimate.learn(seconds * rng.lognormvariate(0.0, noise), tokens, n, k, prompt)


def constants(speed: Speed) -> tuple[float, ...]:
    return (speed.alpha_s, speed.beta_s, speed.gamma_s, 1.0 / speed.prefill_tokens_per_s)


def test_nothing_learned_is_the_prior() -> None:
    assert SpeedEstimate(ROUND).speed == ROUND


def test_a_better_prior_is_taken_over_and_the_first_samples_count_against_it() -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, slower(9.0), FIRST - 1, Random(3), noise=0.0)
    estimate.begin_from(slower(3.0))
    assert estimate.speed == slower(3.0)
    taught(estimate, slower(9.0), 1, Random(4), noise=0.0)
    assert constants(estimate.speed) == pytest.approx(constants(slower(9.0)), rel=0.01)


@pytest.mark.parametrize("by", [0.01, 0.3, 0.5, 1.0, 2.0, 9.0, 100.0])
def test_it_converges_to_a_server_that_is_slower_or_faster_throughout(by: float) -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, slower(by), 60, Random(1))
    assert constants(estimate.speed) == pytest.approx(constants(slower(by)), rel=0.12)


def test_it_tells_the_constants_apart() -> None:
    true = Speed(0.02, 2e-4, 2e-7, 5_000.0, *constants_of_limits())  # twice the prior's, all but one
    estimate = SpeedEstimate(ROUND)
    taught(estimate, true, 400, Random(2))
    assert constants(estimate.speed) == pytest.approx(constants(true), rel=0.2)
    read_faster = Speed(0.01, 1e-4, 1e-7, 20_000.0, *constants_of_limits())
    estimate = SpeedEstimate(ROUND)
    taught(estimate, read_faster, 400, Random(2))
    assert estimate.speed.prefill_tokens_per_s == pytest.approx(20_000.0, rel=0.12)
    assert estimate.speed.alpha_s == pytest.approx(0.01, rel=0.12)


def constants_of_limits() -> tuple[float, ...]:
    return (ROUND.attention_tokens, ROUND.chunk_tokens, ROUND.slots, ROUND.kv_tokens)


def test_one_absurd_sample_changes_little() -> None:
    estimate = SpeedEstimate(ROUND)
    estimate.learn(1e9, 100, 0, 0, 0)  # a cold first request
    assert estimate.speed == ROUND
    taught(estimate, ROUND, 100, Random(3))
    estimate.learn(1e9, 100, 0, 0, 0)
    assert estimate.speed.alpha_s == pytest.approx(ROUND.alpha_s, rel=0.1)


def test_of_the_first_samples_the_least_far_is_believed() -> None:
    estimate = SpeedEstimate(ROUND)
    for times in (3000.0, 5.0, 6.0)[:FIRST]:
        estimate.learn(times * 100 * ROUND.alpha_s, 100, 0, 0, 0)
    assert estimate.speed.alpha_s == pytest.approx(5.0 * ROUND.alpha_s)


@pytest.mark.parametrize("by", [0.5, 2.0, 4.0])
def test_a_change_is_found_within_a_dozen_samples(by: float) -> None:
    rng, estimate = Random(4), SpeedEstimate(ROUND)
    taught(estimate, ROUND, 500, rng)
    assert estimate.refits == 0
    taught(estimate, slower(by), 12, rng)
    assert estimate.refits >= 1
    assert estimate.speed.alpha_s == pytest.approx(by * ROUND.alpha_s, rel=0.25)


def test_noise_alone_is_no_change() -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, ROUND, 2_000, Random(5), noise=0.15)
    assert estimate.refits <= 2
    assert estimate.speed.alpha_s == pytest.approx(ROUND.alpha_s, rel=0.15)


def test_limits_of_the_server_are_not_a_matter_of_speed() -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, slower(3.0), 100, Random(6))
    v = estimate.speed
    assert (v.attention_tokens, v.chunk_tokens, v.slots, v.kv_tokens) == constants_of_limits()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_span_that_cannot_be_teaches_nothing(seconds: float) -> None:
    estimate = SpeedEstimate(ROUND)
    estimate.learn(seconds, 100, 1, 100, 0)
    estimate.learn(1.0, 0, 0, 0, 0)
    assert estimate.samples == 0
    assert estimate.speed == ROUND


span = st.tuples(
    st.floats(1e-6, 1e6), st.floats(1, 1e5), st.floats(0, 500), st.floats(0, 1e6), st.just(0.0) | st.floats(1, 1e6)
)


@given(st.lists(span, max_size=60))
def test_whatever_it_sees_it_stays_usable(seen: list[tuple[float, float, float, float, float]]) -> None:
    estimate = SpeedEstimate(ROUND)
    for sample in seen:
        estimate.learn(*sample)
    far = FACTOR * SCALE * 1.001
    for now, then in zip(constants(estimate.speed), constants(ROUND), strict=True):
        assert isfinite(now)
        assert then / far <= now <= then * far
    assert estimate.speed.alpha_s < inf
