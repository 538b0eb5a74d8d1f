"""Connections to one address: idle ones to use again, new ones where there is none, and a bound on all of them.

What fails for want of something on this machine (file descriptors, ports, memory) says nothing of the server, and is
no reason to leave it alone.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from math import inf
from socket import SO_RCVBUF, SOL_SOCKET
from ssl import SSLContext
from urllib.parse import urlsplit

from common import clock
from common.errors import ConnectFailed, NoEndpoints, Saturated, UpstreamError
from common.relay.delay import Delayed
from common.relay.sending import UpstreamLimits
from common.relay.sweeper import Sweeper
from common.relay.upstream import UpstreamConnection

IDLE_PER_ENDPOINT = 256  # idle connections kept to one address
AHEAD_BYTES = 1 << 19  # of an answer that the kernel takes ahead of its client; unbounded it would be some megabytes
NOT_THE_SERVERS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


class AddressPool:
    """Connections to one address. `make_room` closes idle connections to other addresses, whether it found any."""

    def __init__(
        self,
        url: str,
        limits: UpstreamLimits,
        sweeper: Sweeper,
        *,
        delay_s: float = 0.0,
        tls: SSLContext | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.host_header = parts.netloc.rsplit("@", 1)[-1].encode()
        self.base = parts.path.rstrip("/").encode()
        self.limits = limits
        self.delay_s = delay_s
        self._tls = tls
        self._make_room = make_room
        self._open: set[UpstreamConnection] = set()  # dialling, busy or idle
        self._sweeper = sweeper
        self._idle: list[UpstreamConnection] = []
        self._retired = False
        self.moved_at = -inf  # when a byte of an answer's body last came
        self.completed_at = -inf  # when an answer was last complete

    async def connect(self, *, fresh: bool = False) -> UpstreamConnection:
        """An idle connection (unless `fresh`), or a new one. Raises ConnectFailed, Saturated or NoEndpoints."""
        now = clock.now()
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.closed or connection.transport.is_closing():
                continue
            if now - connection.idle_since > self.limits.idle_timeout_s:
                connection.transport.abort()
                continue
            connection.reused = True
            return connection
        if len(self._open) >= self.limits.max_connections:
            raise Saturated(
                f"{self.limits.max_connections} connections to {self.host}:{self.port} are in use", retry_after_s=1.0
            )
        return await self._dial()

    async def _dial(self) -> UpstreamConnection:
        connection = UpstreamConnection(self)
        self._open.add(connection)
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                await self._connected(connection)
        except (OSError, TimeoutError) as error:
            self._drop(connection)
            if isinstance(error, OSError) and error.errno in NOT_THE_SERVERS:
                raise NoEndpoints(f"this balancer cannot open a connection: {error}", retry_after_s=1.0) from error
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise ConnectFailed(f"cannot connect to {self.host}:{self.port}: {reason}") from error
        except asyncio.CancelledError:
            self._drop(connection)
            raise
        if connection.closed:
            raise ConnectFailed(f"cannot connect to {self.host}:{self.port}: closed as soon as it was made")
        sock = connection.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(SOL_SOCKET, SO_RCVBUF, AHEAD_BYTES)
        self._sweeper.add(connection)
        return connection

    async def _connected(self, connection: UpstreamConnection) -> None:
        loop = asyncio.get_running_loop()
        protocol: asyncio.Protocol = Delayed(connection, self.delay_s) if self.delay_s else connection
        try:
            await loop.create_connection(lambda: protocol, self.host, self.port, ssl=self._tls)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._make_room():
                raise
            await asyncio.sleep(0)  # they are closed by then
            await loop.create_connection(lambda: protocol, self.host, self.port, ssl=self._tls)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    def _drop(self, connection: UpstreamConnection) -> None:
        # A cancelled dial may have connected in the same instant; its socket must not outlive it unowned.
        self._open.discard(connection)
        if connection.transport is not None:
            connection.transport.abort()

    def put_back(self, connection: UpstreamConnection) -> None:
        """A request is over and its connection may serve another."""
        connection.idle_since = clock.now()
        if len(self._idle) < IDLE_PER_ENDPOINT and not self._retired:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def ended(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        self._sweeper.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def trim(self, now: float) -> None:
        """Close what has been idle for too long."""
        for connection in [c for c in self._idle if now - c.idle_since > self.limits.idle_timeout_s]:
            connection.transport.abort()

    @property
    def busy(self) -> bool:
        """Whether a connection is open."""
        return bool(self._open)

    @property
    def waiting(self) -> int:
        """Requests of which nothing has come back."""
        return sum(connection.unanswered for connection in self._open)

    def give_up(self, error: UpstreamError) -> int:
        """End all requests of which nothing has come back, for whoever listens there hangs; how many there were."""
        waiting = [connection for connection in self._open if connection.unanswered]
        for connection in waiting:
            connection.give_up(error)
        return len(waiting)

    def give_up_hung(self, error: UpstreamError, *, sure: bool) -> int:
        """End all requests that no client has a byte of; those answered in one piece only where it is `sure`."""
        waiting = [c for c in self._open if c.uncommitted and (sure or not c.patient)]
        for connection in waiting:
            connection.give_up(error)
        return len(waiting)

    def streams(self) -> list[tuple[float, float]]:
        """(first byte at, last byte at) of each stream under way."""
        return [(c.began_at, c.moved_at) for c in self._open if c.streams]

    def retire(self) -> None:
        """Nobody will look after this pool any more: what is under way ends, and nothing is kept."""
        self._retired = True
        self.close()

    def close(self) -> bool:
        """Close all idle connections; whether there were any."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.transport.abort()
        return bool(idle)
