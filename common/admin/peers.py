"""Asks the other tiers' admin listeners the same question, so that one process answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from typing import Any

import httpx
import msgspec

TIMEOUT_S = 2.0  # for another tier's answer; one that is gone must not keep the others' from being shown
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # of one peer; more is not read


class Peers:
    """`urls` gives the admin URLs of all balancers that membership knows, but this process's own.

    `tls` is how those are known that speak TLS. Without it no certificates are read, which takes some 20 ms.
    """

    def __init__(self, urls: Callable[[], frozenset[str]], tls: SSLContext | None = None) -> None:
        self.urls = urls
        self._tls = tls

    def client(self, timeout_s: float = TIMEOUT_S) -> httpx.AsyncClient:
        """A client for several questions; to be closed."""
        return httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=self._tls or _nobody())

    async def get(
        self, path: str, params: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> list[bytes]:
        """The answers of those that gave one (200), in the order of their URLs."""
        async with self.client(timeout_s) as client:
            found = await asyncio.gather(*(ask(client, "GET", url + path, params) for url in sorted(self.urls())))
        return [content for content in found if content is not None]

    async def post(self, url: str, path: str, body: Mapping[str, Any]) -> bytes | None:
        """One peer's answer; None when it gave none."""
        async with self.client() as client:
            return await ask(client, "POST", url + path, json=body)


def _nobody() -> SSLContext:
    """For those who speak plain HTTP: an empty context, by which nobody that speaks TLS is known."""
    return SSLContext(PROTOCOL_TLS_CLIENT)


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    params: Mapping[str, Any] | None = None,
    json: Mapping[str, Any] | None = None,
) -> bytes | None:
    """The body of a 200, at most MAX_ANSWER_BYTES; None when there was none."""
    try:
        async with client.stream(method, url, params=params, json=json) as reply:
            if reply.status_code != 200:
                return None
            parts, size = [], 0
            async for part in reply.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    return None
            return b"".join(parts)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def decoded(content: bytes | None, kind: Any) -> Any:
    """A peer's answer; None when there is none or it is of another version."""
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError:
        return None
