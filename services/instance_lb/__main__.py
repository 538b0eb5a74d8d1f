"""Runs one balancer of a cluster: `headwater instance --config FILE`."""

from __future__ import annotations

from common.reload import Source
from common.scaling.start import start_scaling
from common.tier import TierProcess
from common.types import Path
from services.instance_lb.config import InstanceConfig
from services.instance_lb.picker import PickerServer


async def run(config: InstanceConfig, source: Source[InstanceConfig] | None = None) -> None:
    """Serve until told to stop, following the configuration's source. Raises ConfigError when it cannot start."""
    tier = TierProcess(config, config.node, source=source)

    async def prepare() -> None:
        await start_scaling(tier, config.scaling, config.node)

    await tier.start(prepare)
    if config.picker.listen is not None:
        await start_picker(tier, config, config.picker.listen)
    await tier.run()


async def start_picker(tier: TierProcess, config: InstanceConfig, listen: str) -> PickerServer:
    """Pick servers of the cluster for gateways as well. Raises ConfigError when that cannot be."""

    def instances() -> list[tuple[Path, str]]:
        balancers = tier.balancing.balancers.items()
        return [
            ((*at, c.endpoint.id), c.endpoint.url) for at, b in balancers for c in b.candidates.values() if len(at) == 2
        ]

    def ready() -> bool:
        return not tier.draining and tier.balancing.serving

    picker = PickerServer(config.picker, config.limits, config.node, tier.serving.serve, instances, ready)
    await picker.start(listen)
    tier.beside.append(picker)
    return picker
