"""Records on their way to where they are kept, written behind the requests and in batches.

While they cannot be written, a bounded number is kept, and the oldest make room for new ones, counted. A batch whose
success is not known is written again, so a record may be there twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import structlog

from common.errors import StoreUnavailable

log = structlog.get_logger()

MAX_PENDING: Final = 10_000  # records; of usage some 4 MB
BATCH: Final = 500
WRITE_S: Final = 0.2
RETRY_S: Final = (0.5, 10.0)  # first and longest pause while they cannot be written
CLOSE_S: Final = 2.0  # the last ones are waited for no longer


class Writer(Protocol):
    """Puts records, each one line of JSON, where they are kept."""

    async def write(self, lines: Sequence[bytes]) -> None:
        """Write them all. Raises OSError or StoreUnavailable; then some may have been written."""

    async def close(self) -> None:
        """Let go of what is open."""


class Outbox:
    """Records on their way to one writer; at most `max_pending` wait for it. `what`: for the log, what is written."""

    def __init__(self, writer: Writer, *, what: str = "usage", max_pending: int = MAX_PENDING) -> None:
        self._writer = writer
        self._what = what
        self._max_pending = max_pending
        self._pending: deque[bytes] = deque()
        self._batch: list[bytes] = []  # being written
        self.written = self.dropped = 0

    def add(self, line: bytes) -> None:
        """Queue a record."""
        if len(self._pending) >= self._max_pending:
            self._pending.popleft()
            self.dropped += 1
        self._pending.append(line)

    @property
    def pending(self) -> int:
        """Records that are not written yet."""
        return len(self._pending) + len(self._batch)

    async def run(self) -> None:
        """Write, until cancelled."""
        pause_s = RETRY_S[0]
        while True:
            await asyncio.sleep(WRITE_S)
            while self.pending:
                reason = await self._write()
                if not reason:
                    if pause_s > RETRY_S[0]:
                        log.info(f"{self._what}_written_again", pending=self.pending)
                    pause_s = RETRY_S[0]
                    continue
                if pause_s == RETRY_S[0]:
                    kept = self._max_pending
                    log.error(f"{self._what}_not_written", reason=reason, pending=self.pending, kept_at_most=kept)
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, RETRY_S[1])

    async def _write(self) -> str:
        """One batch; what is wrong, or ""."""
        while self._pending and len(self._batch) < BATCH:
            self._batch.append(self._pending.popleft())
        try:
            await self._writer.write(self._batch)
        except (OSError, StoreUnavailable) as error:
            return str(error)[:200]
        self.written += len(self._batch)
        self._batch = []
        return ""

    async def close(self) -> None:
        """Write what is left, for at most CLOSE_S; `run` has to have ended."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self.pending and not await self._write():
                    pass
        except TimeoutError:
            pass
        if self.pending:
            self.dropped += self.pending
            log.error(f"{self._what}_lost", records=self.pending)
        await self._writer.close()
