"""The latest finished requests, bounded in number and in bytes, found by trace and followed by number.

Two thousand requests are one second of a busy balancer, which is no memory to look anything up in. So where those kept
go back less than a while, of ordinary ones only every so manyth is kept; which one follows from its trace, so that
tiers keep the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from math import log2

from common.records import RequestRecord


class RecentRequests:
    """A ring of records. Adding is O(stages of the record); the oldest leave when either bound is passed."""

    def __init__(
        self,
        max_count: int,
        max_bytes: int,
        span_s: float = 0.0,
        notable: Callable[[RequestRecord], bool] | None = None,
    ) -> None:
        """`span_s`: seconds that those kept should go back, half of it at least; 0 to keep each.

        `notable`: which are kept in any case.
        """
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._span_s = span_s
        self._notable = notable or (lambda record: False)
        self._mask = 0  # of ordinary ones those are kept whose trace has none of these bits
        self._counted_from = 0.0  # of the requests a second
        self._counted = 0
        self.bytes = 0
        self.added = 0  # ever; also the number of the latest record, the first being 1
        self._records: deque[tuple[RequestRecord, int]] = deque()  # oldest first, with the bytes it was counted for

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Remember a finished request; it must not change any more."""
        if not self.max_count or (self._span_s and self._crowds(record)):
            return
        size = record.footprint()
        self.added += 1
        self.bytes += size
        self._records.append((record, size))
        while len(self._records) > self.max_count or (self.bytes > self.max_bytes and len(self._records) > 1):
            self.bytes -= self._records.popleft()[1]

    def _crowds(self, record: RequestRecord) -> bool:
        """Whether to leave it out, for what is kept goes back too short a time."""
        now = record.ended_at
        self._counted += 1
        if now >= self._counted_from + 1.0:
            rate = self._counted / (now - self._counted_from)
            wanted = rate * self._span_s / max(len(self._records), 1)
            self._mask = (1 << int(log2(wanted))) - 1 if wanted > 1.0 else 0
            self._counted_from, self._counted = now, 0
        full = self.added > len(self._records)
        if not full or not self._mask or self._records[0][0].ended_at <= now - self._span_s:
            return False
        return bool(int(record.id[-4:], 16) & self._mask) and not self._notable(record)

    def find(self, trace_id: str) -> list[RequestRecord]:
        """Those of one trace, oldest first (a client may send several in one trace). O(records).

        No index is kept: requests are many and questions few, and what is kept is cold when it is let go.
        """
        return [record for record, _ in self._records if record.id == trace_id]

    def latest(self, limit: int) -> list[RequestRecord]:
        """Newest first."""
        return [record for record, _ in islice(reversed(self._records), limit)]

    def since(self, number: int, limit: int) -> list[RequestRecord]:
        """Those added after the one of this number, oldest first; of more than `limit` the latest."""
        new = min(self.added - number, limit, len(self._records)) if number <= self.added else limit
        found = [record for record, _ in islice(reversed(self._records), new)]
        return found[::-1]
