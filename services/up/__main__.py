"""`headwater up`: the global tier with nobody below it, so that it runs all three stages itself, and the agent's eyes.

Takeover down is what makes this one process a whole balancer: no cluster or region has a balancer of its own here.
"""

from __future__ import annotations

import asyncio
import secrets
from random import Random

import structlog

from common import clock
from common.errors import ConfigError
from common.store.memory import MemoryMembershipStore
from common.tier import TierProcess
from common.types import Endpoint, LoadReport, Path
from services.agent.accelerators import LocalAccelerators
from services.agent.engines import Scraper, Unreachable, detect
from services.agent.gpu import GpuSampler
from services.agent.host import HostSampler
from services.agent.monitor import InstanceMonitor
from services.up.config import UpConfig

log = structlog.get_logger()

CLUSTER: Path = ("local", "local")
FIRST_LOOK_S = 1.0  # for all servers together to say what they are; later is fine too, nonsense is not


async def run(config: UpConfig) -> None:
    """Serve until told to stop. Raises ConfigError when it cannot start."""
    await _refuse_nonsense(config)
    tier = TierProcess(config, (), serves=lambda path: True, store=MemoryMembershipStore())
    await tier.start()
    gpus = GpuSampler()
    gpus.start()
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

    monitor = InstanceMonitor(
        on_endpoint=found,
        on_gone=gone,
        on_report=reported,
        rng=Random(secrets.randbits(64)),
        accelerators=LocalAccelerators(gpus, HostSampler(clock.now()), sole=len(config.instances) == 1),
        interval_s=config.scrape_interval_s,
        timeout_s=config.scrape_timeout_s,
    )
    monitor.watch(config.by_id)
    try:
        await tier.run()
    finally:
        await monitor.close()
        gpus.close()


async def _refuse_nonsense(config: UpConfig) -> None:
    """A server that is not up yet is waited for; one that answers, and not as an inference server, is a mistake."""
    scraper = Scraper(FIRST_LOOK_S)
    try:
        async with asyncio.timeout(FIRST_LOOK_S):
            found = await asyncio.gather(*(detect(scraper.of(i.url)) for i in config.instances if not i.engine))
    except TimeoutError:
        return
    finally:
        await scraper.close()
    for instance, kind in zip([i for i in config.instances if not i.engine], found, strict=True):
        if isinstance(kind, Unreachable) and kind.refused:
            log.warning("instance_not_up_yet", url=instance.url)
        elif isinstance(kind, Unreachable):
            raise ConfigError(f"instance {instance.url} is no inference server that is known here: {kind.why}")
