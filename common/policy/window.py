"""Sliding windows of what was used lately, and leases on them, so that several balancers keep one limit together.

A window counts units (requests, tokens) in buckets of `bucket_s`. Whoever wants to spend takes units out of it first,
and has `lease_s` to spend them; what is left then is given back to the bucket it came from. A unit counts for at least
`window_s + lease_s` after it was taken, hence for `window_s` after it was spent: in no interval of `window_s` is more
than the limit spent, whoever spends and however late. The price is a window that is longer than it says: a tenant at
its limit gets up to (lease_s + bucket_s) / window_s less, 1.25 % as it stands.

`quota.lua` in `common/store` does the same to Redis' own clock; one contract suite holds both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple

KEPT_BACK = 4  # beyond what is needed at once, a lease gets at most this fraction of what is left: others want some too


@dataclass(frozen=True, slots=True)
class Span:
    """How long a window is and how finely it counts, seconds."""

    window_s: float = 60.0
    lease_s: float = 0.5
    bucket_s: float = 0.25

    @property
    def buckets(self) -> int:
        """Buckets beside the present one that count."""
        return ceil((self.window_s + self.lease_s) / self.bucket_s - 1e-9)


class Grant(NamedTuple):
    """Units taken out of a window: `amount` of them (0: refused), counted in `bucket`.

    `used`: what the window counts now, this included. `wait_s`: until what was refused could fit, as far as is known;
    inf: never, 0: it was granted.
    """

    amount: int
    bucket: int
    used: int
    wait_s: float = 0.0


class SlidingWindow:
    """Units used over the last `span`, in O(1) a call but for the pruning, which is O(1) a bucket."""

    __slots__ = ("_counts", "_span", "_used")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._counts: dict[int, int] = {}  # bucket -> units, the oldest first
        self._used = 0

    def used(self, now: float) -> int:
        """Units that count now."""
        self._prune(now)
        return self._used

    def take(self, now: float, limit: int, least: int, most: int) -> Grant:
        """At least `least` units (0: whatever can be had) and at most `most`, or none."""
        self._prune(now)
        bucket = self._bucket(now)
        amount = granted(limit - self._used, least, most)
        if amount < least:
            return Grant(0, bucket, self._used, self.wait_s(now, limit, least))
        self._add(bucket, amount)
        return Grant(amount, bucket, self._used)

    def charge(self, now: float, amount: int) -> None:
        """Count what was used already, over the limit or not."""
        self._prune(now)
        self._add(self._bucket(now), amount)

    def give_back(self, now: float, bucket: int, amount: int) -> None:
        """Units that were taken and not spent; those that no longer count change nothing."""
        self._prune(now)
        amount = min(amount, self._counts.get(bucket, 0))
        if amount > 0:
            self._counts[bucket] -= amount
            self._used -= amount

    def wait_s(self, now: float, limit: int, need: int) -> float:
        """Seconds until `need` units would fit if nothing else were taken; inf if they never do."""
        self._prune(now)
        too_many = self._used + need - limit
        if too_many <= 0:
            return 0.0
        if need > limit:
            return inf
        for bucket, count in self._counts.items():
            too_many -= count
            if too_many <= 0:
                return (bucket + self._span.buckets + 1) * self._span.bucket_s - now
        return inf

    def _bucket(self, now: float) -> int:
        return floor(now / self._span.bucket_s)

    def _add(self, bucket: int, amount: int) -> None:
        if amount > 0:
            self._counts[bucket] = self._counts.get(bucket, 0) + amount
            self._used += amount

    def _prune(self, now: float) -> None:
        first = self._bucket(now) - self._span.buckets
        while self._counts and (oldest := next(iter(self._counts))) < first:
            self._used -= self._counts.pop(oldest)


def granted(free: int, least: int, most: int) -> int:
    """How much of `free` units one that needs `least` and would like `most` gets; less than `least`: nothing is given.

    The more there is, the more is leased in advance; close to the limit each gets what it needs and no more.
    """
    if free < least:
        return -1
    return least + max(0, min(most - least, (free - least) // KEPT_BACK))


class Draw(NamedTuple):
    """Units and the bucket that they count in."""

    bucket: int
    amount: int


class Allowance:
    """Units that were granted to this process and are not spent yet. Times are this process' own.

    Whatever is over has to be taken out (`expired`) before more is spent, in the same step.
    """

    __slots__ = ("_grants", "left")

    def __init__(self) -> None:
        self._grants: deque[tuple[float, int, int]] = deque()  # (expires at, bucket, amount), the oldest first
        self.left = 0

    def add(self, amount: int, bucket: int, expires_at: float) -> None:
        """A grant. `expires_at` counts from before it was asked for, and is never earlier than that of the last one."""
        if amount > 0:
            self._grants.append((expires_at, bucket, amount))
            self.left += amount

    def expired(self, now: float) -> list[Draw]:
        """Take out what may no longer be spent, to be given back."""
        over = []
        while self._grants and self._grants[0][0] <= now:
            _, bucket, amount = self._grants.popleft()
            over.append(Draw(bucket, amount))
            self.left -= amount
        return over

    def spend(self, amount: int) -> list[Draw]:
        """Spend units, the oldest first; which buckets they count in. There must be as many left."""
        assert amount <= self.left, "more is spent than is left"
        drawn = []
        self.left -= amount
        while amount:
            expires_at, bucket, there = self._grants.popleft()
            part = min(there, amount)
            drawn.append(Draw(bucket, part))
            amount -= part
            if there > part:
                self._grants.appendleft((expires_at, bucket, there - part))
        return drawn
