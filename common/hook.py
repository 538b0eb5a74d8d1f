"""Tells somebody else of an event by a POST, and never waits for them: what cannot be told is logged and dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import structlog

log = structlog.get_logger()

TIMEOUT_S = 5.0
MOST_AT_ONCE = 16


class Hook:
    """One URL that takes events as JSON; "" tells nobody."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, event: str, **facts: Any) -> None:
        """Post `{"event": …, …}` in the background."""
        if not self._url:
            return
        if len(self._telling) >= MOST_AT_ONCE:
            log.warning("hook_busy", event_dropped=event, **facts)
            return
        task = asyncio.get_running_loop().create_task(self._post({"event": event, **facts}), name="hook")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _post(self, body: dict[str, Any]) -> None:
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
                (await client.post(self._url, json=body)).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            log.warning("hook_failed", told=body["event"], reason=str(error) or type(error).__name__)

    def close(self) -> None:
        """Give up what has not been told."""
        for task in self._telling:
            task.cancel()
