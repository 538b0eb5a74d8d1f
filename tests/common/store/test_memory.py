"""What the stores in memory do beyond the contract: the given clock, abandoned leases, bounds."""

from __future__ import annotations

from common.store.base import Placement
from common.store.memory import MemoryAffinityStore, MemoryMembershipStore


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_an_abandoned_lease_expires_by_the_given_clock() -> None:
    clock = Clock()
    store = MemoryMembershipStore(clock)
    lease, other = await store.lease(5.0), await store.lease(5.0)
    await lease.put("/a", b"1")
    await other.put("/b", b"1")
    lease.abandon()
    clock.now += 4.9
    assert await store.get("/a") == b"1"
    snapshots = store.watch("/")
    assert set((await anext(snapshots)).values) == {"/a", "/b"}
    clock.now += 0.2
    assert set((await anext(snapshots)).values) == {"/b"}
    assert await store.get("/a") is None
    await snapshots.aclose()


async def test_what_was_given_up_during_an_outage_is_gone_after_it() -> None:
    store = MemoryMembershipStore()
    lease = await store.lease(5.0)
    await lease.put("/a", b"1")
    await lease.put("/b", b"1")
    store.available = False
    await lease.delete("/a")
    await lease.put("/b", b"2")
    store.available = True
    assert await store.get("/a") is None
    assert await store.get("/b") == b"2"


async def test_placements_expire_by_the_given_clock() -> None:
    clock = Clock()
    store = MemoryAffinityStore(clock)
    await store.put("s", Placement(("r", "c", "i"), 1), 10.0)
    clock.now += 9.9
    assert await store.get("s") is not None
    clock.now += 0.2
    assert await store.get("s") is None


async def test_placements_are_bounded() -> None:
    store = MemoryAffinityStore(max_sessions=2)
    for session in ("a", "b", "a", "c"):
        await store.put(session, Placement(("r", "c", "i"), 1), 10.0)
    assert await store.get("b") is None
    assert await store.get("a") is not None
    assert await store.get("c") is not None
