"""Balancers that hang: a process that is stopped or cut off keeps its connections open and answers nothing.

When a balancer's reports stop, or its registration ends, while requests wait for it, it is asked for its health on the
path that requests take. One that does not answer that either is given up: what waits for it is tried elsewhere, and
counts as tried, for a server may be at work on it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import structlog

from common.errors import FirstByteTimeout
from common.relay.relay import Relay

log = structlog.get_logger()

WAIT_S = 1.5  # reports are missed after about a second; a pause of a process that is this long is no hang yet
ANSWER_S = 1.0  # within which a balancer that lives says how it is, however busy


class HungPeers:
    """Looks after the requests that wait for balancers, by the URLs of these."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._watched: dict[str, asyncio.Task[None]] = {}

    def doubt(self, url: str) -> None:
        """It has not been heard of."""
        if url not in self._watched and self._relay.waiting(url):
            self._watched[url] = task = asyncio.get_running_loop().create_task(self._watch(url), name="hung peer")
            task.add_done_callback(lambda _: self._watched.pop(url, None))

    def trust(self, url: str) -> None:
        """It has been heard of again."""
        task = self._watched.get(url)
        if task is not None:
            task.cancel()

    async def _watch(self, url: str) -> None:
        await asyncio.sleep(WAIT_S)
        while self._relay.waiting(url):
            if not await self._answers(url):
                error = FirstByteTimeout("the balancer that has the request hangs")
                log.warning("balancer_hangs", url=url, requests=self._relay.give_up(url, error))
                return
            await asyncio.sleep(WAIT_S)

    async def _answers(self, url: str) -> bool:
        """Whether it says how it is, well or not."""
        parts = urlsplit(url)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, parts.port, ssl=self._relay.tls_of(url), limit=1024
                )
                try:
                    request = f"GET /health HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
                    writer.write(request.encode())
                    return bool(await reader.read(1))
                finally:
                    writer.transport.abort()
        return False

    def close(self) -> None:
        """Stop looking."""
        for task in self._watched.values():
            task.cancel()
