"""Runs one global balancer: `headwater global --config FILE`."""

from __future__ import annotations

from common.tier import TierProcess
from services.global_lb.config import GlobalConfig


async def run(config: GlobalConfig) -> None:
    """Serve until told to stop. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node)
    await tier.start()
    await tier.run()
