"""Sessions that return to where they were served: a local cache first, then the shared store within its budget.

A placement is advice: it lowers the predicted cost of the endpoint that still holds the session's prefix, and no more.
Writes go behind the request; a store that fails costs a counter and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from common import clock
from common.errors import StoreUnavailable
from common.store.base import AffinityStore, Placement

WRITES_PENDING = 256  # writes to the store under way at once; beyond that a placement stays local


class Affinity:
    """Where sessions were served last."""

    def __init__(self, store: AffinityStore, *, timeout_s: float, max_sessions: int) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._max_sessions = max_sessions
        self._local: OrderedDict[str, tuple[float, Placement]] = OrderedDict()  # session -> (expires at, placement)
        self._writes: set[asyncio.Task[None]] = set()
        self.store_failures = 0

    def reconfigure(self, *, timeout_s: float, max_sessions: int) -> None:
        """Remember for another time, and another number of sessions; those that are known stay as they are."""
        self._timeout_s, self._max_sessions = timeout_s, max_sessions

    def local(self, session: str) -> Placement | None:
        """The placement known in this process, without waiting."""
        entry = self._local.get(session)
        if entry is None or entry[0] < clock.now():
            return None
        self._local.move_to_end(session)
        return entry[1]

    async def lookup(self, session: str) -> Placement | None:
        """The placement, from here or from the store; None when there is none or the store is not able to say."""
        known = self.local(session)
        if known is not None:
            return known
        try:
            found = await self._store.get(session)
        except StoreUnavailable:
            self.store_failures += 1
            return None
        if found is not None:
            self._keep(session, found)
        return found

    def remember(self, session: str, placement: Placement) -> None:
        """A session was served there; returns at once and writes behind."""
        self._keep(session, placement)
        if len(self._writes) < WRITES_PENDING:
            task = asyncio.get_running_loop().create_task(self._write(session, placement))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    def _keep(self, session: str, placement: Placement) -> None:
        self._local[session] = (clock.now() + self._timeout_s, placement)
        self._local.move_to_end(session)
        while len(self._local) > self._max_sessions:
            self._local.popitem(last=False)

    async def _write(self, session: str, placement: Placement) -> None:
        try:
            await self._store.put(session, placement, self._timeout_s)
        except StoreUnavailable:
            self.store_failures += 1
