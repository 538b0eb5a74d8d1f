"""The admin listener of tiers that others can reach: what it tells whom, and that tiers still tell each other."""

from __future__ import annotations

import json
import os
from base64 import b64encode

from tests.fake_engine import FakeEngine
from tests.integration.clients import Raw, Response, metrics
from tests.integration.system import Tiers, headwater, run_command, tiers
from tests.servers import eventually

TOKEN = "an-operator's-token"


async def fetch(world: Tiers, path: str, *headers: str) -> Response:
    async with await Raw.connect(world.admin_url) as raw:
        raw.send("\r\n".join([f"GET {path} HTTP/1.1", "host: gpu7.example:9080", *headers, "", ""]).encode())
        return await raw.response()


async def test_off_loopback_without_a_token_it_tells_of_health_and_metrics_alone() -> None:
    async with tiers(FakeEngine("one"), admin="0.0.0.0:0") as world:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await fetch(world, path)).status == 200
        for path in ("/admin/v1/pools", "/admin/v1/requests", "/openapi.json", "/docs"):
            reply = await fetch(world, path)
            assert (reply.status, "auth.admin_tokens" in reply.json()["detail"]) == (403, True), path


async def test_with_a_token_it_answers_and_tiers_still_ask_each_other() -> None:
    async with tiers(FakeEngine("one"), depth=3, admin="0.0.0.0:0", auth={"admin_tokens": [TOKEN]}) as world:
        decision = (await world.chat()).header("x-headwater-decision")
        path = f"/admin/v1/traces/{decision}?everywhere=true"
        assert (await fetch(world, path)).status == 401
        assert (await fetch(world, path, "authorization: Bearer wrong-token-of-somebody")).status == 401
        browser = b64encode(f"me:{TOKEN}".encode()).decode()
        assert (await fetch(world, path, f"authorization: Basic {browser}")).status == 200

        async def all_three() -> bool:
            reply = await fetch(world, path, f"authorization: Bearer {TOKEN}")
            return len({span["process"] for span in json.loads(reply.body)}) == 3

        await eventually(all_three, 20.0)
        assert await metrics(world.admin_url)
        flags = ("trace", decision or "", "--admin", world.admin_url)
        await run_command(headwater(*flags), code=1)
        out, _ = await run_command(headwater(*flags), env={**os.environ, "HEADWATER_ADMIN_TOKEN": TOKEN})
        assert out.count("choose ") == 3
