"""Prompts that are too much for servers: learned from, tried once where there is more room, and refused in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.fake_engine import MODEL as FAKE_MODEL
from tests.fake_engine import FakeEngine, Script, Seen
from tests.integration.clients import Response, ask, chat, get
from tests.integration.system import MODEL, PORTS, Addresses, engine_process
from tests.integration.test_up import PATH, Up, pool, up
from tests.servers import eventually

POISON = chat(MODEL, text="poison " * 4000, max_tokens=4)
PLAIN = chat(MODEL, text="plain", max_tokens=4)


@asynccontextmanager
async def fleet(tmp_path: Path, gpus: dict[str, str], fault: str, **health: object) -> AsyncIterator[Up]:
    """Servers by name and class, with one fault on all of them."""
    ports = {name: PORTS.take() for name in gpus}
    addresses = Addresses(PORTS.take(), PORTS.take())
    config = {
        "listen": f"127.0.0.1:{addresses.data}",
        "admin": f"127.0.0.1:{addresses.admin}",
        "scrape_interval_s": 0.5,
        "health": health,
        "instances": [{"url": f"http://127.0.0.1:{ports[n]}", "id": n, "gpu": gpu} for n, gpu in gpus.items()],
    }
    file = tmp_path / "up.yaml"
    file.write_text(json.dumps(config))
    async with AsyncExitStack() as stack:
        for profile in sorted(set(gpus.values())):
            mine = {n: ports[n] for n in gpus if gpus[n] == profile}
            await stack.enter_async_context(engine_process(profile, mine, "--speed", "20", profile=profile))
        for port in ports.values():
            await get(f"http://127.0.0.1:{port}/sim/faults", method="POST", body=fault.encode())
        world = await stack.enter_async_context(up("--config", str(file), flags=False, addresses=addresses))
        await eventually(lambda: _known(world, len(gpus)), 20.0)
        yield world


async def _known(world: Up, count: int) -> bool:
    return len(await pool(world)) == count


async def alive(world: Up) -> set[str]:
    """Servers that answer at all."""
    found = set()
    for name, endpoint in (await pool(world)).items():
        try:
            if (await get(f"{endpoint['url']}/health", 2.0)).status == 200:
                found.add(name)
        except OSError:
            continue
    return found


async def send(world: Up, body: bytes) -> Response:
    return await ask(world.url, PATH, body)


async def test_one_poison_prompt_takes_down_two_servers_at_most_and_is_refused_then(tmp_path: Path) -> None:
    gpus = dict.fromkeys("abcd", "h100")
    fault = '{"oom": 3000, "oom_fatal": true}'
    async with fleet(tmp_path, gpus, fault) as world:
        first = await send(world, POISON)
        assert first.status >= 500
        for _ in range(5):
            again = await send(world, POISON)
            assert again.status == 413, again
            assert again.json()["error"]["code"] == "prompt_quarantined"
        dead = {"a", "b", "c", "d"} - await alive(world)
        assert len(dead) <= 2
        # Everybody else is served, by those that live, and nobody notices.
        answers = await asyncio.gather(*(send(world, PLAIN) for _ in range(20)))
        assert {a.status for a in answers} == {200}
        for name in dead:  # as whoever keeps servers running would
            await get(f"{(await pool(world))[name]['url']}/sim/faults", method="DELETE")
        await eventually(lambda: _all_serve(world), 30.0)  # and the fleet recovers by itself


async def _all_serve(world: Up) -> bool:
    await asyncio.gather(*(send(world, PLAIN) for _ in range(12)))
    states = [(e["phase"], e["breaker"]) for e in (await pool(world)).values()]
    return states == [("serving", "closed")] * 4


def refuses_large(seen: Seen) -> Script:
    """A server with little memory, in the words of PyTorch."""
    if len(seen.body) > 4000:
        return Script.error(500, "CUDA out of memory. Tried to allocate 20.00 GiB.")
    return STREAM


STREAM = Script.stream("a")  # tells no count of prompt tokens, so that these stay what they are estimated to be


async def test_what_is_too_large_for_one_server_goes_to_a_larger_one(tmp_path: Path) -> None:
    """And the next time to the larger one at once; somebody is told that there is memory to clean up."""
    events = FakeEngine("events", Script(chunks=(b"ok",)))
    small, other = FakeEngine("small", choose=refuses_large), FakeEngine("other", choose=refuses_large)
    large = FakeEngine("large", STREAM)
    async with events, small, other, large:
        addresses = Addresses(PORTS.take(), PORTS.take())
        gpus = {small: "l4", other: "l4", large: "h200"}
        config = {
            "listen": f"127.0.0.1:{addresses.data}",
            "admin": f"127.0.0.1:{addresses.admin}",
            "health": {"event_url": f"{events.url}/events"},
            "placement": {"rules": [{"prefer_gpus": ["l4"], "prefer_s": 600}]},
            "instances": [{"url": e.url, "id": e.name, "gpu": gpu} for e, gpu in gpus.items()],
        }
        file = tmp_path / "up.yaml"
        file.write_text(json.dumps(config))
        async with up("--config", str(file), flags=False, addresses=addresses) as world:
            await eventually(lambda: _known(world, 3), 20.0)
            body = chat(FAKE_MODEL, text="too large " * 2000, max_tokens=4, stream=True)
            for _ in range(3):
                answer = await send(world, body)
                assert answer.status == 200, answer
                assert answer.header("x-engine-id") == "large"
            assert len(small.seen) + len(other.seen) == 2  # each was found out once
            answers = await asyncio.gather(*(send(world, chat(FAKE_MODEL, stream=True)) for _ in range(20)))
            assert {a.status for a in answers} == {200}
            await eventually(lambda: len(events.seen) == 2, 10.0)
            told = [json.loads(e.body) for e in events.seen]
            assert {t["event"] for t in told} == {"instance_out_of_memory"}
            assert {t["instance"] for t in told} == {"local/local/small", "local/local/other"}
