"""Puts scaling into a tier that is being started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from common.errors import ConfigError
from common.scaling.config import ScaledGroup, Scaling
from common.scaling.keda import KedaScaler
from common.scaling.kubernetes import kubernetes
from common.scaling.scaler import Provider, Scaler
from common.scaling.shown import ScalingMetrics, scaling_router
from common.scaling.webhook import webhook
from common.tier import TierProcess
from common.types import Path

ProcessProvider = Callable[[str, str, ScaledGroup], Provider]
"""Of a model and group, of processes on this machine."""


async def start_scaling(
    tier: TierProcess, config: Scaling, cluster: Path, processes: ProcessProvider | None = None
) -> Scaler | None:
    """Before the tier takes requests (`TierProcess.start`'s `prepare`). None where nothing is scaled.

    Raises ConfigError for what cannot work here.
    """
    if not config.models:
        return None
    nodes = [path for path in (cluster[:0], cluster[:1]) if path != tier.node]  # `up` is all of them in one

    def above() -> list[str]:
        return [peer.id for path in nodes for peer in tier.membership.balancers(path) if peer.id != tier.id]

    scaler = Scaler(
        config,
        cluster,
        tier.balancing,
        tier.affinity_store,
        tier.replicas,
        tier.serving.queue.waiting,
        _providers(config, cluster, processes),
        above,
    )
    on_demand = tier.balancing.on_demand
    tier.balancing.on_demand = lambda model: model in config.models or on_demand(model)
    tier.serving.on_arrival = scaler.arrived
    tier.telemetry.registry.register(ScalingMetrics(scaler))
    tier.routers.append(scaling_router(scaler))
    tier.beside.append(scaler)
    if config.keda.listen is not None:
        keda = KedaScaler(scaler)
        await keda.start(config.keda.listen)
        tier.beside.append(keda)
    tier.spawn(scaler.run(), "scaling")
    return scaler


def _providers(config: Scaling, cluster: Path, processes: ProcessProvider | None) -> Mapping[tuple[str, str], Provider]:
    found: dict[tuple[str, str], Provider] = {}
    for model, scaled in config.models.items():
        for id_, group in scaled.groups.items():
            if group.webhook.url:
                found[model, id_] = webhook(group.webhook, cluster, model, id_)
            elif group.kubernetes.name:
                found[model, id_] = kubernetes(group.kubernetes)
            elif group.process.command:
                if processes is None:
                    raise ConfigError(
                        f"scaling.models.{model}.groups.{id_}.process: only `headwater up` starts servers"
                    )
                found[model, id_] = processes(model, id_, group)
    return found
