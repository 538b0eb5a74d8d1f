"""The latest finished requests, bounded in number and in bytes, found by trace and followed by number."""

from __future__ import annotations

from collections import deque
from itertools import islice

from common.records import RequestRecord


class RecentRequests:
    """A ring of records. Adding is O(stages of the record); the oldest leave when either bound is passed."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.bytes = 0
        self.added = 0  # ever; also the number of the latest record, the first being 1
        self._records: deque[tuple[RequestRecord, int]] = deque()  # oldest first, with the bytes it was counted for
        # Mostly one a trace, and a list of one costs more than it looks: what is kept is cold when it is let go.
        self._by_trace: dict[str, RequestRecord | list[RequestRecord]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """Remember a finished request; it must not change any more."""
        if not self.max_count:
            return
        size = record.footprint()
        self.added += 1
        self.bytes += size
        self._records.append((record, size))
        same = self._by_trace.setdefault(record.id, record)
        if isinstance(same, list):
            same.append(record)
        elif same is not record:
            self._by_trace[record.id] = [same, record]
        while len(self._records) > self.max_count or (self.bytes > self.max_bytes and len(self._records) > 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest, size = self._records.popleft()
        self.bytes -= size
        same = self._by_trace[oldest.id]
        if isinstance(same, list):
            same.pop(0)
        if not isinstance(same, list) or not same:
            del self._by_trace[oldest.id]

    def find(self, trace_id: str) -> list[RequestRecord]:
        """Those of one trace, oldest first (a client may send several in one trace)."""
        found = self._by_trace.get(trace_id, [])
        return found.copy() if isinstance(found, list) else [found]

    def latest(self, limit: int) -> list[RequestRecord]:
        """Newest first."""
        return [record for record, _ in islice(reversed(self._records), limit)]

    def since(self, number: int, limit: int) -> list[RequestRecord]:
        """Those added after the one of this number, oldest first; of more than `limit` the latest."""
        new = min(self.added - number, limit, len(self._records)) if number <= self.added else limit
        found = [record for record, _ in islice(reversed(self._records), new)]
        return found[::-1]
