"""Containers of a Docker engine, by their labels: the list of running ones, asked for every few seconds.

The engine's API is Docker's own (`GET /containers/json`), which Podman answers as well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from services.agent.sources.base import Found, Reader, Tell, get
from services.agent.sources.config import DockerSource

API: Final = "v1.41"  # Docker 20.10 of 2020, and every engine since
TIMEOUT_S: Final = 5.0
HOST_NETWORK: Final = "host"
LISTS: Final = frozenset({"models", "devices"})  # labels with commas


class _Network(msgspec.Struct, rename="pascal"):
    ip: str = msgspec.field(name="IPAddress", default="")
    ip6: str = msgspec.field(name="GlobalIPv6Address", default="")


class _Networks(msgspec.Struct, rename="pascal"):
    networks: dict[str, _Network] | None = None


class _Container(msgspec.Struct, rename="pascal"):
    id: str
    names: list[str] = []
    labels: dict[str, str] | None = None
    network_settings: _Networks | None = None


@dataclass(slots=True)
class DockerContainers:
    """The containers that one source names."""

    config: DockerSource

    @property
    def name(self) -> str:
        """See Source."""
        return f"docker {self.config.url}"

    async def follow(self, tell: Tell) -> None:
        """See Source."""
        reader = Reader(self.name, self.config)
        async with self._client() as client:
            while True:
                tell(reader.read(await self._look(client)))
                await asyncio.sleep(self.config.refresh_s)

    def _client(self) -> httpx.AsyncClient:
        parts = urlsplit(self.config.url)
        if parts.scheme != "unix":
            return httpx.AsyncClient(base_url=self.config.url, timeout=TIMEOUT_S, trust_env=False)
        transport = httpx.AsyncHTTPTransport(uds=parts.path)
        return httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=TIMEOUT_S, trust_env=False)

    async def _look(self, client: httpx.AsyncClient) -> list[Found]:
        filters = json.dumps({"label": [f"{self.config.label}.port"], "status": ["running"]})
        containers = await get(client, f"/{API}/containers/json", list[_Container], params={"filters": filters})
        return [self._found(c) for c in sorted(containers, key=lambda c: c.id)]

    def _found(self, container: _Container) -> Found:
        """The server in a container; what its labels have wrong is found when it is read."""
        prefix = f"{self.config.label}."
        labels = {k.removeprefix(prefix): v for k, v in (container.labels or {}).items() if k.startswith(prefix)}
        name = container.names[0].lstrip("/") if container.names else container.id[:12]
        port = labels.pop("port", "")
        address, problem = self._address(container)
        if not (port.isdecimal() and 0 < int(port[:6]) <= 65_535):
            problem = f"the label {prefix}port is no port: {port[:50]!r}"
        id_ = labels.pop("id", name)
        settings: dict[str, object] = dict(labels)  # an unknown one is refused by its name, as in a file
        for key in LISTS & labels.keys():
            items = [item.strip() for item in labels[key].split(",") if item.strip()]
            settings[key] = [int(i) if key == "devices" and i.isdecimal() else i for i in items]
        return Found(address, 0 if problem else int(port), id_, settings, problem)

    def _address(self, container: _Container) -> tuple[str, str]:
        """Where it is reached, or why it cannot be."""
        networks: Mapping[str, _Network] = (container.network_settings and container.network_settings.networks) or {}
        if HOST_NETWORK in networks:
            return "127.0.0.1", ""
        wanted = [self.config.network] if self.config.network else sorted(networks)
        if len(wanted) > 1:
            return "", f"it is in several networks ({', '.join(wanted)}): say which with `network`"
        network = networks.get(wanted[0]) if wanted else None
        if network is None or not (network.ip or network.ip6):
            return "", f"it has no address in the network {wanted[0] if wanted else '(none)'}"
        return network.ip or network.ip6, ""
