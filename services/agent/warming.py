"""Has a server answer one token: before it is presented as serving, or now and then while it has nothing to do.

The first request pays for what engines put off, compiled kernels and captured graphs, and no client should. And a
server whose engine has died behind a green health path shows it by its next request alone: better not a client's.

For servers that answer chats; one that says a chat is not for it has nothing to show this way.
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
PROBE_TIMEOUT_S: Final = 10.0  # for one token of a server that has nothing else to do


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
        problem = await one_token(url, model, TIMEOUT_S)
        self._task = None
        if problem:
            self._not_before = clock.now() + RETRY_S
            log.warning("warm_up_failed", instance=self._instance, model=model, problem=problem)
            return
        self._warmed = boot
        log.info("warmed_up", instance=self._instance, model=model, took_s=round(clock.now() - began, 3))


class Prober:
    """For one server; `well` is asked at each look that found it serving."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._idle_since: float | None = None
        self._seen: float | None = None  # its counters of work
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    def well(self, url: str, models: frozenset[str], *, idle: bool, work: float | None, idle_s: float) -> bool:
        """Whether its last probe was answered, or none has been; probes in the background what was idle for `idle_s`.

        `work` is what its counters say: what moves them is a sign of life, and takes a failure back.
        """
        now = clock.now()
        moved, self._seen = work is not None and self._seen is not None and work > self._seen, work
        if moved and self._task is None:
            self._failed = False
        if not idle or moved or self._idle_since is None:
            self._idle_since = now if idle else None
        elif self._task is None and models and now >= self._idle_since + idle_s:
            self._task = asyncio.create_task(self._probe(url, min(models)), name="idle probe")
        return not self._failed

    def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, url: str, model: str) -> None:
        problem = await one_token(url, model, PROBE_TIMEOUT_S)
        self._task, self._idle_since = None, clock.now()
        if bool(problem) != self._failed:
            self._failed = bool(problem)
            level = log.warning if problem else log.info
            level("idle_probe", instance=self._instance, model=model, problem=problem or None)


async def one_token(url: str, model: str, timeout_s: float) -> str:
    """Ask for one; what went wrong, "" if nothing did. Answers that refuse it are none of the server's fault."""
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello."}]}
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            status = (await client.post(url + PATH, json=body)).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{type(error).__name__}: {error}"
    return f"status {status}" if status >= 500 or status == 429 else ""
