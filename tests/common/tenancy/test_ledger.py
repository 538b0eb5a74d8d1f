"""A tenant's limits as one balancer keeps them, against a store in memory with a clock of the test's own."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.window import Span
from common.store.base import QuotaCall, QuotaReply
from common.store.memory_quota import MemoryQuotaStore
from common.tenancy.directory import TenantSpec
from common.tenancy.ledger import LOCAL, PLACES_TTL_S, Ledger, Refusal, Taken

SPAN = Span(window_s=60.0, lease_s=0.5, bucket_s=0.25)
MONTH = "2026-11"
NOTHING = (0, 0)


class World:
    """A store, balancers, and a clock."""

    def __init__(self, balancers: int = 1, **spec: Any) -> None:
        self.now = 1000.0
        self.spec = TenantSpec.model_validate(spec)
        self.store = MemoryQuotaStore(SPAN, lambda: self.now)
        self.ledgers = [Ledger("acme", f"b{n}", SPAN) for n in range(balancers)]
        self.numbers = count(1)
        self.trips = 0

    def exchange(self, ledger: Ledger, *needs: int, source: str = "shared", month: str = MONTH) -> QuotaCall:
        """One round trip for those who wait."""
        ledger.needs[:] = needs
        call = ledger.call(self.spec, source, next(self.numbers), month, self.now)
        reply = self.reply(call)
        ledger.answered(call, reply, self.now, self.now)
        ledger.needs.clear()
        self.trips += 1
        return call

    def reply(self, call: QuotaCall) -> QuotaReply:
        coroutine = self.store.exchange(call)
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise AssertionError("it waits")

    def take(self, at: int = 0, tokens: int = 0, likely: tuple[int, int] = NOTHING) -> Taken | Refusal:
        ledger = self.ledgers[at]
        got = ledger.take(self.spec, tokens, likely, MONTH, self.now)
        if got is None:
            self.exchange(ledger, tokens)
            got = ledger.take(self.spec, tokens, likely, MONTH, self.now)
        assert got is not None
        return got

    def sweep(self) -> None:
        for ledger in self.ledgers:
            if ledger.due(self.spec, self.now):
                self.exchange(ledger)


def test_without_limits_the_store_is_not_asked():
    world = World()
    assert all(isinstance(world.take(), Taken) for _ in range(10))
    assert world.trips == 0


def test_a_limit_is_reached_and_says_when_it_will_not_be():
    world = World(requests_per_minute=5)
    assert all(isinstance(world.take(), Taken) for _ in range(5))
    refused = world.take()
    assert refused == Refusal("requests_per_minute", pytest.approx(60.75, abs=0.25))
    world.now += refused.retry_after_s  # type: ignore[union-attr]
    assert isinstance(world.take(), Taken)


def test_whoever_is_over_the_limit_does_not_make_us_ask_all_the_time():
    world = World(requests_per_minute=5)
    for _ in range(5):
        world.take()
    before = world.trips
    for _ in range(1000):
        assert isinstance(world.take(), Refusal)
        world.now += 0.001
    assert world.trips - before <= 5


def test_at_a_steady_rate_few_requests_wait_for_the_store():
    world = World(requests_per_minute=60_000)
    waits = 0
    for _ in range(3000):
        world.now += 0.002
        ledger = world.ledgers[0]
        if ledger.take(world.spec, 0, NOTHING, MONTH, world.now) is None:
            waits += 1
            world.take()
        elif ledger.wants_more(world.spec):
            world.exchange(ledger)
    assert waits < 10
    assert world.trips < 60


def test_what_is_leased_and_not_used_is_given_back():
    world = World(2, requests_per_minute=1000)
    ledger = world.ledgers[0]
    for _ in range(50):
        world.take()
        world.now += 0.001
    world.exchange(ledger)  # ahead of more that does not come
    assert ledger.requests.allowance.left > 0
    world.now += SPAN.lease_s
    assert ledger.due(world.spec, world.now)
    world.sweep()
    call = world.exchange(world.ledgers[1])
    assert call.requests is not None
    assert world.ledgers[1].requests.used == 50


def test_tokens_are_reserved_and_settled():
    world = World(tokens_per_minute=1000)
    taken = world.take(tokens=900)
    assert isinstance(taken, Taken)
    assert isinstance(world.take(tokens=200), Refusal)
    world.ledgers[0].end(taken, 100, 0, MONTH)
    world.now += 0.3
    world.sweep()
    assert isinstance(world.take(tokens=800), Taken)


def test_more_than_was_reserved_is_charged():
    world = World(tokens_per_minute=1000)
    taken = world.take(tokens=100)
    world.ledgers[0].end(taken, 1000, 0, MONTH)  # type: ignore[arg-type]
    world.sweep()
    world.now += 0.3
    assert isinstance(world.take(tokens=1), Refusal)


def test_a_small_request_may_pass_where_a_large_one_was_refused():
    world = World(tokens_per_minute=1000)
    world.take(tokens=900)
    assert isinstance(world.take(tokens=500), Refusal)
    assert isinstance(world.take(tokens=50), Taken)


def test_more_than_the_limit_never_fits():
    assert World(tokens_per_minute=1000).take(tokens=1001) == Refusal("tokens_per_minute", inf)


# -- places ------------------------------------------------------------------------------------------------------------


def test_places_are_kept_over_all_balancers():
    world = World(2, concurrent_requests=3)
    taken = [world.take(0), world.take(1), world.take(0)]
    assert all(isinstance(t, Taken) for t in taken)
    assert world.take(1) == Refusal("concurrent_requests", 1.0)
    world.ledgers[0].end(taken[0], 0, 0, MONTH)  # type: ignore[arg-type]
    assert world.ledgers[0].wants_more(world.spec)
    world.exchange(world.ledgers[0])
    world.now += 0.1
    assert isinstance(world.take(1), Taken)


def test_a_place_is_used_again_without_asking():
    world = World(concurrent_requests=1)
    for _ in range(100):
        taken = world.take()
        world.ledgers[0].end(taken, 0, 0, MONTH)  # type: ignore[arg-type]
    assert world.trips == 1


def test_places_in_use_are_renewed_and_idle_ones_given_up():
    world = World(2, concurrent_requests=2)
    taken = [world.take(0), world.take(0)]
    for _ in range(20):
        world.now += 0.4 * PLACES_TTL_S
        world.sweep()
    assert isinstance(world.take(1), Refusal)
    for each in taken:
        world.ledgers[0].end(each, 0, 0, MONTH)  # type: ignore[arg-type]
    world.sweep()
    world.now += 0.1
    assert isinstance(world.take(1), Taken)
    assert world.ledgers[0].idle


def test_places_of_one_that_told_nothing_for_long_are_not_used():
    world = World(concurrent_requests=2)
    world.take()
    world.now += 2.0 * PLACES_TTL_S
    assert world.ledgers[0].take(world.spec, 0, NOTHING, MONTH, world.now) is None


def test_a_request_ends_once():
    world = World()
    taken = world.take()
    world.ledgers[0].end(taken, 0, 0, MONTH)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        world.ledgers[0].end(taken, 0, 0, MONTH)  # type: ignore[arg-type]


# -- the month ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "limit"), [({"monthly_tokens": 1000}, "monthly_tokens"), ({"monthly_usd": 0.001}, "monthly_usd")]
)
def test_a_budget_counts_what_is_spent_anywhere_and_what_is_under_way(spec, limit):
    world = World(2, **spec)
    taken = world.take(0, likely=(400, 400))
    assert isinstance(taken, Taken)
    assert isinstance(world.take(0, likely=(500, 500)), Taken)
    assert world.take(0, likely=(200, 200)) == Refusal(limit, inf)
    world.ledgers[0].end(taken, 300, 300, MONTH)
    assert isinstance(world.take(0, likely=(200, 200)), Taken)
    world.now += 1.0
    world.sweep()
    assert isinstance(world.take(1, likely=(700, 700)), Taken)
    assert world.take(1, likely=(1, 1)) == Refusal(limit, inf)


def test_a_new_month_is_a_new_budget():
    world = World(monthly_tokens=1000)
    taken = world.take(likely=(1000, 0))
    world.ledgers[0].end(taken, 1000, 0, MONTH)  # type: ignore[arg-type]
    world.exchange(world.ledgers[0])
    assert world.take(likely=(1, 0)) == Refusal("monthly_tokens", inf)
    ledger = world.ledgers[0]
    assert ledger.take(world.spec, 0, (1000, 0), "2026-12", world.now) is None
    world.exchange(ledger, 0, month="2026-12")
    assert isinstance(ledger.take(world.spec, 0, (1000, 0), "2026-12", world.now), Taken)


def test_a_reply_that_was_lost_settles_once():
    world = World(monthly_tokens=10_000)
    ledger = world.ledgers[0]
    taken = world.take()
    ledger.end(taken, 70, 7, MONTH)  # type: ignore[arg-type]
    world.reply(ledger.call(world.spec, "shared", next(world.numbers), MONTH, world.now))  # and nobody hears of it
    taken = world.take()
    ledger.end(taken, 30, 3, MONTH)  # type: ignore[arg-type]
    assert ledger.month_so_far() == (100, 10)
    world.exchange(ledger)
    assert not ledger.idle
    world.exchange(ledger)
    assert ledger.idle
    assert (ledger.month_tokens, ledger.month_micro_usd) == (100, 10)


# -- the store is gone -------------------------------------------------------------------------------------------------


def test_leases_of_one_store_are_nothing_to_another():
    world = World(requests_per_minute=10_000, tokens_per_minute=10_000)
    ledger = world.ledgers[0]
    taken = world.take(tokens=100)
    for _ in range(20):
        world.take(tokens=1)
    world.exchange(ledger)
    call = world.exchange(ledger, 50, source=LOCAL)
    assert ledger.source == LOCAL
    assert call.requests is not None
    assert call.requests.returned == ()
    ledger.end(taken, 10, 0, MONTH)  # type: ignore[arg-type]
    assert not ledger.tokens.returns  # its bucket is one of the other store's


def test_a_store_that_is_asked_in_vain_takes_no_lease_away():
    world = World(requests_per_minute=10_000, concurrent_requests=100)
    ledger = world.ledgers[0]
    for _ in range(20):
        world.take()
    world.exchange(ledger, 0, source=LOCAL)
    left = ledger.requests.allowance.left
    assert left > 1
    ledger.needs[:] = [0]
    call = ledger.call(world.spec, "shared", next(world.numbers), MONTH, world.now)  # and it is not answered
    assert call.requests is not None
    assert (call.requests.least, call.requests.returned) == (1, ())
    assert isinstance(ledger.take(world.spec, 0, NOTHING, MONTH, world.now), Taken)
    assert (ledger.source, ledger.requests.allowance.left) == (LOCAL, left - 1)
    world.exchange(ledger)
    assert ledger.source == "shared"


def test_what_was_spent_meanwhile_is_told_when_it_is_back():
    world = World(monthly_tokens=10_000)
    ledger = world.ledgers[0]
    world.take()
    ledger.end(world.take(), 70, 7, MONTH)  # type: ignore[arg-type]
    for _ in range(3):
        call = world.exchange(ledger, source=LOCAL)
        assert (call.tokens_spent, call.micro_usd_spent) == (0, 0)
    assert ledger.month_so_far() == (70, 7)
    world.exchange(ledger)
    assert (ledger.month_tokens, ledger.idle) == (70, False)


def test_a_request_may_be_larger_than_one_balancers_share():
    world = World(tokens_per_minute=1000)
    ledger = world.ledgers[0]
    ledger.needs[:] = [800]
    call = ledger.call(world.spec, LOCAL, 1, MONTH, world.now, share=4)
    assert call.tokens is not None
    assert (call.tokens.limit, call.tokens.least) == (800, 800)


def test_a_budget_that_could_never_be_looked_up_does_not_keep_requests_waiting():
    world = World(monthly_tokens=1000)
    ledger = world.ledgers[0]
    assert ledger.take(world.spec, 0, (1, 0), MONTH, world.now) is None
    world.exchange(ledger, 0, source=LOCAL)
    assert isinstance(ledger.take(world.spec, 0, (1, 0), MONTH, world.now), Taken)


# -- all together ------------------------------------------------------------------------------------------------------

Steps = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),
        st.integers(0, 2),
        st.integers(1, 300),  # tokens it may use
        st.floats(0.0, 1.0),  # the share of them that it does
        st.integers(0, 3),  # how many end
    ),
    max_size=120,
)


@given(Steps)
def test_whatever_comes_no_limit_is_passed_and_nothing_is_left(steps):
    world = World(3, requests_per_minute=20, tokens_per_minute=1000, concurrent_requests=6)
    under_way: list[tuple[int, Taken, int]] = []
    requests: list[float] = []
    tokens: list[tuple[float, int]] = []
    for pause, at, need, share, ending in steps:
        world.now += pause
        for _ in range(min(ending, len(under_way))):
            who, taken, used = under_way.pop(0)
            world.ledgers[who].end(taken, used, used, MONTH)
        world.sweep()
        got = world.take(at, tokens=need, likely=(need, need))
        if isinstance(got, Taken):
            used = int(need * share)
            under_way.append((at, got, used))
            requests.append(world.now)
            tokens.append((world.now, used))
        assert len(under_way) <= 6
    for begin in requests:
        assert sum(begin <= t < begin + 60.0 for t in requests) <= 20
        assert sum(n for t, n in tokens if begin <= t < begin + 60.0) <= 1000
    for who, taken, used in under_way:
        world.ledgers[who].end(taken, used, used, MONTH)
    for _ in range(4):
        world.now += 1.1
        world.sweep()
    assert all(ledger.idle and ledger.in_use == 0 for ledger in world.ledgers)
    world.exchange(world.ledgers[0])
    assert world.ledgers[0].month_tokens == sum(n for _, n in tokens)
