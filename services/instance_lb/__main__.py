"""Runs one balancer of a cluster: `headwater instance --config FILE`."""

from __future__ import annotations

from common.reload import Source
from common.tier import TierProcess
from services.instance_lb.config import InstanceConfig


async def run(config: InstanceConfig, source: Source[InstanceConfig] | None = None) -> None:
    """Serve until told to stop, following the configuration's source. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node, source=source)
    await tier.start()
    await tier.run()
