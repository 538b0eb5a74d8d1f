"""Runs one balancer of a region: `headwater region --config FILE`."""

from __future__ import annotations

from common.reload import Source
from common.tier import TierProcess
from services.region_lb.config import RegionConfig


async def run(config: RegionConfig, source: Source[RegionConfig] | None = None) -> None:
    """Serve until told to stop, following the configuration's source. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node, source=source)
    await tier.start()
    await tier.run()
