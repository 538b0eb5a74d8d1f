"""Adds records to a Redis stream of a bounded length, many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.store.redis_calls import RedisCalls

_ADD: Final = "for at = 3, #ARGV do redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', ARGV[2], ARGV[at]) end"


class StreamWriter(RedisCalls):
    """Adds to a Redis stream, of about `max_entries`; each entry has one field, `field`."""

    probe_key = "headwater:stream:~probe"

    def __init__(self, url: str, key: str, max_entries: int, *, field: str, budget_ms: float = 1000.0) -> None:
        super().__init__(url, budget_ms=budget_ms, max_connections=1)
        self._key, self._max_entries, self._field = key, max_entries, field

    async def write(self, lines: Sequence[bytes]) -> None:
        """See Writer."""
        await self.call("EVAL", _ADD, 1, self._key, self._max_entries, self._field, *lines)
