"""C29: a configuration that changes under load, in every way that a file can change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, ask, chat, get, metrics, post, total
from tests.integration.system import PORTS, Addresses, headwater, run_command
from tests.integration.test_up import Up, pool, up
from tests.servers import eventually

PATH = "/v1/chat/completions"
APPLIED_S = 15.0  # on a busy machine; otherwise half a second
QUIET_S = 1.0  # five looks at a server
PAUSE_S = 0.04  # between two requests of the load


class World:
    """`headwater up` on a file, in front of two servers, with a client that asks it all the time."""

    def __init__(self, process: Up, file: Path, engines: dict[str, FakeEngine], values: dict[str, Any]) -> None:
        self.up = process
        self.file = file
        self.engines = engines
        self.values = values
        self.statuses: list[int] = []

    def text(self, *names: str, **values: Any) -> str:
        """A configuration with these servers."""
        instances = [{"id": name, "url": self.engines[name].url, "engine": "openai"} for name in names]
        return json.dumps(self.values | {"instances": instances} | values)

    def rename(self, text: str) -> None:
        """Put another file in its place, as editors do."""
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.file)

    async def has(self, *names: str) -> bool:
        return set(await pool(self.up)) == set(names)

    async def state(self) -> dict[str, Any]:
        return dict((await get(f"{self.up.admin_url}/admin/v1/config")).json())

    async def becomes(self, *, valid: bool) -> None:
        async def is_so() -> bool:
            return bool((await self.state())["valid"]) is valid

        await eventually(is_so, APPLIED_S)

    async def load(self) -> None:
        while True:
            self.statuses.append((await ask(self.up.url, PATH, chat(MODEL, max_tokens=2))).status)
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def loaded(world: World) -> AsyncIterator[None]:
    """A load under which nothing may fail."""
    task = asyncio.create_task(world.load())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert len(world.statuses) > 10
    assert set(world.statuses) == {200}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    addresses = Addresses(PORTS.take(), PORTS.take())
    values = {
        "listen": f"127.0.0.1:{addresses.data}",
        "admin": f"127.0.0.1:{addresses.admin}",
        "scrape_interval_s": 0.2,
        "drain": {"grace_s": 1},
    }
    file = tmp_path / "headwater.yaml"
    async with FakeEngine("one") as one, FakeEngine("two") as two:
        engines = {"one": one, "two": two}
        found = World(None, file, engines, values)  # type: ignore[arg-type]
        file.write_text(found.text("one", "two"))
        async with up("--config", str(file), flags=False, addresses=addresses) as process:
            found.up = process
            await eventually(lambda: found.has("one", "two"), APPLIED_S)
            yield found


async def test_a_bad_file_changes_nothing_and_the_old_content_mends_it(world: World) -> None:
    good = world.text("one", "two")
    async with loaded(world):
        for bad in ("listen: [", world.text("one", retry={"attempts": 0}), good[: len(good) // 2], None):
            world.file.unlink() if bad is None else world.file.write_text(bad)
            await world.becomes(valid=False)
            assert await world.has("one", "two")
            world.file.write_text(good)
            await world.becomes(valid=True)
    samples = await metrics(world.up.admin_url)
    assert total(samples, "headwater_config_reloads_total", result="refused") >= 4
    assert total(samples, "headwater_config_valid") == 1.0
    assert world.up.process.log.count("config_refused") == 4


async def test_a_server_that_is_taken_out_is_left_alone_and_its_streams_end_well(world: World) -> None:
    slow = Script.stream(*(f"{i} " for i in range(300)), gap_s=0.02)
    async with loaded(world), await Raw.connect(world.up.url) as raw:
        for engine in world.engines.values():
            engine.choose = lambda seen: slow if b'"stream":true' in seen.body else Script.whole()
        raw.send(post(PATH, chat(MODEL, stream=True)))
        await raw.until(b"data:", 2)
        gone, kept = ("one", "two") if world.engines["one"].in_flight else ("two", "one")
        world.file.write_text(world.text(kept)[:40])  # a truncated file, then another one renamed over it
        world.rename(world.text(kept))
        await eventually(lambda: world.has(kept), APPLIED_S)
        await raw.until(b"data: [DONE]", timeout_s=60.0)
        engine = world.engines[gone]
        before = len(engine.seen), engine.looks
        await asyncio.sleep(QUIET_S)
        assert (len(engine.seen), engine.looks) == before
        assert world.engines[kept].looks


async def test_the_last_of_two_files_and_the_target_of_a_link_count(world: World) -> None:
    async with loaded(world):
        for name in ("one", "two"):
            target = world.file.with_name(f"only-{name}")
            target.write_text(world.text(name))
            link = world.file.with_name("link")
            link.symlink_to(target)
            link.rename(world.file)
            await eventually(lambda name=name: world.has(name), APPLIED_S)
        world.rename(world.text("one"))
        await asyncio.sleep(0.04)
        world.rename(world.text("one", "two"))
        await eventually(lambda: world.has("one", "two"), APPLIED_S)


async def test_settings_of_requests_change_with_sighup_and_addresses_do_not(world: World) -> None:
    large = chat(MODEL, text="x" * 3000)
    assert (await ask(world.up.url, PATH, large)).status == 200
    new = {"limits": {"max_body_bytes": 2048}, "policy": {"name": "round_robin"}}
    world.file.write_text(world.text("one", "two", **new))
    os.kill(world.up.process.pid, signal.SIGHUP)

    async def refused() -> bool:
        return (await ask(world.up.url, PATH, large)).status == 413

    await eventually(refused, APPLIED_S)
    pools = (await get(f"{world.up.admin_url}/admin/v1/pools")).json()["pools"]
    assert {p["policy"] for p in pools.values()} == {"round_robin"}
    world.file.write_text(world.text("one", "two", admin="127.0.0.1:1"))
    reply = (await get(f"{world.up.admin_url}/admin/v1/config/reload", method="POST")).json()
    assert (reply["valid"], reply["error"]) == (False, f"{world.file}: admin cannot change while the process runs")
    assert await refused()


async def test_names_needs_and_the_waiting_room_change_together_or_not_at_all(world: World) -> None:
    async def status(model: str) -> int:
        return (await ask(world.up.url, PATH, chat(model, max_tokens=2))).status

    async def becomes(model: str, wanted: int) -> None:
        async def is_so() -> bool:
            return await status(model) == wanted

        await eventually(is_so, APPLIED_S)

    assert await status("chat") == 404
    alias = {"models": {"aliases": {"chat": MODEL}}}
    unmet = {"placement": {"rules": [{"models": [MODEL], "min_memory_gb": 5000}]}}
    world.rename(world.text("one", "two", **alias))
    await becomes("chat", 200)
    world.rename(world.text("one", "two", **alias, placement={"rules": [{"exclusive": True}]}))
    await world.becomes(valid=False)
    assert await status("chat") == 200
    world.rename(world.text("one", "two", **unmet))
    await becomes("chat", 404)
    assert await status(MODEL) == 503
    world.rename(world.text("one", "two", upstream={"max_in_flight": 1}, queue={"max_requests": 0}))
    await becomes(MODEL, 200)
    for engine in world.engines.values():
        engine.choose = lambda seen: Script.whole(delay_s=1.0)
    statuses = {r.status for r in await asyncio.gather(*(ask(world.up.url, PATH, chat(MODEL)) for _ in range(6)))}
    assert statuses == {200, 429}
    world.rename(world.text("one", "two", upstream={"max_in_flight": 1}, queue={"max_requests": 9}))

    async def all_wait() -> bool:
        asked = (ask(world.up.url, PATH, chat(MODEL)) for _ in range(4))
        return {r.status for r in await asyncio.gather(*asked)} == {200}

    await eventually(all_wait, APPLIED_S)


async def test_how_much_is_logged_changes_by_hand_and_by_file(world: World) -> None:
    url = f"{world.up.admin_url}/admin/v1/log-level"

    async def decision() -> str:
        reply = await ask(world.up.url, PATH, chat(MODEL, max_tokens=2))
        return reply.header("x-headwater-decision") or "none"

    async def logged(trace_id: str) -> bool:
        return any("decided" in line and trace_id in line for line in world.up.process.log.splitlines())

    command = ("log-level", "--admin", world.up.admin_url)
    assert (await run_command(headwater(*command)))[0] == "info\n"
    quiet = await decision()
    assert (await run_command(headwater(*command, "debug")))[0] == "debug\n"
    loud = await decision()
    await eventually(lambda: logged(loud), APPLIED_S)
    assert not await logged(quiet)
    _, err = await run_command(headwater(*command, "loud"), code=1)
    assert "'debug', 'info', 'warning' or 'error'" in err
    for bad in (b"", b"{}", b'{"level": "INFO"}', b'{"level": "info", "more": 1}', b"[]"):
        async with httpx.AsyncClient() as client:
            assert (await client.put(url, content=bad, headers={"content-type": "application/json"})).status_code == 422
    async with httpx.AsyncClient() as client:  # as all of the admin API: not for a page of another origin
        evil = {"origin": "http://evil.example"}
        assert (await client.put(url, json={"level": "error"}, headers=evil)).status_code == 403
    assert (await get(url)).json() == {"level": "debug"}

    world.file.write_text(world.text("one", "two", log={"level": "warning"}))

    async def is_warning() -> bool:
        return bool((await get(url)).json()["level"] == "warning")

    await eventually(is_warning, APPLIED_S)
    assert world.up.process.log.count("log_level_changed") == 1
