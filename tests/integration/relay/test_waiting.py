"""Requests that nobody has room for wait in the tier they entered, in turn, and none is lost or sent too early."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from tests.fake_engine import FakeEngine, Script
from tests.integration.clients import Raw, metrics, total
from tests.integration.relay.cases import is_error, records, streamed
from tests.integration.system import Tiers, tiers
from tests.servers import eventually

ONE_AT_A_TIME = {"upstream": {"max_in_flight": 1}}


async def queued(world: Tiers) -> float:
    """Requests that wait in the tier that clients call."""
    return total(await metrics(world.admin_url), "headwater_queued_requests")


async def _queued(world: Tiers, number: int) -> bool:
    return await queued(world) == number


async def test_a_server_gets_no_more_than_it_may_and_all_are_answered(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=0.05))
    async with tiers(engine, depth=depth, **ONE_AT_A_TIME) as world:
        responses = await asyncio.gather(*(world.chat() for _ in range(20)))
        assert [r.status for r in responses] == [200] * 20
        arrived = [s.at for s in engine.seen]
        assert all(later - earlier >= 0.045 for earlier, later in pairwise(arrived)), arrived
        assert await queued(world) == 0
        waited = [r["queued_s"] for r in await records(world)]
        assert sum(w > 0.0 for w in waited) >= 15


async def test_a_pause_that_a_server_asked_for_is_waited_out(depth: int) -> None:
    refusal = Script.error(429, "busy", headers=(("retry-after", "1"),))
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, retry={"attempts": 1}) as world:
        engine.then(refusal)
        assert (await world.chat()).status == 429  # whom it told itself
        responses = await asyncio.gather(*(world.chat() for _ in range(3)))
        assert [r.status for r in responses] == [200] * 3
        assert engine.seen[1].at - engine.seen[0].at >= 0.9


async def test_a_longer_pause_than_anybody_may_wait_is_told_at_once(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, retry={"attempts": 1}, queue={"timeout_s": 5.0}) as world:
        engine.then(Script.error(429, "busy", headers=(("retry-after", "50"),)))
        assert (await world.chat()).status == 429
        if depth == 1:  # above, the pause itself is not known: the room's time-out is the bound
            again = await asyncio.wait_for(world.chat(), 3.0)
            assert is_error(again, 429)
            assert int(again.header("retry-after") or 0) >= 45
        assert len(engine.seen) == 1


async def test_a_full_room_and_a_long_wait_are_refused(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=3.0))
    settings: dict[str, Any] = {**ONE_AT_A_TIME, "queue": {"max_requests": 2, "timeout_s": 1.0}}
    async with tiers(engine, depth=depth, **settings) as world:
        first = asyncio.create_task(world.chat())
        await eventually(lambda: _seen(engine, 1), 5.0, step_s=0.02)
        waiting = [asyncio.create_task(world.chat()) for _ in range(2)]
        await eventually(lambda: _queued(world, 2), 5.0, step_s=0.02)
        refused = await world.chat()
        assert is_error(refused, 429)
        assert int(refused.header("retry-after") or 0) >= 1
        assert [is_error(r, 429) for r in await asyncio.gather(*waiting)] == [True, True]
        assert (await first).status == 200
        assert len(engine.seen) == 1
        assert await queued(world) == 0


async def _seen(engine: FakeEngine, number: int) -> bool:
    return len(engine.seen) == number


async def test_whoever_leaves_while_it_waits_is_gone_at_once(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=1.0))
    async with tiers(engine, depth=depth, **ONE_AT_A_TIME) as world:
        first = asyncio.create_task(world.chat())
        await eventually(lambda: _seen(engine, 1), 5.0, step_s=0.02)
        for _ in range(5):
            async with await Raw.connect(world.url) as raw:
                raw.send(streamed())
                await eventually(lambda: _queued(world, 1), 5.0, step_s=0.02)
            await eventually(lambda: _queued(world, 0), 5.0, step_s=0.02)
        assert (await first).status == 200
        assert (await world.chat()).status == 200
        assert len(engine.seen) == 2
        assert [b.in_flight for tier in world.chain for b in tier.balancing.balancers.values()] == [
            0 for tier in world.chain for _ in tier.balancing.balancers
        ]


async def test_a_stream_that_waits_is_kept_up_by_comments(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=1.0))
    settings: dict[str, Any] = {**ONE_AT_A_TIME, "streaming": {"keepalive_comment_s": 0.1}}
    async with tiers(engine, depth=depth, **settings) as world:
        first = asyncio.create_task(world.chat())
        await eventually(lambda: _seen(engine, 1), 5.0, step_s=0.02)
        engine.choose = lambda seen: Script.stream("one ", "two ")
        async with await Raw.connect(world.url) as raw:
            raw.send(streamed())
            answer = await raw.response()
        assert (await first).status == 200
        assert answer.status == 200
        assert answer.body.startswith(b":")
        assert answer.body.endswith(b"data: [DONE]\n\n")
