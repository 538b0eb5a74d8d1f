"""Draining by hand, under load: by the command line at one tier, seen by all, and not forgotten by any restart."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from common.sim.workload import TraceRow
from services.bench.prompts import Template
from services.bench.replay import Replay, Sample
from tests.integration.clients import get
from tests.integration.system import GLOBALS, LONER, MODEL, System, headwater
from tests.integration.test_three_tiers import run
from tests.servers import eventually

ENTRIES = (*GLOBALS, "region-east", "instance-east-a", "instance-west-b")
RATE, LAST_S = 40.0, 4.0
SEEN_S = 20.0  # until all tiers know, on a busy machine; otherwise some 50 ms


async def drained(system: System, *paths: str) -> bool:
    """Whether every tier sees these marks and no others."""
    replies = await asyncio.gather(*(get(f"{t.admin_url}/admin/v1/drains") for t in system.tiers.values()))
    return all([mark["path"] for mark in reply.json()] == list(paths) for reply in replies)


async def command(system: System, *arguments: str) -> str:
    code, out, err = await run(*headwater(*arguments, "--admin", system.admin_url))
    assert (code, err) == (0, "")
    return out


async def traffic(system: System, seconds: float = LAST_S) -> list[Sample]:
    """Through every kind of entry; half of it streams, some in sessions."""
    rows = [TraceRow(i / RATE, 60, 30, session=f"s{i % 20}" if i % 2 else "") for i in range(int(RATE * seconds))]
    urls = [system.tiers[name].url for name in ENTRIES]
    replay = Replay(Template(model=MODEL, sim=True), stream_share=0.5)
    return await replay.run(rows, urls, choose=lambda row, index: index % len(urls), timeout_s=30.0)


def places(samples: list[Sample]) -> Counter[str]:
    assert not [s for s in samples if not s.ok], Counter((s.error, s.status) for s in samples if not s.ok)
    return Counter(s.served_by for s in samples)


async def test_a_drained_server_is_passed_over_by_all_tiers_until_it_is_given_back(system: System) -> None:
    path = f"east/east-a/{LONER}"
    busy = asyncio.create_task(traffic(system))
    await asyncio.sleep(LAST_S / 4)
    out = await command(system, "drain", LONER, "--reason", "new driver", "--wait", "30")
    first, *rest = out.splitlines()
    assert first == f"{path} gets no new work"
    assert rest[-1] == "nothing is under way there any more"
    assert all(re.fullmatch(r"\d+ under way(, predicted to end in \d+ s)?", line) for line in rest[:-1]), rest
    places(await busy)
    await eventually(lambda: drained(system, path), SEEN_S)
    assert path not in places(await traffic(system, 2.0))

    system.kill("region-east", "instance-east-a", "agent-east-a", "etcd")
    await asyncio.gather(
        *(system.processes[n].start() for n in ("etcd", "region-east", "instance-east-a", "agent-east-a"))
    )
    await eventually(lambda: drained(system, path), SEEN_S)
    assert path not in places(await traffic(system, 2.0))
    assert "new driver" in await command(system, "drain")

    assert await command(system, "undrain", path) == f"{path} gets work again\n"
    others = ["east/east-a/east-a-1", "east/east-b", "west"]
    for other in others:
        await command(system, "drain", other)
    await eventually(lambda: drained(system, *others), SEEN_S)
    assert set(places(await traffic(system, 1.0))) == {path}


async def test_a_drained_cluster_and_region_get_nothing_whichever_way_a_request_comes_in(system: System) -> None:
    for path, node in (("west/west-a", "west-a"), ("east", "east")):
        await command(system, "drain", node)
        await eventually(lambda path=path: drained(system, path), SEEN_S)
        served = places(await traffic(system, 2.0))
        assert served
        assert not [place for place in served if place.startswith(f"{path}/")], served
        await command(system, "undrain", node)
        await eventually(lambda: drained(system), SEEN_S)


async def test_what_cannot_be_drained_is_told_in_one_line(system: System) -> None:
    code, out, err = await run(*headwater("drain", "nowhere", "--admin", system.admin_url))
    assert (code, out) == (1, "")
    assert err == "headwater: there is no region, cluster or instance 'nowhere'\n"
    code, out, err = await run(*headwater("undrain", "east", "--admin", system.admin_url))
    assert (code, err) == (1, "headwater: east is not drained\n")
