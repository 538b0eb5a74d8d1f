"""Runs one global balancer: `headwater global --config FILE`."""

from __future__ import annotations

from common.reload import Source
from common.tier import TierProcess
from services.global_lb.config import GlobalConfig


async def run(config: GlobalConfig, source: Source[GlobalConfig] | None = None) -> None:
    """Serve until told to stop, following the configuration's source. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node, source=source)
    await tier.start()
    await tier.run()
