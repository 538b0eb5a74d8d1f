"""The admin routes that drain, on a store in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import httpx
import pytest
from fastapi import FastAPI

from common.admin.peers import Peers
from common.balancing import Balancing
from common.drain_api import drain_router
from common.membership import Membership
from common.policy.candidate import Limits
from common.policy.stages import Route, predicted_completion
from common.store.memory import MemoryMembershipStore
from common.types import Endpoint, InferenceRequest, Outcome, Path, Phase
from tests.common.membership.test_membership import instance, running, settled

A: Path = ("eu", "a")
URL = "/admin/v1/drains"
LONG = InferenceRequest("0" * 32, "m", input_tokens=400, output_tokens=1000.0)


class World:
    """A tier's balancing and membership, with the admin routes in front of them."""

    def __init__(self) -> None:
        self.store = MemoryMembershipStore()
        self.balancing = Balancing("g1", lambda path: not path, lambda _: predicted_completion(), Limits(), Random(1))
        self.membership = Membership(self.store, on_change=self.balancing.update)
        app = FastAPI()
        app.include_router(drain_router(self.membership, self.balancing, Peers(frozenset)))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")

    def endpoint(self, *path: str) -> Endpoint:
        return next(e for e in self.membership.pool(path[:-1]).endpoints if e.id == path[-1])

    async def post(self, **body: str) -> httpx.Response:
        return await self.client.post(URL, json=body)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    found = World()
    async with running(found.membership), found.client:
        for path, id_ in ((A, "i1"), (A, "i2"), (("eu", "b"), "i1"), (("us", "b"), "i9")):
            await found.membership.register_instance(path, instance(id_))
        await settled(lambda: ("us", "b") in found.balancing.balancers)
        yield found


async def test_a_place_is_drained_listed_and_given_back(world: World) -> None:
    route = world.balancing.route(LONG, A, frozenset())
    assert isinstance(route, Route)
    id_ = "/".join(route.target)
    said = (await world.post(id=id_, reason="new driver", by="anna")).json()
    assert (said["path"], said["reason"], said["by"], said["in_flight"]) == (id_, "new driver", "anna", 1)
    predicted_s = route.hops[-1].pick.predicted_total_s
    assert predicted_s is not None
    assert 0.5 * predicted_s < said["remaining_s"] <= predicted_s
    await settled(lambda: world.endpoint(*route.target).phase is Phase.DRAINING)
    for _ in range(4):
        other = world.balancing.route(InferenceRequest("0" * 32, "m"), A, frozenset())
        assert isinstance(other, Route)
        assert other.target != route.target
        world.balancing.release(other, Outcome.SUCCESS)
    world.balancing.release(route, Outcome.SUCCESS)
    (listed,) = (await world.client.get(URL)).json()
    assert listed == said | {"in_flight": 0, "remaining_s": 0.0}
    assert listed["since"].endswith("+00:00")
    assert (await world.client.delete(f"{URL}/{id_}")).status_code == 200
    await settled(lambda: world.endpoint(*route.target).phase is Phase.SERVING)
    assert (await world.client.get(URL, params={"everywhere": True})).json() == []


async def test_a_name_is_enough_where_one_place_carries_it(world: World) -> None:
    assert (await world.post(id="us")).json()["path"] == "us"
    assert (await world.post(id="i9")).json()["path"] == "us/b/i9"
    twice = await world.post(id="i1")
    assert twice.status_code == 409
    assert twice.json()["detail"] == "2 places are called i1: eu/a/i1, eu/b/i1; give the path"
    assert (await world.client.delete(f"{URL}/i9")).json()["path"] == "us/b/i9"


@pytest.mark.parametrize("id_", ["nowhere", "eu/nowhere", "eu/a/i1/x", "../..", "/"])
async def test_what_is_nowhere_is_not_drained(world: World, id_: str) -> None:
    assert (await world.post(id=id_)).status_code == 404
    assert not world.membership.drains


async def test_what_is_not_drained_cannot_be_given_back(world: World) -> None:
    reply = await world.client.delete(f"{URL}/eu/a")
    assert (reply.status_code, reply.json()["detail"]) == (404, "eu/a is not drained")


async def test_without_the_store_it_is_said_that_nothing_happened(world: World) -> None:
    world.store.available = False
    assert (await world.post(id="eu")).status_code == 503


async def test_what_left_can_still_be_given_back(world: World) -> None:
    await world.post(id="us/b/i9")
    await settled(lambda: world.membership.drains)
    await world.membership.deregister(("us", "b"), "i9")
    await settled(lambda: ("us", "b") not in world.membership.pools)
    (mark,) = (await world.client.get(URL)).json()
    assert mark["exists"] is False
    assert (await world.client.delete(f"{URL}/us/b/i9")).status_code == 200
