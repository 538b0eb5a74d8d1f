"""Measures what failures cost whoever calls: real etcd, Redis, tiers and simulated servers, broken under load.

    python -m bench.failures                    all, about five minutes on two quiet cores
    python -m bench.failures --only redis

Two regions of two clusters of two servers and two global balancers, a process each, with default time-outs and Redis'
default budget. Half of the requests stream, half of them belong to sessions. Ends with 1 when a goal is missed.

    redis     frozen (SIGSTOP) for 30 s: p99 added to an answer after the first two seconds
    etcd      stopped for 40 s, twenty times its time to live: no request fails
    region    all processes of one killed: goodput (whole, within 2 s) is back, nothing fails but what ran there
    tier      a regional balancer killed, and an instance tier: what the slowest request of the next second took
    rolling   every server drained, started anew and given back, one after the other: nothing fails, p99 against before
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from common import clock
from common.sim.measures import quantile
from common.sim.workload import TraceRow
from services.bench.prompts import Template
from services.bench.replay import Replay, Sample
from tests.integration.clients import get
from tests.integration.system import CLUSTERS, GLOBALS, MODEL, REGIONS, System, engine_process, headwater, run_command
from tests.servers import eventually

RATE = 20.0  # requests a second,
TOKENS = 100  # of each answer: some ten are under way at any time
GOOD_S, BACK_SHARE = 2.0, 0.99
NOTICED_S = 2.0  # by then at least two lookups have failed in every process
SKEW_S = 0.2  # between the clock here and the replay's
GOALS = {"redis": 0.05, "region": 5.0, "tier": 1.0}  # s
APART_S = 4.0  # between one server and the next in a rolling update
STEADY = 1.3  # p99 during a rolling update ÷ p99 before


class Live(System):
    """The tests' system, with Redis' default budget and a process for each server."""

    def add_engines(self, *flags: str) -> None:
        """See System."""
        for name, port in self.servers.items():
            self.processes[name] = engine_process(name, {name: port}, *flags)

    def process_of(self, server: str) -> str:
        """See System."""
        return server

    def settings(self, name: str) -> dict[str, Any]:
        """See System."""
        return {"redis": {"url": self.redis.url}} if name in self.tiers else {}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    figure: str
    kept: bool


async def load(system: System, trouble: Callable[[], Awaitable[None]], before_s: float, total_s: float) -> Trial:
    """Traffic for so long, with trouble from `before_s` on."""
    sessions = [f"failures-{i % 30}" if i // 2 % 2 else "" for i in range(int(RATE * total_s))]
    rows = [TraceRow(i / RATE, 60, TOKENS, session=session) for i, session in enumerate(sessions)]
    began = clock.now()
    at: list[float] = []

    async def soon() -> None:
        await asyncio.sleep(before_s)
        at.append(clock.now() - began)
        await trouble()
        at.append(clock.now() - began)

    troubling = asyncio.create_task(soon())
    replay = Replay(Template(model=MODEL, sim=True), stream_share=0.5)
    samples = await replay.run(rows, [system.tiers[name].url for name in GLOBALS], timeout_s=30.0)
    await troubling
    return Trial(samples, *at)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was sent, and when the trouble began and ended, in seconds from the first request on."""

    samples: Sequence[Sample]
    began_s: float
    ended_s: float

    def between(self, first_s: float, last_s: float) -> list[Sample]:
        """Those that were sent within that time."""
        return [s for s in self.samples if first_s <= s.due_s + s.late_s < last_s]

    @property
    def bad(self) -> list[Sample]:
        """Those that did not go well."""
        return [s for s in self.samples if not s.ok]

    def under_way(self, s: Sample) -> bool:
        """Whether it was, when the trouble began."""
        sent_s = s.due_s + s.late_s
        return sent_s <= self.began_s + SKEW_S and sent_s + s.e2e_s >= self.began_s - SKEW_S


def p99(samples: Sequence[Sample]) -> float:
    """Seconds to the end of an answer."""
    return quantile(sorted(s.e2e_s for s in samples), 0.99)


async def redis(system: System) -> list[Row]:
    """Frozen for half a minute."""

    async def freeze() -> None:
        system.redis.pause()
        await asyncio.sleep(30.0)
        system.redis.resume()

    trial = await load(system, freeze, 20.0, 55.0)
    before = p99(trial.between(2.0, trial.began_s))
    during = p99(trial.between(trial.began_s + NOTICED_S, trial.ended_s))
    added = during - before
    said = f"p99 {1e3 * before:.0f} ms before, {1e3 * during:.0f} ms meanwhile: {1e3 * added:+.0f} ms"
    return [
        Row("Redis frozen for 30 s: time of an answer", said, added <= GOALS["redis"]),
        Row("Redis frozen for 30 s: failed", failed(trial.bad, trial), not trial.bad),
    ]


async def etcd(system: System) -> list[Row]:
    """Stopped for twenty times its time to live."""

    async def stop() -> None:
        system.etcd.pause()
        await asyncio.sleep(40.0)
        system.etcd.resume()

    trial = await load(system, stop, 2.0, 46.0)
    back_s = await system.settled()
    return [
        Row("etcd stopped for 40 s: failed", failed(trial.bad, trial), not trial.bad),
        Row("etcd stopped for 40 s: all registered again after", f"{back_s:.1f} s", True),
    ]


async def region(system: System) -> list[Row]:
    """Everything of one at once, and back."""
    lost = "east"
    engines = [name for name in system.servers if name.startswith(lost)]
    clusters = [name for c in REGIONS[lost] for name in (f"instance-{c}", f"agent-{c}")]
    parts = [f"region-{lost}", *clusters, *engines]

    async def kill() -> None:
        system.kill(*parts)
        await asyncio.sleep(8.0)

    trial = await load(system, kill, 5.0, 15.0)
    seconds: dict[int, list[bool]] = {}
    for s in trial.samples:
        seconds.setdefault(int(s.due_s - trial.began_s), []).append(s.ok and s.e2e_s < GOOD_S)
    poor = [k for k, good in seconds.items() if k >= 0 and sum(good) < BACK_SHARE * len(good)]
    back_s = max(poor, default=-1) + 1.0
    others = [s for s in trial.bad if not trial.under_way(s)]
    before = Counter(s.served_by.startswith(lost) for s in trial.between(0.0, trial.began_s - 1.0))
    await asyncio.gather(*(system.processes[name].start() for name in parts))
    again = await load(system, lambda: asyncio.sleep(0.0), 0.0, 5.0)
    return [
        Row("region lost: of the requests before it had", f"{before[True]} of {before.total()}", before[True] > 0),
        Row("region lost: goodput is back after", f"{back_s:.0f} s", back_s <= GOALS["region"]),
        Row("region lost: cut with it", str(len(trial.bad) - len(others)), True),
        Row("region lost: failed otherwise", failed(others, trial), not others),
        Row("region back: failed", failed(again.bad, again), not again.bad),
    ]


async def tier(system: System) -> list[Row]:
    """A regional balancer, then an instance tier."""
    rows = []
    for name in ("region-east", f"instance-{next(iter(CLUSTERS))}"):

        async def kill(name: str = name) -> None:
            system.kill(name)
            await asyncio.sleep(1.0)

        trial = await load(system, kill, 5.0, 10.0)
        slowest = max(s.e2e_s for s in trial.between(trial.began_s, trial.ended_s))
        usual = p99(trial.between(2.0, trial.began_s))
        others = [s for s in trial.bad if not (s.stream and trial.under_way(s))]
        said = f"{slowest:.2f} s (p99 before {usual:.2f} s)"
        rows.append(Row(f"{name} killed: slowest answer of the next second", said, slowest - usual <= GOALS["tier"]))
        rows.append(Row(f"{name} killed: streams cut with it", str(len(trial.bad) - len(others)), True))
        rows.append(Row(f"{name} killed: failed otherwise", failed(others, trial), not others))
        await system.heal()
    return rows


async def rolling(system: System) -> list[Row]:
    """An update of every server, as an operator would do it by hand."""

    async def ask(*words: str) -> None:
        await run_command(headwater(*words, "--admin", system.admin_url))

    async def serves(path: str) -> bool:
        parent, _, id_ = path.rpartition("/")
        pools = (await get(f"{system.admin_url}/admin/v1/pools")).json()["pools"]
        found = pools.get(parent, {"endpoints": {}})["endpoints"].get(id_)
        return found is not None and found["phase"] == "serving"

    async def update() -> None:
        for server in system.servers:
            cluster = server.rpartition("-")[0]
            path = f"{CLUSTERS[cluster]}/{cluster}/{server}"
            await ask("drain", path, "--reason", "update", "--wait", "30")
            process = system.processes[server]
            process.kill()
            await process.start()
            await ask("undrain", path)
            await eventually(lambda path=path: serves(path), 30.0)
            await asyncio.sleep(APART_S)

    trial = await load(system, update, 20.0, 75.0)
    before, during = p99(trial.between(2.0, trial.began_s)), p99(trial.between(trial.began_s, trial.ended_s))
    said = f"{during / before:.2f} of {before:.3f} s before, in {trial.ended_s - trial.began_s:.0f} s"
    return [
        Row("rolling update of 8 servers: p99 of answers", said, during <= STEADY * before),
        Row("rolling update of 8 servers: failed", failed(trial.bad, trial), not trial.bad),
    ]


def failed(samples: Sequence[Sample], trial: Trial) -> str:
    """How many of how many, and why."""
    why = Counter(s.error for s in samples).most_common(3)
    return f"{len(samples)} of {len(trial.samples)}" + (f" {why}" if why else "")


TRIALS: dict[str, Callable[[System], Awaitable[list[Row]]]] = {
    "redis": redis,
    "etcd": etcd,
    "region": region,
    "tier": tier,
    "rolling": rolling,
}


async def measure(names: Sequence[str]) -> int:
    """Print the table; 1 when a goal is missed."""
    system, err = Live("--speed", "2", "--tick", "0.02"), Console(stderr=True)
    table, missed = Table("failure", "figure", "goal"), 0
    try:
        err.print(f"all processes ready after {await system.start():.1f} s")
        for name in names:
            await system.heal()
            for row in await TRIALS[name](system):
                table.add_row(row.what, row.figure, "kept" if row.kept else "[red]missed[/]")
                missed += not row.kept
                err.print(f"{row.what}: {row.figure}")
    finally:
        system.discard()
    Console(width=140).print(table)
    return 1 if missed else 0


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(TRIALS), help="some of them")
    given = parser.parse_args()
    sys.exit(uvloop.run(measure(given.only or list(TRIALS))))


if __name__ == "__main__":
    main()
