"""Both listeners do what their OpenAPI documents say, whatever they are asked: schemathesis against tiers that serve.

Needs schemathesis, which `make tools` brings; skipped without.
"""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from tests.fake_engine import FakeEngine
from tests.integration.system import run, tiers
from tests.servers import EtcdServer, eventually
from tests.tools import program

CONFIG = Path(__file__).with_name("schemathesis.toml")
SECONDS = int(os.environ.get("HEADWATER_FUZZ_SECONDS", "10"))
ENDLESS = "/admin/v1/events"  # a stream that ends with its reader


async def test_the_admin_api_is_as_its_document_says(tmp_path: Path) -> None:
    schemathesis = program("schemathesis")
    settings = {"tenants": {"stored": True, "anonymous": "public"}}
    async with EtcdServer() as etcd:
        engines = FakeEngine("one"), FakeEngine("two")
        async with tiers(*engines, depth=3, etcd={"urls": [etcd.url]}, **settings) as world:
            async with httpx.AsyncClient() as client:
                made = await client.put(f"{world.admin_url}/admin/v1/tenants/public", json={})
            assert made.status_code == 200, made.text

            known: list[str] = []  # a request that can be explained

            async def served() -> bool:
                reply = await world.chat("x-session-id: s", stream=True, max_tokens=5)
                known.append(reply.header("x-headwater-decision") or "")
                return reply.status == 200

            await eventually(served, 20.0)
            config = tmp_path / "schemathesis.toml"
            config.write_text(f'[parameters]\n"path.trace_id" = "{known[-1]}"\n{CONFIG.read_text()}')
            await clean(schemathesis, f"{world.admin_url}/openapi.json", "--exclude-path", ENDLESS, config=config)


async def test_what_is_relayed_is_as_its_document_says() -> None:
    """Which answers are right is the servers' business; ours is that each is one of those named."""
    schemathesis = program("schemathesis")
    async with tiers(FakeEngine("one"), depth=3) as world:
        checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
        await clean(schemathesis, f"{world.url}/openapi.json", "--checks", checks)


async def clean(schemathesis: str, url: str, *options: str, config: Path | None = None) -> None:
    """Fails with what schemathesis finds."""
    seed = os.environ.get("HEADWATER_FUZZ_SEED", "1")
    command = [
        *(schemathesis, *(("--config-file", str(config)) if config else ()), "run", url, "--seed", seed, "--no-color"),
        *("--max-time", str(SECONDS), "--continue-on-failure", "--output-sanitize", "false", *options),
    ]
    code, out, err = await run(*command, timeout_s=60.0 + 2 * SECONDS)
    assert code == 0, out + err
