"""Looks at the processes and the servers while it goes on: memory, open files, and how often each request was run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.world import ChaosSystem
from tests.integration.clients import get
from tests.integration.system import open_files

EVERY_S = 5.0
SETTLES_S = 60.0  # of a process's life, before its memory is compared: what is needed once is not given back
GROWN_KB = 40 * 1024  # per process, from then on; rings, caches and learned figures are full long before that
OPENED = 40  # more files than when it was new: two pools of at most 17 connections to Redis, and some to peers
RUNS = 4  # most that one request is run: two tries, of which balancers that died may each have begun one


@dataclass
class Watch:
    """What was seen of every process."""

    system: ChaosSystem
    memory_kb: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    runs: Counter[str] = field(default_factory=Counter)  # by the request's own id
    answered: Counter[str] = field(default_factory=Counter)  # run to the end
    _seen: dict[str, int] = field(default_factory=dict)  # server -> requests of it that were counted
    files: dict[str, int] = field(default_factory=dict)  # of the new processes

    @property
    def _watched(self) -> list[tuple[str, int]]:
        names = [*self.system.tiers, *self.system.names("agent")]
        found = [(name, self.system.processes[name].process) for name in names]
        return [(name, process.pid) for name, process in found if process is not None]

    def begin(self) -> None:
        """Remember how many files each has open before there was traffic."""
        self.files = {name: open_files(pid) for name, pid in self._watched}

    async def run(self) -> None:
        """Look, until cancelled."""
        while True:
            self.look()
            await self.count()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Note the memory of each process that runs."""
        for name, pid in self._watched:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it has just ended
            resident = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "VmRSS: 0")
            self.memory_kb[name, pid].append((time.monotonic(), int(resident.split()[1])))

    async def count(self) -> None:
        """Count what the servers have run since they were asked last."""
        await asyncio.gather(*(self._count(name) for name in self.system.servers))

    async def _count(self, server: str) -> None:
        try:
            reply = (await get(f"{self.system.engine_url(server)}/sim/requests", 2.0)).json()
        except (OSError, TimeoutError):
            return  # dead, or stopped: it is asked again
        received, records = reply["received"], reply["requests"]
        before = self._seen.get(server, 0)
        new = records[-(received - before) :] if received > before else [] if received == before else records
        # Those that are not over yet are looked at again the next time.
        under_way = next((i for i, r in enumerate(new) if not (r["finished"] or r["aborted"] or r["status"])), len(new))
        self._seen[server] = received - len(new) + under_way
        for record in (r for r in new[:under_way] if r["id"]):  # others ask only whether all are well
            self.runs[record["id"]] += record["executed"]
            self.answered[record["id"]] += record["finished"] and record["executed"]

    def leaks(self) -> list[str]:
        """Processes that hold more than they should, now that nothing is under way."""
        found = []
        for name, pid in self._watched:
            level = name.split("-")[0]
            most = max(count for other, count in self.files.items() if other.split("-")[0] == level) + OPENED
            if (now := open_files(pid)) > most:
                found.append(f"{name} has {now} files open, of at most {most}")
        for (name, pid), seen in self.memory_kb.items():
            settled = [kb for at, kb in seen if at > seen[0][0] + SETTLES_S]
            if settled and (grown := settled[-1] - settled[0]) > GROWN_KB:
                found.append(f"{name} ({pid}) has grown by {grown} KB in {seen[-1][0] - seen[0][0]:.0f} s")
        return found

    def most_grown(self) -> str:
        """The process whose memory grew most once it had settled."""
        grown = {
            name: settled[-1] - settled[0]
            for (name, _), seen in self.memory_kb.items()
            if (settled := [kb for at, kb in seen if at > seen[0][0] + SETTLES_S])
        }
        return max(((kb, name) for name, kb in grown.items()), default=(0, "-")).__repr__()
