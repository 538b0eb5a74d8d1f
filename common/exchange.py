"""Balancers of one node tell each other what they have under way, so that none sends where another just did.

Six numbers an endpoint, every 30 ms, through the shared store, expiring with their owner. While nothing is heard of a
balancer that lives, its traffic is taken to be like ours (`Balancer.replicas`). Several times a second they tell where
prompts went, which a server then has cached, and, if there is anything to tell, which prompts have taken servers down.

Tiers above tell clusters that start servers by themselves which models are waited for that nobody serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from common import clock
from common.balancing import Balancing
from common.errors import StoreUnavailable
from common.policy.prefix import TELL_S, Prompts
from common.policy.quarantine import Quarantine, Strike
from common.policy.server import Told
from common.store.base import AffinityStore
from common.types import Path

INTERVAL_S = 0.03
PROMPTS_TTL_S = 2.0
STRIKES_S = 0.5  # between two looks at each other's strikes
STRIKES_TTL_S = 5.0
WANTED_S = 0.5
WANTED_TTL_S = 2.0
TTL_S = 1.0  # a balancer that told nothing for so long has died, or cannot reach the store

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


class Board(Generic[T]):
    """One matter that the balancers of a node tell each other of, through the shared store; each has a place on it."""

    def __init__(self, store: AffinityStore, node: Path, what: str, kind: Any, ttl_s: float) -> None:
        """`kind`: of what is told, as msgspec has types. `ttl_s`: it is believed for so long."""
        self._store = store
        # Braces keep all keys of a node on one shard of a Redis Cluster, so that they can be read together.
        self._prefix = f"headwater:{what}:{{{'/'.join(node)}}}:"
        self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(kind).decode
        self._ttl_s = ttl_s

    async def tell(self, balancer: str, told: T) -> None:
        """Put what one says in its place. Raises StoreUnavailable."""
        await self._store.share(self._prefix + balancer, _encode(told), self._ttl_s)

    async def hear(self, balancers: Sequence[str]) -> dict[str, T | None]:
        """What these say; None of one that says nothing, or nothing that can be read. Raises StoreUnavailable."""
        found = await self._store.shared([self._prefix + balancer for balancer in balancers])
        return {balancer: self._read(value) for balancer, value in zip(balancers, found, strict=True)}

    def _read(self, value: bytes | None) -> T | None:
        try:
            return None if value is None else self._decode(value)
        except msgspec.DecodeError:
            return None  # of another version


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
        self._in_flight = Board[dict[str, Told]](store, node, "in_flight", dict[str, Told], TTL_S)
        self._prompts = Board[Prompts](store, node, "prompts", Prompts, PROMPTS_TTL_S)
        self._strikes = Board[list[Strike]](store, node, "strikes", list[Strike], STRIKES_TTL_S)
        self._node = node
        self._balancing = balancing
        self._quarantine = quarantine
        self._prompts_at = 0.0
        self._strikes_at = 0.0
        self._told = False  # of strikes, at the last look
        self._others = others

    async def run(self) -> None:
        """Until cancelled. Alone in a node, nothing is told and nothing asked."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            others = sorted(self._others())
            if others:
                with suppress(StoreUnavailable):  # which it logs itself; balancers that are not heard of are guessed at
                    await self._exchange_loads(others)
                    await self._exchange_prompts(others)
                    await self._exchange_strikes(others)

    async def _exchange_loads(self, others: list[str]) -> None:
        balancer = self._balancing.balancers.get(self._node)
        if balancer is None:
            return
        await self._in_flight.tell(self._balancing.process_id, balancer.tell(clock.now()))
        found = await self._in_flight.hear(others)
        now = clock.now()
        for other, told in found.items():
            if told is not None:
                balancer.hear(other, told, now)

    async def _exchange_prompts(self, others: list[str]) -> None:
        now, balancer = clock.now(), self._balancing.balancers.get(self._node)
        if balancer is None or now < self._prompts_at + TELL_S:
            return
        self._prompts_at = now
        told = balancer.tell_prompts(now)
        if told[1]:  # what was told before runs out by itself
            await self._prompts.tell(self._balancing.process_id, told)
        for other, prompts in (await self._prompts.hear(others)).items():
            if prompts is not None:
                balancer.hear_prompts(other, prompts)

    async def _exchange_strikes(self, others: list[str]) -> None:
        now, quarantine = clock.now(), self._quarantine
        if not quarantine.for_s or now < self._strikes_at + STRIKES_S:
            return
        self._strikes_at = now
        told = quarantine.tell(now)
        if told or self._told:  # that there are none any more as well, once
            await self._strikes.tell(self._balancing.process_id, told)
        self._told = bool(told)
        found = await self._strikes.hear(others)
        now = clock.now()
        for other, strikes in found.items():
            if strikes is not None:  # else it has none, or its store is away: what it told counts as long as it would
                quarantine.hear(other, strikes, now)
        quarantine.forget(now, frozenset(others))


Wanted = dict[str, int]
"""Model -> requests that wait for it, although nobody serves it."""


def wanted_board(store: AffinityStore) -> Board[Wanted]:
    """Where balancers of tiers above say what they wait for; one for the whole system."""
    return Board[Wanted](store, ("above",), "wanted", Wanted, WANTED_TTL_S)


async def tell_wanted(store: AffinityStore, balancer: str, waiting: Callable[[], Wanted]) -> None:
    """Until cancelled, tell what is waited for here. What was told before runs out by itself."""
    board = wanted_board(store)
    while True:
        await asyncio.sleep(WANTED_S)
        wanted = waiting()
        if wanted:
            with suppress(StoreUnavailable):
                await board.tell(balancer, wanted)
