"""Quotas in Redis: one script a call, by the server's own clock, so that no two hosts' clocks are compared.

The script is sent whole each time, 5 kB, and compiled once: Redis knows it by its hash, and a server that was restarted
or has taken over need not be asked whether it has it.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Final

import msgspec

from common.errors import StoreUnavailable
from common.policy.window import KEPT_BACK, Grant, Span
from common.store.base import QuotaCall, QuotaReply
from common.store.redis_calls import RedisCalls

KEY_PREFIX: Final = "headwater:tenant:"
SCRIPT: Final = Path(__file__).with_name("quota.lua").read_text(encoding="utf-8")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(QuotaReply).decode


class RedisQuotaStore(RedisCalls):
    """Quotas in the server, sentinels' master or cluster behind `url`; see `RedisCalls`."""

    probe_key = KEY_PREFIX + "~probe"

    def __init__(self, url: str, *, budget_ms: float, span: Span) -> None:
        super().__init__(url, budget_ms=budget_ms)
        self._span = (round(span.bucket_s * 1e6), span.buckets, KEPT_BACK)

    async def exchange(self, call: QuotaCall) -> QuotaReply:
        """See QuotaStore."""
        tag = f"{KEY_PREFIX}{{{call.tenant}}}:"  # braces: all keys of a tenant are on one shard of a Redis Cluster
        keys = (tag + "requests", tag + "tokens", tag + "slots", tag + call.month, tag + "settled")
        reply = await self.call("EVAL", SCRIPT, len(keys), *keys, _encode(call), *self._span)
        try:
            decoded = _decode(reply)
        except (msgspec.DecodeError, TypeError):
            raise StoreUnavailable("redis: the script's reply makes no sense") from None
        if not decoded.requests and not decoded.tokens:
            return decoded
        return msgspec.structs.replace(decoded, requests=_grant(decoded.requests), tokens=_grant(decoded.tokens))


def _grant(grant: Grant | None) -> Grant | None:
    """JSON has no infinity."""
    return grant._replace(wait_s=inf) if grant is not None and grant.wait_s < 0.0 else grant
