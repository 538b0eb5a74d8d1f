"""The relay of one process: its listener, and its pools of connections to servers and peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from ssl import SSLContext

from common import clock
from common.errors import ConnectFailed, NoEndpoints, ResetBeforeByte, Saturated, UpstreamError
from common.policy.progress import Signs
from common.relay.client import ClientConnection
from common.relay.exchange import ClientLimits, Handler, Refusal
from common.relay.listener import Listener
from common.relay.pool import AddressPool
from common.relay.sending import Answer, Sending, UpstreamLimits
from common.relay.sweeper import Sweeper

TRIM_INTERVAL_S = 1.0  # idle connections are looked through this often
LAST_WORDS_S = 0.5  # for clients to take what their answers end with
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
        half_close: bool = False,
    ) -> None:
        self._sweeper = Sweeper()
        self.listener = Listener(handler, refusal, limits, self._sweeper, half_close=half_close)
        self._upstream = upstream
        self._pools: dict[str, AddressPool] = {}
        self._retired: dict[str, AddressPool] = {}  # forgotten by membership, with requests under way
        self._trimmer: asyncio.Task[None] | None = None
        self.delay_of: Callable[[str], float] = lambda url: 0.0  # emulated round trip to a URL, seconds
        self.tls_of: Callable[[str], SSLContext | None] = lambda url: None  # what to speak to a URL

    def reconfigure(self, limits: ClientLimits, upstream: UpstreamLimits, *, half_close: bool) -> None:
        """Other bounds from now on; connections that are open keep those of clients they began with."""
        self.listener.reconfigure(limits, half_close=half_close)
        self._upstream = upstream
        for pool in (*self._pools.values(), *self._retired.values()):
            pool.limits = upstream

    # -- clients -----------------------------------------------------------------------------------------------------

    @property
    def connections(self) -> set[ClientConnection]:
        """Those of clients."""
        return self.listener.connections

    async def listen(self, host: str, port: int, *, shared: bool = False, tls: SSLContext | None = None) -> int:
        """Begin to accept; returns the port. Raises OSError when it cannot be bound."""
        bound = await self.listener.listen(host, port, shared=shared, tls=tls)
        self._trimmer = asyncio.get_running_loop().create_task(self._trim())
        return bound

    async def close(self, grace_s: float) -> None:
        """Stop accepting, close idle clients, let answers under way end within `grace_s`, then break what is left."""
        self.listener.close()
        await self.listener.quiet(grace_s)
        self.listener.end("this balancer is shutting down")
        await self.listener.quiet(LAST_WORDS_S)
        if self._trimmer is not None:
            self._trimmer.cancel()
        for pool in self._pools.values():
            pool.close()

    def abort(self) -> None:
        """Drop the listener and every connection at once, as a crash would."""
        self.listener.abort()

    # -- servers -----------------------------------------------------------------------------------------------------

    def pool(self, url: str) -> AddressPool:
        """The connections to an address."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = AddressPool(
                url,
                self._upstream,
                self._sweeper,
                delay_s=self.delay_of(url),
                tls=self.tls_of(url),
                make_room=self._make_room,
            )
        return pool

    def _make_room(self) -> bool:
        """Close all idle connections to servers, for file descriptors have run out; whether there were any."""
        closed = [pool.close() for pool in self._pools.values()]
        return any(closed)

    async def forward(self, url: str, sending: Sending) -> Answer:
        """Send a request and stream its answer to the client. Raises UpstreamError or RejectedError.

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
            except (Saturated, NoEndpoints):
                return False  # we could not ask
            self.pool(url).put_back(connection)
        return False

    def keep_only(self, urls: Mapping[str, object] | set[str]) -> None:
        """Forget addresses that membership no longer names; requests under way there are not disturbed."""
        for url in self._pools.keys() - set(urls):
            pool = self._pools.pop(url)
            pool.retire()
            if pool.busy:
                self._retired[url] = pool

    def _of(self, url: str) -> list[AddressPool]:
        return [pool for pool in (self._pools.get(url), self._retired.get(url)) if pool is not None]

    def waiting(self, url: str) -> int:
        """Requests that were sent to an address and of which nothing has come back."""
        return sum(pool.waiting for pool in self._of(url))

    def give_up(self, url: str, error: UpstreamError) -> int:
        """End those with an error, since whoever has them hangs; how many there were."""
        return sum(pool.give_up(error) for pool in self._of(url))

    def give_up_hung(self, url: str, error: UpstreamError, *, sure: bool) -> int:
        """End what no client has a byte of yet, for an instance hangs; see `AddressPool.give_up_hung`."""
        return sum(pool.give_up_hung(error, sure=sure) for pool in self._of(url))

    def signs(self, url: str) -> Signs:
        """What came of answers from an address."""
        pools = self._of(url)
        return Signs(
            max((pool.moved_at for pool in pools), default=-inf),
            max((pool.completed_at for pool in pools), default=-inf),
            tuple(stream for pool in pools for stream in pool.streams()),
        )

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(TRIM_INTERVAL_S)
            now = clock.now()
            for pool in self._pools.values():
                pool.trim(now)
            if self._retired:
                self._retired = {url: pool for url, pool in self._retired.items() if pool.busy}
