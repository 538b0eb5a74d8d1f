"""What one client address may ask of a listener."""

from __future__ import annotations

import asyncio

import pytest

from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import Raw, ask, chat, get, post
from tests.integration.system import tiers
from tests.servers import eventually

PATH = "/v1/chat/completions"


async def test_connections_of_one_address_are_bounded_and_make_room_when_they_end() -> None:
    async with tiers(FakeEngine("one"), limits={"max_connections_per_address": 3}) as world:
        first = [await Raw.connect(world.url) for _ in range(3)]
        for raw in first:
            raw.send(post(PATH, chat(MODEL)))
            assert (await raw.response()).status == 200
        over = await Raw.connect(world.url)
        over.send(post(PATH, chat(MODEL)))
        await over.to_end()
        assert over.received == b""
        first.pop().fin()
        await eventually(lambda: len(world.top.relay.connections) == 2, 20.0)
        assert (await world.chat()).status == 200
        for raw in first:
            raw.rst()
        await eventually(lambda: not world.top.relay.connections, 20.0)
        assert not world.top.relay.listener._clients


@pytest.mark.parametrize("depth", [1, 3])
async def test_requests_of_one_address_are_bounded_at_the_tier_they_enter_by(depth: int) -> None:
    """Two seconds' worth at once. Tiers below get everybody's from the one above, and count none."""
    async with tiers(FakeEngine("one"), depth=depth, limits={"requests_per_s_per_address": 0.01}) as world:
        assert (await world.chat()).status == 200
        refused = await world.chat()
        assert (refused.status, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.header("retry-after") or 0) > 10
        assert (await get(f"{world.url}/v1/models")).status == 429
        assert (await get(f"{world.url}/health")).status == 200
        anthropic = await ask(world.url, "/v1/messages", b"{}")
        assert (anthropic.status, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize("network", ["127.0.0.0/8", "127.0.0.1"])
async def test_proxies_and_other_tiers_can_be_left_out(network: str) -> None:
    limits = {
        "requests_per_s_per_address": 0.01,
        "max_connections_per_address": 1,
        "unlimited_addresses": [network],
    }
    async with tiers(FakeEngine("one"), limits=limits) as world:
        assert {r.status for r in await asyncio.gather(*(world.chat() for _ in range(8)))} == {200}
