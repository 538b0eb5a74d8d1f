"""`headwater up`: the global tier with nobody below it, so that it runs all three stages itself, and the agent's eyes.

Takeover down is what makes this one process a whole balancer: no cluster or region has a balancer of its own here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from random import Random

import structlog

from common import clock
from common.errors import ConfigError
from common.reload import Source
from common.scaling.config import ScaledGroup
from common.scaling.start import start_scaling
from common.store.memory import MemoryMembershipStore
from common.tier import TierProcess
from common.types import Endpoint, LoadReport, Path, Pool
from services.agent.accelerators import LocalAccelerators
from services.agent.config import InstanceConfig
from services.agent.engines import Scraper, Unreachable, detect
from services.agent.gpu import GpuSampler
from services.agent.host import HostSampler
from services.agent.monitor import InstanceMonitor
from services.up.config import UpConfig
from services.up.processes import ProcessGroup

log = structlog.get_logger()

CLUSTER: Path = ("local", "local")
FIRST_LOOK_S = 1.0  # for each server to say what it is; later is fine too, nonsense is not


async def run(config: UpConfig, source: Source[UpConfig] | None = None) -> None:
    """Serve until told to stop, following the configuration's source. Raises ConfigError when it cannot start."""
    there = await _refuse_nonsense(config)
    started: list[ProcessGroup] = []  # of servers that are started as they are needed

    def watch(new: UpConfig | None = None) -> None:
        nonlocal config
        config = new or config
        monitor.watch(config.by_id | {id_: i for group in started for id_, i in group.instances.items()})

    tier = TierProcess(
        config,
        (),
        serves=lambda path: True,
        store=MemoryMembershipStore(),
        source=source,
        on_config=watch,
        live=("instances",),
    )

    def processes(model: str, name: str, group: ScaledGroup) -> ProcessGroup:
        started.append(ProcessGroup(tier, CLUSTER, model, name, group, watch))
        return started[-1]

    registering: set[asyncio.Task[None]] = set()

    def registered(work: asyncio.Task[None]) -> None:
        registering.add(work)
        work.add_done_callback(registering.discard)

    def found(endpoint: Endpoint) -> None:
        registered(asyncio.create_task(tier.membership.register_instance(CLUSTER, endpoint)))

    def gone(id_: str) -> None:
        registered(asyncio.create_task(tier.membership.deregister(CLUSTER, id_)))

    def reported(report: LoadReport) -> None:
        tier.balancing.report(CLUSTER, report)

    gpus = GpuSampler()
    monitor = InstanceMonitor(
        on_endpoint=found,
        on_gone=gone,
        on_report=reported,
        rng=Random(secrets.randbits(64)),
        accelerators=LocalAccelerators(gpus, HostSampler(clock.now()), sole=len(config.instances) == 1),
        interval_s=config.scrape_interval_s,
        timeout_s=config.scrape_timeout_s,
    )

    async def look() -> None:
        """Have the servers that are there known before the first request comes."""

        def known(pools: Mapping[Path, Pool]) -> bool:
            return CLUSTER in pools and there <= {e.id for e in pools[CLUSTER].endpoints}

        watch()
        if config.by_id:
            await tier.until(known, FIRST_LOOK_S)
        await start_scaling(tier, config.scaling, CLUSTER, processes)

    gpus.start()
    try:
        await tier.start(look)
        await tier.run()
    finally:
        await monitor.close()
        gpus.close()


async def _refuse_nonsense(config: UpConfig) -> set[str]:
    """The ids of the servers that answer as inference servers do.

    One that is not up yet, or is silent, is waited for; one that answers as something else is a mistake.
    """
    scraper = Scraper(2.0 * FIRST_LOOK_S)

    async def look(id_: str, instance: InstanceConfig) -> str:
        try:
            async with asyncio.timeout(FIRST_LOOK_S):
                kind = await detect(scraper.of(instance.url))
        except TimeoutError:
            return ""
        if isinstance(kind, Unreachable) and kind.refused:
            log.warning("instance_not_up_yet", url=instance.url)
            return ""
        if isinstance(kind, Unreachable) and not instance.engine:
            raise ConfigError(f"instance {instance.url} is no inference server that is known here: {kind.why}")
        return id_

    try:
        return set(await asyncio.gather(*(look(id_, i) for id_, i in config.by_id.items()))) - {""}
    finally:
        await scraper.close()
