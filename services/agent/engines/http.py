"""Bounded GETs: one HTTP client for all servers; whatever one answers, or fails to, costs little and raises nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass
from ssl import SSLContext
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

import anyio
import httpx

from common import clock
from services.agent.engines.base import Answer, Ask, Listener

MAX_BODY_BYTES: Final = 4 * 1024 * 1024  # a vLLM page is 0.1 MB, with many LoRA adapters 1 MB
MAX_POOLS: Final = 4096  # servers whose connections are kept
KEEPALIVE_S: Final = 2.0  # an idle connection is not used again after this: servers close theirs after 5 s
FORGET_S: Final = (
    60.0  # a server that was asked nothing for so long is not watched any more: its connections are closed
)


@dataclass(slots=True)
class _Pool:
    """The connections to one server."""

    transport: httpx.AsyncHTTPTransport
    used_at: float  # monotonic, s


class _PoolEach(httpx.AsyncBaseTransport):
    """A connection pool for each server: httpx looks through all of a pool, and polls its sockets, at each request.

    In one pool sixteen servers cost a fifth of a balancer's CPU time; in pools of their own a hundredth.
    """

    def __init__(self, limits: httpx.Limits) -> None:
        self._limits = limits
        self._tls: SSLContext | None = None  # made when it is needed: it costs tens of milliseconds
        self._pools: OrderedDict[tuple[str, bytes], _Pool] = OrderedDict()  # by when they were last used

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        key, now = (request.url.scheme, request.url.netloc), clock.now()
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self._made(request.url.scheme), now)
        self._pools.move_to_end(key)
        pool.used_at = now
        while (oldest := next(iter(self._pools.values()))).used_at < now - FORGET_S or len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)
            await oldest.transport.aclose()
        return await pool.transport.handle_async_request(request)

    def _made(self, scheme: str) -> httpx.AsyncHTTPTransport:
        if scheme != "https":
            return httpx.AsyncHTTPTransport(verify=False, limits=self._limits)
        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        return httpx.AsyncHTTPTransport(verify=self._tls, limits=self._limits)

    async def aclose(self) -> None:
        while self._pools:
            _, pool = self._pools.popitem()
            await pool.transport.aclose()


class Scraper:
    """The HTTP client that all looks share."""

    def __init__(self, timeout_s: float, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        """`timeout_s`: for one answer, from the connection to its last byte."""
        self.timeout_s = timeout_s
        self.max_body_bytes = max_body_bytes
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        self._client = httpx.AsyncClient(
            transport=_PoolEach(limits),
            timeout=timeout_s,
            headers={"accept-encoding": "identity", "user-agent": "headwater-agent"},
            follow_redirects=False,
            trust_env=False,  # a proxy of the environment is for the world outside, not for the server next door
        )

    def of(self, url: str, *, metrics_url: str | None = None, management_url: str | None = None) -> Ask:
        """What asks the server at this base URL, and its other listeners: `InstanceConfig` has what these are."""

        def ask(path: str, listener: Listener = Listener.MAIN, ports_up: int = 0) -> Awaitable[Answer]:
            if listener is Listener.METRICS and metrics_url:
                return self._get(metrics_url if urlsplit(metrics_url).path else metrics_url + path)
            if listener is Listener.MANAGEMENT and management_url:
                return self._get(management_url + path)
            base = beside(url, ports_up) if ports_up else url
            return self._get(base + path if base else "")

        return ask

    async def _get(self, url: str) -> Answer:
        if not url:
            return Answer(0, problem="there is no such port")
        try:
            # Not asyncio's own time-out: where the loop is late its cancellation falls between two steps of the client,
            # which then keeps the connection for ever, neither idle nor in use.
            with anyio.fail_after(self.timeout_s):
                async with self._client.stream("GET", url) as response:
                    return await self._read(response)
        except TimeoutError:
            return Answer(0, problem="timed out")
        except httpx.TimeoutException:
            return Answer(0, problem="timed out")
        except httpx.ConnectError as error:
            return Answer(0, problem=f"no connection ({str(error)[:80]})", refused=True)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return Answer(0, problem=f"broken answer ({type(error).__name__})")

    async def _read(self, response: httpx.Response) -> Answer:
        # Compressed although we asked not to be: a small body may unpack to any size.
        if response.headers.get("content-encoding", "identity") != "identity":
            return Answer(response.status_code, problem="compressed")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self.max_body_bytes:
                return Answer(response.status_code, problem=f"larger than {self.max_body_bytes} bytes")
        return Answer(response.status_code, bytes(body))

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def beside(url: str, ports_up: int) -> str:
    """The base URL of a listener on the same host, this many ports above; "" above the last port.

    Without the URL's path: a prefix of the one is none of the other.
    """
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = (parts.port or (443 if parts.scheme == "https" else 80)) + ports_up
    return urlunsplit((parts.scheme, f"{host}:{port}", "", "", "")) if port <= 65_535 else ""


def remembered(ask: Ask) -> Ask:
    """Asks for each path once: adapters that all try to recognise one server share what it answered."""
    answers: dict[tuple[str, Listener, int], Answer] = {}

    async def again(path: str, listener: Listener = Listener.MAIN, ports_up: int = 0) -> Answer:
        key = (path, listener, ports_up)
        if key not in answers:
            answers[key] = await ask(path, listener, ports_up)
        return answers[key]

    return again
