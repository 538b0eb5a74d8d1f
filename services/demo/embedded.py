"""Tiers and agents inside the demo's own process, over one memory store: for machines without an etcd binary."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from random import Random

from common.config import TierConfig, load
from common.membership import Membership
from common.store.memory import MemoryMembershipStore
from common.tier import TierProcess
from services.agent.agent import Agent
from services.agent.config import AgentConfig
from services.global_lb.config import GlobalConfig
from services.instance_lb.config import InstanceConfig
from services.region_lb.config import RegionConfig

CONFIGS: dict[str, type[GlobalConfig] | type[RegionConfig] | type[InstanceConfig]] = {
    "global": GlobalConfig,
    "region": RegionConfig,
    "instance": InstanceConfig,
}


class EmbeddedNodes:
    """Tiers and agents by name, each started from the command line it would have as a process."""

    def __init__(self) -> None:
        self.store = MemoryMembershipStore()
        self.nodes: dict[str, TierProcess | Agent] = {}
        self._argv: dict[str, Sequence[str]] = {}

    async def start(self, name: str, argv: Sequence[str]) -> None:
        """Start what `headwater COMMAND --config FILE` would start."""
        self._argv[name] = argv
        command, _, file = argv[-3:]
        if command == "agent":
            config = load(AgentConfig, file)
            registry = Membership(self.store, ttl_s=config.etcd.ttl_s)
            agent = Agent(config, registry, Random(secrets.randbits(64)))
            await agent.start()
            self.nodes[name] = agent
            return
        settings: TierConfig = load(CONFIGS[command], file)
        node = settings.node  # type: ignore[attr-defined]
        tier = TierProcess(settings, node, store=self.store)
        await tier.start()
        self.nodes[name] = tier

    def kill(self, name: str) -> None:
        """As a crash would: every socket is reset at once and nothing is said to anybody."""
        node = self.nodes[name]
        assert isinstance(node, TierProcess)
        node.abort()

    async def restart(self, name: str) -> None:
        """Start a killed one again."""
        await self.start(name, self._argv[name])

    async def stop(self) -> None:
        """End all of them, the last one started first."""
        for node in reversed(self.nodes.values()):
            if isinstance(node, TierProcess):
                await node.stop()
            else:
                await node.close()
