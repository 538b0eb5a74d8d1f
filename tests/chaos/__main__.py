"""Mixed traffic through the whole system while a seeded schedule breaks it: what becomes of the requests?

    make chaos ARGS="--minutes 20 --seed 1"

Starts two global balancers, two of each of two regions and four clusters, eight servers with their agents, three
members of etcd and a Redis, all as processes; sends chats, whole and streamed, of several models, tenants and sessions,
some of whose clients leave; and meanwhile kills, stops, slows, cuts and starts anew what there is, fills the disk that
snapshots are on, and steps clocks (where libfaketime is installed). Checked throughout: each request ends exactly once,
with the answer that is its own or with an error that says so; none goes in circles; in the end nothing is under way,
all see each other again, and no process holds more memory or files than it should. Prints what was seen a minute, and
ends with 1 when anything of this does not hold, or when fewer than 99.99 % of the whole answers came, leaving out those
that were with a process when it was killed, which are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import uvloop

from services.bench.report import quantile
from tests.chaos.faults import Fault, Schedule
from tests.chaos.traffic import Asked, Traffic
from tests.chaos.watch import RUNS, Watch
from tests.chaos.world import FAKETIME, ChaosSystem
from tests.integration.clients import get, metrics, total
from tests.integration.system import complaints
from tests.servers import eventually

AVAILABLE = 0.9999  # of whole answers
WARM_S = 5.0  # of traffic before the first fault
QUIET_S = 90.0  # for everything to be well again at the end
DISK = "4m"  # of the snapshots
ISOLATED = "CHAOS_DISK"  # set in the process that has a disk of its own


async def run(minutes: float, seed: int, rate: float, disk: Path) -> int:
    """All of it; the exit status."""
    began = time.monotonic()
    system = ChaosSystem(disk)
    try:
        took = await system.start()
        print(f"{len(system.processes)} processes up after {took:.0f} s; seed {seed}, {minutes:g} minutes", flush=True)
        if FAKETIME is None:
            print("clocks are not stepped: libfaketime is not installed")
        if not os.environ.get(ISOLATED):
            print("the disk of snapshots is not filled: it takes `unshare` and the right to mount")
        watch = Watch(system)
        watch.begin()
        traffic = Traffic(system, Random(f"traffic {seed}"), rate)
        watching = asyncio.create_task(watch.run())
        began = time.monotonic()
        sending = asyncio.create_task(traffic.run(began + 60.0 * minutes))
        await asyncio.sleep(min(WARM_S, 6.0 * minutes))
        schedule = Schedule(system, Random(f"faults {seed}"), began)
        await schedule.run(began + 60.0 * minutes - 10.0)
        await sending
        watching.cancel()
        broken = list(schedule.broken) + await _afterwards(system, traffic, watch)
        return await _report(system, traffic, schedule, watch, broken, began)
    finally:
        system.discard()
        await asyncio.gather(*(relay.close() for relay in system.relays.values()))


async def _afterwards(system: ChaosSystem, traffic: Traffic, watch: Watch) -> list[str]:
    """What does not hold once the last fault is over and the last answer is there."""
    broken = []
    try:
        await eventually(system.idle, QUIET_S, step_s=0.5)
    except (AssertionError, OSError) as error:
        left = await _counted(system, "headwater_in_flight_requests")
        broken.append(f"something is under way though no client waits: {error}: {left}")
    try:
        took = await system.settled(QUIET_S)
        print(f"all see each other again after {took:.1f} s")
    except (AssertionError, OSError) as error:
        broken.append(f"not all see each other again: {error}")
    await asyncio.sleep(6.0)  # idle connections are closed after four
    await watch.count()
    watch.look()
    broken += watch.leaks()
    for name, looped in (await _counted(system, "headwater_requests_total", status="508")).items():
        broken.append(f"{looped} requests came back to {name}")
    broken += [f"{id_} was run {count} times" for id_, count in watch.runs.items() if count > RUNS]
    broken += [f"request {a.number} ({a.kind}): {a.detail}" for a in traffic.asked if a.ending == "wrong"]
    broken += [f"request {a.number} has not ended" for a in traffic.asked if not a.ending]
    return broken + [f"in a log: {found}" for found in complaints()]


async def _counted(system: ChaosSystem, metric: str, **labels: str) -> dict[str, str]:
    """What each tier counts, where it is not 0; one that does not answer is among them."""

    async def count(url: str) -> str:
        try:
            return f"{total(await metrics(url), metric, **labels):.0f}"
        except (OSError, AssertionError) as error:
            return f"no answer ({error or type(error).__name__}) for"

    found = await asyncio.gather(*(count(tier.admin_url) for tier in system.tiers.values()))
    return {name: value for name, value in zip(system.tiers, found, strict=True) if value != "0"}


# -- the report --------------------------------------------------------------------------------------------------------


async def _report(
    system: ChaosSystem, traffic: Traffic, schedule: Schedule, watch: Watch, broken: list[str], began: float
) -> int:
    asked = traffic.asked
    excused = {a.number: why for a in asked if a.ending == "failed" and (why := await _killed(a, schedule, system))}
    print(f"\n{'min':>4}{'asked':>7}{'whole':>7}{'avail.':>9}{'p50':>7}{'p99':>7}{'max':>7}", end="")
    print(f"{'streams':>9}{'cut':>5}{'p99 first':>11}{'left':>6}{'429':>5}{'killed':>8}{'faults':>8}")
    for minute in range(1 + int((asked[-1].at - began) // 60.0)):
        _line(str(minute + 1), [a for a in asked if (a.at - began) // 60.0 == minute], schedule.done, excused, minute)
    _line("all", asked, schedule.done, excused, None)
    whole = [a for a in asked if a.kind == "whole" and a.ending != "limited" and a.number not in excused]
    available = _share(whole)
    failed = [a for a in asked if a.ending == "failed" and a.number not in excused]
    print(
        f"\nseconds throughout. Of whole answers {sum(a.ending == 'ok' for a in whole)} of {len(whole)} came, ", end=""
    )
    print(f"{available:.4%}; {sum(1 for a in asked if a.kind == 'whole' and a.number in excused)} more were ", end="")
    print("with a process when it was killed.")
    twice = sum(1 for count in watch.answered.values() if count > 1)
    print(f"most often one request was run: {max(watch.runs.values(), default=0)} times; answered twice: {twice}")
    print(f"most grown: {watch.most_grown()} KB; endings: {dict(Counter(a.ending for a in asked))}")
    for (reason, entry), number in Counter((_reason(a), a.entry) for a in failed).most_common(20):
        print(f"  {number} failed at {entry}: {reason}")
    for a in _spread(failed, 20):
        print(
            f"  failed at {a.at - began:.1f} s after {a.took_s:.1f} s, by {a.entry}: "
            f"{a.kind} of {a.model} for {a.tenant}, {a.detail[:300]}"
        )
        print(f"    {await _story(a, system)}")
    for number, why in list(excused.items())[:30]:
        a = asked[number]
        print(f"  excused at {a.at - began:.1f} s after {a.took_s:.1f} s: {a.kind}, {a.detail[:120]}; {why}")
    for what in broken[:50]:
        print(f"BROKEN: {what}")
    well = not broken and available >= AVAILABLE
    print("all held" if well else f"NOT WELL: {len(broken)} broken, availability {available:.4%}")
    return int(not well)


def _line(title: str, asked: list[Asked], faults: list[Fault], excused: dict[int, str], minute: int | None) -> None:
    whole = [a for a in asked if a.kind == "whole" and a.ending != "limited" and a.number not in excused]
    took = sorted(a.took_s for a in whole if a.ending == "ok") or [0.0]
    streams = [a for a in asked if a.kind == "stream" and a.ending != "limited"]
    first = sorted(a.first_s for a in streams if a.first_s is not None) or [0.0]
    count = sum(1 for f in faults if minute is None or f.at // 60.0 == minute)
    print(
        f"{title:>4}{len(asked):7}{len(whole):7}{_share(whole):9.3%}"
        f"{quantile(took, 0.5):7.2f}{quantile(took, 0.99):7.2f}{took[-1]:7.2f}"
        f"{len(streams):9}{sum(a.ending != 'ok' for a in streams):5}{quantile(first, 0.99):11.2f}"
        f"{sum(a.ending == 'left' for a in asked):6}{sum(a.ending == 'limited' for a in asked):5}"
        f"{sum(a.number in excused for a in asked):8}{count:8}"
    )


def _reason(a: Asked) -> str:
    """What its error says, without what is different each time."""
    return re.sub(r"[0-9a-f]{32}|\d+", "#", a.detail[:160])


def _spread(asked: list[Asked], count: int) -> list[Asked]:
    """So many of them at most, from the first to the last."""
    return asked[:: max(1, len(asked) // count)]


def _share(asked: Iterable[Asked]) -> float:
    endings = [a.ending == "ok" for a in asked]
    return sum(endings) / len(endings) if endings else 1.0


async def _killed(a: Asked, schedule: Schedule, system: ChaosSystem) -> str:
    """The process it was with when that was killed, "" if none was."""
    killed = {name for at, name in schedule.kills if a.at - 0.1 <= at <= a.at + a.took_s + 0.1}
    if a.entry in killed:
        return f"it was with {a.entry}"
    return ""


async def _story(a: Asked, system: ChaosSystem) -> str:
    """How the balancers tell it."""
    url = f"{system.admin_url}/admin/v1/decisions/{a.trace}/words"
    try:
        return (await get(url)).body.decode(errors="replace")[:1500]
    except OSError as error:
        return str(error)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="traffic through the whole system while it is broken on purpose")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults and of the traffic")
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    given = parser.parse_args()
    if ISOLATED not in os.environ:
        _isolate()
    disk = os.environ.get(ISOLATED)
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-chaos-") as folder:
            code = uvloop.run(run(given.minutes, given.seed, given.rate, Path(disk or folder)))
    finally:
        if disk:
            subprocess.run(["umount", disk], check=False)
            os.rmdir(disk)
    sys.exit(code)


def _isolate() -> None:
    """Start over with a small disk that only this process and its children see, where that may be."""
    program = shutil.which("unshare")
    if program is None:
        return
    disk = tempfile.mkdtemp(prefix="headwater-chaos-disk-")
    unshare = [program, "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    mounted = f'mount -t tmpfs -o size={DISK} headwater-chaos "$0"'
    if subprocess.run([*unshare, "sh", "-c", mounted, disk], check=False, capture_output=True).returncode:
        os.rmdir(disk)
        return
    again = f'{mounted} && exec "$@"'
    os.environ[ISOLATED] = disk
    os.execv(program, [*unshare, "sh", "-c", again, disk, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


if __name__ == "__main__":
    main()
