"""A network path of a given round trip, emulated on one connection: what regions on one machine stand apart by.

Half of the round trip is added to each direction; order is kept because all delays of a connection are equal. Used when
`network.emulated_rtt_s` names a peer's region, never otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast


class _DelayedTransport:
    """The transport as the inner protocol sees it: writes leave half a round trip later."""

    def __init__(self, transport: asyncio.Transport, half_s: float) -> None:
        self._transport = transport
        self._half_s = half_s

    def write(self, data: bytes) -> None:
        asyncio.get_running_loop().call_later(self._half_s, self._late, data)

    def _late(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Delayed(asyncio.Protocol):
    """Wraps a protocol; everything it receives comes half a round trip late."""

    def __init__(self, inner: asyncio.Protocol, round_trip_s: float) -> None:
        self._inner = inner
        self._half_s = round_trip_s / 2.0

    def _later(self, call: Callable[..., None], *args: object) -> None:
        asyncio.get_running_loop().call_later(self._half_s, call, *args)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Passed on at once: the dialler itself waits for the handshake."""
        delayed = _DelayedTransport(cast("asyncio.Transport", transport), self._half_s)
        self._inner.connection_made(cast("asyncio.Transport", delayed))

    def data_received(self, data: bytes) -> None:
        """Passed on late."""
        self._later(self._inner.data_received, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Passed on late, after the data before it."""
        self._later(self._inner.connection_lost, exc)
