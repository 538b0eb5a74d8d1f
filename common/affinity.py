"""Sessions that return to where they were served: a local cache first, then the shared store within its budget.

A placement is advice: it lowers the predicted cost of the endpoint that still holds the session's prefix, and no more,
unless a rule says strict. What one server alone holds in memory (a response, a conversation) is remembered the same
way, under a name of its own; that is no advice. Writes go behind the request; a store that fails costs a counter.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from common import clock
from common.config import Affinity as Rules
from common.errors import StoreUnavailable
from common.store.base import AffinityStore, Placement

WRITES_PENDING = 256  # writes to the store under way at once; beyond that a placement stays local
AGAIN_S = 0.05  # who holds something is asked for once more after this: its write may still be under way elsewhere


class Affinity:
    """Where sessions were served last."""

    def __init__(self, store: AffinityStore, rules: Rules) -> None:
        self.rules = rules
        self._store = store
        self._local: OrderedDict[str, tuple[float, Placement]] = OrderedDict()  # session -> (expires at, placement)
        self._writes: set[asyncio.Task[None]] = set()
        self.store_failures = 0

    def sticks(self, path: str, model: str) -> tuple[str, float]:
        """(mode, seconds a session is remembered) of requests to a path for a model."""
        for rule in self.rules.routes:
            if (not rule.path or rule.path == path) and _names(rule.model, model):
                return rule.mode, rule.timeout_s
        return self.rules.mode, self.rules.timeout_s

    def local(self, session: str) -> Placement | None:
        """The placement known in this process, without waiting."""
        entry = self._local.get(session)
        if entry is None or entry[0] < clock.now():
            return None
        self._local.move_to_end(session)
        return entry[1]

    async def lookup(self, session: str) -> Placement | None:
        """The placement, from here or from the store; None when there is none or the store is not able to say."""
        try:
            return await self._find(session)
        except StoreUnavailable:
            return None

    async def holder(self, key: str) -> Placement | None:
        """Who holds something in memory, None if nobody is known to. Raises StoreUnavailable when it cannot be told."""
        found = await self._find(key)
        if found is None:
            await asyncio.sleep(AGAIN_S)
            found = await self._find(key)
        return found

    async def _find(self, session: str) -> Placement | None:
        known = self.local(session)
        if known is not None:
            return known
        try:
            found = await self._store.get(session)
        except StoreUnavailable:
            self.store_failures += 1
            raise
        if found is not None:
            self._keep(session, found, self.rules.timeout_s)
        return found

    def remember(self, session: str, placement: Placement, timeout_s: float) -> None:
        """A session was served there; returns at once and writes behind."""
        self._keep(session, placement, timeout_s)
        if len(self._writes) < WRITES_PENDING:
            task = asyncio.get_running_loop().create_task(self._write(session, placement, timeout_s))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    def _keep(self, session: str, placement: Placement, timeout_s: float) -> None:
        self._local[session] = (clock.now() + timeout_s, placement)
        self._local.move_to_end(session)
        while len(self._local) > self.rules.max_sessions:
            self._local.popitem(last=False)

    async def _write(self, session: str, placement: Placement, timeout_s: float) -> None:
        try:
            await self._store.put(session, placement, timeout_s)
        except StoreUnavailable:
            self.store_failures += 1


def _names(pattern: str, model: str) -> bool:
    return not pattern or pattern == model or (pattern.endswith("*") and model.startswith(pattern[:-1]))
