"""All sources of one agent, and its list, as one set of servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Final

import structlog

from common import clock
from common.config import NAME
from common.errors import ConfigError
from services.agent.config import AgentConfig, InstanceConfig
from services.agent.sources.base import Source, SourceUnavailable
from services.agent.sources.dns import DnsName
from services.agent.sources.docker import DockerContainers
from services.agent.sources.kubernetes import KubernetesEndpoints

log = structlog.get_logger()

RETRY_S: Final = 1.0  # after a source failed; doubles while it goes on failing
MAX_RETRY_S: Final = 30.0


class Sources:
    """Follows every source, and says which servers there are in all whenever that changes."""

    def __init__(self, config: AgentConfig, on_change: Callable[[AgentConfig], None], rng: Random) -> None:
        """`on_change` gets the configuration with all servers as its `instances`. Raises ConfigError."""
        discovery = config.discovery
        if discovery.dns and find_spec("dns") is None:
            raise ConfigError("discovery.dns: dnspython is missing; pip install 'headwater[discovery]'")
        self._config = config
        self._on_change = on_change
        self._rng = rng
        self._sources: list[Source] = [
            *(DnsName(c) for c in discovery.dns),
            *(DockerContainers(c) for c in discovery.docker),
            *(KubernetesEndpoints(c, discovery.node) for c in discovery.kubernetes),
        ]
        self._found: list[Sequence[InstanceConfig]] = [()] * len(self._sources)
        self._instances = config.instances
        self._left_out: frozenset[str] = frozenset()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow them."""
        self._tasks = [
            asyncio.create_task(self._follow(number, source), name=source.name)
            for number, source in enumerate(self._sources)
        ]

    async def close(self) -> None:
        """Follow them no more; nobody is told that their servers are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, number: int, source: Source) -> None:
        pause, away = RETRY_S, ""
        while True:
            began = clock.now()
            try:
                await source.follow(partial(self._tell, number))
            except SourceUnavailable as error:
                if str(error) != away:
                    log.warning("source_unavailable", source=source.name, why=str(error), kept=len(self._found[number]))
                    away = str(error)
            except Exception:  # an answer that nobody thought of must not be the last one that is heard
                log.exception("source_failed", source=source.name)
            else:
                away = ""
            if clock.now() - began > MAX_RETRY_S:  # it has worked for a while
                pause = RETRY_S
            await asyncio.sleep(pause * self._rng.uniform(0.8, 1.2))
            pause = min(2.0 * pause, MAX_RETRY_S)

    def reconfigure(self, config: AgentConfig) -> None:
        """Take another list over; the sources stay what they are."""
        self._config = config
        self._instances = self._merged()
        self._on_change(config.model_copy(update={"instances": self._instances}))

    def _tell(self, number: int, instances: Sequence[InstanceConfig]) -> None:
        self._found[number] = instances
        merged = self._merged()
        if merged != self._instances:
            self._instances = merged
            log.info("servers_changed", source=self._sources[number].name, servers=len(merged))
            self._on_change(self._config.model_copy(update={"instances": merged}))

    def _merged(self) -> tuple[InstanceConfig, ...]:
        """The list first, then the sources in their order; of two with one name or URL the first counts."""
        taken: dict[str, InstanceConfig] = {}
        urls: set[str] = set()
        left_out: dict[str, str] = {}
        for instance in [*self._config.instances, *(i for found in self._found for i in found)]:
            id_ = self._config.instance_id(instance)
            if instance.url in urls:
                continue  # known twice, which is no mistake: a list and a source may overlap
            if not NAME.fullmatch(id_):
                left_out[id_] = "it needs an id of 1 to 64 of letters, digits, '.', '_' and '-'"
            elif id_ in taken:
                left_out[f"{id_} at {instance.url}"] = f"{taken[id_].url} has that name"
            elif len(taken) >= self._config.discovery.max_instances:
                left_out[id_] = "there are more than discovery.max_instances"
            else:
                taken[id_] = instance
                urls.add(instance.url)
        for name in sorted(left_out.keys() - self._left_out):
            log.warning("server_left_out", server=name, why=left_out[name])
        self._left_out = frozenset(left_out)
        return tuple(taken.values())
