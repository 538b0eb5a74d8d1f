"""The whole system of the integration tests, two or three of everything, with what is needed to break all of it.

Every second balancer, some servers, etcd and Redis are reached through relays, which cut, slow and hold what passes. A
relay listens on another loopback address, at its target's own port, and refuses while its target is dead.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Any

from common.tenancy.keys import make
from tests.integration.clients import Response
from tests.integration.system import CLUSTERS, MODEL, TTL_S, Process, System, engine_process
from tests.servers import Relay, Server

RELAYED = "127.0.1.1"
START_S = 240.0  # of a process, on a machine that does much else while thirty of them start
OTHER_MODEL = "qwen-7b"
ADAPTER = "sql-lora"
MODELS = (MODEL, OTHER_MODEL, ADAPTER)
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"priority": "standard"},
    "beta": {"priority": "batch", "concurrent_requests": 1000, "tokens_per_minute": 50_000_000},
    "gamma": {"priority": "critical", "requests_per_minute": 100_000},
    "small": {"priority": "standard", "requests_per_minute": 20},  # whose 429s are right answers
}
CLOCKS = ("global-2", "region-east-2", "instance-east-a-2", "instance-west-b-1", "agent-west-a", "redis")
FAKETIME = next(iter(FilePath("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


class ChaosSystem(System):
    """Two balancers of every region and cluster, three members of etcd, and each server a process of its own."""

    replicas = 2
    members = 3

    def __init__(self, disk: FilePath) -> None:
        self.disk = disk
        self.keys: dict[str, str] = {}
        self._stepped: dict[str, FilePath] = {}
        # Servers that close idle connections sooner than a link may be held leave it open whether a request was run.
        super().__init__("--speed", "2", "--tick", "0.02", "--keepalive-timeout", "60")
        for process in self.processes.values():
            process.start_timeout_s = START_S
        self._write_tenants()
        self.relays = {name: Relay(self._port(name), at=RELAYED, own_port=self._port(name)) for name in self._relayed()}
        if FAKETIME:
            for name in CLOCKS:
                self._with_clock(name, self.processes[name])

    # -- what it consists of -----------------------------------------------------------------------------------------

    def add_engines(self, *flags: str) -> None:
        """See System."""
        for server, port in self.servers.items():
            other = server.endswith("1")
            more = () if other else ("--adapter", ADAPTER)
            model = OTHER_MODEL if other else MODEL
            self.processes[server] = engine_process(server, {server: port}, *flags, *more, model=model)

    def process_of(self, server: str) -> str:
        """See System."""
        return server

    def seen_url(self, server: str) -> str:
        """See System."""
        return f"http://{RELAYED if self._is_relayed(server) else '127.0.0.1'}:{self.servers[server]}"

    def settings(self, name: str) -> dict[str, Any]:
        """See System."""
        etcd: dict[str, Any] = {"urls": [f"http://{RELAYED}:{etcd.port}" for etcd in self.etcds], "ttl_s": TTL_S}
        if name not in self.tiers:
            return {"etcd": etcd}
        return {
            "etcd": {**etcd, "snapshot_file": str(self.snapshot_file(name))},
            "redis": {"url": f"redis://{RELAYED}:{self.redis.port}", "budget_ms": 100},
            "tenants": {"file": str(self._folder / "tenants.yaml"), "budget_ms": 500},
            "tracing": {"recent": 500},
            **({"advertise": RELAYED} if self._is_relayed(name) else {}),
        }

    def snapshot_file(self, name: str) -> FilePath:
        """See System; on the disk that can be filled."""
        return self.disk / f"{name}.json"

    def _write_tenants(self) -> None:
        tenants = {}
        for tenant, limits in TENANTS.items():
            self.keys[tenant], kept = make(datetime(2026, 1, 1, tzinfo=UTC))
            tenants[tenant] = {**limits, "keys": [{"id": kept.id, "sha256": kept.sha256}]}
        (self._folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))

    def _is_relayed(self, name: str) -> bool:
        second = name in self.tiers and name.endswith("2") and not name.startswith("global")
        return second or name in self.stores or name.startswith("west-")

    def _relayed(self) -> list[str]:
        return [name for name in self.processes if self._is_relayed(name)]

    def _port(self, name: str) -> int:
        if name in self.tiers:
            return self.tiers[name].data
        return self.servers[name] if name in self.servers else self.processes[name].port

    def group(self, name: str) -> list[str]:
        """The balancers of the same node, itself among them."""
        return [other for other, node in self.nodes.items() if node == self.nodes[name]]

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> float:
        """See System."""
        for relay in self.relays.values():
            await relay.start()
        return await super().start()

    def down(self, *names: str) -> None:
        """SIGKILL, and nobody listens any more where they were."""
        for name in names:
            if name in self.relays:
                self.relays[name].refuse()
            self.processes[name].kill()

    async def up(self, name: str) -> None:
        """Start what was killed."""
        await self.processes[name].start()
        if name in self.relays:
            await self.relays[name].start()

    async def chat(self, *headers: str, url: str = "", **fields: Any) -> Response:
        """See System."""
        return await super().chat(f"authorization: Bearer {self.keys['acme']}", *headers, url=url, **fields)

    # -- clocks and disks --------------------------------------------------------------------------------------------

    def _with_clock(self, name: str, server: Server) -> None:
        """Run it with a wall clock that can be stepped; what it measures time by goes on as it does."""
        assert FAKETIME is not None
        file = self._stepped[name] = self._folder / f"{name}.clock"
        file.write_text("+0\n")
        variables = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        command = ["env", *(f"{key}={value}" for key, value in variables.items()), *server.command()]
        if isinstance(server, Process):
            server.argv = command
        else:
            server.command = lambda: command  # type: ignore[method-assign]

    def step(self, name: str, seconds: int) -> None:
        """Set the wall clock of a process so far from the true time."""
        new = self._stepped[name].with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.replace(self._stepped[name])

    def fill(self) -> None:
        """Leave no room on the snapshots' disk."""
        with suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
            for _ in range(4096):  # of a small disk; where it is a large one after all, this is the end
                file.write(b"\0" * 4096)

    def empty(self) -> None:
        """Give the room back."""
        (self.disk / "filler").unlink(missing_ok=True)

    def unreadable(self) -> list[str]:
        """Snapshots that are no whole files."""
        bad = []
        for name in self.tiers:
            try:
                json.loads(self.snapshot_file(name).read_text())
            except (OSError, ValueError) as error:
                bad.append(f"{name}: {error}")
        return bad

    def names(self, kind: str) -> list[str]:
        """Processes of a kind: global, region, instance, agent, server, etcd, redis."""
        if kind == "server":
            return list(self.servers)
        return [name for name in self.processes if name.split("-")[0] == kind]


assert set(CLUSTERS) == {"east-a", "east-b", "west-a", "west-b"}  # what CLOCKS and the relays go by
