"""Versions and aliases of models behind `headwater up`, and rollouts with the command that people use."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Response, ask, chat, get
from tests.integration.system import PORTS, Addresses, headwater
from tests.integration.test_up import PATH, Up, run, up
from tests.servers import eventually

GOOD = Script.whole(delay_s=0.02)
STEPS = ("--steps", "10,50,100", "--step-s", "1.5", "--min-requests", "5")


@asynccontextmanager
async def fleet(tmp_path: Path, engines: Mapping[FakeEngine, str], **config: Any) -> AsyncIterator[Up]:
    """`headwater up` in front of engines of the given versions; those without a port come up later."""
    addresses = Addresses(PORTS.take(), PORTS.take())
    for engine in engines:
        engine.port = engine.port or PORTS.take()
    values = {
        "listen": f"127.0.0.1:{addresses.data}",
        "admin": f"127.0.0.1:{addresses.admin}",
        "scrape_interval_s": 0.2,
        "instances": [
            {"url": e.url, "id": e.name, "version": v, "engine": "openai", "gpu": "h100"} for e, v in engines.items()
        ],
        **config,
    }
    file = tmp_path / "up.json"
    file.write_text(json.dumps(values))
    try:
        async with up("--config", str(file), flags=False, addresses=addresses) as world:
            yield world
    finally:
        for engine in engines:
            engine.kill()


class Traffic:
    """Chats at a steady rate, each of a session of its own, until it is stopped."""

    def __init__(self, world: Up, rps: float) -> None:
        self.answers: list[Response] = []
        self._world = world
        self._pause_s = 1.0 / rps
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self._pause_s)

    async def _one(self) -> None:
        self._number += 1
        self.answers.append(await ask(self._world.url, PATH, chat(MODEL), f"x-session-id: s{self._number}"))

    def served(self, since: int = 0) -> Counter[str]:
        """How many well-answered requests each engine had."""
        return Counter(a.header("x-engine-id") or "?" for a in self.answers[since:] if a.status == 200)

    async def stop(self) -> list[Response]:
        self._running.cancel()
        await asyncio.gather(*self._tasks)
        return self.answers


async def rollout(world: Up, *arguments: str) -> str:
    """What `headwater rollout …` says."""
    code, out, err = await run(*headwater("rollout", *arguments, "--admin", world.admin_url))
    assert code == 0, err
    return out


async def _says(world: Up, words: str) -> bool:
    return words in await rollout(world, "status")


async def _stage(world: Up, stage: str) -> bool:
    reply = (await get(f"{world.admin_url}/admin/v1/rollouts")).json()
    return [r["stage"] for r in reply] == [stage]


async def test_a_rolling_update_under_load_loses_nothing(tmp_path: Path) -> None:
    """The new version comes up after the start of its rollout; in the end the old servers are stopped."""
    old = [FakeEngine(n, GOOD) for n in ("old-1", "old-2")]
    new = [FakeEngine(n, GOOD) for n in ("new-1", "new-2")]
    for engine in old:
        await engine.start()
    versions = {**dict.fromkeys(old, "v1"), **dict.fromkeys(new, "v2")}
    async with fleet(tmp_path, versions) as world:
        assert await rollout(world, "status") == "no rollouts\n"
        traffic = Traffic(world, 25.0)
        said = await rollout(world, "start", MODEL, "--to", "v2", *STEPS)
        assert said == f"{MODEL}: v2 has 0 %, waiting\n"
        for engine in new:
            await engine.start()
        await eventually(lambda: _stage(world, "stepping"), 20.0)
        await eventually(lambda: _stage(world, "done"), 60.0)
        assert await _says(world, "v2 has 100 %, done")
        mixed = traffic.served()
        assert sum(mixed[e.name] for e in old) > 0
        assert sum(mixed[e.name] for e in new) > 0
        since = len(traffic.answers) + 5
        await eventually(lambda: _more(traffic, since + 20), 20.0)
        assert set(traffic.served(since)) <= {"new-1", "new-2"}
        for engine in old:  # what runs there has ended; nobody asks them any more
            await eventually(lambda e=engine: _idle(e), 10.0)
            engine.kill()
        await eventually(lambda: _more(traffic, since + 60), 20.0)
        answers = await traffic.stop()
        assert {a.status for a in answers} == {200}
        print(f"{len(answers)} requests, none failed; served by {dict(traffic.served())}")


async def _more(traffic: Traffic, number: int) -> bool:
    return len(traffic.answers) >= number


async def _idle(engine: FakeEngine) -> bool:
    return engine.in_flight == 0


async def test_a_bad_version_is_taken_back_by_itself(tmp_path: Path) -> None:
    old, new = FakeEngine("old", GOOD), FakeEngine("new", GOOD)
    await old.start()
    await new.start()
    async with fleet(tmp_path, {old: "v1", new: "v2"}) as world:
        await rollout(world, "start", MODEL, "--to", "v2", "--steps", "5,100", "--step-s", "60")
        traffic = Traffic(world, 60.0)
        await eventually(lambda: _stage(world, "stepping"), 20.0)
        new.script = Script.error(500, "an error of the new version")
        began = time.monotonic()
        await eventually(lambda: _stage(world, "rolled_back"), 60.0)
        took, since = time.monotonic() - began, len(traffic.answers) + 10
        await eventually(lambda: _more(traffic, since + 50), 20.0)
        answers = await traffic.stop()
        assert set(traffic.served(since)) == {"old"}
        failed = [a for a in answers if a.status != 200]
        print(f"taken back after {took:.1f} s, {len(failed)} of {len(answers)} requests failed")
        assert len(failed) <= 8
        said = await rollout(world, "status")
        assert re.search(r"v2 has 0 %, rolled_back \(\d of \d+ requests failed, against 0 of \d+\)", said), said


async def test_by_hand_it_is_taken_back_at_once_and_forgotten(tmp_path: Path) -> None:
    old, new = FakeEngine("old", GOOD), FakeEngine("new", GOOD)
    await old.start()
    await new.start()
    async with fleet(tmp_path, {old: "v1", new: "v2"}) as world:
        await rollout(world, "start", MODEL, "--to", "v2", "--steps", "100", "--step-s", "600")
        await eventually(lambda: _stage(world, "stepping"), 20.0)
        assert await served_by(world) == {"new"}
        assert "aborted (by hand)" in await rollout(world, "abort", MODEL)
        assert await served_by(world) == {"old"}
        old.kill()  # rather another version than none
        await eventually(lambda: _served(world, {"new"}), 20.0)
        assert await rollout(world, "abort", MODEL, "--forget") == f"{MODEL}: forgotten\n"
        code, _, err = await run(*headwater("rollout", "abort", "nothing", "--admin", world.admin_url))
        assert code == 1
        assert "there is no rollout of nothing" in err
        code, _, err = await run(
            *headwater("rollout", "start", MODEL, "--to", "v2", "--steps", "9,3", "--admin", world.admin_url)
        )
        assert code == 1
        assert "steps must rise" in err


async def served_by(world: Up, model: str = MODEL, times: int = 12, session: str = "") -> set[str]:
    """Engines that answer so many requests, each of its own session unless one is given."""
    found = set()
    for i in range(times):
        answer = await ask(world.url, PATH, chat(model), f"x-session-id: {session or f'{model}-{i}'}")
        assert answer.status == 200, answer
        found.add(answer.header("x-engine-id") or "?")
    return found


async def _served(world: Up, names: set[str]) -> bool:
    try:
        return await served_by(world, times=3) == names
    except AssertionError:
        return False


async def test_aliases_splits_and_models_that_are_started_when_asked_for(tmp_path: Path) -> None:
    one, two = FakeEngine("one", GOOD), FakeEngine("two", GOOD)
    large, late = FakeEngine("large", GOOD, model="large"), FakeEngine("late", GOOD, model="late")
    for engine in (one, two, large):
        await engine.start()
    models = {
        "aliases": {"chat": MODEL, "any": {MODEL: 1, "large": 1}},
        "splits": {MODEL: {"v1": 3, "v2": 1}},
        "on_demand": ["late"],
    }
    versions = {one: "v1", two: "v2", large: "", late: ""}
    async with fleet(tmp_path, versions, models=models) as world:
        assert await served_by(world, times=40) == {"one", "two"}
        assert len(one.seen) > len(two.seen)
        assert len(await served_by(world, session="mine")) == 1  # sticky by session
        # The alias: only the name is another one in the body, which is odd in its spaces and its order of keys.
        assert (await served_by(world, "chat")) <= {"one", "two"}
        assert {s.body for s in (*one.seen, *two.seen)} == {chat(MODEL)}
        assert await served_by(world, "any", times=40) == {"one", "two", "large"}
        assert {s.body for s in large.seen} == {chat("large")}
        listed = {m["id"] for m in (await get(f"{world.url}/v1/models")).json()["data"]}
        assert listed == {MODEL, "large", "chat", "any"}
        # Nobody has it yet: it waits, and is served as soon as somebody has.
        waiting = [asyncio.create_task(ask(world.url, PATH, chat("late"))) for _ in range(5)]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        assert (await ask(world.url, PATH, chat("unknown"))).status == 404
        await late.start()
        assert {a.status for a in await asyncio.gather(*waiting)} == {200}
