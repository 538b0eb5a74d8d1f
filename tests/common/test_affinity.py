from __future__ import annotations

import asyncio

import pytest

from common import clock
from common.affinity import WRITES_PENDING, Affinity
from common.config import Affinity as Rules
from common.errors import StoreUnavailable
from common.store.base import Placement
from tests.servers import eventually

HERE, THERE = Placement(("eu", "c1", "i1"), 100), Placement(("us", "c1", "i9"), 7)


class Store:
    """A store that answers, fails or hangs, and counts."""

    def __init__(self) -> None:
        self.values: dict[str, Placement] = {}
        self.gets = 0
        self.puts: list[tuple[str, Placement, float]] = []
        self.fails = False
        self.hangs: asyncio.Event | None = None

    async def get(self, session: str) -> Placement | None:
        self.gets += 1
        await self._answer()
        return self.values.get(session)

    async def put(self, session: str, placement: Placement, ttl_s: float) -> None:
        self.puts.append((session, placement, ttl_s))
        await self._answer()
        self.values[session] = placement

    async def _answer(self) -> None:
        if self.hangs is not None:
            await self.hangs.wait()
        if self.fails:
            raise StoreUnavailable("out of reach")

    async def ping(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(clock, "now", found)
    return found


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def affinity(store: Store) -> Affinity:
    return Affinity(store, Rules(timeout_s=600.0, max_sessions=100))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_was_served_here_is_known_without_asking_anybody(store: Store, affinity: Affinity) -> None:
    affinity.remember("s", HERE, 600.0)
    assert affinity.local("s") == HERE
    assert await affinity.lookup("s") == HERE
    assert store.gets == 0


async def test_what_another_balancer_served_comes_from_the_store_once(store: Store, affinity: Affinity) -> None:
    store.values["s"] = THERE
    assert affinity.local("s") is None
    assert await affinity.lookup("s") == THERE
    assert await affinity.lookup("s") == THERE
    assert store.gets == 1
    assert affinity.local("s") == THERE


async def test_a_session_that_nobody_knows_is_none_and_asked_for_each_time(store: Store, affinity: Affinity) -> None:
    assert await affinity.lookup("s") is None
    store.values["s"] = THERE
    assert await affinity.lookup("s") == THERE


async def test_a_store_that_fails_is_a_none_and_a_count(store: Store, affinity: Affinity) -> None:
    store.fails = True
    assert await affinity.lookup("s") is None
    assert affinity.store_failures == 1
    affinity.remember("s", HERE, 600.0)
    await settled()
    assert affinity.store_failures == 2
    assert await affinity.lookup("s") == HERE  # this process still knows
    assert affinity.store_failures == 2
    assert not affinity._writes


async def test_a_placement_is_written_behind_with_its_time_to_live(store: Store, affinity: Affinity) -> None:
    affinity.remember("s", HERE, 600.0)
    assert store.puts == []  # not yet: the request goes first
    await settled()
    assert store.puts == [("s", HERE, 600.0)]
    assert not affinity._writes


async def test_the_last_place_wins(store: Store, affinity: Affinity) -> None:
    affinity.remember("s", HERE, 600.0)
    affinity.remember("s", THERE, 600.0)
    await settled()
    assert await affinity.lookup("s") == THERE
    assert store.values["s"] == THERE


async def test_a_placement_expires(store: Store, affinity: Affinity, now: Clock) -> None:
    affinity.remember("s", HERE, 600.0)
    await settled()
    now.at += 599.9
    assert affinity.local("s") == HERE
    store.values.clear()
    now.at += 0.2  # having been looked at does not prolong it
    assert affinity.local("s") is None
    assert await affinity.lookup("s") is None


async def test_being_served_again_prolongs_it(affinity: Affinity, now: Clock) -> None:
    affinity.remember("s", HERE, 600.0)
    now.at += 500.0
    affinity.remember("s", THERE, 600.0)
    now.at += 500.0
    assert affinity.local("s") == THERE


async def test_sessions_kept_here_are_bounded_and_the_least_used_go_first(store: Store) -> None:
    affinity = Affinity(store, Rules(timeout_s=600.0, max_sessions=3))
    for session in "abc":
        affinity.remember(session, HERE, 600.0)
    affinity.local("a")
    affinity.remember("d", HERE, 600.0)
    assert [s for s in "abcd" if affinity.local(s)] == ["a", "c", "d"]
    for n in range(1_000):
        affinity.remember(f"s{n}", HERE, 600.0)
        store.values[f"t{n}"] = THERE
        await affinity.lookup(f"t{n}")
    assert len(affinity._local) == 3


async def test_writes_under_way_are_bounded_while_the_store_hangs(store: Store) -> None:
    affinity = Affinity(store, Rules(timeout_s=600.0, max_sessions=100_000))
    store.hangs = asyncio.Event()
    for n in range(WRITES_PENDING + 50):
        affinity.remember(f"s{n}", HERE, 600.0)
    await settled()
    assert len(affinity._writes) == len(store.puts) == WRITES_PENDING
    assert affinity.local(f"s{WRITES_PENDING + 49}") == HERE  # what is not written stays known here
    store.hangs.set()
    await settled()
    assert not affinity._writes
    affinity.remember("later", HERE, 600.0)
    await settled()
    assert "later" in store.values


async def test_the_first_rule_that_matches_counts(store: Store) -> None:
    routes = (
        {"path": "/v1/completions", "mode": "off"},
        {"model": "llama-*", "mode": "strict", "timeout_s": 5.0},
        {"model": "m", "timeout_s": 7.0},
    )
    affinity = Affinity(store, Rules.model_validate({"timeout_s": 60.0, "routes": routes}))
    assert affinity.sticks("/v1/completions", "llama-8b")[0] == "off"
    assert affinity.sticks("/v1/chat/completions", "llama-8b") == ("strict", 5.0)
    assert affinity.sticks("/v1/chat/completions", "m") == ("soft", 7.0)
    assert affinity.sticks("/v1/chat/completions", "mm") == ("soft", 60.0)


async def test_who_holds_something_is_asked_for_twice_and_a_store_that_fails_is_told(
    store: Store, affinity: Affinity
) -> None:
    asked = asyncio.create_task(affinity.holder("held-1"))
    await eventually(lambda: store.gets == 1, 5.0)
    store.values["held-1"] = HERE  # its write was still under way
    assert await asked == HERE
    assert await affinity.holder("held-2") is None
    store.fails = True
    with pytest.raises(StoreUnavailable):
        await affinity.holder("held-3")
    assert await affinity.holder("held-1") == HERE
