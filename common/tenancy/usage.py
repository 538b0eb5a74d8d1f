"""What was used, one record a request, for whoever writes the bills: into a file, into a Redis stream, or both.

Records are written behind the requests, in batches. While they cannot be written, up to MAX_PENDING are kept, and the
oldest make room for new ones, counted. A batch whose success is not known is written again, so a record may be there
twice: `record` is the same then, and different for all others.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Final, Protocol

import msgspec
import structlog

from common.config import Price
from common.errors import StoreUnavailable

log = structlog.get_logger()

MAX_PENDING: Final = 10_000  # records, some 4 MB
BATCH: Final = 500
WRITE_S: Final = 0.2
RETRY_S: Final = (0.5, 10.0)  # first and longest pause while they cannot be written
CLOSE_S: Final = 2.0  # the last ones are waited for no longer


class UsageRecord(msgspec.Struct, kw_only=True):
    """One request of one tenant."""

    record: str  # unique
    time: float  # when it arrived, seconds since the epoch
    trace_id: str
    tenant: str
    credential: str  # key:ID, jwt:HASH of its subject, or anonymous; never a key
    operation: str
    model: str
    input_tokens: int
    cached_tokens: int  # of these, those that the server had in its cache
    output_tokens: int
    estimated: bool  # the server gave no counts of its own for all of them
    usd: float  # by `tenants.prices`
    status: int
    ending: str
    served_by: str  # region/cluster/instance
    duration_s: float


def cost_micro_usd(prices: Mapping[str, Price], model: str, input_tokens: int, cached: int, output_tokens: int) -> int:
    """What a request costs, in millionths of a dollar; `*` is the price of models that have none of their own."""
    price = prices.get(model) or prices.get("*")
    if price is None:
        return 0
    cached = min(cached, input_tokens)
    cached_usd = price.input_usd if price.cached_input_usd is None else price.cached_input_usd
    # A dollar for a million tokens is a millionth of a dollar for one.
    return round((input_tokens - cached) * price.input_usd + cached * cached_usd + output_tokens * price.output_usd)


class Writer(Protocol):
    """Puts records, each one line of JSON, where they are kept."""

    async def write(self, lines: Sequence[bytes]) -> None:
        """Write them all. Raises OSError or StoreUnavailable; then some may have been written."""

    async def close(self) -> None:
        """Let go of what is open."""


class FileWriter:
    """Appends to a file, opened anew each time, so that it may be moved away; on disk when `write` returns."""

    def __init__(self, file: str) -> None:
        self._file = FilePath(file)

    async def write(self, lines: Sequence[bytes]) -> None:
        """See Writer."""
        await asyncio.to_thread(self._append, b"".join(line + b"\n" for line in lines))

    async def close(self) -> None:
        """See Writer."""

    def _append(self, text: bytes) -> None:
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), "ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(text)
                if written < len(text):
                    raise OSError(28, "no space left")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)  # half a line would be read as part of the next one
                raise


class UsageLog:
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
