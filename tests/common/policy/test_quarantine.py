"""Which prompts are refused, and what was learned of memory."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from common.policy.balancer import Balancer
from common.policy.quarantine import REMEMBERED, SUSPECTED_S, TOLD, Quarantine, Strike
from common.types import LoadReport, Outcome, Pick
from tests.common.policy.build import ask, balancer_of, instance, picked


def test_two_strikes_and_a_prompt_is_refused_for_a_while() -> None:
    quarantine = Quarantine(60.0)
    quarantine.struck(7, 100.0, certain=False)
    assert quarantine.refused_for_s(7, 100.0) == 0.0
    quarantine.struck(7, 110.0, certain=False)
    assert quarantine.refused_for_s(7, 120.0) == 50.0
    assert quarantine.refused_for_s(7, 171.0) == 0.0
    assert quarantine.refused_for_s(8, 120.0) == 0.0


def test_an_answer_clears_a_prompt_and_vouches_for_it() -> None:
    quarantine = Quarantine(60.0)
    quarantine.struck(7, 100.0, certain=False)
    quarantine.answered(7, 101.0)
    for second in range(102, 110):  # servers die around it, as in an outage
        quarantine.struck(7, float(second), certain=False)
    assert quarantine.refused_for_s(7, 110.0) == 0.0
    for second in range(102, 104):  # but what a server says itself counts
        quarantine.struck(7, float(second), certain=True)
    assert quarantine.refused_for_s(7, 110.0) > 0.0


def test_strikes_far_apart_are_two_accidents() -> None:
    quarantine = Quarantine(60.0)
    quarantine.struck(7, 0.0, certain=False)
    quarantine.struck(7, SUSPECTED_S + 1.0, certain=False)
    assert quarantine.refused_for_s(7, SUSPECTED_S + 1.0) == 0.0


def test_it_is_bounded_and_may_be_off() -> None:
    quarantine = Quarantine(60.0)
    for fingerprint in range(1, 2 * REMEMBERED):
        quarantine.struck(fingerprint, 1.0, certain=True)
    assert len(quarantine) == REMEMBERED
    off = Quarantine(0.0)
    off.struck(7, 1.0, certain=True)
    off.struck(7, 1.0, certain=True)
    assert off.refused_for_s(7, 1.0) == 0.0


def pair() -> Balancer:
    return balancer_of(instance("large", gpu="h200"), instance("small", gpu="l4"))


def test_a_size_that_was_too_large_goes_where_there_is_more_room() -> None:
    balancer = pair()
    big, little = ask(input_tokens=8000), ask(input_tokens=100)
    assert balancer.ran_out("small", big, 100.0, certain=True) == {"small"}
    assert {picked(balancer, big, now=101.0).endpoint.id for _ in range(20)} == {"large"}
    assert balancer.ran_out("large", big, 102.0, certain=True) == frozenset()  # nobody is larger
    assert isinstance(balancer.pick(big, 103.0, Random(1)), Pick)  # rather there than nowhere
    assert isinstance(balancer.pick(little, 103.0, Random(1)), Pick)


def test_what_was_learned_of_memory_is_doubted_and_forgotten() -> None:
    balancer = pair()
    candidate = balancer.candidates["small"]
    big = ask(input_tokens=8000)
    balancer.ran_out("small", big, 0.0, certain=True)
    assert candidate.safe_tokens(0.0) < candidate.safe_tokens(600.0) < inf
    assert candidate.safe_tokens(1e5) == inf
    balancer.ran_out("small", big, 1e5, certain=True)
    candidate.fitted(9000.0)
    assert candidate.safe_tokens(1e5) == inf


def test_the_size_that_fits_goes_with_the_memory_that_is_free() -> None:
    balancer = pair()
    candidate = balancer.candidates["small"]

    def free(gigabytes: int, now: float) -> None:
        for n in range(100):
            at = now + 0.2 * n
            balancer.report(LoadReport("small", running=0.0, gpu_memory_free_bytes=gigabytes * 10**9), at)

    free(8, 0.0)
    balancer.ran_out("small", ask(input_tokens=8000), 20.0, certain=True)
    at_failure = candidate.safe_tokens(20.0)
    free(4, 20.0)  # somebody else took half of it
    assert candidate.safe_tokens(20.0) == pytest.approx(0.5 * at_failure, rel=0.01)
    free(16, 40.0)
    assert candidate.safe_tokens(20.0) == pytest.approx(2.0 * at_failure, rel=0.01)
    free(0, 60.0)
    assert candidate.safe_tokens(20.0) == pytest.approx(0.25 * at_failure)  # what is left may still do


def test_a_death_says_nothing_of_sizes_that_were_answered_before() -> None:
    balancer = balancer_of(instance("a"))
    big = ask(input_tokens=8000)
    pick = picked(balancer, big, now=1.0)
    balancer.release(pick.reservation, Outcome.SUCCESS, 2.0, output_tokens=10.0)
    balancer.ran_out("a", big, 3.0, certain=False)
    assert balancer.candidates["a"].safe_tokens(3.0) == inf
    balancer.ran_out("a", ask(input_tokens=80_000), 3.0, certain=False)
    assert balancer.candidates["a"].safe_tokens(3.0) < inf


def test_strikes_of_other_balancers_count_until_their_time_is_over_or_an_answer_comes() -> None:
    quarantine = Quarantine(60.0)
    quarantine.struck(7, 100.0, certain=True)
    quarantine.hear("other", [Strike(7, 1, 10.0), Strike(8, 2, 5.0)], 105.0)
    assert quarantine.refused_for_s(7, 110.0) == 50.0
    assert quarantine.refused_for_s(8, 110.0) == 50.0
    assert quarantine.tell(110.0) == [Strike(7, 1, 10.0)]  # its own alone: nothing goes round
    quarantine.answered(8, 111.0)
    assert quarantine.refused_for_s(8, 112.0) == 0.0
    quarantine.forget(112.0, set())  # the other one is gone: what it told counts on
    assert quarantine.refused_for_s(7, 112.0) == 48.0
    quarantine.hear("other", [], 113.0)
    assert quarantine.refused_for_s(7, 113.0) == 0.0
    quarantine.hear("other", [Strike(n, 2, 0.0) for n in range(10 * TOLD)], 113.0)
    assert not quarantine.refused_for_s(TOLD + 1, 113.0)
    quarantine.forget(113.0 + SUSPECTED_S, set())
    assert not quarantine.refused_for_s(1, 113.0 + SUSPECTED_S)
