"""The whole system for tests: as processes with real etcd and Redis, or as tiers in this process over real sockets.

Every process is watched: what it writes must hold no traceback and no crash, which `complaints` finds.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from random import Random
from typing import Any

import pytest

from common.config import TierConfig
from common.policy.versions import label_of
from common.store.memory import MemoryMembershipStore
from common.tier import TierProcess
from common.types import Endpoint, Path
from services.demo.processes import Ports
from tests.fake_engine import MODEL as FAKE_MODEL
from tests.fake_engine import FakeEngine
from tests.integration.clients import Response, ask, chat, get, metrics, total
from tests.servers import RedisServer, Server, etcd_cluster, eventually

MODEL = "llama-8b"
# Below the range that the kernel gives to outgoing connections, so that a killed process gets its port back; from a
# random one on, so that two test runs at a time hardly meet.
PORTS = Ports(first=20_000 + Random().randrange(7_000))
SETTLED_S = 60.0  # for all processes to see each other, on a machine that runs other tests as well
REPOSITORY = FilePath(__file__).parents[2]

BAD = re.compile(r"Traceback|never retrieved|never awaited|Fatal error|\"critical\"|ResourceWarning|core dumped")
_watched: list[Process] = []
_left: list[str] = []  # of processes whose logs are gone by now


def complaints() -> list[str]:
    """What no process should ever have written since this was asked last, with what stands around it."""
    found, _left[:] = list(_left), []
    for process in _watched:
        found += process.complaints()
    return found


class Process(Server):
    """One of our own processes, with its output in a log; `ready_url` answers 200 when it is ready."""

    start_timeout_s = 60.0
    poll_s = 0.03

    def __init__(self, name: str, argv: Iterable[str], ready_url: str = "", ready_line: str = "") -> None:
        super().__init__()
        self.name = name
        self.argv = list(argv)
        self.ready_url = ready_url
        self.ready_line = ready_line
        self._read = 0  # characters of the log that were looked at
        _watched.append(self)

    def command(self) -> list[str]:
        """See Server."""
        return self.argv

    @property
    def pid(self) -> int:
        """Its process id; only while it runs."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> Process:
        """See Server."""
        self._begin = len(self.log) if (self.directory / "log").exists() else 0
        return await super().start()

    async def ready(self) -> bool:
        """See Server."""
        if self.ready_line:
            return self.ready_line in self.log[self._begin :]
        try:
            return (await get(self.ready_url)).status == 200
        except OSError:
            return False

    def complaints(self) -> list[str]:
        """New lines of its log that should not be there."""
        text, begin = self.log if (self.directory / "log").exists() else "", self._read
        self._read = len(text)
        return [
            f"{self.name}: …{text[max(0, m.start() - 300) : m.end() + 1500]}…"
            for m in list(BAD.finditer(text, begin))[:3]
        ]

    def discard(self) -> None:
        """See Server."""
        if self in _watched:
            _watched.remove(self)
            self.kill()
            _left.extend(self.complaints())
        super().discard()


def headwater(*arguments: str) -> list[str]:
    """The command line of one of our own commands, in this very Python."""
    return [sys.executable, "-m", "services.cli", *arguments]


async def run_command(argv: Sequence[str], *, code: int = 0, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """What a program writes."""
    ended, out, err = await run(*argv, env=env)
    assert ended == code, (argv, out, err)
    return out, err


async def run(*argv: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command; no process of its group may be left."""
    # Not asyncio's own subprocesses: under uvloop they fork, which gRPC's threads do not take well.
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.to_thread(process.communicate, timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return process.returncode, out.decode(), err.decode()


def engine_process(
    name: str, engines: Mapping[str, int], *flags: str, profile: str = "h100", model: str = MODEL
) -> Process:
    """A process of simulated servers: their names and ports."""
    arguments = [a for n, port in engines.items() for a in ("--engine", f"{profile}:{port}:{n}")]
    url = f"http://127.0.0.1:{list(engines.values())[-1]}/health"
    argv = [sys.executable, "-m", "services.engine_sim", "--model", model, "--grace", "1", *flags, *arguments]
    return Process(name, argv, url)


# -- three tiers as processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Addresses:
    """Where a tier listens."""

    data: int
    admin: int

    @property
    def url(self) -> str:
        """Of its data listener."""
        return f"http://127.0.0.1:{self.data}"

    @property
    def admin_url(self) -> str:
        """Of its admin listener."""
        return f"http://127.0.0.1:{self.admin}"


REGIONS = {"east": ("east-a", "east-b"), "west": ("west-a", "west-b")}
CLUSTERS = {cluster: region for region, clusters in REGIONS.items() for cluster in clusters}
GLOBALS = ("global-1", "global-2")
LONER = "east-a-0"  # the server that has a process of its own, to be killed
ENGINES = ("engines-east", "engines-west")  # processes of the others
TTL_S = 2


def process_of(server: str) -> str:
    """Which process a simulated server lives in."""
    return LONER if server == LONER else f"engines-{server.partition('-')[0]}"


class System:
    """etcd, Redis, two regions of two clusters of two servers, and two global balancers: seventeen processes.

    A subclass may have more of each: `replicas` balancers of every region and cluster, `members` of etcd.
    """

    replicas = 1
    members = 1

    def __init__(self, *engine_flags: str) -> None:
        each = [f"-{i + 1}" for i in range(self.replicas)] if self.replicas > 1 else [""]
        self.nodes: dict[str, Path] = {
            **dict.fromkeys(GLOBALS, ()),
            **{f"region-{r}{e}": (r,) for r in REGIONS for e in each},
            **{f"instance-{c}{e}": (r, c) for c, r in CLUSTERS.items() for e in each},
        }
        self.tiers = {name: Addresses(PORTS.take(), PORTS.take()) for name in self.nodes}
        self.servers = {f"{cluster}-{i}": PORTS.take() for cluster in CLUSTERS for i in (0, 1)}
        self.etcds = etcd_cluster([(PORTS.take(), PORTS.take()) for _ in range(self.members)])
        self.etcd = self.etcds[0]
        self.redis = RedisServer()
        self.redis.port = PORTS.take()
        self.processes: dict[str, Server] = {"etcd": self.etcd, "redis": self.redis}
        self.processes |= {f"etcd-{i + 1}": etcd for i, etcd in enumerate(self.etcds) if i}
        self.stores = tuple(self.processes)
        self._folder = self.etcd.directory
        self.add_engines(*engine_flags)
        self._engine_names = tuple(name for name in self.processes if name not in self.stores)
        for cluster, region in CLUSTERS.items():
            self._add_agent(cluster, region)
        for name in self.tiers:
            self._add_tier(name)

    def add_engines(self, *flags: str) -> None:
        """Put the processes of the simulated servers among the others."""
        for name in (*ENGINES, LONER):
            engines = {n: p for n, p in self.servers.items() if process_of(n) == name}
            self.processes[name] = engine_process(name, engines, *flags)

    def process_of(self, server: str) -> str:
        """Which process a simulated server lives in."""
        return process_of(server)

    def settings(self, name: str) -> dict[str, Any]:
        """What a subclass sets otherwise in the configuration of a process."""
        return {}

    def seen_url(self, server: str) -> str:
        """Where the agents say that a server is."""
        return self.engine_url(server)

    @property
    def url(self) -> str:
        """The first global balancer."""
        return self.tiers[GLOBALS[0]].url

    @property
    def admin_url(self) -> str:
        """Its admin listener."""
        return self.tiers[GLOBALS[0]].admin_url

    def _add_agent(self, cluster: str, region: str) -> None:
        instances = [
            {"id": name, "url": self.seen_url(name), "gpu": "h100"} for name in self.servers if name.startswith(cluster)
        ]
        values = {"scrape_interval_s": 0.5, "instances": instances, "id": f"agent-{cluster}"}
        self._add("agent", f"agent-{cluster}", {"region": region, "cluster": cluster, **values}, line="agent_started")

    def _add_tier(self, name: str) -> None:
        tier, node = name.partition("-")[0], self.nodes[name]
        addresses = self.tiers[name]
        values: dict[str, Any] = {
            "id": name,
            "listen": f"127.0.0.1:{addresses.data}",
            "admin": f"127.0.0.1:{addresses.admin}",
            "redis": {"url": self.redis.url, "budget_ms": 500},  # the default of 10 is for machines that are not busy
            "drain": {"grace_s": 5},
            "log": {"format": "json"},
            "tracing": {"recent": 5000},
        }
        values |= dict(zip(("region", "cluster"), node, strict=False))
        self._add(tier, name, values, url=f"{addresses.admin_url}/readyz")

    def _add(self, command: str, name: str, values: dict[str, Any], url: str = "", line: str = "") -> None:
        config = self._folder / f"{name}.yaml"
        etcd = {"urls": [etcd.url for etcd in self.etcds], "ttl_s": TTL_S}
        if name in self.tiers:
            etcd["snapshot_file"] = str(self.snapshot_file(name))
        config.write_text(json.dumps({**values, "etcd": etcd, **self.settings(name)}))
        self.processes[name] = Process(name, headwater(command, "--config", str(config)), url, line)

    def snapshot_file(self, name: str) -> FilePath:
        """Where a tier keeps what etcd said last."""
        return self._folder / f"{name}.snapshot.json"

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> float:
        """Start everything and wait until all see each other; the seconds it took."""
        began = time.monotonic()
        first = (*self.stores, *self._engine_names)
        await asyncio.gather(*(self.processes[name].start() for name in first))
        await asyncio.gather(*(process.start() for name, process in self.processes.items() if name not in first))
        await self.settled()
        return time.monotonic() - began

    def kill(self, *names: str) -> None:
        """SIGKILL."""
        for name in names:
            self.processes[name].kill()

    async def heal(self) -> None:
        """Start what is not running, clear all faults, and wait until all see each other again."""
        for name in self.servers:
            if not await self._lives(name):
                self.kill(self.process_of(name))
        dead = [name for name, process in self.processes.items() if process.process is None]
        await asyncio.gather(*(self.processes[name].start() for name in dead))
        await asyncio.gather(*(get(f"{self.engine_url(n)}/sim/faults", method="DELETE") for n in self.servers))
        for mark in (await get(f"{self.admin_url}/admin/v1/drains")).json():
            await get(f"{self.admin_url}/admin/v1/drains/{mark['path']}", method="DELETE")
        await self.settled()

    def discard(self) -> None:
        """End everything at once."""
        for process in reversed(list(self.processes.values())):
            process.discard()

    async def _lives(self, server: str) -> bool:
        try:
            return (await get(f"{self.engine_url(server)}/health")).status == 200
        except OSError:
            return False

    async def settled(self, timeout_s: float = SETTLED_S) -> float:
        """Wait until every tier sees all servers and balancers, and requests pass all tiers."""
        began = time.monotonic()
        await eventually(self._all_seen, timeout_s, step_s=0.1)
        await eventually(self._no_takeover, timeout_s, step_s=0.2)
        return time.monotonic() - began

    async def _all_seen(self) -> bool:
        try:
            return all(await asyncio.gather(*(self._sees_all(t) for t in self.tiers.values())))
        except OSError:
            return False

    async def _sees_all(self, tier: Addresses) -> bool:
        reply = await get(f"{tier.admin_url}/admin/v1/pools")
        assert reply.status == 200, reply
        pools = reply.json()["pools"]
        if any(pool["stale"] for pool in pools.values()):
            return False
        nodes = {"": REGIONS, **REGIONS, **{f"{r}/{c}": () for c, r in CLUSTERS.items()}}
        endpoints = {path: pools.get(path, {"endpoints": {}})["endpoints"] for path in nodes}
        balancers = [e["balancers"] for path, es in endpoints.items() if path.count("/") == 0 for e in es.values()]
        instances = [e for path, es in endpoints.items() if "/" in path for e in es.values()]
        return (
            len(instances) == len(self.servers)
            and all(e["phase"] == "serving" for e in instances)
            and [len(b) for b in balancers] == [self.replicas] * (len(REGIONS) + len(CLUSTERS))
        )

    async def _no_takeover(self) -> bool:
        """Whether some requests come through with each stage run by its own tier."""
        before = await self.takeovers()
        for name in GLOBALS:
            for _ in range(4):
                if (await self.chat(url=self.tiers[name].url)).status != 200:
                    return False
        return await self.takeovers() == before

    # -- what is asked -----------------------------------------------------------------------------------------------

    def engine_url(self, name: str) -> str:
        """Of a simulated server."""
        return f"http://127.0.0.1:{self.servers[name]}"

    async def chat(self, *headers: str, url: str = "", **fields: Any) -> Response:
        """A short chat, in one piece unless `stream` is given."""
        body = chat(MODEL, **{"max_tokens": 4, "ignore_eos": True, **fields})
        return await ask(url or self.url, "/v1/chat/completions", body, *headers)

    async def requests(self) -> dict[str, list[dict[str, Any]]]:
        """What each server that lives remembers of the requests it got."""

        async def of(name: str) -> list[dict[str, Any]]:
            try:
                return list((await get(f"{self.engine_url(name)}/sim/requests")).json()["requests"])
            except OSError:
                return []

        return dict(zip(self.servers, await asyncio.gather(*(of(name) for name in self.servers)), strict=True))

    async def received(self) -> int:
        """Requests that all servers together have got so far."""
        replies = await asyncio.gather(*(get(f"{self.engine_url(name)}/sim/requests") for name in self.servers))
        return sum(reply.json()["received"] for reply in replies)

    async def set_faults(self, names: Iterable[str], **faults: Any) -> None:
        """Let something go wrong with these servers."""
        for name in names:
            url = f"{self.engine_url(name)}/sim/faults"
            assert (await get(url, method="POST", body=json.dumps(faults).encode())).status == 200

    async def takeovers(self) -> dict[str, float]:
        """Stages run for a tier that is gone, by process that is alive."""
        alive = [name for name in self.tiers if self.processes[name].process is not None]
        samples = await asyncio.gather(*(metrics(self.tiers[name].admin_url) for name in alive))
        return {n: total(s, "headwater_takeovers_total") for n, s in zip(alive, samples, strict=True)}

    async def idle(self) -> bool:
        """Whether no process that is alive has a request under way: by its gauge, and by its reservations."""
        for name, tier in self.tiers.items():
            if self.processes[name].process is None:
                continue
            if total(await metrics(tier.admin_url), "headwater_in_flight_requests") != 0.0:
                return False
            pools = (await get(f"{tier.admin_url}/admin/v1/pools")).json()["pools"]
            if any(p["in_flight"] or any(e["in_flight"] for e in p["endpoints"].values()) for p in pools.values()):
                return False
        return True


# -- tiers in this process ---------------------------------------------------------------------------------------------

CLUSTER: Path = ("r", "c")


class Tiers:
    """One tier that runs all stages, or a chain of three, in front of fake engines."""

    def __init__(self, chain: list[TierProcess], engines: tuple[FakeEngine, ...], spare: list[TierProcess]) -> None:
        self.chain = chain
        self.engines = engines
        self.spare = spare

    @property
    def top(self) -> TierProcess:
        """The one that clients call."""
        return self.chain[0]

    @property
    def bottom(self) -> TierProcess:
        """The one that calls the engines."""
        return self.chain[-1]

    @property
    def url(self) -> str:
        """Where clients call."""
        return f"http://127.0.0.1:{self.top.port}"

    @property
    def admin_url(self) -> str:
        """The top tier's admin listener."""
        return f"http://127.0.0.1:{self.top.admin_port}"

    async def chat(self, *headers: str, **fields: Any) -> Response:
        """A chat with the fake model."""
        return await ask(self.url, "/v1/chat/completions", chat(FAKE_MODEL, **fields), *headers)

    def idle(self) -> bool:
        """Whether nothing is under way: no gauge, no reservation, and nothing predicted on any server."""
        return not any(
            tier.telemetry.registry.get_sample_value("headwater_in_flight_requests")
            or any(b.in_flight for b in tier.balancing.balancers.values())
            or any(s.n or s.w or s.p or s.k or s.r for c in self._candidates(tier) for s in c.own)
            for tier in self.chain
        )

    @staticmethod
    def _candidates(tier: TierProcess) -> list[Any]:
        return [c for b in tier.balancing.balancers.values() for c in b.candidates.values()]

    def candidate(self, engine: FakeEngine) -> Any:
        """What the bottom tier knows of an engine."""
        return self.bottom.balancing.balancers[CLUSTER].candidates[engine.name]


@asynccontextmanager
async def tiers(
    *engines: FakeEngine, depth: int = 1, more: Iterable[Path] = (), **settings: Any
) -> AsyncIterator[Tiers]:
    """`depth` 1: what `headwater up` is; 3: a tier for each stage. Starts and ends the engines as well.

    `more`: nodes that get one more balancer each; these stand in `spare`.
    """
    store = MemoryMembershipStore()
    nodes: list[Path] = [()] if depth == 1 else [(), CLUSTER[:1], CLUSTER]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        serves: Callable[[Path], bool] | None = (lambda path: True) if depth == 1 else None
        chain = [TierProcess(_settings(node, settings), node, serves=serves, store=store) for node in nodes]
        spare = [TierProcess(_settings(node, settings, "spare"), node, store=store) for node in more]
        await asyncio.gather(*(tier.start() for tier in (*chain, *spare)))
        stack.push_async_callback(lambda: asyncio.gather(*(tier._close(0.0) for tier in (*chain, *spare))))
        for engine in engines:
            endpoint = Endpoint(engine.name, url=engine.url, models=frozenset({engine.model}), gpu="h100")
            labels = frozenset({label_of(engine.version)} if engine.version else ())
            endpoint = replace(endpoint, engine=engine.engine, labels=labels)
            await chain[-1].membership.register_instance(CLUSTER, endpoint)
        world = Tiers(chain, engines, spare)
        await eventually(lambda: _known(world), 20.0)
        yield world


def _settings(node: Path, settings: Mapping[str, Any], kind: str = "tier") -> TierConfig:
    values = {
        "id": "-".join((kind, *node)),
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "log": {"access": False},
        **settings,
    }
    return TierConfig.model_validate(values)


def _known(world: Tiers) -> bool:
    """Whether every tier knows every engine and, where there are three, all the balancers and their quotes."""
    for tier in world.chain:
        instances = tier.pools.get(CLUSTER)
        if instances is None or len(instances.endpoints) != len(world.engines):
            return False
    if len(world.chain) == 1:
        return True
    above = ((world.chain[0], (), "r"), (world.chain[1], CLUSTER[:1], "c"))
    return all(
        len(t.balancing.balancers[path].candidates[child].quoted) == len(world.engines) for t, path, child in above
    )


def open_files(pid: int | None = None) -> int:
    """Open file descriptors of a process, ours by default."""
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))
