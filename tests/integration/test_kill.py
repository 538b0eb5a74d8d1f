"""kill -9 of any one process under load: nothing fails but the streams that ran through the killed one.

And one that is told to leave: nothing fails at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from common import clock
from common.sim.workload import TraceRow
from services.bench.prompts import Template
from services.bench.replay import Replay, Sample
from tests.integration.system import GLOBALS, LONER, MODEL, System
from tests.servers import eventually

RATE = 50.0  # requests a second
KILL_AT_S, REVIVE_AT_S, LAST_S = 1.5, 3.5, 5.0
OUTPUT_TOKENS = 100  # 0.35 s at the engines' speed: some twenty streams are under way at any time
SEEN_S = 3.0  # a cut stream ends within this after the kill; a dead process is noticed at once, a busy machine is late
SKEW_S = 0.1  # between the clock of this test and that of the replay


@dataclass(frozen=True)
class Victim:
    """A process to kill. `path` is the place below which it serves, None if no stream runs through it."""

    name: str
    path: str | None


# What restarts with nothing learned may get little traffic for a while, so the lowest come first.
VICTIMS = [
    Victim(LONER, f"east/east-a/{LONER}"),
    Victim(GLOBALS[1], ""),
    Victim("region-east", "east/"),
    Victim("instance-east-a", "east/east-a/"),
    Victim("agent-west-a", None),
    Victim("etcd", None),
    Victim("redis", None),
]


@pytest.mark.parametrize("victim", VICTIMS, ids=lambda v: v.name)
async def test_a_killed_process_fails_nothing_but_its_own_streams(system: System, victim: Victim) -> None:
    samples, killed_s = await _load(system, victim)
    bad = [s for s in samples if not s.ok]
    cut = [s for s in bad if _was_cut(s, system, victim, killed_s)]
    other = [s for s in bad if s not in cut]
    under_way = [s for s in samples if _under_way(s, killed_s)]
    after = [s for s in samples if killed_s < s.due_s + s.late_s < killed_s + 1.0]
    print(
        f"{victim.name}: {len(samples)} requests, {len(under_way)} under way at the kill, {len(cut)} cut with it; "
        f"of those sent in the second after it the slowest took {max(s.e2e_s for s in after) * 1000:.0f} ms, "
        f"of all {max(s.e2e_s for s in samples) * 1000:.0f} ms; late by up to {max(s.late_s for s in samples):.2f} s"
    )
    print(f"under way: {_places(under_way)}; before: {_places(s for s in samples if s.due_s < killed_s)}")
    assert not other, Counter((s.stream, s.error, s.status) for s in other)
    assert len(samples) == int(RATE * LAST_S)
    if victim.path is None:
        assert not cut
    assert all(s.error in ("broken", "reset") or s.error.startswith("stream_error") for s in cut)
    # What was asked of the killed balancer itself its client asks again, elsewhere, as the OpenAI client does.
    again = await asyncio.gather(*(system.chat() for s in cut if not s.stream))
    assert all(response.status == 200 for response in again)
    await eventually(system.idle, 15.0)
    print(f"all see each other again {await system.settled():.1f} s after the last answer")


@pytest.mark.parametrize("name", ["region-east", "instance-west-b"])
async def test_a_tier_that_is_told_to_leave_fails_nothing(system: System, name: str) -> None:
    samples, told_s = await _load(system, Victim(name, ""), politely=True)
    bad = [s for s in samples if not s.ok]
    print(
        f"{name}: {len([s for s in samples if _under_way(s, told_s)])} under way when it was told; {_places(samples)}"
    )
    assert not bad, Counter((s.stream, s.error, s.status) for s in bad)
    await eventually(system.idle, 15.0)


async def _load(system: System, victim: Victim, *, politely: bool = False) -> tuple[list[Sample], float]:
    """Traffic with a kill and a restart in it: all samples, and when the kill was, as the samples count time."""
    urls = [system.tiers[name].url for name in GLOBALS]
    gone = asyncio.Event()  # clients of a global balancer that is dead use the other one
    killed_s = 0.0

    async def trouble() -> None:
        nonlocal killed_s
        await asyncio.sleep(KILL_AT_S)
        killed_s = clock.now() - began
        if politely:
            await system.processes[victim.name].stop()
        else:
            system.kill(victim.name)
        if victim.name == GLOBALS[1]:
            gone.set()
        await asyncio.sleep(max(0.0, REVIVE_AT_S - (clock.now() - began)))
        await system.processes[victim.name].start()
        gone.clear()

    sessions = [f"{victim.name}-{i % 40}" if i % 2 else "" for i in range(int(RATE * LAST_S))]
    rows = [TraceRow(i / RATE, 60, OUTPUT_TOKENS, session=session) for i, session in enumerate(sessions)]
    replay = Replay(Template(model=MODEL, sim=True), stream_share=0.5)
    began = clock.now()
    troubling = asyncio.create_task(trouble())
    samples = await replay.run(
        rows, urls, choose=lambda row, index: 0 if gone.is_set() else index // 2 % 2, timeout_s=30.0
    )
    await troubling
    return samples, killed_s


def _places(samples: Iterable[Sample]) -> dict[str, int]:
    return dict(sorted(Counter(s.served_by.rpartition("/")[2] for s in samples).items()))


def _under_way(sample: Sample, killed_s: float) -> bool:
    sent_s = sample.due_s + sample.late_s
    return sent_s <= killed_s + SKEW_S and sent_s + sample.e2e_s >= killed_s - SKEW_S


def _was_cut(sample: Sample, system: System, victim: Victim, killed_s: float) -> bool:
    """Whether it ran through the killed process at that moment, and nobody could have saved it."""
    if victim.path is None or not _under_way(sample, killed_s):
        return False
    if sample.due_s + sample.late_s + sample.e2e_s > killed_s + SEEN_S:
        return False
    if victim.name in GLOBALS:
        return sample.target == system.tiers[victim.name].url
    return sample.stream and sample.served_by != "" and sample.served_by.startswith(victim.path)
