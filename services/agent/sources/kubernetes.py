"""Endpoints of a Kubernetes Service, as its EndpointSlices have them: listed once, then watched.

The protocol is Kubernetes' own (API concepts: "Efficient detection of changes"): a list gives a resource version, a
watch from there gives the changes, and where that version is no longer known (410), one lists again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx
import msgspec

from common.errors import ConfigError
from common.kubernetes_api import TIMEOUT_S, ApiServer
from services.agent.sources.base import MAX_ANSWER_BYTES, Found, Reader, SourceUnavailable, Tell, get
from services.agent.sources.config import KubernetesSource

GONE: Final = 410


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Reference(msgspec.Struct):
    kind: str = ""
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Reference | None = None
    node_name: str | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Slices(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


@dataclass(slots=True)
class KubernetesEndpoints:
    """The endpoints of one Service."""

    config: KubernetesSource
    node: str = ""  # endpoints on other nodes do not count
    _slices: dict[str, _Slice] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See Source."""
        return f"kubernetes {self.config.service}"

    async def follow(self, tell: Tell) -> None:
        """See Source."""
        reader = Reader(self.name, self.config)
        async with self._client() as client:
            version = await self._list(client)
            tell(reader.read(self._found()))
            while version:
                version = await self._watch(client, version, lambda: tell(reader.read(self._found())))

    # -- the API server ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        labelled = {"labelSelector": f"kubernetes.io/service-name={self.config.service}"}
        try:
            made = self._server().client(params=labelled)
        except ConfigError as error:
            raise SourceUnavailable(str(error)) from None
        async with made as client:
            yield client

    def _server(self) -> ApiServer:
        config = self.config
        return ApiServer(config.api_url or "", config.token_file, config.ca_file, config.namespace)

    def _path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._server().own_namespace}/endpointslices"

    def _headers(self) -> dict[str, str]:
        try:
            return self._server().headers()
        except ConfigError as error:
            raise SourceUnavailable(str(error)) from None

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Take what there is; the version it is of."""
        listed = await get(client, self._path(), _Slices, headers=self._headers())
        self._slices = {s.metadata.name: s for s in listed.items}
        return listed.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient, version: str, changed: Callable[[], None]) -> str:
        """Watch once; the version to go on from, "" if one has to list again. Raises SourceUnavailable."""
        params = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "1",
            "timeoutSeconds": str(round(self.config.watch_s)),
        }
        timeout = httpx.Timeout(TIMEOUT_S, read=self.config.watch_s + TIMEOUT_S)
        try:
            ask = client.stream("GET", self._path(), params=params, headers=self._headers(), timeout=timeout)
            async with ask as response:
                if response.status_code == GONE:
                    return ""
                if response.status_code != 200:
                    raise SourceUnavailable(f"watch: status {response.status_code}")
                async for line in _lines(response):
                    version, different = self._take(line, version)
                    if different:
                        changed()
                    if not version:
                        return ""
        except (httpx.HTTPError, OSError) as error:
            raise SourceUnavailable(f"watch: {str(error) or type(error).__name__}"[:300]) from None
        return version

    def _take(self, line: bytes, version: str) -> tuple[str, bool]:
        """One event: the version to go on from ("": list again), and whether anything is different."""
        try:
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                if status.code != GONE:
                    raise SourceUnavailable(f"watch: {status.code} {status.message}"[:300])
                return "", False
            slice_ = msgspec.json.decode(event.object, type=_Slice)
        except msgspec.DecodeError as error:
            raise SourceUnavailable(f"watch: not the event expected: {error}") from None
        version = slice_.metadata.resource_version or version
        if event.type == "BOOKMARK":
            return version, False
        if event.type == "DELETED":
            self._slices.pop(slice_.metadata.name, None)
        else:
            self._slices[slice_.metadata.name] = slice_
        return version, True

    # -- what the slices say -----------------------------------------------------------------------------------------

    def _found(self) -> list[Found]:
        """One of each pod: an endpoint may be in two slices while it moves, and once in each family of addresses."""
        found: dict[str, Found] = {}
        for slice_ in sorted(self._slices.values(), key=lambda s: (s.address_type != "IPv4", s.metadata.name)):
            port, problem = self._port(slice_.ports or [])
            for endpoint in slice_.endpoints or ():
                if not (endpoint.addresses and self._counts(endpoint)):
                    continue
                host = endpoint.addresses[0]
                ref = endpoint.target_ref
                id_ = ref.name if ref is not None and ref.kind == "Pod" else ""
                found.setdefault(id_ or host, Found(host, port, id_, problem=problem))
        return [found[key] for key in sorted(found)]

    def _counts(self, endpoint: _Endpoint) -> bool:
        conditions = endpoint.conditions or _Conditions()
        if self.node and endpoint.node_name != self.node:
            return False
        if conditions.terminating:
            return False  # it ends what it has, and wants nothing new
        return conditions.ready is not False or self.config.not_ready  # unknown is to be read as ready

    def _port(self, ports: list[_Port]) -> tuple[int, str]:
        wanted = self.config.port
        matching = [p.port for p in ports if p.port and (not wanted or wanted in (p.name, str(p.port)))]
        if len(matching) == 1:
            return matching[0], ""
        have = ", ".join(f"{p.name or '(unnamed)'}={p.port}" for p in ports) or "none"
        return (
            0,
            f"no port '{wanted}' (there are: {have})" if wanted else f"say which port is meant (there are: {have})",
        )


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a body as they come, each bounded."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > MAX_ANSWER_BYTES:
            raise SourceUnavailable(f"watch: a line is longer than {MAX_ANSWER_BYTES} bytes")
