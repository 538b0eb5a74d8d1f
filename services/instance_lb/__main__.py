"""Runs one balancer of a cluster: `headwater instance --config FILE`."""

from __future__ import annotations

from common.tier import TierProcess
from services.instance_lb.config import InstanceConfig


async def run(config: InstanceConfig) -> None:
    """Serve until told to stop. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node)
    await tier.start()
    await tier.run()
