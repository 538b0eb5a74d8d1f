"""What a store must do, whichever it is; held to by one contract suite (`tests/contract/`).

Membership lives in a `MembershipStore`: keys under leases, and one stream of consistent snapshots to whoever watches.
Affinity lives in an `AffinityStore`: small values that expire. Neither is ever waited for longer than told, and neither
fails a request: what goes wrong is a `StoreUnavailable` that the caller counts and lives with. Quotas that balancers
keep together live in a `QuotaStore`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from common.policy.window import Draw, Grant
from common.types import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under the watched prefix at one revision. `stale`: the store is out of reach and this was known last.

    `removed`: of keys that were deleted since the snapshot before, the last value, where the store has seen it.
    """

    values: Mapping[str, bytes]
    revision: int
    stale: bool = False
    removed: Mapping[str, bytes] = field(default_factory=dict)


class Lease(Protocol):
    """Presence: keys that live as long as their owner renews them, which happens by itself in the background.

    A key that disappears while the lease is held (deleted by hand, store came back empty) is put back within half the
    time to live. The first `put` of a key takes it over from whoever had it; after that a key that another lease wrote
    belongs to that successor: it is neither replaced nor deleted from here, and presented again once it is free.
    """

    async def put(self, key: str, value: bytes) -> None:
        """Write or replace a key under this lease, and wait for that within the store's time-out.

        Without the store it is written as soon as that is back; nothing is raised.
        """

    async def delete(self, key: str) -> None:
        """Stop presenting one key, at once; without the store, as soon as that is back. Raises nothing."""

    async def close(self) -> None:
        """Stop presenting all of them and revoke the lease; returns within the store's time-out and raises nothing.

        Where the store is out of reach the keys expire by themselves. A second call changes nothing.
        """


class MembershipStore(Protocol):
    """Who exists. Keys are paths as in `/headwater/regions/eu/balancers/a1`, values are JSON."""

    async def lease(self, ttl_s: float) -> Lease:
        """Presence of this process, renewed until closed. Waits for nothing: the store may be out of reach."""

    def watch(self, prefix: str) -> AsyncGenerator[Snapshot, None]:
        """Snapshots under `prefix`: the present one, then one after each change (changes close together may share one).

        Gaps (compaction, reconnection, a stalled stream) are closed by listing again, deletions included. While the
        store is out of reach the last snapshot is given once more with `stale` set (an empty one if there was none),
        and a fresh one when it is back. A store that comes back with an older state than was seen counts as out of
        reach before. Never raises a StoreError; ends when the store is closed.
        """

    async def get(self, key: str) -> bytes | None:
        """One value. Raises StoreUnavailable."""

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """Write a value (under no lease) unless the key exists; what is stored then. Raises StoreUnavailable."""

    async def put(self, key: str, value: bytes) -> None:
        """Write a value, under no lease, whether there is one or not. Raises StoreUnavailable."""

    async def delete(self, key: str) -> bool:
        """Delete a key that is under no lease; whether there was one. Raises StoreUnavailable."""

    async def ping(self, timeout_s: float) -> None:
        """Return as soon as the store answers, trying until `timeout_s` is over. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Let go of connections and end the watches; leases are closed by their owners, before this."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a session was served last, and how many tokens of it may be cached there."""

    path: Path  # region, cluster, instance
    tokens: int


class AffinityStore(Protocol):
    """Session to placement, expiring."""

    async def get(self, session: str) -> Placement | None:
        """The placement, or None if there is none or it expired. Raises StoreUnavailable within the budget."""

    async def put(self, session: str, placement: Placement, ttl_s: float) -> None:
        """Remember a placement for `ttl_s`. Raises StoreUnavailable within the budget."""

    async def share(self, key: str, value: bytes, ttl_s: float) -> None:
        """Have others see a value for `ttl_s`. Raises StoreUnavailable within the budget."""

    async def shared(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """What others share under these keys, None where nothing is. Raises StoreUnavailable within the budget."""

    async def ping(self, timeout_s: float) -> None:
        """Return as soon as the store takes a write, trying until `timeout_s` is over. Raises StoreUnavailable."""

    async def close(self) -> None:
        """Let go of connections."""


class WindowCall(msgspec.Struct, frozen=True):
    """What is asked of one sliding window: at least `least` units or none, and at most `most`."""

    limit: int
    least: int = 0
    most: int = 0
    charge: int = 0  # used already, beyond what was taken for it
    returned: tuple[Draw, ...] = ()  # taken and not spent


class SlotCall(msgspec.Struct, frozen=True):
    """What is asked of the places for requests under way: `least` of them or none more, and at most `most`.

    `in_use` of them are kept in any case, until `ttl_s` after the last call.
    """

    limit: int
    in_use: int
    least: int
    most: int
    ttl_s: float


class QuotaCall(msgspec.Struct, frozen=True):
    """Everything that one balancer has to say of one tenant, and what it wants, in one round trip.

    `settles` numbers what is told for good (charges, returns, amounts spent); the same number told twice by one
    `balancer` counts once, so a call whose reply was lost may be made again. Numbers go up.
    """

    tenant: str
    balancer: str  # different for each process and each of its starts
    settles: int
    month: str  # 2026-11, in UTC, by the caller's clock
    tokens_spent: int = 0
    micro_usd_spent: int = 0
    requests: WindowCall | None = None
    tokens: WindowCall | None = None
    slots: SlotCall | None = None


class QuotaReply(msgspec.Struct, frozen=True):
    """What was granted: all that was asked for at least, or nothing of it. Slots: how many are held now."""

    month_tokens: int
    month_micro_usd: int
    requests: Grant | None = None
    tokens: Grant | None = None
    slots: int = 0


class QuotaStore(Protocol):
    """What tenants may still use and have used this month, over all balancers."""

    async def exchange(self, call: QuotaCall) -> QuotaReply:
        """Settle, and take. Raises StoreUnavailable within the budget; then it may have happened or not."""

    async def close(self) -> None:
        """Let go of connections."""
