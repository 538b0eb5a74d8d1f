"""Instances whose agent died: what is kept, and what is let go of."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from common.membership import Membership
from common.membership.orphans import Orphans
from common.store.etcd import EtcdMembershipStore
from common.types import Peer
from tests.common.membership.test_membership import A, Told, instance, running, settled
from tests.servers import EtcdServer

I1, I2 = {"i1": b"one"}, {"i2": b"two"}
KEY = "/headwater/regions/eu/clusters/a/instances/"


def adopt(
    orphans: Orphans, values: Mapping[str, bytes], now: float = 0.0, removed: Mapping[str, bytes] | None = None
) -> set[str]:
    return set(orphans.adopt(values, removed or {}, now, lambda key, value: value == b"draining"))


def test_what_runs_out_stays_until_it_is_silent_or_back_or_forgotten() -> None:
    orphans = Orphans(most_s=100.0)
    assert adopt(orphans, I1 | I2) == {"i1", "i2"}
    assert adopt(orphans, I2, 1.0) == {"i1", "i2"}
    assert orphans.kept == {"i1"}
    assert adopt(orphans, I1 | I2, 2.0) == {"i1", "i2"}
    assert not orphans.kept  # registered again
    assert adopt(orphans, I2, 3.0) == {"i1", "i2"}
    orphans.silent("i1")
    orphans.silent("i2")  # it is not looked at: it is registered
    assert adopt(orphans, I2, 4.0) == {"i2"}
    assert adopt(orphans, {}, 5.0) == {"i2"}
    assert adopt(orphans, {}, 105.0) == {"i2"}
    assert adopt(orphans, {}, 105.1) == set()


def test_what_leaves_in_order_goes_at_once() -> None:
    orphans = Orphans()
    adopt(orphans, {"i1": b"draining"} | I2)
    assert adopt(orphans, I2) == {"i2"}
    assert adopt(orphans, {}, removed={"i2": b"draining"}) == set()  # both words came together


@pytest.fixture
async def told() -> Told:
    return Told()


async def test_with_a_real_etcd_a_dead_agent_takes_nothing_away_and_one_that_leaves_takes_its_own(told: Told) -> None:
    async with EtcdServer() as etcd:
        stores = [EtcdMembershipStore([etcd.url], timeout_s=1.0, check_interval_s=0.2) for _ in range(4)]
        watching, dying, leaving, balancer = stores
        async with running(Membership(watching, on_change=told, adopts=True)) as gateway:
            dead, left = Membership(dying, ttl_s=1.0), Membership(leaving, ttl_s=1.0)
            await dead.register_instance(A, instance("i1"))
            for id_ in ("i2", "i3"):
                await left.register_instance(A, instance(id_))
            tier = Membership(balancer, ttl_s=1.0)
            await tier.register_balancer(A, Peer("b1", "http://b1:8080"))
            await settled(lambda: told.ids(A) == ["i1", "i2", "i3"] and gateway.balancers(A), 10.0)
            await dying.close()  # as a kill would: nothing is revoked, nothing renewed
            await balancer.close()
            await settled(lambda: set(gateway.orphans) == {f"{KEY}i1"}, 10.0)
            assert told.ids(A) == ["i1", "i2", "i3"]
            assert gateway.tree["orphans"] == [f"{KEY}i1"]
            await settled(lambda: not gateway.balancers(A), 10.0)  # balancers are found out about by other means
            await left.deregister(A, "i2")
            await settled(lambda: told.ids(A) == ["i1", "i3"], 10.0)
            await left.close()
            await settled(lambda: told.ids(A) == ["i1"], 10.0)
            gateway.silent(f"{KEY}i1")
            await settled(lambda: told.ids(A) == [], 10.0)
        for store in (watching, leaving):
            await store.close()
