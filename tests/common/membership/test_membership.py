"""A process and its pools, on stores in memory and on a real etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from common.errors import ConfigError
from common.membership import Membership, Source
from common.store.base import Snapshot
from common.store.etcd import EtcdMembershipStore
from common.store.memory import MemoryMembershipStore
from common.types import Endpoint, Path, Peer, Phase, Pool
from tests.servers import EtcdServer, eventually

A: Path = ("eu", "a")


def instance(id_: str, **kwargs: Any) -> Endpoint:
    return Endpoint(id_, f"http://{id_}:8000", **kwargs)


class Told:
    """What on_change was called with."""

    def __init__(self) -> None:
        self.all: list[Mapping[Path, Pool]] = []

    def __call__(self, pools: Mapping[Path, Pool]) -> None:
        self.all.append(pools)

    def ids(self, path: Path) -> list[str]:
        return [e.id for e in self.all[-1][path].endpoints] if self.all and path in self.all[-1] else []


@asynccontextmanager
async def running(membership: Membership) -> AsyncIterator[Membership]:
    task = asyncio.create_task(membership.run())
    try:
        yield membership
    finally:
        await membership.close()
        task.cancel()
        await asyncio.wait({task})


async def settled(condition: Any, within_s: float = 3.0) -> float:
    return await eventually(condition, within_s, step_s=0.005)


async def test_processes_see_each_other() -> None:
    store, told = MemoryMembershipStore(), Told()
    async with running(Membership(store, on_change=told)) as gateway, running(Membership(store)) as agent:
        await settled(lambda: told.all)
        assert told.all[0].keys() == {()}
        assert told.ids(()) == []
        await gateway.register_balancer(A, Peer("c1", "http://c1:8080", "c1:9000"))
        await agent.register_instance(A, instance("i2"))
        await agent.register_instance(A, instance("i1", gpu="h100", models=frozenset({"x"})))
        await settled(lambda: told.ids(A) == ["i1", "i2"])
        assert told.ids(()) == ["eu"]
        assert gateway.pools == told.all[-1]
        assert gateway.pool(A) is told.all[-1][A]
        assert gateway.balancers(A) == (Peer("c1", "http://c1:8080", "c1:9000"),)
        assert gateway.balancers(()) == ()
        assert gateway.pool(("nowhere",)) == Pool(("nowhere",))
        await agent.deregister(A, "i2")
        await agent.deregister(A, "never")
        await settled(lambda: told.ids(A) == ["i1"])
    assert await store.get("/headwater/regions/eu/clusters/a/instances/i1") is None


async def test_phases() -> None:
    store, told = MemoryMembershipStore(), Told()
    async with running(Membership(store, on_change=told)) as one:
        await one.register_balancer(A, Peer("c1", "http://c1:8080"))
        await one.register_instance(A, instance("i1", phase=Phase.LOADING))
        await one.register_instance(A, instance("i2"))
        await one.set_phase(Phase.SERVING, "i1")
        await settled(lambda: told.ids(A) == ["i1", "i2"] and one.pool(A).endpoints[0].phase is Phase.SERVING)
        await one.set_phase(Phase.DRAINING)
        await settled(lambda: {e.phase for e in one.pool(A).endpoints} == {Phase.DRAINING})
        assert one.balancers(A)[0].phase is Phase.DRAINING


async def test_a_bad_record_costs_itself_only_and_one_log_line() -> None:
    store, told = MemoryMembershipStore(), Told()
    with structlog.testing.capture_logs() as lines:
        async with running(Membership(store, on_change=told)) as one:
            await one.register_instance(A, instance("i1"))
            prefix = "/headwater/regions/eu/clusters/a/instances/"
            await store.put_if_absent(prefix + "i2", b"not json")
            await store.put_if_absent(prefix + "i3", b'{"schema":2,"id":"i3","url":"http://i3:1"}')
            await store.put_if_absent(prefix + "i 4", b"{}")
            await store.put_if_absent("/headwater/route_key", b"secret")
            await store.put_if_absent("/headwater/later/thing", b"{}")
            await one.register_instance(A, instance("i5"))
            await settled(lambda: told.ids(A) == ["i1", "i5"])
            await one.register_instance(A, instance("i6"))
            await settled(lambda: told.ids(A) == ["i1", "i5", "i6"])
    assert sorted(line["key"][-3:] for line in lines) == ["/i2", "/i3", "i 4"]
    assert "secret" not in str(lines)


async def test_bad_registrations_are_refused() -> None:
    one = Membership(MemoryMembershipStore())
    for path, endpoint in ((A, instance("a/b")), (("eu",), instance("i1")), (A, Endpoint("i1", "nowhere"))):
        with pytest.raises(ConfigError):
            await one.register_instance(path, endpoint)
    with pytest.raises(ConfigError):
        await one.register_balancer(("e u",), Peer("b", "http://b:1"))
    with pytest.raises(ConfigError):
        await Membership([Source(MemoryMembershipStore(), "/headwater/regions/us/")]).register_instance(
            A, instance("i")
        )
    assert one.tree["regions"] == {}


async def test_unchanged_pools_keep_their_objects_and_nobody_is_told_twice() -> None:
    store, told = MemoryMembershipStore(), Told()
    async with running(Membership(store, on_change=told)) as one:
        await one.register_instance(A, instance("i1"))
        await one.register_instance(("us", "b"), instance("i2"))
        await settled(lambda: told.ids(("us", "b")) == ["i2"])
        before, calls = told.all[-1], len(told.all)
        await store.put_if_absent("/headwater/route_key", b"x")
        await asyncio.sleep(0.1)
        assert len(told.all) == calls
        await one.register_instance(A, instance("i3"))
        await settled(lambda: told.ids(A) == ["i1", "i3"])
        assert told.all[-1][("us", "b")] is before[("us", "b")]


async def test_an_outage_marks_pools_stale_and_a_burst_after_it_is_doubted() -> None:
    store, told = MemoryMembershipStore(), Told()
    dead: set[str] = set()
    gateway = Membership(store, on_change=told, ttl_s=1.0, answers=lambda member: member.id not in dead)
    async with running(gateway):
        agents = [Membership(store) for _ in range(6)]
        for n, agent in enumerate(agents):
            await agent.register_instance(A, instance(f"i{n}"))
        await settled(lambda: len(told.ids(A)) == 6)
        store.available = False
        await settled(lambda: told.all[-1][A].stale)
        assert len(told.ids(A)) == 6
        for agent in agents:
            await agent.close()  # all leases expire while etcd is away
        store.available = True
        await settled(lambda: not told.all[-1][A].stale)
        assert len(told.ids(A)) == 6
        assert len(gateway.tree["unconfirmed"]) == 6
        await Membership(store).register_instance(A, instance("i0", boot="2"))
        await settled(lambda: len(gateway.tree["unconfirmed"]) == 5)
        dead.add("i1")
        await settled(lambda: told.ids(A) == ["i0", "i2", "i3", "i4", "i5"], 1.0)
        await settled(lambda: told.ids(A) == ["i0"], 2.0)
        assert gateway.tree["unconfirmed"] == []


async def test_a_removal_takes_effect_at_once() -> None:
    store, told = MemoryMembershipStore(), Told()
    async with running(Membership(store, on_change=told)):
        agents = [Membership(store) for _ in range(4)]
        for n, agent in enumerate(agents):
            await agent.register_instance(A, instance(f"i{n}"))
        await settled(lambda: len(told.ids(A)) == 4)
        await asyncio.gather(*(agent.close() for agent in agents[1:]))
        await settled(lambda: told.ids(A) == ["i0"], 0.5)


async def test_a_region_may_have_a_store_of_its_own() -> None:
    world, eu = MemoryMembershipStore(), MemoryMembershipStore()
    told = Told()
    sources = [Source(world), Source(eu, "/headwater/regions/eu/")]
    async with running(Membership(sources, on_change=told)) as both, running(Membership(world)) as far:
        await both.register_balancer(("eu",), Peer("r1", "http://r1:8080"))
        await both.register_balancer((), Peer("g1", "http://g1:8080"))
        agent = Membership([Source(eu, "/headwater/regions/eu/")])
        await agent.register_instance(A, instance("i1"))
        await settled(lambda: told.ids(A) == ["i1"] and both.balancers(("eu",)) and both.balancers(()))
        await settled(lambda: far.balancers(("eu",)))
        assert far.pool(A).endpoints == ()
        assert await eu.get("/headwater/regions/eu/balancers/r1") is not None
        assert await eu.get("/headwater/global/balancers/g1") is None
        eu.available = False
        await settled(lambda: both.pool(A).stale)
        assert both.pool(()).stale
        assert told.ids(A) == ["i1"]
        assert not far.pool(("eu",)).stale


async def test_before_anything_is_heard_a_pool_is_stale() -> None:
    assert Membership(MemoryMembershipStore()).pool(A).stale


async def test_the_tree_is_for_people() -> None:
    async with running(Membership(MemoryMembershipStore())) as one:
        await one.register_balancer((), Peer("g1", "http://g1:8080"))
        await one.register_instance(A, instance("i1", gpu="l4", models=frozenset({"x"})))
        await settled(lambda: one.balancers(()) and one.pool(A).endpoints)
        tree = one.tree
    assert tree["balancers"] == {"g1": {"url": "http://g1:8080", "load": "", "admin": "", "phase": "serving"}}
    assert tree["regions"]["eu"]["clusters"]["a"]["instances"]["i1"]["models"] == ["x"]
    assert (tree["stale"], tree["unconfirmed"]) == (False, [])


async def test_a_change_among_a_thousand_instances_is_cheap() -> None:
    store = MemoryMembershipStore()
    one = Membership(store)
    for n in range(1000):
        await one.register_instance((f"r{n % 4}", f"c{n % 20}"), instance(f"i{n}", models=frozenset({"x", "y"})))
    async with running(one):
        await settled(lambda: sum(len(p.endpoints) for path, p in one.pools.items() if len(path) == 2) == 1000)
        (source,) = one._sources
        key = "/headwater/regions/r0/clusters/c0/instances/i0"
        best = 1.0
        for n in range(10):
            value = source.snapshot.values[key].replace(b'"weight":', b'"weight":1')
            source.snapshot = Snapshot({**source.snapshot.values, key: value}, n)
            begin = time.perf_counter()
            one._refresh()
            best = min(best, time.perf_counter() - begin)
        assert best < 0.02


async def test_with_a_real_etcd_paused_and_emptied() -> None:
    """C26: what is known stays in use over a pause and a loss of all data, and all are registered again soon after."""
    told = Told()
    stores: list[EtcdMembershipStore] = []

    def store(etcd: EtcdServer) -> EtcdMembershipStore:
        stores.append(EtcdMembershipStore([etcd.url], timeout_s=0.5, check_interval_s=0.2))
        return stores[-1]

    async with EtcdServer() as etcd, running(Membership(store(etcd), on_change=told, ttl_s=5.0)):
        agents = [Membership(store(etcd), ttl_s=1.0) for _ in range(6)]
        for n, agent in enumerate(agents):
            await agent.register_instance(A, instance(f"i{n}"))
        await settled(lambda: len(told.ids(A)) == 6)
        first = len(told.all)
        etcd.pause()
        await settled(lambda: told.all[-1][A].stale, 5.0)
        await asyncio.sleep(1.2)
        etcd.resume()
        await settled(lambda: not told.all[-1][A].stale, 10.0)
        await settled(lambda: _all_there(etcd), 10.0)
        await etcd.restart(empty=True)
        await settled(lambda: _all_there(etcd), 10.0)
        await settled(lambda: not told.all[-1][A].stale, 10.0)
        assert {len(pools[A].endpoints) for pools in told.all[first:]} == {6}
        await asyncio.gather(*(agent.close() for agent in agents))
        for s in stores[1:]:
            await s.close()
    await stores[0].close()


async def _all_there(etcd: EtcdServer) -> bool:
    return len(await etcd.keys("/headwater/regions/eu/clusters/a/instances/")) == 6
