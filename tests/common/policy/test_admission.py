from __future__ import annotations

from math import e

from hypothesis import given
from hypothesis import strategies as st

from common.policy.admission import RESERVE, WINDOW_S, RetryBudget


def granted(budget: RetryBudget, asked: int, now: float) -> int:
    return sum(budget.take(now) for _ in range(asked))


def test_without_any_traffic_the_reserve_is_granted_and_no_more() -> None:
    assert granted(RetryBudget(0.2), 1_000, now=0.0) == RESERVE


def test_a_share_of_recent_requests_is_granted_on_top() -> None:
    budget = RetryBudget(0.2)
    for _ in range(1_000):
        budget.request(now=50.0)
    assert granted(budget, 10_000, now=50.0) == RESERVE + 200


def test_a_refused_retry_is_not_counted() -> None:
    budget = RetryBudget(0.0)
    granted(budget, 1_000, now=0.0)
    # What was granted has faded to 1/e; had all thousand counted, nothing would be left.
    assert granted(budget, 1_000, now=WINDOW_S) == int(RESERVE * (1.0 - 1.0 / e))


def test_old_requests_no_longer_earn_retries() -> None:
    budget = RetryBudget(1.0)
    for _ in range(1_000):
        budget.request(now=0.0)
    assert granted(budget, 10_000, now=WINDOW_S * 20) == RESERVE


def test_a_ratio_of_zero_leaves_the_reserve_alone() -> None:
    budget = RetryBudget(0.0)
    for _ in range(1_000):
        budget.request(now=0.0)
    assert granted(budget, 1_000, now=0.0) == RESERVE


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_within_a_window_an_outage_is_multiplied_by_no_more_than_the_ratio(steps: list[tuple[float, int, int]]) -> None:
    budget, now, requests, retries = RetryBudget(0.2), 0.0, 0, 0
    for gap, requested, retried in steps:
        now += gap
        for _ in range(requested):
            budget.request(now)
        requests += requested
        retries += granted(budget, retried, now)
    windows = 1.0 + now / WINDOW_S
    assert retries <= 0.2 * requests + RESERVE * windows + 1
