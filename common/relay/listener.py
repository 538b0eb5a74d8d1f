"""Takes clients in: as many as there are file descriptors for, and sees them off when this process leaves.

A client costs two descriptors, its own and one towards a server, so half of what the process may open (RLIMIT_NOFILE)
is the most that is taken, whatever is configured. At that limit the connections that idle longest make room, as in
nginx; where none idles, a newcomer gets a quick 503. The accept loop never meets the end of descriptors itself.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from contextlib import suppress
from math import inf
from ssl import SSLContext
from typing import cast

from common import clock
from common.policy.addresses import client_of, within
from common.relay import heads
from common.relay.client import ClientConnection
from common.relay.exchange import ClientLimits, Exchange, Handler, Refusal
from common.relay.sweeper import Sweeper

BACKLOG = 4096
RESERVED_FILES = 64  # for the stores, reports, metrics, logs, and the turned away
TURNED_AWAY = 32  # at once; those beyond are closed without a word
TURN_AWAY_S = 1.0  # for a client that is turned away to send something, and to read that it is
ROOM_IDLE_S = 0.5  # a connection that rested for this long may be closed for another one
ROOM_BATCH = 64  # so many are closed together, so that looking for them costs little for each newcomer


def most_clients(configured: int) -> int:
    """Client connections that fit the process's file descriptors, at most as configured."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(configured, max(1, (soft - RESERVED_FILES) // 2)) if soft != resource.RLIM_INFINITY else configured


class Listener:
    """The listener of one process and its client connections."""

    def __init__(
        self,
        handler: Handler,
        refusal: Refusal,
        limits: ClientLimits,
        sweeper: Sweeper,
        *,
        half_close: bool = False,
    ) -> None:
        self.handler = handler
        self.refusal = refusal
        self.limits = limits
        self.half_close = half_close
        self.leaving = False  # every answer is the last of its connection
        self.connections: set[ClientConnection] = set()
        self.closed_for_address = 0  # connections, for there were too many from the same address
        self._clients: Counter[str] = Counter()  # connections by what counts as one address
        self._turned_away: set[TurnedAway] = set()
        self._most = most_clients(limits.max_connections)
        self._room = 0  # connections that are being closed for newcomers
        self.sweeper = sweeper
        self._server: asyncio.Server | None = None
        self._quiet = asyncio.Event()  # set whenever the last client has left

    def reconfigure(self, limits: ClientLimits, *, half_close: bool) -> None:
        """Other bounds for those that connect from now on."""
        self.limits, self.half_close = limits, half_close
        self._most = most_clients(limits.max_connections)

    async def listen(self, host: str, port: int, *, shared: bool = False, tls: SSLContext | None = None) -> int:
        """Begin to accept; returns the port. `shared`: with other processes. Raises OSError when it cannot be bound."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._protocol, host, port, backlog=BACKLOG, reuse_port=shared or None, ssl=tls
        )
        return int(self._server.sockets[0].getsockname()[1])

    def _protocol(self) -> asyncio.Protocol:
        if len(self.connections) < self._most:
            return ClientConnection(self)
        if not self._room:
            self._room = self._make_room()
        if not self._room:
            return TurnedAway(self)
        self._room -= 1
        return ClientConnection(self)

    def _make_room(self) -> int:
        """Close the connections that idle longest; how many there were."""
        before = clock.now() - ROOM_IDLE_S
        idle = [(c.idle_since, id(c), c) for c in self.connections if c.idle_since is not None]
        longest = sorted(item for item in idle if item[0] is not None and item[0] <= before)[:ROOM_BATCH]
        for _, _, connection in longest:
            connection.transport.abort()
        return len(longest)

    def opened(self, connection: ClientConnection) -> None:
        """A client connected; one of too many from its address is closed."""
        self.connections.add(connection)
        self.sweeper.add(connection)
        client = client_of(connection.peername)
        self._clients[client] += 1
        most = self.limits.max_connections_per_address
        if most and self._clients[client] > most and not within(connection.peername, self.limits.unlimited_addresses):
            self.closed_for_address += 1
            connection.transport.abort()

    def closed(self, connection: ClientConnection) -> None:
        """It is gone."""
        self.sweeper.discard(connection)
        self.connections.discard(connection)
        client = client_of(connection.peername)
        self._clients[client] -= 1
        if self._clients[client] <= 0:
            del self._clients[client]
        self._room = max(0, self._room - 1)
        if not self.connections:
            self._quiet.set()

    # -- clients for whom there is no room ---------------------------------------------------------------------------

    def turned_away(self, protocol: TurnedAway) -> bool:
        """Whether there is room to tell one more that there is none."""
        if len(self._turned_away) >= TURNED_AWAY:
            return False
        self._turned_away.add(protocol)
        self.sweeper.add(protocol)
        return True

    def forget(self, protocol: TurnedAway) -> None:
        """It is gone."""
        self._turned_away.discard(protocol)
        self.sweeper.discard(protocol)

    # -- the end -----------------------------------------------------------------------------------------------------

    def last_call(self) -> None:
        """From now on every answer is the last one of its connection, and says so."""
        self.leaving = True
        for connection in self.connections:
            connection.last()

    def close(self) -> None:
        """Accept no more, and close what idles."""
        if self._server is not None:
            self._server.close()
        self.last_call()
        for connection in list(self.connections):
            if connection.idle_since is not None:
                connection.close()

    async def quiet(self, within_s: float) -> None:
        """Wait until no client is left, for at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.connections:
                    self._quiet.clear()
                    await self._quiet.wait()

    def end(self, message: str) -> None:
        """Break what is still under way."""
        for connection in list(self.connections):
            connection.end(message)

    def abort(self) -> None:
        """Drop the listener and every connection at once, as a crash would."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()


class TurnedAway(asyncio.Protocol):
    """A client for whom there is no room: told so as soon as it has asked for something."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.deadline = inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)
        self.deadline = clock.now() + TURN_AWAY_S
        if not self._listener.turned_away(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._listener.forget(self)

    def data_received(self, data: bytes) -> None:
        """Its request, or the begin of it."""
        if self._transport.is_closing() or not data:
            return
        asked = Exchange(cast("ClientConnection", None))
        asked.target = [*data.split(b" ", 2), b""][1]
        content_type, body = self._listener.refusal(asked, 503, "too many connections; try again in a moment")
        lines = b"retry-after: 1\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self._transport.write(heads.response_head(503, [(b"content-type", content_type)], lines) + body)
        self._transport.close()

    def expired(self, now: float) -> None:
        """It said nothing, or reads nothing."""
        self._transport.abort()
