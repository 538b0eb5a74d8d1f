"""What every affinity store must do; run against the one in memory and against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.store.base import AffinityStore, Placement
from common.store.memory import MemoryAffinityStore
from common.store.redis import RedisAffinityStore
from tests.servers import RedisServer


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[AffinityStore]:
    if request.param == "memory":
        yield MemoryAffinityStore()
        return
    async with RedisServer() as server:
        redis = RedisAffinityStore(server.url, budget_ms=5000)
        yield redis
        await redis.close()


async def test_what_was_put_is_found(store: AffinityStore) -> None:
    await store.ping(5.0)
    assert await store.get("s1") is None
    placement = Placement(("eu", "a", "i-1.x"), 1234)
    await store.put("s1", placement, 60.0)
    assert await store.get("s1") == placement
    assert await store.get("s2") is None


async def test_the_last_put_counts(store: AffinityStore) -> None:
    await store.put("s1", Placement(("eu", "a", "i1"), 1), 60.0)
    await store.put("s1", Placement(("us", "b", "i2"), 2), 60.0)
    assert await store.get("s1") == Placement(("us", "b", "i2"), 2)


async def test_placements_expire(store: AffinityStore) -> None:
    await store.put("s1", Placement(("eu", "a", "i1"), 1), 0.5)
    await store.put("s2", Placement(("eu", "a", "i1"), 1), 60.0)
    await store.put("s3", Placement(("eu", "a", "i1"), 1), 0.5)
    await store.put("s3", Placement(("eu", "a", "i1"), 1), 60.0)
    assert await store.get("s1") is not None
    await asyncio.sleep(0.55)
    assert await store.get("s1") is None
    assert await store.get("s2") is not None
    assert await store.get("s3") is not None


async def test_many_at_once(store: AffinityStore) -> None:
    placements = {f"s{n}": Placement(("eu", "a", f"i{n}"), n) for n in range(300)}
    await asyncio.gather(*(store.put(s, p, 60.0) for s, p in placements.items()))
    found = await asyncio.gather(*(store.get(s) for s in placements))
    assert dict(zip(placements, found, strict=True)) == placements


async def test_what_is_shared_is_seen_until_it_expires(store: AffinityStore) -> None:
    await store.share("headwater:x:1", b"one", 0.5)
    await store.share("headwater:x:2", b"\x00two", 60.0)
    assert list(await store.shared(["headwater:x:1", "headwater:x:2", "headwater:x:3"])) == [b"one", b"\x00two", None]
    await asyncio.sleep(0.55)
    assert list(await store.shared(["headwater:x:1", "headwater:x:2"])) == [None, b"\x00two"]
