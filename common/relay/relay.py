"""The relay of one process: its listener's connections and its pools of connections to servers and peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from common import clock
from common.errors import ConnectFailed, ResetBeforeByte
from common.relay.client import ClientConnection, ClientLimits, Handler, Refusal
from common.relay.sweeper import Sweeper
from common.relay.upstream import AddressPool, Answer, Sending, UpstreamLimits

TRIM_INTERVAL_S = 1.0  # idle connections are looked through this often
DYING_S = (
    0.05  # from a killed process's first closed connection to its closed listener; some microseconds, were it alone
)


class Relay:
    """Carries requests: accepts them from clients, forwards them to one address at a time."""

    def __init__(
        self,
        handler: Handler,
        refusal: Refusal,
        limits: ClientLimits,
        upstream: UpstreamLimits,
        *,
        max_connections: int,
        half_close: bool = False,
    ) -> None:
        self._handler = handler
        self._refusal = refusal
        self._limits = limits
        self._upstream = upstream
        self._max_connections = max_connections
        self._half_close = half_close
        self._sweeper = Sweeper()
        self._pools: dict[str, AddressPool] = {}
        self._server: asyncio.Server | None = None
        self._trimmer: asyncio.Task[None] | None = None
        self.delay_of: Callable[[str], float] = lambda url: 0.0  # emulated round trip to a URL, seconds
        self.connections: set[ClientConnection] = set()
        self._quiet = asyncio.Event()  # set whenever the last client has left

    # -- clients -----------------------------------------------------------------------------------------------------

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept; returns the port. Raises OSError when it cannot be bound."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, host, port, backlog=4096)
        self._trimmer = loop.create_task(self._trim())
        return int(self._server.sockets[0].getsockname()[1])

    def _connection(self) -> ClientConnection:
        return ClientConnection(
            self._handler,
            self._refusal,
            self._limits,
            self._sweeper,
            self._opened,
            self._closed,
            half_close=self._half_close,
        )

    def _opened(self, connection: ClientConnection) -> bool:
        if len(self.connections) >= self._max_connections:
            return False
        self.connections.add(connection)
        return True

    def _closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._quiet.set()

    async def close(self, grace_s: float) -> None:
        """Stop accepting, close idle clients, let answers under way end within `grace_s`, then break what is left."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.connections:
                    self._quiet.clear()
                    await self._quiet.wait()
        for connection in list(self.connections):
            connection.end("this balancer is shutting down")
        if self._trimmer is not None:
            self._trimmer.cancel()
        for pool in self._pools.values():
            pool.close()
        await asyncio.sleep(0)  # lets the sockets' last words out

    def abort(self) -> None:
        """Drop the listener and every connection at once, as a crash would."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    # -- servers -----------------------------------------------------------------------------------------------------

    def pool(self, url: str) -> AddressPool:
        """The connections to an address."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = AddressPool(url, self._upstream, self._sweeper, self.delay_of(url))
        return pool

    async def forward(self, url: str, sending: Sending) -> Answer:
        """Send a request and stream its answer to the client. Raises UpstreamError or Saturated.

        A reused connection that turns out to have been closing is replaced by a fresh one, once: the server never saw
        the request. The answer of a cancelled call is given up at once, so that the server stops working on it.
        """
        pool = self.pool(url)
        connection = await pool.connect()
        for last in (False, True):
            try:
                return await connection.send(sending)
            except ResetBeforeByte:
                if last or not connection.lost_in_race:
                    raise
            except asyncio.CancelledError:
                connection.abandon()
                raise
            connection = await pool.connect(fresh=True)
        raise AssertionError("unreachable")

    async def refuses(self, url: str) -> bool:
        """Whether nobody listens at an address any more: the process that had a request there is gone.

        Asked twice: of a process that is killed, Linux closes the connections first and the listener last, so that
        whoever hears of the reset and asks at once is still let in.
        """
        for wait_s in (0.0, DYING_S):
            await asyncio.sleep(wait_s)
            try:
                connection = await self.pool(url).connect(fresh=True)
            except ConnectFailed:
                return True
            connection.put_back()
        return False

    def keep_only(self, urls: Mapping[str, object] | set[str]) -> None:
        """Forget addresses that membership no longer names; requests under way there are not disturbed."""
        for url in self._pools.keys() - set(urls):
            self._pools.pop(url).close()

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(TRIM_INTERVAL_S)
            now = clock.now()
            for pool in self._pools.values():
                pool.trim(now)
