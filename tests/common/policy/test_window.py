"""Sliding windows and leases on them, against what a list of every unit says."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.window import Allowance, Draw, SlidingWindow, Span, granted

SPAN = Span(window_s=60.0, lease_s=0.5, bucket_s=0.25)


def test_the_limit_is_granted_and_not_one_unit_more():
    window = SlidingWindow(SPAN)
    assert [window.take(0.0, 3, 1, 1).amount for _ in range(4)] == [1, 1, 1, 0]
    assert window.used(0.0) == 3


def test_a_unit_counts_for_the_window_and_the_lease_and_is_free_soon_after():
    window = SlidingWindow(SPAN)
    window.take(10.1, 1, 1, 1)
    assert window.take(10.1 + 60.5, 1, 1, 1).amount == 0
    assert window.take(10.1 + 60.5 + 0.25, 1, 1, 1).amount == 1


def test_a_refusal_says_when_it_would_fit():
    window = SlidingWindow(SPAN)
    window.take(0.0, 10, 4, 4)
    window.take(30.0, 10, 6, 6)
    wait = window.take(40.0, 10, 3, 3).wait_s
    assert wait == pytest.approx(20.75)
    assert window.take(40.0 + wait - 0.01, 10, 3, 3).amount == 0
    assert window.take(40.0 + wait, 10, 3, 3).amount == 3


def test_what_is_more_than_the_limit_never_fits():
    assert SlidingWindow(SPAN).take(0.0, 10, 11, 11).wait_s == inf


def test_what_was_used_beyond_the_limit_has_to_leave_first():
    window = SlidingWindow(SPAN)
    window.charge(0.0, 25)
    refused = window.take(1.0, 10, 1, 1)
    assert (refused.amount, refused.used) == (0, 25)
    assert window.take(1.0 + refused.wait_s, 10, 10, 10).amount == 10


def test_what_is_given_back_is_free_at_once_and_only_once():
    window = SlidingWindow(SPAN)
    grant = window.take(0.0, 10, 10, 10)
    window.give_back(0.3, grant.bucket, 7)
    window.give_back(0.3, grant.bucket, 7)
    assert window.used(0.3) == 0


def test_what_no_longer_counts_cannot_be_given_back():
    window = SlidingWindow(SPAN)
    old = window.take(0.0, 10, 5, 5)
    window.take(100.0, 10, 5, 5)
    window.give_back(100.0, old.bucket, 5)
    assert window.used(100.0) == 5


def test_a_lease_in_advance_is_smaller_the_less_there_is_left():
    assert granted(1000, 1, 50) == 50
    assert granted(101, 1, 50) == 26
    assert granted(4, 1, 50) == 1
    assert granted(1, 1, 50) == 1
    assert granted(0, 1, 50) < 1
    assert granted(-3, 0, 50) < 0


def test_an_allowance_is_spent_from_the_oldest_and_says_from_where():
    allowance = Allowance()
    allowance.add(3, 7, 1.0)
    allowance.add(4, 8, 2.0)
    assert allowance.spend(5) == [Draw(7, 3), Draw(8, 2)]
    assert allowance.left == 2
    assert allowance.expired(2.0) == [Draw(8, 2)]
    assert allowance.left == 0


def test_what_is_left_of_a_lease_that_is_over_is_taken_out():
    allowance = Allowance()
    allowance.add(3, 7, 1.0)
    allowance.add(4, 8, 2.0)
    allowance.spend(1)
    assert allowance.expired(0.9) == []
    assert allowance.expired(1.0) == [Draw(7, 2)]
    assert allowance.left == 4


def test_more_than_is_left_cannot_be_spent():
    with pytest.raises(AssertionError):
        Allowance().spend(1)


Steps = st.lists(
    st.tuples(st.floats(0.0, 1.5), st.integers(0, 2), st.integers(1, 8), st.integers(0, 12), st.floats(0.0, 1.0)),
    max_size=80,
)


@given(Steps, st.integers(1, 12))
def test_in_no_interval_is_more_than_the_limit_spent_whoever_spends_and_however_late(steps, limit):
    """Three balancers take, spend some of it up to the end of their lease, and give the rest back."""
    span = Span(window_s=4.0, lease_s=0.5, bucket_s=0.25)
    window, allowances, spent, now = SlidingWindow(span), [Allowance() for _ in range(3)], [], 0.0
    for pause, who, least, more, share in steps:
        now += pause
        mine = allowances[who]
        for bucket, amount in mine.expired(now):
            window.give_back(now, bucket, amount)
        grant = window.take(now, limit, min(least, limit), least + more)
        mine.add(grant.amount, grant.bucket, now + span.lease_s)
        part = int(mine.left * share)
        mine.spend(part)
        spent += [now] * part
    for begin in spent:
        assert sum(begin <= at <= begin + span.window_s for at in spent) <= limit


@given(Steps)
def test_what_counts_is_what_was_taken_and_not_given_back(steps):
    window, taken, now = SlidingWindow(SPAN), [], 0.0
    for pause, _, least, more, share in steps:
        now += 10.0 * pause
        grant = window.take(now, 40, least, least + more)
        back = int(grant.amount * share)
        window.give_back(now, grant.bucket, back)
        taken.append((grant.bucket, grant.amount - back))
        first = int(now / SPAN.bucket_s) - SPAN.buckets
        assert window.used(now) == sum(amount for bucket, amount in taken if bucket >= first) <= 40
