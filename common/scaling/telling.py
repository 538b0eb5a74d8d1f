"""Tells whoever makes replicas how many there should be: the newest number, with bounded tries, again now and then."""

from __future__ import annotations

import asyncio
from typing import Protocol

import httpx
import structlog

from common import clock

log = structlog.get_logger()

MOST_PAUSE_S = 60.0


class Target(Protocol):
    """Takes a number."""

    name: str  # for people

    async def tell(self, client: httpx.AsyncClient, replicas: int, reason: str, *, at_least: bool) -> None:
        """Once; see Provider. Raises httpx.HTTPError, httpx.InvalidURL or OSError where it was not taken."""


class Telling:
    """A provider that tells a target. A number that was not taken in so many tries is told at the next repetition."""

    def __init__(
        self, target: Target, client: httpx.AsyncClient, *, attempts: int, retry_s: float, repeat_s: float
    ) -> None:
        self.failures = 0
        self._target = target
        self._client = client
        self._attempts = attempts
        self._retry_s = retry_s
        self._repeat_s = repeat_s
        self._wanted: tuple[int, str, bool] | None = None
        self._told_at = 0.0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def want(self, replicas: int, reason: str, *, at_least: bool) -> None:
        """See Provider."""
        before = self._wanted
        new = before is None or (before[0], before[2]) != (replicas, at_least)
        self._wanted = (replicas, reason, at_least)
        if new or clock.now() - self._told_at >= self._repeat_s:
            self._told_at = clock.now()
            self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"scaling {self._target.name}")

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._tell()

    async def _tell(self) -> None:
        """The present number, until it is taken, the tries are used up, or there is another one."""
        assert self._wanted is not None
        replicas, reason, at_least = self._wanted
        pause_s = self._retry_s
        for attempt in range(1, self._attempts + 1):
            try:
                await self._target.tell(self._client, replicas, reason, at_least=at_least)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                self.failures += 1
                why = str(error) or type(error).__name__
                log.warning("scaling_not_told", target=self._target.name, replicas=replicas, attempt=attempt, why=why)
            else:
                return
            if attempt < self._attempts:
                try:
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                    return  # there is another number, which has tries of its own
                except TimeoutError:
                    pause_s = min(2.0 * pause_s, MOST_PAUSE_S)

    async def close(self) -> None:
        """See Provider."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._client.aclose()
