"""Affinity in Redis: what must be fresh, within milliseconds or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.store.base import Placement
from common.store.redis_calls import RedisCalls

KEY_PREFIX: Final = "headwater:session:"


class RedisAffinityStore(RedisCalls):
    """Affinity in the server, sentinels' master or cluster behind `url`; see `RedisCalls`."""

    probe_key = KEY_PREFIX + "~probe"  # no session hashes to it; under the prefix, as access rules may demand

    async def get(self, session: str) -> Placement | None:
        """See AffinityStore."""
        reply = await self.call("GET", KEY_PREFIX + session)
        return _decode(reply) if isinstance(reply, bytes) else None

    async def put(self, session: str, placement: Placement, ttl_s: float) -> None:
        """See AffinityStore."""
        await self.call("SET", KEY_PREFIX + session, _encode(placement), "PX", max(1, round(ttl_s * 1000.0)))

    async def share(self, key: str, value: bytes, ttl_s: float) -> None:
        """See AffinityStore."""
        await self.call("SET", key, value, "PX", max(1, round(ttl_s * 1000.0)))

    async def shared(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See AffinityStore."""
        reply = await self.call("MGET", *keys)
        return [value if isinstance(value, bytes) else None for value in reply]


def _encode(placement: Placement) -> bytes:
    return f"{'/'.join(placement.path)} {placement.tokens}".encode()


def _decode(value: bytes) -> Placement | None:
    """None for what this version did not write."""
    path, _, tokens = value.decode(errors="replace").rpartition(" ")
    return Placement(tuple(path.split("/")), int(tokens)) if path and tokens.isascii() and tokens.isdigit() else None
