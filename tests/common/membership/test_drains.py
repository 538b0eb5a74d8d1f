"""Marks of operators: keys, values, and what they do to pools, on a store in memory and on a real etcd."""

from __future__ import annotations

import pytest

from common.errors import ConfigError, StoreUnavailable
from common.membership import Drain, Membership
from common.membership.drains import decode_drain, drain_path, encode_drain, key_of_drain
from common.store.etcd import EtcdMembershipStore
from common.store.memory import MemoryMembershipStore
from common.types import Endpoint, Path, Peer, Phase
from tests.common.membership.test_membership import Told, instance, running, settled
from tests.servers import EtcdServer

A, B = ("eu", "a"), ("eu", "b")


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("/headwater/global/drains/eu", ("eu",)),
        ("/headwater/regions/eu/drains/a", ("eu", "a")),
        ("/headwater/regions/eu/clusters/a/drains/i1", ("eu", "a", "i1")),
    ],
)
def test_keys_stand_beside_the_siblings_of_what_they_mark(key: str, path: Path) -> None:
    assert key_of_drain("/headwater", path) == key
    assert drain_path("/headwater", key) == path


@pytest.mark.parametrize("path", [(), ("a", "b", "c", "d"), ("e u",), ("eu", ""), ("eu", "../x")])
def test_what_is_no_place_cannot_be_drained(path: Path) -> None:
    with pytest.raises(ConfigError):
        key_of_drain("/headwater", path)


def test_other_keys_are_no_marks() -> None:
    assert drain_path("/headwater", "/headwater/regions/eu/balancers/r1") is None
    assert drain_path("/headwater", "/headwater/route_key") is None
    with pytest.raises(ValueError, match="a name in the key"):
        drain_path("/headwater", "/headwater/global/drains/e u")


def test_values_come_back_and_what_cannot_be_read_drains_all_the_same() -> None:
    drain = Drain(("eu",), "new GPUs", "anna", "2026-01-01T00:00:00Z")
    assert decode_drain(("eu",), encode_drain(drain)) == drain
    assert len(decode_drain(("eu",), encode_drain(Drain(("eu",), "x" * 9999))).reason) == 200
    for value in (b"", b"\xff", b"[]", b'{"schema":9}', b"true"):
        assert decode_drain(("eu",), value).path == ("eu",)


def phases(membership: Membership, path: Path) -> dict[str, Phase]:
    return {e.id: e.phase for e in membership.pool(path).endpoints}


async def test_what_is_marked_drains_and_nothing_else() -> None:
    store, told = MemoryMembershipStore(), Told()
    async with running(Membership(store, on_change=told)) as one, running(Membership(store)) as other:
        for path in (A, B):
            await one.register_balancer(path, Peer(f"{path[1]}1", f"http://{path[1]}1:8080"))
            for n in (1, 2):
                await one.register_instance(path, instance(f"{path[1]}-{n}"))
        await one.register_balancer(("us",), Peer("us1", "http://us1:8080"))
        await settled(lambda: len(told.ids(B)) == 2 and one.balancers(("us",)) and other.pool(B).endpoints)

        await other.drain(Drain((*A, "a-1"), by="anna"))
        await settled(lambda: phases(one, A) == {"a-1": Phase.DRAINING, "a-2": Phase.SERVING})
        assert phases(one, ("eu",)) == {"a": Phase.SERVING, "b": Phase.SERVING}
        await one.drain(Drain(A))
        await settled(lambda: phases(one, ("eu",)) == {"a": Phase.DRAINING, "b": Phase.SERVING})
        assert phases(one, A)["a-2"] is Phase.SERVING  # who has come so far is served
        assert phases(one, ())["eu"] is Phase.SERVING
        await one.drain(Drain(B))
        await settled(lambda: phases(one, ())["eu"] is Phase.DRAINING)  # nothing below it takes work
        await one.undrain(B)
        await one.drain(Drain(("us",), "moving"))
        await settled(lambda: phases(other, ()) == {"eu": Phase.SERVING, "us": Phase.DRAINING})
        assert [d.path for d in other.drains] == [A, (*A, "a-1"), ("us",)]
        assert [d.by for d in other.drains] == ["", "anna", ""]
        assert other.tree["drains"] == ["eu/a", "eu/a/a-1", "us"]

        for path in (A, (*A, "a-1"), ("us",), ("us",)):
            await one.undrain(path)
        await settled(lambda: not other.drains)
        assert phases(other, A) == {"a-1": Phase.SERVING, "a-2": Phase.SERVING}


async def test_a_mark_waits_for_what_it_names() -> None:
    store = MemoryMembershipStore()
    async with running(Membership(store)) as one:
        await one.drain(Drain((*A, "late")))
        await settled(lambda: one.drains)
        assert not one.pool(A).endpoints
        await one.register_instance(A, instance("late"))
        await settled(lambda: phases(one, A) == {"late": Phase.DRAINING})
        await one.register_instance(A, Endpoint("late", "http://late:8000", phase=Phase.LOADING))
        await settled(lambda: phases(one, A) == {"late": Phase.DRAINING})


async def test_without_the_store_nothing_is_promised() -> None:
    store = MemoryMembershipStore()
    async with running(Membership(store)) as one:
        store.available = False
        with pytest.raises(StoreUnavailable):
            await one.drain(Drain(("eu",)))


async def test_marks_outlive_every_process_and_an_etcd_that_lost_its_data() -> None:
    async with EtcdServer() as etcd:
        first = EtcdMembershipStore([etcd.url], check_interval_s=0.2)
        async with running(Membership(first)) as one:
            await one.register_instance(A, instance("i1"))
            await one.drain(Drain((*A, "i1"), "disk"))
            await settled(lambda: phases(one, A) == {"i1": Phase.DRAINING})
        await first.close()
        await etcd.restart()
        store = EtcdMembershipStore([etcd.url], check_interval_s=0.2)
        async with running(Membership(store, ttl_s=2.0)) as two:
            await two.register_instance(A, instance("i1"))
            await settled(lambda: phases(two, A) == {"i1": Phase.DRAINING}, 10.0)
            await etcd.restart(empty=True)

            async def put_back() -> bool:
                return "/headwater/regions/eu/clusters/a/drains/i1" in await etcd.keys("/headwater")

            await settled(put_back, 15.0)
            assert phases(two, A).get("i1", Phase.DRAINING) is Phase.DRAINING
            assert [d.reason for d in two.drains] == ["disk"]
        await store.close()
