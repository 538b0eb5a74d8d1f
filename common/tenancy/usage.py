"""What was used, one record a request, for whoever writes the bills: into a file, into a Redis stream, or both.

They go through an `Outbox`, so a record may be there twice: `record` is the same then, and different for all others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

import msgspec

from common.config import Price


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
