"""etcd and Redis may fail (C26, C27): with real ones, stopped, killed and emptied under load, no request fails."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable

from common import clock
from common.sim.workload import TraceRow
from services.bench.prompts import Template
from services.bench.replay import Replay, Sample
from tests.integration.clients import get
from tests.integration.system import GLOBALS, LONER, MODEL, TTL_S, System
from tests.servers import eventually

RATE = 25.0  # requests a second
BEFORE_S, AFTER_S = 1.0, 2.0
BACK_S = 30.0  # for all to be registered again, on a busy machine; the goal is TTL + 5 s


async def load(system: System, trouble: Callable[[], Awaitable[None]], lasts_s: float) -> list[Sample]:
    """Traffic with sessions; `trouble` begins after BEFORE_S and may last as long as it was said to."""

    async def soon() -> None:
        await asyncio.sleep(BEFORE_S)
        await trouble()

    total_s = BEFORE_S + lasts_s + AFTER_S
    sessions = [f"stores-{i % 30}" if i // 2 % 2 else "" for i in range(int(RATE * total_s))]
    rows = [TraceRow(i / RATE, 60, 20, session=session) for i, session in enumerate(sessions)]
    replay = Replay(Template(model=MODEL, sim=True), stream_share=0.5)
    troubling = asyncio.create_task(soon())
    samples = await replay.run(rows, [system.tiers[name].url for name in GLOBALS], timeout_s=30.0)
    await troubling
    return samples


def none_failed(samples: list[Sample]) -> None:
    assert not [s for s in samples if not s.ok], Counter((s.stream, s.error, s.status) for s in samples if not s.ok)


def p99_ms(samples: list[Sample]) -> float:
    times = sorted(s.e2e_s for s in samples)
    return 1000.0 * times[math.ceil(0.99 * len(times)) - 1]


def logged(system: System, event: str, since: dict[str, int]) -> dict[str, int]:
    """How often each tier has written an event since its log had so many characters."""
    return {name: system.processes[name].log[since[name] :].count(event) for name in system.tiers}


def marks(system: System) -> dict[str, int]:
    return {name: len(system.processes[name].log) for name in system.tiers}


async def test_etcd_stopped_for_many_times_to_live(system: System) -> None:
    """All leases run out while it is away; what is known stays, and all is registered again when it goes on."""

    async def stop() -> None:
        system.etcd.pause()
        await asyncio.sleep(4 * TTL_S)
        system.etcd.resume()

    none_failed(await load(system, stop, 4 * TTL_S))
    back_s = await system.settled(BACK_S)
    print(f"etcd stopped for {4 * TTL_S} s with a time to live of {TTL_S} s; all registered {back_s:.1f} s after that")
    keys = await system.etcd.keys("/headwater/")
    assert len([k for k in keys if "/instances/" in k]) == len(system.servers)
    assert len([k for k in keys if "/balancers/" in k]) == len(system.tiers)


async def test_etcd_and_redis_killed_emptied_and_started_again(system: System) -> None:
    async def restart() -> None:
        system.kill("redis")
        await system.etcd.restart(empty=True)
        await system.processes["redis"].start()

    none_failed(await load(system, restart, 3.0))
    print(f"all registered {await system.settled(BACK_S):.1f} s later")


async def test_redis_frozen_costs_no_request_and_a_log_line_for_each_change(system: System) -> None:
    since = marks(system)
    frozen: list[float] = []
    began = clock.now()

    async def freeze() -> None:
        frozen.append(clock.now() - began)
        system.redis.pause()
        await asyncio.sleep(5.0)
        system.redis.resume()
        frozen.append(clock.now() - began)

    samples = await load(system, freeze, 5.0)
    none_failed(samples)
    before = [s for s in samples if s.due_s < frozen[0] - 0.5]
    during = [s for s in samples if frozen[0] + 2.0 < s.due_s < frozen[1]]  # after the second failing call
    print(f"p99 {p99_ms(before):.0f} ms before, {p99_ms(during):.0f} ms while Redis was frozen")

    async def again() -> bool:
        said = logged(system, "redis answers again", since)
        return all(said[name] == n for name, n in logged(system, "redis unavailable", since).items())

    await eventually(again, BACK_S)
    said = logged(system, "redis unavailable", since)
    assert said[GLOBALS[0]] == said[GLOBALS[1]] == 1
    assert max(said.values()) == 1


async def test_a_dead_agent_takes_no_healthy_server_away_and_a_dead_server_goes(system: System) -> None:
    cluster = "east-a"
    admin = system.tiers[GLOBALS[0]].admin_url

    async def servers() -> set[str]:
        return set((await get(f"{admin}/admin/v1/pools")).json()["pools"][f"east/{cluster}"]["endpoints"])

    async def kill() -> None:
        system.kill(f"agent-{cluster}")
        await eventually(unregistered, BACK_S)

    async def unregistered() -> bool:
        return not [k for k in await system.etcd.keys("/headwater/") if f"{cluster}/instances" in k]

    none_failed(await load(system, kill, 2 * TTL_S))
    assert await servers() == {f"{cluster}-0", f"{cluster}-1"}
    system.kill(LONER)
    left = {f"{cluster}-0", f"{cluster}-1"} - {LONER}

    async def gone() -> bool:
        return await servers() == left

    await eventually(gone, BACK_S)
    assert (await system.chat()).status == 200


async def test_a_tier_starts_without_etcd_from_what_it_said_last(system: System) -> None:
    name = "region-east"
    await eventually(lambda: _saved(system, name), BACK_S)
    system.kill("etcd", name)
    await system.processes[name].start()
    reply = await system.chat(url=system.tiers[name].url)
    assert reply.status == 200
    assert "etcd_unavailable" in system.processes[name].log
    replies = await asyncio.gather(*(system.chat() for _ in range(8)))  # its peers sign with the key it has
    assert {r.status for r in replies} == {200}
    await system.heal()


def _saved(system: System, name: str) -> bool:
    file = system.snapshot_file(name)
    return file.exists() and all(server in file.read_text() for server in system.servers)
