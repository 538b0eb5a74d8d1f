"""Both stores inside one process: for `headwater up`, for simulation and for tests.

Several holders share one store object and see each other through it. A lease cannot be late here, so it lives until it
is closed; `MemoryLease.abandon` does what the death of its holder would, and then the clock that was given decides.
`MemoryMembershipStore.available` plays an outage.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from common import clock
from common.errors import StoreUnavailable
from common.store.base import Placement, Snapshot

EXPIRY_POLL_S: Final = 0.02  # how often a watch looks at the clock while an abandoned lease runs out
MAX_SESSIONS: Final = 100_000  # about 30 MB


class MemoryMembershipStore:
    """Keys under leases, as in etcd. `now`: monotonic seconds, by which abandoned leases expire."""

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.now = now
        self._keys: dict[str, tuple[bytes, MemoryLease | None]] = {}
        self._leases: list[MemoryLease] = []
        self._revision = 1
        self._available = True
        self._closed = False
        self._watchers: set[asyncio.Event] = set()

    @property
    def available(self) -> bool:
        """Whether the store answers. Set it to False for an outage: watches go stale, writes wait, reads raise."""
        return self._available

    @available.setter
    def available(self, value: bool) -> None:
        self._available = value
        if value:
            for lease in tuple(self._leases):
                lease.present()
        self._notify()

    async def lease(self, ttl_s: float) -> MemoryLease:
        """See MembershipStore."""
        lease = MemoryLease(self, ttl_s)
        self._leases.append(lease)
        return lease

    async def watch(self, prefix: str) -> AsyncGenerator[Snapshot, None]:
        """See MembershipStore."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last: Snapshot | None = None
            while not self._closed:
                changed.clear()
                snapshot = self._snapshot(prefix, last)
                if last is None or (snapshot.values, snapshot.stale) != (last.values, last.stale):
                    last = snapshot
                    yield snapshot
                else:
                    await self._wait(changed)
        finally:
            self._watchers.discard(changed)

    async def get(self, key: str) -> bytes | None:
        """See MembershipStore."""
        self._check()
        return self.value(key)

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """See MembershipStore."""
        self._check()
        if key not in self._keys:
            self.write(key, value, None)
        return self._keys[key][0]

    async def put(self, key: str, value: bytes) -> None:
        """See MembershipStore."""
        self._check()
        self.write(key, value, None)

    async def delete(self, key: str) -> bool:
        """See MembershipStore."""
        self._check()
        there = key in self._keys
        self.write(key, None, None)
        return there

    async def ping(self, timeout_s: float) -> None:
        """See MembershipStore."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._available:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._watchers.discard(changed)
        self._check()

    async def close(self) -> None:
        """See MembershipStore."""
        self._closed = True
        self._notify()

    # -- for leases --------------------------------------------------------------------------------------------------

    def holder(self, key: str) -> MemoryLease | None:
        """The lease that holds a key, None if there is no such key or it is under none."""
        return self._keys.get(key, (b"", None))[1]

    def value(self, key: str) -> bytes | None:
        """The value of a key, outage or not."""
        return self._keys.get(key, (None, None))[0]

    def write(self, key: str, value: bytes | None, holder: MemoryLease | None) -> None:
        """Set a key, or delete it (None); whoever still presents a deleted key gets it back, the oldest first."""
        if value is not None:
            self._keys[key] = (value, holder)
        elif self._keys.pop(key, None) is None:
            return
        self._revision += 1
        if value is None and self._available:
            for lease in tuple(self._leases):
                lease.present()
        self._notify()

    def forget(self, lease: MemoryLease) -> None:
        """A lease ended: its keys are gone."""
        if lease not in self._leases:
            return
        self._leases.remove(lease)
        for key in [k for k, (_, holder) in self._keys.items() if holder is lease]:
            self.write(key, None, None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _snapshot(self, prefix: str, last: Snapshot | None) -> Snapshot:
        if not self._available:
            return Snapshot(last.values if last else {}, last.revision if last else 0, stale=True)
        self._expire()
        values = {key: value for key, (value, _) in sorted(self._keys.items()) if key.startswith(prefix)}
        return Snapshot(values, self._revision)

    def _expire(self) -> None:
        for lease in [x for x in self._leases if x.expires_at <= self.now()]:
            self.forget(lease)

    def _check(self) -> None:
        if not self._available or self._closed:
            raise StoreUnavailable("memory store: closed" if self._closed else "memory store: set unavailable")
        self._expire()

    def _notify(self) -> None:
        for event in self._watchers:
            event.set()

    async def _wait(self, changed: asyncio.Event) -> None:
        expiring = any(lease.expires_at < float("inf") for lease in self._leases)
        try:
            async with asyncio.timeout(EXPIRY_POLL_S if expiring else None):
                await changed.wait()
        except TimeoutError:
            pass


class MemoryLease:
    """Presence in a MemoryMembershipStore."""

    def __init__(self, store: MemoryMembershipStore, ttl_s: float) -> None:
        self.expires_at = float("inf")
        self._store = store
        self._ttl_s = ttl_s
        self._values: dict[str, bytes] = {}
        self._presented: set[str] = set()  # keys written at least once

    async def put(self, key: str, value: bytes) -> None:
        """See Lease."""
        self._values[key] = value
        if self._store.available:
            self._write(key, value)

    async def delete(self, key: str) -> None:
        """See Lease."""
        self._values.pop(key, None)
        if self._store.available:
            self.present()

    async def close(self) -> None:
        """See Lease."""
        self._values.clear()
        self._store.forget(self)

    def abandon(self) -> None:
        """What a killed holder does: renew no more. The keys go when the time to live is over."""
        self.expires_at = self._store.now() + self._ttl_s

    def present(self) -> None:
        """Put back what is missing, give up what is no longer presented."""
        if self.expires_at < float("inf"):
            return
        for key, value in self._values.items():
            self._write(key, value)
        for key in self._presented - self._values.keys():
            self._presented.discard(key)
            if self._store.holder(key) is self:
                self._store.write(key, None, None)

    def _write(self, key: str, value: bytes) -> None:
        holder = self._store.holder(key)
        if key in self._presented and holder not in (None, self):
            return  # a successor's
        self._presented.add(key)
        if holder is not self or self._store.value(key) != value:
            self._store.write(key, value, self)


class MemoryAffinityStore:
    """Placements in this process, at most `max_sessions` of them (the oldest go first). `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = clock.now, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._now = now
        self._max_sessions = max_sessions
        self._placements: OrderedDict[str, tuple[float, Placement]] = OrderedDict()  # session -> (expires at, …)
        self._shared: dict[str, tuple[float, bytes]] = {}  # key -> (expires at, value); one a balancer

    async def get(self, session: str) -> Placement | None:
        """See AffinityStore; raises nothing."""
        expires_at, placement = self._placements.get(session, (0.0, None))
        if placement is not None and expires_at <= self._now():
            del self._placements[session]
            return None
        return placement

    async def put(self, session: str, placement: Placement, ttl_s: float) -> None:
        """See AffinityStore; raises nothing."""
        self._placements[session] = (self._now() + ttl_s, placement)
        self._placements.move_to_end(session)
        if len(self._placements) > self._max_sessions:
            self._placements.popitem(last=False)

    async def share(self, key: str, value: bytes, ttl_s: float) -> None:
        """See AffinityStore; raises nothing."""
        self._shared[key] = (self._now() + ttl_s, value)

    async def shared(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See AffinityStore; raises nothing."""
        now = self._now()
        found = (self._shared.get(key, (0.0, None)) for key in keys)
        return [value if expires_at > now else None for expires_at, value in found]

    async def ping(self, timeout_s: float) -> None:
        """See AffinityStore; returns at once."""

    async def close(self) -> None:
        """Forget everything."""
        self._placements.clear()
