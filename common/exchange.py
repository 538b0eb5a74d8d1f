"""Balancers of one node tell each other what they have under way, so that none sends where another just did.

Five numbers an endpoint, every 50 ms, through the shared store, expiring with their owner. While nothing is heard of a
balancer that lives, its traffic is taken to be like ours (`Balancer.replicas`). Twice a second they tell, if there is
anything to tell, which prompts have taken servers down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from common import clock
from common.balancing import Balancing
from common.errors import StoreUnavailable
from common.policy.quarantine import Quarantine, Strike
from common.policy.server import Sums
from common.store.base import AffinityStore
from common.types import Path

INTERVAL_S = 0.05
STRIKES_S = 0.5  # between two looks at each other's strikes
STRIKES_TTL_S = 5.0
TTL_S = 1.0  # a balancer that told nothing for so long has died, or cannot reach the store

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Sums]).decode
_decode_strikes = msgspec.msgpack.Decoder(list[Strike]).decode


class Exchange:
    """Tells and hears for one node. `others` gives the ids of its other live balancers."""

    def __init__(
        self,
        store: AffinityStore,
        node: Path,
        balancing: Balancing,
        quarantine: Quarantine,
        others: Callable[[], frozenset[str]],
    ) -> None:
        self._store = store
        self._node = node
        self._balancing = balancing
        self._quarantine = quarantine
        self._strikes_at = 0.0
        self._told = False  # of strikes, at the last look
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
                    await self._strikes(others)
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

    async def _strikes(self, others: list[str]) -> None:
        now, quarantine = clock.now(), self._quarantine
        if not quarantine.for_s or now < self._strikes_at + STRIKES_S:
            return
        self._strikes_at = now
        told = quarantine.tell(now)
        if told or self._told:  # that there are none any more as well, once
            await self._store.share(self._key(self._balancing.process_id, "strikes"), _encode(told), STRIKES_TTL_S)
        self._told = bool(told)
        found = await self._store.shared([self._key(other, "strikes") for other in others])
        now = clock.now()
        for other, value in zip(others, found, strict=True):
            if value is None:
                continue  # it has none, or its store is away: what it told counts for as long as it would have
            try:
                quarantine.hear(other, _decode_strikes(value), now)
            except msgspec.DecodeError:
                self.failures += 1
        quarantine.forget(now, frozenset(others))

    def _key(self, balancer: str, what: str = "in_flight") -> str:
        # Braces keep all keys of a node on one shard of a Redis Cluster, so that they can be read together.
        return f"headwater:{what}:{{{'/'.join(self._node)}}}:{balancer}"
