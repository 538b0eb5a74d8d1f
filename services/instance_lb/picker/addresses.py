"""Addresses of servers as a gateway wants them: `ip:port`, of URLs that may have names."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from common import clock
from common.errors import ConnectFailed

KEPT_S: Final = 30.0  # a name is looked up again after this
KEPT: Final = 10_000  # names at most


class Addresses:
    """Of one process; names are looked up by the system's resolver, off the event loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}  # url -> when looked up, address

    async def of(self, url: str) -> str:
        """The address of a server's URL. Raises ConnectFailed for a name that stands for nothing."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        with suppress(ValueError):
            return _joined(str(ip_address(host)), port)
        looked_up_at, address = self._known.get(url, (0.0, ""))
        if address and clock.now() - looked_up_at < KEPT_S:
            return address
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectFailed(f"{host}: {error.strerror or error}") from None
        address = _joined(str(infos[0][4][0]), port)
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[url] = (clock.now(), address)
        return address


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
