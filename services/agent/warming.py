"""Has a server answer one token before it is presented as serving: the first request pays for what engines put off,
compiled kernels and captured graphs, and no client should.

For servers that answer chats; one that says a chat is not for it has nothing to warm this way.
"""

from __future__ import annotations

import asyncio
from typing import Final

import httpx
import structlog

from common import clock

log = structlog.get_logger()

PATH: Final = "/v1/chat/completions"
TIMEOUT_S: Final = 600.0  # a first compile takes minutes
RETRY_S: Final = 2.0


class Warmer:
    """For one server; `warm` is asked at each look."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._warmed: str | None = None  # boot of the process that is warm
        self._boot = ""  # of the one that is being warmed
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0

    def warm(self, boot: str, url: str, models: frozenset[str]) -> bool:
        """Whether this process of the server has answered one; has it answer one in the background if not."""
        if self._warmed == boot or not models:
            return True
        if self._task is not None and self._boot != boot:
            self._task.cancel()  # that was another process
            self._task = None
        if self._task is None and clock.now() >= self._not_before:
            self._boot = boot
            self._task = asyncio.create_task(self._probe(boot, url, min(models)), name="warm-up")
        return False

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, boot: str, url: str, model: str) -> None:
        began = clock.now()
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]}
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
                status = (await client.post(url + PATH, json=body)).status_code
            problem = f"status {status}" if status >= 500 or status == 429 else ""
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
        self._task = None
        if problem:
            self._not_before = clock.now() + RETRY_S
            log.warning("warm_up_failed", instance=self._instance, model=model, problem=problem)
            return
        self._warmed = boot
        log.info("warmed_up", instance=self._instance, model=model, took_s=round(clock.now() - began, 3))
