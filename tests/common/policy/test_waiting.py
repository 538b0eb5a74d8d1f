from __future__ import annotations

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.policy.waiting import AGEING_S, Bounds, Waiter, WaitingRoom
from common.types import Priority, Shed

CRITICAL, STANDARD, BATCH = Priority


def waiter(
    tenant: str = "t", priority: Priority = STANDARD, tokens: float = 100.0, at: float = 0.0, **f: float
) -> Waiter:
    return Waiter("m", tenant, priority, tokens, at, **f)


def entered(room: WaitingRoom, *waiters: Waiter, now: float = 0.0) -> None:
    for w in waiters:
        assert room.enter(w, now) is None


def served(room: WaitingRoom, now: float = 0.0) -> list[Waiter]:
    order = []
    while head := room.in_order(now):
        room.took(head[0], now)
        order.append(head[0])
    return order


def test_a_higher_class_goes_first() -> None:
    room = WaitingRoom(Bounds())
    batch, standard, critical = (waiter(priority=p) for p in (BATCH, STANDARD, CRITICAL))
    entered(room, batch, standard, critical)
    assert served(room) == [critical, standard, batch]


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    room = WaitingRoom(Bounds())
    late, none, early = waiter(deadline=9.0), waiter(), waiter(deadline=5.0)
    entered(room, late, none, early)
    assert served(room) == [early, late, none]


def test_between_tenants_tokens_are_shared_and_not_turns() -> None:
    room = WaitingRoom(Bounds())
    big = [waiter("big", tokens=1_000.0, at=n / 100) for n in range(10)]
    small = [waiter("small", tokens=100.0, at=n / 100) for n in range(100)]
    entered(room, *big, *small)
    order = [w.tenant for w in served(room)]
    half = order[: len(order) // 2]
    assert abs(half.count("big") * 1_000 - half.count("small") * 100) <= 1_000


def test_a_tenant_with_a_larger_share_gets_more() -> None:
    room = WaitingRoom(Bounds(), {"gold": 3.0})
    entered(room, *(waiter(t) for t in ("gold", "lead") for _ in range(40)))
    first = [w.tenant for w in served(room)][:20]
    assert first.count("gold") == 15


def test_one_that_was_away_has_not_saved_up() -> None:
    room = WaitingRoom(Bounds())
    entered(room, *(waiter("here") for _ in range(20)))
    for _ in range(10):
        room.took(room.in_order(0.0)[0], 0.0)
    entered(room, *(waiter("back") for _ in range(10)))
    order = [w.tenant for w in served(room)][:10]
    assert 4 <= order.count("back") <= 6


def test_who_waits_long_counts_as_a_class_higher_so_nothing_starves() -> None:
    room = WaitingRoom(Bounds(timeout_s=1e9))
    old = waiter(priority=BATCH)
    entered(room, old)
    young = waiter(priority=CRITICAL, at=2 * AGEING_S + 1, deadline=1e9)
    entered(room, young, now=2 * AGEING_S + 1)
    room._served["t"] = 0.0
    heads = room.in_order(2 * AGEING_S + 1)
    assert {heads[0], heads[1]} == {old, young}
    assert room._rank(old, 2 * AGEING_S + 1)[0] == 0


@pytest.mark.parametrize("bounds", [Bounds(max_requests=2), Bounds(max_tokens=200)])
def test_a_full_room_refuses_or_gives_up_its_least(bounds: Bounds) -> None:
    room = WaitingRoom(bounds)
    batch, standard = waiter(priority=BATCH), waiter()
    entered(room, batch, standard)
    assert isinstance(room.enter(waiter(), 0.0), Waiter)  # in the place of the batch request
    assert batch.gone
    refused = room.enter(waiter(priority=BATCH), 0.0)
    assert isinstance(refused, Shed)
    assert refused.reason == "saturated"
    assert room.requests == 2


def test_what_cannot_make_its_deadline_is_refused_at_once() -> None:
    room = WaitingRoom(Bounds())
    entered(room, *(waiter(tokens=100.0) for _ in range(50)))
    for n in range(20):  # two a second leave
        room.took(room.in_order(n / 2)[0], n / 2)
    wait = room.expected_wait_s(10.0)
    assert 10.0 < wait < 40.0
    shed = room.enter(waiter(deadline=10.0 + wait / 2), 10.0)
    assert shed == Shed("deadline_exceeded", wait)
    assert room.enter(waiter(deadline=10.0 + wait * 2), 10.0) is None


def test_who_is_over_leaves() -> None:
    room = WaitingRoom(Bounds(timeout_s=5.0))
    hurried, patient = waiter(deadline=2.0), waiter()
    entered(room, hurried, patient)
    assert room.expired(1.9) == []
    assert room.expired(2.0) == [hurried]
    assert room.expired(5.0) == [patient]
    assert (room.requests, room.tokens) == (0, 0)


class Life(RuleBasedStateMachine):
    """Whatever comes and goes, the counts are those of who is there."""

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom(Bounds(max_requests=8, max_tokens=2_000, timeout_s=20.0))
        self.here: list[Waiter] = []
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(Priority),
        tokens=st.sampled_from([1.0, 300.0, 900.0]),
        deadline=st.sampled_from([inf, 1.0, 30.0]),
    )
    def enter(self, tenant: str, priority: Priority, tokens: float, deadline: float) -> None:
        w = Waiter("m", tenant, priority, tokens, self.now, self.now + deadline)
        answer = self.room.enter(w, self.now)
        if not isinstance(answer, Shed):
            self.here.append(w)
            if answer is not None:
                self.here.remove(answer)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        w = data.draw(st.sampled_from(self.here))
        self.room.leave(w)
        self.room.leave(w)
        self.here.remove(w)

    @rule()
    def take(self) -> None:
        heads = self.room.in_order(self.now)
        assert bool(heads) == bool(self.here)
        if heads:
            self.room.took(heads[0], self.now)
            self.here.remove(heads[0])

    @rule(seconds=st.sampled_from([0.1, 3.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for w in self.room.expired(self.now):
            self.here.remove(w)

    @invariant()
    def counted(self) -> None:
        assert self.room.requests == len(self.here) <= 8
        assert self.room.tokens == pytest.approx(sum(w.tokens for w in self.here))
        if not self.here:
            assert not self.room._served


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
