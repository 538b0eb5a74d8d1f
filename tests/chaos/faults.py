"""What is done to the system, and when: a schedule that follows from its seed.

A fault holds the names of what it takes away, so that two faults never take the last of anything that has no stand-in:
of both global balancers one stays, of the servers all but one. A whole region's or cluster's balancers may go, which
their neighbours then stand in for, and so may all of etcd, and Redis. Links to a server that is at work are slowed and
held but not reset: whoever loses one cannot know whether the request was run, so it is rightly not tried again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from tests.chaos.world import CLOCKS, FAKETIME, ChaosSystem
from tests.integration.clients import get
from tests.integration.system import CLUSTERS, REGIONS

GAP_S = 1.0  # between the ends of draws; several faults may last at a time
AT_ONCE = 3
Act = Callable[[], Awaitable[None]]


@dataclass
class Fault:
    """One thing that goes wrong for some seconds."""

    what: str
    holds: frozenset[str]
    lasts_s: float
    begin: Act
    end: Act
    kills: tuple[str, ...] = ()  # processes
    at: float = 0.0  # seconds since the begin of the traffic


@dataclass
class Schedule:
    """Draws faults and carries them out until told to stop."""

    system: ChaosSystem
    rng: Random
    began: float
    done: list[Fault] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)  # when, and which process
    down: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)  # what did not come back
    _held: set[str] = field(default_factory=set)

    async def run(self, until: float) -> None:
        """One fault after the other, some at a time; all of them are over at the end."""
        running: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            fault = self._draw()
            if len(running) < AT_ONCE and not fault.holds & self._held:
                task = asyncio.create_task(self._carry_out(fault))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(self.rng.uniform(0.2, 2.0) * GAP_S)
        await asyncio.gather(*running)

    async def _carry_out(self, fault: Fault) -> None:
        self._held |= fault.holds
        fault.at = time.monotonic() - self.began
        self.done.append(fault)
        print(f"  {fault.at:7.1f} s  {fault.what}, for {fault.lasts_s:.1f} s", flush=True)
        self.kills += [(time.monotonic(), name) for name in fault.kills]
        self.down |= set(fault.kills)
        try:
            await fault.begin()
            await asyncio.sleep(fault.lasts_s)
            await fault.end()
        except (AssertionError, OSError, TimeoutError) as error:
            self.broken.append(f"{fault.what}, at {fault.at:.0f} s: {str(error)[:500] or type(error).__name__}")
        self.down -= set(fault.kills)
        await asyncio.sleep(2.0)  # for the others to see that it is back
        self._held -= fault.holds

    # -- what there is -----------------------------------------------------------------------------------------------

    def _draw(self) -> Fault:
        kinds: dict[Callable[[], Fault], int] = {
            self._kill_tier: 6,
            self._kill_node: 2,
            self._stop_tier: 3,
            self._server: 5,
            self._agent: 2,
            self._link: 5,
            self._etcd: 4,
            self._no_etcd: 1,
            self._redis: 3,
            self._disk: 1,
            self._clock: 2 if FAKETIME else 0,
        }
        return self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def _kill_tier(self) -> Fault:
        return self._kill(self.rng.choice(list(self.system.tiers)), held="")

    def _kill(self, name: str, held: str) -> Fault:
        holds = self._group(name) if name in self.system.tiers else frozenset({held})
        return Fault(f"kill {name}", holds, self._seconds(1.0, 8.0), self._down(name), self._up(name), (name,))

    def _kill_node(self) -> Fault:
        node = self.rng.choice([*(f"region-{r}" for r in REGIONS), *(f"instance-{c}" for c in CLUSTERS)])
        names = self.system.group(f"{node}-1")
        holds = frozenset(names)
        return Fault(
            f"kill all of {node}", holds, self._seconds(3.0, 8.0), self._down(*names), self._up(*names), tuple(names)
        )

    def _stop_tier(self) -> Fault:
        name = self.rng.choice(list(self.system.tiers))
        return self._stop(name, self._group(name))

    def _stop(self, name: str, holds: frozenset[str], most_s: float = 6.0) -> Fault:
        process = self.system.processes[name]
        return Fault(f"stop {name}", holds, self._seconds(1.0, most_s), _plain(process.pause), _plain(process.resume))

    def _server(self) -> Fault:
        name, holds = self.rng.choice(list(self.system.servers)), frozenset({"servers"})
        match self.rng.choice(["kill", "kill", "stop", "slow", "stall"]):
            case "kill":
                return self._kill(name, "servers")
            case "stop":
                return self._stop(name, holds)
            case "slow":
                what, faults = "slow down", {"slow": 10.0}
            case _:
                what, faults = "stall", {"stall": True}
        url = f"{self.system.engine_url(name)}/sim/faults"

        async def begin() -> None:
            await get(url, method="POST", body=json.dumps(faults).encode())

        async def end() -> None:
            await get(url, method="DELETE")

        return Fault(f"{what} {name}", holds, self._seconds(2.0, 8.0), begin, end)

    def _agent(self) -> Fault:
        name = self.rng.choice(self.system.names("agent"))
        return self._kill(name, "agents") if self.rng.random() < 0.5 else self._stop(name, frozenset({"agents"}))

    def _link(self) -> Fault:
        name = self.rng.choice([n for n in self.system.relays if n not in self.system.stores])
        if name in self.system.servers:
            return self._relay(name, frozenset({"servers"}), ("slow", "hold"))
        return self._relay(name, self._group(name), ("slow", "hold", "cut", "refuse"))

    def _relay(self, name: str, holds: frozenset[str], kinds: tuple[str, ...]) -> Fault:
        relay, kind = self.system.relays[name], self.rng.choice(kinds)

        def delay(seconds: float) -> Callable[[], None]:
            def set_() -> None:
                relay.delay_s = relay.request_delay_s = seconds

            return set_

        async def listen() -> None:
            await relay.start()

        begin, end = {
            "slow": (_plain(delay(0.15)), _plain(delay(0.0))),
            "hold": (_plain(relay.stall), _plain(relay.resume)),
            "cut": (_plain(relay.cut), _plain(relay.cut)),
            "refuse": (_plain(relay.refuse), listen),
        }[kind]
        return Fault(f"{kind} the way to {name}", holds, self._seconds(1.0, 6.0), begin, end)

    def _etcd(self) -> Fault:
        name = self.rng.choice(self.system.names("etcd"))
        return self._store(name, "etcd")

    def _redis(self) -> Fault:
        return self._store("redis", "redis")

    def _store(self, name: str, held: str) -> Fault:
        match self.rng.choice(["kill", "stop", "relay"]):
            case "kill":
                return self._kill(name, held)
            case "stop":
                return self._stop(name, frozenset({held}), 10.0)
            case _:
                return self._relay(name, frozenset({held}), ("slow", "hold", "cut", "refuse"))

    def _no_etcd(self) -> Fault:
        """All of etcd stops, and a balancer that is started meanwhile has its snapshot alone."""
        members = [self.system.processes[name] for name in self.system.names("etcd")]
        victim = self.rng.choice([n for n in self.system.tiers if not n.startswith("global")])

        async def begin() -> None:
            for member in members:
                member.pause()
            await asyncio.sleep(1.0)
            self.system.down(victim)
            await asyncio.sleep(1.0)
            await self.system.up(victim)

        async def end() -> None:
            for member in members:
                member.resume()

        holds = frozenset({"etcd", "agents", *self.system.group(victim)})
        what = f"stop all of etcd, and start {victim} anew meanwhile"
        return Fault(what, holds, self._seconds(3.0, 10.0), begin, end, (victim,))

    def _disk(self) -> Fault:
        """No room for snapshots while there is something to write: an agent comes and goes, and a balancer."""
        agent = self.rng.choice(self.system.names("agent"))
        victim = self.rng.choice([n for n in self.system.tiers if not n.startswith("global")])

        async def begin() -> None:
            self.system.fill()
            self.system.down(agent, victim)
            await asyncio.sleep(3.0)

        async def end() -> None:
            await asyncio.gather(self.system.up(agent), self.system.up(victim))
            await asyncio.sleep(2.0)
            bad = self.system.unreadable()
            assert not bad, f"snapshots that cannot be read: {bad}"
            self.system.empty()

        holds = frozenset({"disk", "agents", *self.system.group(victim)})
        what = f"fill the disk of snapshots, and kill {agent} and {victim} meanwhile"
        return Fault(what, holds, self._seconds(1.0, 5.0), begin, end, (agent, victim))

    def _clock(self) -> Fault:
        name = self.rng.choice(CLOCKS)
        seconds = self.rng.choice([-86_400, -600, -5, 5, 600, 86_400, 40 * 86_400])

        async def begin() -> None:
            self.system.step(name, seconds)

        async def end() -> None:
            self.system.step(name, 0)

        return Fault(
            f"step the clock of {name} by {seconds:+d} s", frozenset({"clock"}), self._seconds(3.0, 10.0), begin, end
        )

    # -- how ---------------------------------------------------------------------------------------------------------

    def _seconds(self, least: float, most: float) -> float:
        return self.rng.uniform(least, most)

    def _group(self, name: str) -> frozenset[str]:
        return frozenset(self.system.group(name))

    def _down(self, *names: str) -> Act:
        return _plain(lambda: self.system.down(*names))

    def _up(self, *names: str) -> Act:
        async def up() -> None:
            await asyncio.gather(*(self.system.up(name) for name in names))

        return up


def _plain(act: Callable[[], None]) -> Act:
    async def acts() -> None:
        act()

    return acts
