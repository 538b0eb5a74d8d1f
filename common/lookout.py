"""Looks at instances whose agent died: they stay in their pools while they answer (`membership.orphans`).

It is asked what it serves and not only whether somebody is there: an address may be another server's by now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ssl import SSLContext
from typing import Final

import httpx

from common.membership import Membership
from common.types import Endpoint

LOOK_S: Final = 1.0
TIMEOUT_S: Final = 2.0
MISSES: Final = 3  # a busy server may be slow to say that it is well; one that refuses connections is gone at once
AT_ONCE: Final = 64
PATHS: Final = {"triton": "/v2/health/ready", "torchserve": "/ping", "ollama": "/api/tags"}
MODELS: Final = "/v1/models"


class Lookout:
    """Tells membership which of those it keeps do not answer."""

    def __init__(self, membership: Membership, tls: Callable[[], SSLContext]) -> None:
        self._membership = membership
        self._tls = tls
        self._misses: dict[str, int] = {}

    async def run(self) -> None:
        """Look every second, if there is anything to look at, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            orphans = self._membership.orphans
            self._misses = {key: n for key, n in self._misses.items() if key in orphans}
            if orphans:
                await self._look(orphans)

    async def _look(self, orphans: dict[str, Endpoint]) -> None:
        some = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, verify=self._tls()) as client:

            async def one(key: str, endpoint: Endpoint) -> None:
                async with some:
                    missed = await _missed(client, endpoint)
                self._misses[key] = self._misses.get(key, 0) + missed if missed else 0
                if self._misses[key] >= MISSES:
                    self._membership.silent(key)

            await asyncio.gather(*(one(key, endpoint) for key, endpoint in orphans.items()))


async def _missed(client: httpx.AsyncClient, endpoint: Endpoint) -> int:
    """0 if it is well, MISSES if it is not or is another one, 1 if it cannot be told."""
    path = PATHS.get(endpoint.engine, MODELS)
    try:
        reply = await client.get(endpoint.url.rstrip("/") + path)
        if path == MODELS and reply.status_code == 200 and endpoint.models:
            served = {str(m.get("id")) for m in reply.json()["data"]}
            return 0 if endpoint.models <= served else MISSES
    except httpx.TimeoutException:
        return 1
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return MISSES
    return 0 if reply.status_code in (200, 401, 403) else MISSES
