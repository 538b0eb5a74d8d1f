"""What all sources have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import httpx
import msgspec
import structlog
from pydantic import ValidationError

from services.agent.config import InstanceConfig
from services.agent.sources.config import Served

log = structlog.get_logger()

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024  # a thousand containers or endpoints are about 3 MB

T = TypeVar("T")
Tell = Callable[[Sequence[InstanceConfig]], None]


class SourceUnavailable(Exception):  # noqa: N818 - names a condition, as common.errors does
    """A source cannot be asked now, or answers nonsense; what it said before goes on holding."""


class Source(Protocol):
    """One place that knows servers."""

    @property
    def name(self) -> str:
        """For the log: what it is and what it asks for."""

    async def follow(self, tell: Tell) -> None:
        """Tell all servers at first and after each change, without end. Raises SourceUnavailable."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server as a source has it, before it is checked; `settings` are `InstanceConfig`'s, over the source's own."""

    host: str
    port: int
    id: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""  # why it cannot be used, if it cannot


class Reader:
    """Turns what was found into instances; what cannot be one is left out, with a word in the log the first time."""

    def __init__(self, source: str, served: Served) -> None:
        self._source = source
        self._scheme = served.scheme
        # Of the class above all sources alone: their own settings say where to look.
        self._common = {key: getattr(served, key) for key in Served.model_fields if key != "scheme"}
        self._told: frozenset[tuple[str, str]] = frozenset()

    def read(self, found: Sequence[Found]) -> list[InstanceConfig]:
        """The instances, in the order given."""
        instances: list[InstanceConfig] = []
        ignored = set()
        for server in found:
            read = self._one(server)
            if isinstance(read, InstanceConfig):
                instances.append(read)
            else:
                ignored.add((server.id or f"{server.host}:{server.port}", read))
        for name, why in sorted(ignored - self._told):
            log.warning("server_ignored", source=self._source, server=name, why=why)
        self._told = frozenset(ignored)
        return instances

    def _one(self, server: Found) -> InstanceConfig | str:
        """One of them, or why it cannot be."""
        if server.problem:
            return server.problem
        host = f"[{server.host}]" if ":" in server.host else server.host
        values = {**self._common, **server.settings, "url": f"{self._scheme}://{host}:{server.port}"}
        if server.id:
            values["id"] = server.id
        try:
            return InstanceConfig.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{'.'.join(map(str, first['loc'])) or 'instance'}: {first['msg']}"


async def get(client: httpx.AsyncClient, url: str, kind: type[T], **request: Any) -> T:
    """A bounded GET of a JSON document of this form; what it has besides is left out. Raises SourceUnavailable."""
    try:
        async with client.stream("GET", url, **request) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise SourceUnavailable(f"{url}: the answer is larger than {MAX_ANSWER_BYTES} bytes")
            if response.status_code != 200:
                text = bytes(body[:200]).decode(errors="replace")
                raise SourceUnavailable(f"{url}: status {response.status_code}: {text}")
        return msgspec.json.decode(body, type=kind)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise SourceUnavailable(f"{url}: {str(error) or type(error).__name__}"[:300]) from None
    except msgspec.DecodeError as error:
        raise SourceUnavailable(f"{url}: not the answer expected: {error}"[:300]) from None
