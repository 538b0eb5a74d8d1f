"""Runs one balancer of a region: `headwater region --config FILE`."""

from __future__ import annotations

from common.tier import TierProcess
from services.region_lb.config import RegionConfig


async def run(config: RegionConfig) -> None:
    """Serve until told to stop. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node)
    await tier.start()
    await tier.run()
