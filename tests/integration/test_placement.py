"""Rules of placement and LoRA adapters, with simulated servers as processes behind `headwater up`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.clients import ask, chat, get
from tests.integration.system import MODEL, PORTS, Addresses, engine_process
from tests.integration.test_up import PATH, Up, pool, up
from tests.servers import eventually

CONFIG = """
listen: 127.0.0.1:{data}
admin: 127.0.0.1:{admin}
scrape_interval_s: 0.2
instances:
  - {{url: "http://127.0.0.1:{big}", id: big, gpu: h100, labels: {{pool: shared}}}}
  - {{url: "http://127.0.0.1:{small}", id: small, gpu: l4, adapters: {{poet: /adapters/poet}}}}
  - {{url: "http://127.0.0.1:{vectors}", id: vectors, gpu: l4, labels: {{pool: vectors}}}}
placement:
  rules:
    - {{operations: [embeddings], labels: {{pool: vectors}}, exclusive: true}}
    - {{models: [sql-lora], min_memory_gb: 80}}
    - {{models: ["{model}"], operations: [chat], gpus: [l4]}}
    - {{models: [huge-lora], min_memory_gb: 500}}
"""


async def served_by(world: Up, path: str, body: bytes, times: int = 8) -> set[str]:
    """Which instances answer so many requests, all of them well and by the model they name."""
    found = set()
    for _ in range(times):
        reply = await ask(world.url, path, body)
        assert reply.status == 200, reply
        assert reply.json()["model"] == json.loads(body)["model"]
        found.add((reply.header("x-headwater-served-by") or "").rpartition("/")[2])
    return found


async def test_requests_go_where_rules_and_adapters_have_them(tmp_path: Path) -> None:
    ports = {name: PORTS.take() for name in ("big", "small", "vectors")}
    addresses = Addresses(PORTS.take(), PORTS.take())
    config = tmp_path / "up.yaml"
    config.write_text(CONFIG.format(data=addresses.data, admin=addresses.admin, model=MODEL, **ports))
    lora = ("--adapter", "sql-lora", "--adapter", "huge-lora", "--speed", "20")
    async with (
        engine_process("big", {"big": ports["big"]}, *lora),
        engine_process("small", {n: ports[n] for n in ("small", "vectors")}, "--speed", "20", profile="l4"),
        up("--config", str(config), flags=False, addresses=addresses) as world,
    ):
        await eventually(lambda: _known(world, 3), 20.0)
        # Small models stay off the big GPU, which is idle all the while.
        assert await served_by(world, PATH, chat(MODEL, max_tokens=2)) == {"small"}
        # Embeddings have a server of their own, which serves nothing else.
        embed = json.dumps({"model": MODEL, "input": "words"}).encode()
        assert await served_by(world, "/v1/embeddings", embed) == {"vectors"}
        # An adapter is served where it is listed, and by nobody else.
        assert await served_by(world, PATH, chat("sql-lora", max_tokens=2)) == {"big"}
        # No server is large enough: known, and refused with the reason.
        refused = await ask(world.url, PATH, chat("huge-lora", max_tokens=2))
        assert refused.status == 503
        assert "placement" in refused.json()["error"]["message"]
        # What an instance is configured to have is loaded by its agent, and again after it was lost.
        await eventually(lambda: _answers(world, "poet"), 20.0)
        assert await served_by(world, PATH, chat("poet", max_tokens=2)) == {"small"}
        gone = await get(
            f"http://127.0.0.1:{ports['small']}/v1/unload_lora_adapter", method="POST", body=b'{"lora_name": "poet"}'
        )
        assert gone.status == 200, gone
        await eventually(lambda: _answers(world, "poet"), 20.0)
        # No engine was ever sent a model that it does not list.
        for name, models in {"big": {"sql-lora"}, "small": {MODEL, "poet"}, "vectors": {MODEL}}.items():
            records = (await get(f"http://127.0.0.1:{ports[name]}/sim/requests")).json()
            assert {r["model"] for r in records["requests"] if r["executed"]} == models, name


async def _known(world: Up, count: int) -> bool:
    return len(await pool(world)) == count


async def _answers(world: Up, model: str) -> bool:
    return (await ask(world.url, PATH, chat(model, max_tokens=2))).status == 200
