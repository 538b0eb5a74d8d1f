"""What clients say in headers of how urgent a request is decides where it goes and when it has its turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.types import InferenceRequest, Path, Slo
from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import ask, chat
from tests.integration.relay.cases import PATH, is_error
from tests.integration.relay.test_waiting import ONE_AT_A_TIME, _queued
from tests.integration.system import Tiers, tiers
from tests.servers import eventually


def decided(world: Tiers) -> list[InferenceRequest]:
    """The requests that every tier decides on from now on, the top one's first."""
    seen: list[InferenceRequest] = []
    for tier in world.chain:
        route = tier.balancing.route

        def note(request: InferenceRequest, node: Path, exclude: frozenset[Path], route: Any = route) -> Any:
            seen.append(request)
            return route(request, node, exclude)

        tier.balancing.route = note  # type: ignore[method-assign]
    return seen


async def test_service_levels_of_the_header_or_else_of_the_configuration_reach_every_decision(depth: int) -> None:
    policy = {"slo_ttft_s": 3.0, "slo_tpot_s": 0.2}
    async with tiers(FakeEngine("a"), FakeEngine("b"), depth=depth, policy=policy) as world:
        seen = decided(world)
        assert (await world.chat()).status == 200
        assert [r.slo for r in seen] == [Slo(3.0, 0.2)] * depth
        seen.clear()
        assert (await ask(world.url, PATH, chat(MODEL), "x-slo-ttft-ms: 500")).status == 200
        assert [r.slo for r in seen] == [Slo(0.5, None)] * depth


@pytest.mark.parametrize(
    "header", ["x-slo-ttft-ms: soon", "x-slo-tpot-ms: -5", "x-deadline-ms: 0", "x-priority: urgent"]
)
async def test_what_makes_no_sense_is_refused(depth: int, header: str) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        response = await ask(world.url, PATH, chat(MODEL), header)
        assert is_error(response, 400)
        assert header.partition(":")[0] in response.json()["error"]["message"]


async def test_the_more_urgent_class_has_its_turn_first(depth: int) -> None:
    engine = FakeEngine("a")
    engine.choose = lambda seen: Script.whole(delay_s=0.3)
    async with tiers(engine, depth=depth, **ONE_AT_A_TIME) as world:
        first = asyncio.create_task(world.chat())
        await eventually(lambda: bool(engine.seen), 5.0)
        waiting = []
        for i, name in enumerate(("batch", "batch", "standard")):
            body = chat(MODEL, user=f"{name}-{i}")
            waiting.append(asyncio.create_task(ask(world.url, PATH, body, f"x-priority: {name}")))
            await eventually(lambda i=i: _queued(world, i + 1), 5.0)  # type: ignore[misc]
        assert [r.status for r in await asyncio.gather(first, *waiting)] == [200] * 4
        order = [json.loads(s.body)["user"] for s in engine.seen[1:]]
        assert order == ["standard-2", "batch-0", "batch-1"]


async def test_what_cannot_make_its_deadline_is_told_so_while_it_waits(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=2.0))
    async with tiers(engine, depth=depth, **ONE_AT_A_TIME) as world:
        first = asyncio.create_task(world.chat())
        await eventually(lambda: bool(engine.seen), 5.0)
        late = await ask(world.url, PATH, chat(MODEL), "x-deadline-ms: 300")
        assert is_error(late, 504)
        assert late.json()["error"]["code"] == "deadline_exceeded"
        assert (await first).status == 200
        assert len(engine.seen) == 1
