"""The agent process: what the monitor finds is registered and reported.

The monitor's call-backs only note what is to be so; one task brings the registry there, the newest word on each
instance first served. A registry that is slow or away thus delays no look, and no look waits for it.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final, Protocol

import structlog

from common import clock
from common.errors import ConfigError, StoreError
from common.reporting import ReportServer, Tls
from common.types import Endpoint, LoadReport, Path
from services.agent.accelerators import LocalAccelerators
from services.agent.config import LOOPBACKS, AgentConfig
from services.agent.gpu import GpuSampler
from services.agent.host import HostSampler
from services.agent.monitor import InstanceMonitor

log = structlog.get_logger()

RETRY_S: Final = 1.0  # after the registry refused a change; it retries outages by itself


class Registry(Protocol):
    """Where instances are made known, under a lease that lasts as long as this process."""

    async def register_instance(self, path: Path, endpoint: Endpoint) -> None:
        """Make an instance of the cluster at `path` known, or replace what is known of it.

        May raise StoreError, or ConfigError for what can never be stored.
        """

    async def deregister(self, path: Path, id_: str) -> None:
        """Have it forgotten. May raise StoreError."""

    async def close(self) -> None:
        """Give up the lease, and with it every registration."""


class Agent:
    """Everything that `headwater agent` runs, without the process around it."""

    def __init__(self, config: AgentConfig, registry: Registry, rng: Random) -> None:
        self.config = config
        self.path: Path = (config.region, config.cluster)
        tls = config.tls
        self.reports = ReportServer(tls=Tls(tls.cert_file, tls.key_file, tls.ca_file) if tls.cert_file else None)
        self.monitor: InstanceMonitor | None = None
        self._registry = registry
        self._rng = rng
        self._gpus = GpuSampler(_slices(config))
        self._accelerators = LocalAccelerators(self._gpus, HostSampler(clock.now()), sole=len(config.instances) == 1)
        self._wanted: dict[str, Endpoint | None] = {}  # still to be brought to the registry; None: to be removed
        self._changed = asyncio.Event()
        self._registrar: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen for subscribers and begin to look. Raises ConfigError if it cannot listen."""
        port = await self.reports.start(self.config.listen)
        address = f"{self.config.advertised_host}:{port}"
        self._gpus.start()
        self._registrar = asyncio.create_task(self._register(), name="registrar")
        self.monitor = InstanceMonitor(
            on_endpoint=self._found,
            on_gone=self._gone,
            on_report=self._reported,
            rng=self._rng,
            accelerators=self._accelerators,
            agent=address,
            interval_s=self.config.scrape_interval_s,
            timeout_s=self.config.scrape_timeout_s,
            fail_after=self.config.fail_after,
            hang_after_s=self.config.hang_after_s,
        )
        self._watch(self.config)
        log.info("agent_started", agent=self.config.id, reports=address, instances=len(self.config.instances))

    def reconfigure(self, config: AgentConfig) -> None:
        """Take another list of instances over. What else changed (addresses, intervals, etcd) needs a new process."""
        self.config = config
        self._accelerators.sole = len(config.instances) == 1
        self._watch(config)

    async def close(self) -> None:
        """Leave: registrations first, so that no balancer sends here what nobody reports on any more."""
        if self._registrar is not None:
            self._registrar.cancel()
            await asyncio.gather(self._registrar, return_exceptions=True)
        await self._registry.close()
        await self.reports.close()
        if self.monitor is not None:
            await self.monitor.close()
        self._gpus.close()
        log.info("agent_left", agent=self.config.id)

    def _watch(self, config: AgentConfig) -> None:
        assert self.monitor is not None
        for instance in config.instances:
            if instance.host in LOOPBACKS and config.advertised_host not in LOOPBACKS:
                log.warning("instance_on_loopback", url=instance.url, hint="balancers on other hosts cannot reach it")
        self.monitor.watch({config.instance_id(i): i for i in config.instances})

    def _found(self, endpoint: Endpoint) -> None:
        monitor = self.monitor
        assert monitor is not None
        self._want(endpoint.id, endpoint)
        self.reports.offer(endpoint.id, lambda now: monitor.report(endpoint.id, now))

    def _gone(self, id_: str) -> None:
        self._want(id_, None)
        self.reports.withdraw(id_)

    def _reported(self, report: LoadReport) -> None:
        self.reports.changed(report.endpoint)

    def _want(self, id_: str, endpoint: Endpoint | None) -> None:
        self._wanted[id_] = endpoint
        self._changed.set()

    async def _register(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for id_ in list(self._wanted):
                if not await self._bring(id_, self._wanted.pop(id_)):
                    await asyncio.sleep(RETRY_S)

    async def _bring(self, id_: str, endpoint: Endpoint | None) -> bool:
        """One instance to the registry; False if that has to be done again."""
        try:
            if endpoint is None:
                await self._registry.deregister(self.path, id_)
            else:
                await self._registry.register_instance(self.path, endpoint)
        except ConfigError as error:  # a name or URL that the store cannot hold; trying again would not help
            log.error("registration_impossible", instance=id_, error=str(error))
        except StoreError as error:
            log.warning("registration_failed", instance=id_, error=str(error))
            self._wanted.setdefault(id_, endpoint)  # unless there is a newer word on it by now
            self._changed.set()
            return False
        return True


def _slices(config: AgentConfig) -> list[str]:
    """UUIDs of MIG slices among the configured devices."""
    devices = (d for i in config.instances for d in i.devices if isinstance(d, str))
    return sorted({d for d in devices if d.startswith("MIG-")})
