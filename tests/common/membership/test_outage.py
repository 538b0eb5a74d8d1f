"""Which removals are doubted after an outage (CASES C26)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.membership.outage import GATHER_S, OutageGuard

TTL_S = 5.0


def keys(*ids: int, group: str = "/a") -> dict[str, bytes]:
    return {f"{group}/{i}": b"%d" % i for i in ids}


class Scene:
    """A guard and its clock, in which a store says things."""

    def __init__(self) -> None:
        self.guard = OutageGuard(TTL_S)
        self.now = 100.0
        self.dead: set[str] = set()

    def says(self, values: dict[str, bytes], *, stale: bool = False, after_s: float = 0.01) -> set[str]:
        self.now += after_s
        return set(self.guard.believe(values, stale, self.now, lambda key: key not in self.dead))

    def outage(self, values: dict[str, bytes]) -> None:
        self.says(values)
        self.says(values, stale=True)


def test_removals_take_effect_at_once_without_an_outage() -> None:
    scene = Scene()
    assert scene.says(keys(1, 2, 3)) == set(keys(1, 2, 3))
    assert scene.says({}) == set()
    assert not scene.guard.unconfirmed


def test_an_outage_alone_changes_nothing() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    assert scene.says(keys(1, 2, 3), stale=True, after_s=100.0) == set(keys(1, 2, 3))
    assert scene.says(keys(1, 2, 3)) == set(keys(1, 2, 3))


def test_a_burst_after_an_outage_is_kept_for_one_time_to_live() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    assert scene.says({}, after_s=40.0) == set(keys(1, 2, 3))
    assert scene.guard.unconfirmed == set(keys(1, 2, 3))
    assert scene.says({}, after_s=TTL_S - 0.1) == set(keys(1, 2, 3))
    assert scene.says({}, after_s=0.2) == set()
    assert scene.says({}) == set()


def test_what_registers_again_is_confirmed() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    scene.says({})
    assert scene.says(keys(1)) == set(keys(1, 2, 3))
    assert scene.guard.unconfirmed == set(keys(2, 3))
    assert scene.says(keys(1, 2, 3)) == set(keys(1, 2, 3))
    assert not scene.guard.unconfirmed
    assert scene.says(keys(1, 2, 3), after_s=TTL_S) == set(keys(1, 2, 3))


def test_what_does_not_answer_goes() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    scene.says({})
    scene.dead = {"/a/2"}
    assert scene.says({}) == set(keys(1, 3))
    scene.dead = set()
    assert scene.says({}) == set(keys(1, 3))  # and does not come back by answering


def test_a_few_removals_after_an_outage_take_effect_a_moment_later() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    assert scene.says(keys(1, 2)) == set(keys(1, 2, 3))  # one of several: it may be the first of a burst
    assert scene.says(keys(1, 2), after_s=GATHER_S) == set(keys(1, 2))
    assert scene.says(keys(1, 2)) == set(keys(1, 2))
    scene = Scene()
    scene.outage(keys(*range(9)))
    scene.says(keys(*range(6)))
    assert scene.says(keys(*range(6)), after_s=GATHER_S) == set(keys(*range(6)))  # a third, and not more
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    scene.dead = {"/a/3"}
    assert scene.says(keys(1, 2)) == set(keys(1, 2))  # known not to answer: at once


def test_the_only_member_of_a_group_is_kept() -> None:
    scene = Scene()
    scene.outage({**keys(1), **keys(1, 2, 3, group="/b")})
    assert scene.says(keys(1, 2, 3, group="/b")) == {"/a/1", *keys(1, 2, 3, group="/b")}


def test_a_burst_in_several_parts_is_one() -> None:
    scene = Scene()
    scene.outage(keys(*range(6)))
    for first in range(1, 6):
        assert scene.says(keys(*range(first, 6)), after_s=0.3) == set(keys(*range(6)))
    assert scene.says({}, after_s=GATHER_S + 0.1) == set(keys(*range(6)))
    slow = Scene()
    slow.outage(keys(*range(6)))
    slow.says(keys(*range(1, 6)))
    assert slow.says(keys(*range(1, 6)), after_s=GATHER_S) == set(keys(*range(1, 6)))
    assert slow.says({}) == set(keys(*range(6)))  # the burst brings its beginning back


def test_groups_are_counted_apart() -> None:
    scene = Scene()
    scene.outage({**keys(*range(10)), **keys(1, 2, group="/b")})
    believed = scene.says(keys(*range(9)))
    assert believed == {*keys(*range(10)), *keys(1, 2, group="/b")}
    believed = scene.says(keys(*range(9)), after_s=GATHER_S)
    assert believed == {*keys(*range(9)), *keys(1, 2, group="/b")}


def test_later_removals_take_effect_at_once() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    scene.says(keys(1, 2, 3))
    assert scene.says({}, after_s=TTL_S + 0.1) == set()


def test_a_second_outage_keeps_what_was_in_doubt() -> None:
    scene = Scene()
    scene.outage(keys(1, 2, 3))
    scene.says({})
    assert scene.says({}, stale=True, after_s=3 * TTL_S) == set(keys(1, 2, 3))
    assert scene.says({}) == set(keys(1, 2, 3))
    assert scene.says({}, after_s=TTL_S + 0.1) == set()


def test_values_are_those_of_before() -> None:
    guard = OutageGuard(TTL_S)
    guard.believe(keys(1, 2), False, 0.0)
    guard.believe(keys(1, 2), True, 1.0)
    assert guard.believe({}, False, 2.0) == keys(1, 2)
    assert guard.believe({"/a/1": b"new"}, False, 2.1) == {"/a/1": b"new", "/a/2": b"2"}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.booleans(), st.floats(0.0, 10.0)), max_size=30))
def test_what_the_store_has_is_always_believed_and_doubt_always_ends(
    steps: list[tuple[set[int], bool, float]],
) -> None:
    scene = Scene()
    last: dict[str, bytes] = {}
    for ids, stale, after_s in steps:
        last = last if stale else keys(*ids)
        assert scene.says(last, stale=stale, after_s=after_s) >= set(last)
    scene.says(last)
    assert scene.says(last, after_s=2 * TTL_S + 1) == set(last)
    assert not scene.guard.unconfirmed
