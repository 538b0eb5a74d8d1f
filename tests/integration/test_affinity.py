"""Sessions over several balancers that share a real Redis, and what one server alone holds in memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest

from common.membership import Membership
from common.store.memory import MemoryMembershipStore
from common.tier import TierProcess
from common.types import Endpoint, Phase
from tests.fake_engine import MODEL, FakeEngine, Script, Seen
from tests.integration.clients import Raw, Response, ask, chat, get, post
from tests.integration.system import CLUSTER, _settings
from tests.servers import RedisServer, eventually

REPLICAS = 4
ENGINES = ("a", "b", "c", "d")
LONG = "What was said before, again and again. " * 400  # some 4,000 tokens: leaving costs tenths of a second
KNOWN_S = 20.0
BUSY = 30  # long prompts that wait on one server: seconds of reading before a turn of the session


class World:
    """Balancers that know nothing of each other but what etcd and Redis would tell them, before the same servers."""

    def __init__(self, store: MemoryMembershipStore, engines: dict[str, FakeEngine], redis: RedisServer) -> None:
        self.store = store
        self.registry = Membership(store)
        self.engines = engines
        self.redis = redis
        self.tiers: list[TierProcess] = []

    def url(self, replica: int) -> str:
        return f"http://127.0.0.1:{self.tiers[replica].port}"

    async def add(self, **settings: Any) -> None:
        redis = {"url": self.redis.url, "budget_ms": 500}  # the default of 10 is for machines that are not busy
        name = f"replica{len(self.tiers)}"
        config = _settings((), {"redis": redis, "id": name, **settings})
        tier = TierProcess(config, (), serves=lambda path: True, store=self.store)
        await tier.start()
        self.tiers.append(tier)
        await self.known(tier, len(self.engines))

    async def known(self, tier: TierProcess, servers: int) -> None:
        """Wait until a balancer knows of so many servers."""
        await eventually(lambda: CLUSTER in tier.pools and len(tier.pools[CLUSTER].endpoints) == servers, KNOWN_S)

    async def turn(self, replica: int, session: str) -> str:
        """Which server a chat of a session came to."""
        text = f"{session}: {LONG}"  # no two sessions have the beginning of a prompt in common
        reply = await ask(self.url(replica), "/v1/chat/completions", chat(MODEL, text=text), f"x-session-id: {session}")
        assert reply.status == 200, reply
        return str(reply.header("x-headwater-served-by")).rpartition("/")[2]

    async def written(self) -> None:
        """Wait until no balancer has a placement to write."""
        await eventually(lambda: not any(t.serving.affinity._writes for t in self.tiers), KNOWN_S)


def answers(engine: FakeEngine) -> None:
    """Have a server keep responses in memory, as vLLM does."""
    kept: set[str] = set()

    def choose(seen: Seen) -> Script:
        if seen.target.startswith(("/v1/responses/", "/v1/conversations/")):
            known = seen.target.split("/")[3] in kept
            return Script.whole(engine.name) if known else Script.error(404, "no such thing here")
        if seen.target in ("/v1/responses", "/v1/conversations"):
            before = json.loads(seen.body or b"{}").get("previous_response_id")
            if before and before not in kept:
                return Script.error(404, "previous response not found")
            id_ = f"{'resp' if 'resp' in seen.target else 'conv'}_{engine.name}{len(kept)}"
            kept.add(id_)
            if b'"stream":true' in seen.body:
                begun = b'event: response.created\ndata: {"type":"response.created","response":{"id":"%b"}}\n\n'
                return Script.stream("x", gap_s=0.01).but(chunks=(begun % id_.encode(), b"data: [DONE]\n\n"))
            return Script(chunks=(json.dumps({"id": id_, "object": "response"}).encode(),))
        return Script.whole(engine.name)

    engine.choose = choose


@asynccontextmanager
async def running(replicas: int, **settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(RedisServer())
        engines = {name: await stack.enter_async_context(FakeEngine(name)) for name in ENGINES}
        world = World(MemoryMembershipStore(), engines, redis)
        for engine in engines.values():
            answers(engine)
            endpoint = Endpoint(engine.name, url=engine.url, models=frozenset({MODEL}), gpu="h100")
            await world.registry.register_instance(CLUSTER, endpoint)
        stack.push_async_callback(lambda: asyncio.gather(*(t._close(0.0) for t in world.tiers)))
        for _ in range(replicas):
            await world.add(**settings)
        yield world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(REPLICAS) as found:
        yield found


async def test_sessions_return_to_their_server_through_any_replica_and_a_new_one(world: World) -> None:
    rng = Random(5)
    first = {f"s{n}": await world.turn(n % REPLICAS, f"s{n}") for n in range(24)}
    assert set(first.values()) == set(ENGINES)
    await world.written()
    world.tiers[0].abort()  # one that is started anew knows nothing but what Redis does
    await world.add()
    came = Counter[bool]()
    for _ in range(5):
        for session, server in first.items():
            came[await world.turn(rng.randrange(1, REPLICAS + 1), session) == server] += 1
    print(f"{came[True]} of {came.total()} follow-ups came to the server of their session")
    assert came[True] >= 0.99 * came.total()


async def _busy(world: World, server: str, requests: int) -> list[Raw]:
    """Prompts that a server has to read before anything else."""
    raws = []
    for n in range(requests):
        raw = await Raw.connect(world.url(0))
        raw.send(post("/v1/chat/completions", chat(MODEL, text=f"{n} {LONG}", stream=True)))
        raws.append(raw)
    return raws


@pytest.mark.parametrize(("mode", "stays"), [("soft", False), ("strict", True)])
async def test_a_soft_session_leaves_when_waiting_costs_more_than_reading_anew_a_strict_one_never(
    mode: str, stays: bool
) -> None:
    async with running(1, affinity={"mode": mode}) as world:
        home = await world.turn(0, "s")
        assert await world.turn(0, "s") == home
        slow = Script.stream("x", delay_s=120.0)
        for engine in world.engines.values():
            engine.choose = lambda seen: slow if b'"stream":true' in seen.body else Script.whole()
        balancer = world.tiers[0].balancing.balancers[CLUSTER]
        others = [c for name, c in balancer.candidates.items() if name != home]
        for c in others:  # all that comes now has to go to the session's server
            c.busy_until = float("inf")
        balancer._qualified.clear()
        raws = await _busy(world, home, BUSY)
        await eventually(lambda: balancer.candidates[home].in_flight == BUSY, KNOWN_S)
        for c in others:
            c.busy_until = 0.0
        assert (await world.turn(0, "s") == home) is stays
        for raw in raws:
            raw.rst()


async def test_a_session_leaves_a_server_that_drains_and_one_that_is_gone(world: World) -> None:
    home = await world.turn(0, "s")
    await world.written()
    await world.registry.set_phase(Phase.DRAINING, home)
    await eventually(lambda: _phase(world.tiers[1], home) is Phase.DRAINING, KNOWN_S)
    second = await world.turn(1, "s")
    assert second != home
    await world.registry.deregister(CLUSTER, second)
    await world.known(world.tiers[1], len(ENGINES) - 1)
    assert await world.turn(1, "s") not in (home, second)


def _phase(tier: TierProcess, server: str) -> Phase:
    return next(e.phase for e in tier.pools[CLUSTER].endpoints if e.id == server)


async def _response(world: World, replica: int, **fields: Any) -> Response:
    return await ask(world.url(replica), "/v1/responses", chat(MODEL, **fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_builds_on_a_response_comes_to_the_server_that_holds_it(world: World, stream: bool) -> None:
    held = {}
    for n in range(12):
        reply = await _response(world, n % REPLICAS, stream=stream)
        server = str(reply.header("x-headwater-served-by")).rpartition("/")[2]
        id_ = json.loads(reply.body.partition(b"data: ")[2].partition(b"\n")[0])["response"]["id"] if stream else ""
        held[id_ or reply.json()["id"]] = server
    assert len(set(held.values())) > 1
    for n, (id_, server) in enumerate(held.items()):
        replica = (n + 1) % REPLICAS  # another one than it was made through
        for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            reply = await get(f"{world.url(replica)}/v1/responses/{id_}{path}", method=method)
            assert (reply.status, reply.json()["choices"][0]["message"]["content"]) == (200, server)
        reply = await _response(world, replica, previous_response_id=id_)
        assert (reply.status, reply.header("x-headwater-served-by")) == (200, f"r/c/{server}")
        reply = await get(f"{world.url(replica)}/v1/responses/{id_}", method="DELETE")
        assert (reply.status, reply.json()["choices"][0]["message"]["content"]) == (200, server)
    assert (await get(f"{world.url(0)}/v1/responses/resp_nobody")).status == 404


async def test_a_conversation_has_one_server_too(world: World) -> None:
    made = await get(f"{world.url(0)}/v1/conversations", method="POST")
    id_, server = made.json()["id"], str(made.header("x-headwater-served-by"))
    for replica in range(REPLICAS):
        assert (await get(f"{world.url(replica)}/v1/conversations/{id_}/items")).status == 200
        reply = await _response(world, replica, conversation={"id": id_})
        assert (reply.status, reply.header("x-headwater-served-by")) == (200, server)


async def test_what_a_server_held_is_told_to_be_gone_with_it_and_lost_for_now_without_redis(world: World) -> None:
    made = await asyncio.gather(*(_response(world, 0, text=f"{n} {LONG}") for n in range(8)))
    id_, server = made[0].json()["id"], str(made[0].header("x-headwater-served-by")).rpartition("/")[2]
    await world.written()

    async def statuses() -> set[tuple[int, str]]:
        found = [
            await get(f"{world.url(1)}/v1/responses/{id_}"),
            await _response(world, 2, previous_response_id=id_),
        ]
        return {(reply.status, reply.json()["error"]["code"]) for reply in found}

    await world.registry.set_phase(Phase.DRAINING, server)
    await eventually(lambda: _phase(world.tiers[1], server) is Phase.DRAINING, KNOWN_S)
    assert (await get(f"{world.url(1)}/v1/responses/{id_}")).status == 200  # to the end, since nobody else has it
    await world.engines[server].__aexit__(None, None, None)
    assert await statuses() == {(409, "owner_unavailable")}
    await world.registry.deregister(CLUSTER, server)
    for tier in world.tiers:
        await world.known(tier, len(ENGINES) - 1)
    assert await statuses() == {(404, "owner_gone")}
    other = next(
        reply.json()["id"] for reply in made if not str(reply.header("x-headwater-served-by")).endswith("/" + server)
    )
    world.redis.kill()
    reply = await get(f"{world.url(3)}/v1/responses/{other}")
    assert (reply.status, reply.header("retry-after")) == (503, "1")
    assert (await get(f"{world.url(0)}/v1/responses/{other}")).status == 200  # who made it knows by itself
