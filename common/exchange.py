"""Balancers of one node tell each other what they have under way, so that none sends where another just did.

Five numbers an endpoint, every 50 ms, through the shared store, expiring with their owner. While nothing is heard of a
balancer that lives, its traffic is taken to be like ours (`Balancer.replicas`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common import clock
from common.balancing import Balancing
from common.errors import StoreUnavailable
from common.policy.server import Sums
from common.store.base import AffinityStore
from common.types import Path

INTERVAL_S = 0.05
TTL_S = 1.0  # a balancer that told nothing for so long has died, or cannot reach the store

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Sums]).decode


class Exchange:
    """Tells and hears for one node. `others` gives the ids of its other live balancers."""

    def __init__(
        self, store: AffinityStore, node: Path, balancing: Balancing, others: Callable[[], frozenset[str]]
    ) -> None:
        self._store = store
        self._node = node
        self._balancing = balancing
        self._others = others
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled. Alone in a node, nothing is told and nothing asked."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            others = sorted(self._others())
            if others:
                try:
                    await self._once(others)
                except StoreUnavailable:
                    self.failures += 1

    async def _once(self, others: list[str]) -> None:
        balancer = self._balancing.balancers.get(self._node)
        if balancer is None:
            return
        told = _encode(balancer.tell(clock.now()))
        await self._store.share(self._key(self._balancing.process_id), told, TTL_S)
        found = await self._store.shared([self._key(other) for other in others])
        now = clock.now()
        for other, value in zip(others, found, strict=True):
            if value is None:
                continue
            try:
                balancer.hear(other, _decode(value), now)
            except msgspec.DecodeError:
                self.failures += 1  # a balancer of another version: counted as one that tells nothing

    def _key(self, balancer: str) -> str:
        # Braces keep all keys of a node on one shard of a Redis Cluster, so that they can be read together.
        return f"headwater:in_flight:{{{'/'.join(self._node)}}}:{balancer}"
