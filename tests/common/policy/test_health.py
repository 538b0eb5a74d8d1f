from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.health import Breaker, State
from common.types import Outcome

CLOSED, OPEN, HALF_OPEN = State.CLOSED, State.OPEN, State.HALF_OPEN
SUCCESS, FAILED, OVERLOADED, IGNORED = Outcome.SUCCESS, Outcome.FAILED, Outcome.OVERLOADED, Outcome.IGNORED


def breaker_in(state: State, cooldown_s: float = 2.0) -> Breaker:
    """A breaker that got into that state at time 0 (half open: at time 2) in the ordinary way."""
    breaker = Breaker(eject_after=5, cooldown_s=cooldown_s)
    if state is not CLOSED:
        for _ in range(5):
            breaker.ended(FAILED, 0.0)
    if state is HALF_OPEN:
        assert breaker.ready(2.0)
    assert breaker.state is state
    return breaker


@pytest.mark.parametrize(
    ("state", "outcome", "unreachable", "then"),
    [
        (CLOSED, SUCCESS, False, CLOSED),
        (CLOSED, FAILED, False, CLOSED),  # one of five
        (CLOSED, FAILED, True, OPEN),  # nobody is there
        (CLOSED, OVERLOADED, False, CLOSED),
        (CLOSED, IGNORED, False, CLOSED),
        (OPEN, SUCCESS, False, CLOSED),  # a request sent before it opened
        (OPEN, FAILED, False, OPEN),
        (OPEN, FAILED, True, OPEN),
        (OPEN, OVERLOADED, False, OPEN),
        (OPEN, IGNORED, False, OPEN),
        (HALF_OPEN, SUCCESS, False, CLOSED),
        (HALF_OPEN, FAILED, False, OPEN),
        (HALF_OPEN, FAILED, True, OPEN),
        (HALF_OPEN, OVERLOADED, False, HALF_OPEN),
        (HALF_OPEN, IGNORED, False, HALF_OPEN),
    ],
)
def test_transitions(state: State, outcome: Outcome, unreachable: bool, then: State) -> None:
    breaker = breaker_in(state)
    breaker.picked()
    breaker.ended(outcome, 3.0, unreachable=unreachable)
    assert breaker.state is then


@pytest.mark.parametrize("outcome", [IGNORED, OVERLOADED])
def test_fifty_client_mistakes_or_refusals_open_nothing(outcome: Outcome) -> None:
    breaker = Breaker(eject_after=5)
    for second in range(50):
        breaker.picked()
        breaker.ended(outcome, float(second))
    assert breaker.state is CLOSED
    assert breaker.ready(50.0)


@pytest.mark.parametrize("between", [IGNORED, OVERLOADED])
def test_five_failures_open_it_whatever_neutral_comes_between(between: Outcome) -> None:
    breaker = Breaker(eject_after=5)
    for _ in range(4):
        breaker.ended(FAILED, 0.0)
        breaker.ended(between, 0.0)
    assert breaker.state is CLOSED
    breaker.ended(FAILED, 0.0)
    assert breaker.state is OPEN


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = Breaker(eject_after=5)
    for _ in range(20):
        for _ in range(4):
            breaker.ended(FAILED, 0.0)
        breaker.ended(SUCCESS, 0.0)
    assert breaker.state is CLOSED


def test_open_takes_nothing_until_the_cool_down_is_over_and_then_one_at_a_time() -> None:
    breaker = breaker_in(OPEN, cooldown_s=2.0)
    assert not breaker.ready(1.999)
    assert breaker.ready(2.0)
    assert breaker.ready(2.0)  # being asked is not being picked
    assert breaker.picked()
    assert not breaker.ready(2.0)
    assert not breaker.ready(1e9)  # however long the trial takes


@pytest.mark.parametrize("outcome", [IGNORED, OVERLOADED])
def test_a_trial_that_says_nothing_moves_nothing_and_gives_its_place_back(outcome: Outcome) -> None:
    breaker = breaker_in(HALF_OPEN)
    for second in range(3, 20):
        assert breaker.ready(float(second))
        trial = breaker.picked()
        assert not breaker.ready(float(second))
        breaker.ended(outcome, float(second), trial=trial)
        assert breaker.state is HALF_OPEN
    assert breaker.openings == 1  # the cool-down has not grown


def test_a_request_sent_before_the_opening_does_not_free_the_place_of_the_trial() -> None:
    breaker = Breaker(eject_after=5, cooldown_s=2.0)
    sent_before = breaker.picked()
    assert not sent_before
    for _ in range(5):
        breaker.ended(FAILED, 0.0)
    assert breaker.ready(2.0)
    breaker.picked()
    breaker.ended(IGNORED, 2.5, trial=sent_before)
    assert not breaker.ready(2.5)


def test_a_closed_breaker_takes_any_number_at_once() -> None:
    breaker = Breaker()
    for _ in range(100):
        assert breaker.ready(0.0)
        assert not breaker.picked()


def test_cool_down_doubles_with_each_trial_that_fails_up_to_its_maximum() -> None:
    breaker, now, waited = Breaker(5, cooldown_s=2.0, max_cooldown_s=60.0), 0.0, []
    for _ in range(5):
        breaker.ended(FAILED, now)
    for _ in range(7):
        waited.append(breaker.retry_at - now)
        now = breaker.retry_at
        assert breaker.ready(now)
        breaker.picked()
        breaker.ended(FAILED, now)
    assert waited == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_success_brings_the_first_cool_down_back() -> None:
    breaker = breaker_in(HALF_OPEN, cooldown_s=2.0)
    breaker.ended(FAILED, 2.0)
    assert breaker.retry_at == 6.0
    assert breaker.ready(6.0)
    breaker.ended(SUCCESS, 6.0)
    breaker.ended(FAILED, 7.0, unreachable=True)
    assert breaker.retry_at == 9.0


def test_failures_that_come_in_while_it_is_open_do_not_prolong_it() -> None:
    breaker = breaker_in(OPEN, cooldown_s=2.0)
    for _ in range(100):
        breaker.ended(FAILED, 1.9, unreachable=True)
    assert breaker.retry_at == 2.0
    assert breaker.openings == 1


def test_an_outage_of_weeks_still_has_a_next_trial() -> None:
    breaker, now = Breaker(1, cooldown_s=1.0, max_cooldown_s=10.0), 0.0
    for _ in range(5_000):
        breaker.ended(FAILED, now)
        now = breaker.retry_at
        assert breaker.ready(now)
    assert now == pytest.approx(5_000 * 10.0, rel=0.01)


@given(
    st.lists(
        st.tuples(st.sampled_from([*Outcome, "wait", "pick"]), st.booleans(), st.floats(0.0, 30.0)),
        max_size=60,
    )
)
def test_whatever_happens_it_is_tried_again_within_the_maximum(events: list[tuple[object, bool, float]]) -> None:
    breaker, now = Breaker(3, cooldown_s=2.0, max_cooldown_s=60.0), 0.0
    for event, flag, gap in events:
        now += gap
        if event == "wait":
            breaker.ready(now)
        elif event == "pick":
            if breaker.ready(now):
                breaker.picked()
        else:
            assert isinstance(event, Outcome)
            breaker.ended(event, now, unreachable=flag)
        assert breaker.failures < 3
        assert breaker.state is not OPEN or breaker.opened_at < breaker.retry_at <= now + 60.0
    breaker.ended(IGNORED, now)  # what was under way has ended
    assert breaker.ready(now + 60.0)
