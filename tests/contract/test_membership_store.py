"""What every membership store must do; run against the one in memory and against a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest

from common.errors import StoreUnavailable
from common.store.base import MembershipStore, Snapshot
from common.store.etcd import EtcdMembershipStore
from common.store.memory import MemoryMembershipStore
from tests.servers import EtcdServer, eventually

TTL_S = 1.0
LATE_S = 0.4  # what a busy machine may add to a time
P = "/headwater/regions/eu/balancers/"


@dataclass
class World:
    """A store as two processes see it, and what an operator does to it."""

    one: MembershipStore
    two: MembershipStore
    etcd: EtcdServer | None = None

    async def delete_by_hand(self, key: str) -> None:
        if self.etcd is not None:
            await self.etcd.ctl("del", key)
        else:
            await self.one.delete(key)

    async def outage(self) -> None:
        if self.etcd is not None:
            self.etcd.kill()
        else:
            self.one.available = False  # type: ignore[attr-defined]

    async def recovery(self) -> None:
        if self.etcd is not None:
            await self.etcd.start()
        else:
            self.one.available = True  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "etcd"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        store = MemoryMembershipStore()
        yield World(store, store)
        await store.close()
        return
    async with EtcdServer() as server:
        stores = [EtcdMembershipStore([server.url], timeout_s=1.0, check_interval_s=0.2) for _ in range(2)]
        yield World(stores[0], stores[1], server)
        for store in stores:
            await store.close()


class Watched:
    """The snapshots of a watch as they come."""

    def __init__(self) -> None:
        self.all: list[Snapshot] = []

    @property
    def last(self) -> Snapshot:
        return self.all[-1]

    async def follow(self, snapshots: AsyncGenerator[Snapshot, None]) -> None:
        async with aclosing(snapshots):
            async for snapshot in snapshots:
                self.all.append(snapshot)

    async def until(self, values: dict[str, bytes], *, stale: bool = False, within_s: float = 5.0) -> float:
        return await eventually(
            lambda: self.all and dict(self.last.values) == values and self.last.stale is stale, within_s, step_s=0.005
        )


@asynccontextmanager
async def watching(store: MembershipStore, prefix: str = "/headwater/") -> AsyncIterator[Watched]:
    watched = Watched()
    task = asyncio.create_task(watched.follow(store.watch(prefix)))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_key_lives_as_long_as_its_lease(world: World) -> None:
    lease = await world.one.lease(TTL_S)
    await lease.put(P + "a", b"1")
    assert await world.two.get(P + "a") == b"1"
    await asyncio.sleep(1.5 * TTL_S if world.etcd else 0.0)
    assert await world.two.get(P + "a") == b"1"
    await lease.close()
    assert await world.two.get(P + "a") is None
    await lease.close()


async def test_a_put_replaces_and_a_delete_removes_one_key(world: World) -> None:
    lease = await world.one.lease(TTL_S)
    await lease.put(P + "a", b"1")
    await lease.put(P + "b", b"1")
    await lease.put(P + "a", b"2")
    assert await world.two.get(P + "a") == b"2"
    await lease.delete(P + "a")
    assert await world.two.get(P + "a") is None
    assert await world.two.get(P + "b") == b"1"
    await lease.delete(P + "never")
    await lease.put(P + "a", b"3")
    assert await world.two.get(P + "a") == b"3"
    await lease.close()


async def test_a_key_deleted_by_hand_comes_back(world: World) -> None:
    lease = await world.one.lease(TTL_S)
    await lease.put(P + "a", b"1")
    await asyncio.sleep(0.1)
    await world.delete_by_hand(P + "a")

    async def back() -> bool:
        return await world.two.get(P + "a") == b"1"

    await eventually(back, TTL_S / 2 + LATE_S)
    await lease.close()


async def test_a_leaving_process_spares_its_successors_key(world: World) -> None:
    old = await world.one.lease(TTL_S)
    await old.put(P + "a", b"old")
    new = await world.two.lease(TTL_S)
    await new.put(P + "a", b"new")
    await old.put(P + "a", b"old, draining")
    assert await world.one.get(P + "a") == b"new"
    await old.delete(P + "a")
    assert await world.one.get(P + "a") == b"new"
    await old.close()
    assert await world.one.get(P + "a") == b"new"
    await new.close()
    assert await world.one.get(P + "a") is None


async def test_who_was_superseded_returns_when_the_successor_leaves(world: World) -> None:
    old, new = await world.one.lease(TTL_S), await world.two.lease(TTL_S)
    await old.put(P + "a", b"old")
    await new.put(P + "a", b"new")
    await asyncio.sleep(TTL_S / 2)
    assert await world.one.get(P + "a") == b"new"
    await new.close()

    async def back() -> bool:
        return await world.one.get(P + "a") == b"old"

    await eventually(back, TTL_S / 2 + LATE_S)
    await old.close()


async def test_put_if_absent_writes_once(world: World) -> None:
    assert await world.one.put_if_absent("/headwater/secret", b"1") == b"1"
    assert await world.two.put_if_absent("/headwater/secret", b"2") == b"1"
    assert await world.two.get("/headwater/secret") == b"1"
    both = await asyncio.gather(
        *(s.put_if_absent("/headwater/x", v) for s, v in ((world.one, b"1"), (world.two, b"2")))
    )
    assert both[0] == both[1]


async def test_what_is_under_no_lease_stays_until_it_is_deleted(world: World) -> None:
    key = "/headwater/global/drains/eu"
    await world.one.put(key, b"1")
    await world.one.put(key, b"2")
    assert await world.two.get(key) == b"2"
    async with watching(world.two) as watched:
        await watched.until({key: b"2"})
        await world.two.delete(key)
        await world.two.delete(key)
        await watched.until({})


async def test_without_the_store_nothing_is_written_and_that_is_said(world: World) -> None:
    await world.outage()
    with pytest.raises(StoreUnavailable):
        await world.one.put("/headwater/x", b"1")
    with pytest.raises(StoreUnavailable):
        await world.one.delete("/headwater/x")


async def test_a_watch_begins_with_what_is_there_and_follows(world: World) -> None:
    lease = await world.one.lease(TTL_S)
    await lease.put(P + "a", b"1")
    await lease.put("/other/b", b"1")
    async with watching(world.two) as watched:
        await watched.until({P + "a": b"1"}, within_s=0.5 + LATE_S)
        await lease.put(P + "b", b"2")
        await watched.until({P + "a": b"1", P + "b": b"2"})
        await lease.put(P + "a", b"3")
        await watched.until({P + "a": b"3", P + "b": b"2"})
        await lease.delete(P + "b")
        await watched.until({P + "a": b"3"})
        await lease.close()
        assert await watched.until({}) < 0.1 + LATE_S
        revisions = [s.revision for s in watched.all]
        assert revisions == sorted(revisions)
        assert not any(s.stale for s in watched.all)


async def test_a_watch_of_nothing_says_so_at_once(world: World) -> None:
    async with watching(world.one) as watched:
        await watched.until({}, within_s=0.5 + LATE_S)


async def test_snapshots_are_not_changed_afterwards(world: World) -> None:
    lease = await world.one.lease(TTL_S)
    async with watching(world.one) as watched:
        await watched.until({})
        first = watched.all[0]
        await lease.put(P + "a", b"1")
        await watched.until({P + "a": b"1"})
        assert dict(first.values) == {}
    await lease.close()


async def test_an_outage_leaves_the_last_state_marked_stale(world: World) -> None:
    lease = await world.one.lease(3.0)
    await lease.put(P + "a", b"1")
    async with watching(world.two) as watched:
        await watched.until({P + "a": b"1"})
        await world.outage()
        await watched.until({P + "a": b"1"}, stale=True)
        with pytest.raises(StoreUnavailable):
            await world.two.get(P + "a")
        with pytest.raises(StoreUnavailable):
            await world.two.put_if_absent("/x", b"1")
        with pytest.raises(StoreUnavailable):
            await world.two.ping(0.1)
        put = asyncio.create_task(lease.put(P + "b", b"2"))
        await asyncio.wait_for(put, 1.0 + LATE_S)  # raises nothing, though it cannot be written yet
        await asyncio.sleep(0.2)
        assert sum(s.stale for s in watched.all) == 1
        await world.recovery()
        await world.two.ping(10.0)
        await watched.until({P + "a": b"1", P + "b": b"2"}, within_s=10.0)
        await lease.close()


async def test_closing_the_store_ends_its_watches(world: World) -> None:
    watched = Watched()
    task = asyncio.create_task(watched.follow(world.one.watch("/headwater/")))
    await watched.until({})
    await world.one.close()
    await asyncio.wait_for(task, 1.0)
    with pytest.raises(StoreUnavailable):
        await world.one.get("/x")


async def test_what_is_under_no_lease_is_written_replaced_and_deleted(world: World) -> None:
    async with watching(world.two) as watched:
        await watched.until({})
        await world.one.put(P + "k", b"1")
        assert await world.two.get(P + "k") == b"1"
        await watched.until({P + "k": b"1"})
        await world.two.put(P + "k", b"2")
        await watched.until({P + "k": b"2"})
        assert await world.one.delete(P + "k")
        await watched.until({})
        assert not await world.one.delete(P + "k")
        assert await world.two.get(P + "k") is None


async def test_nothing_is_written_or_deleted_while_the_store_is_gone(world: World) -> None:
    await world.one.put(P + "k", b"1")
    await world.outage()
    with pytest.raises(StoreUnavailable):
        await world.one.put(P + "k", b"2")
    with pytest.raises(StoreUnavailable):
        await world.one.delete(P + "k")
    await world.recovery()
    await world.one.ping(20.0)
    assert await world.one.get(P + "k") == b"1"
