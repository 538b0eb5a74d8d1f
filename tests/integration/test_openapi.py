"""The admin API does what its OpenAPI document says, whatever it is asked: schemathesis against a tier that has served.

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
            await clean(schemathesis, f"{world.admin_url}/openapi.json", str(config))


async def clean(schemathesis: str, url: str, config: str) -> None:
    """Fails with what schemathesis finds."""
    seed = os.environ.get("HEADWATER_FUZZ_SEED", "1")
    command = [
        *(schemathesis, "--config-file", config, "run", url, "--seed", seed, "--no-color"),
        *("--exclude-path", ENDLESS, "--max-time", str(SECONDS), "--continue-on-failure", "--output-sanitize", "false"),
    ]
    code, out, err = await run(*command, timeout_s=60.0 + 2 * SECONDS)
    assert code == 0, out + err
