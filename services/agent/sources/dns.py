"""Servers that a DNS name stands for.

An answer may be a part of what there is (resolvers shuffle and cut), so an address is kept for a while after it was
last seen: whether a server lives is found out by looking at it, and not by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from common import clock
from common.errors import ConfigError
from services.agent.sources.base import Found, Reader, SourceUnavailable, Tell
from services.agent.sources.config import DnsSource

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

TIMEOUT_S: Final = 5.0  # for one look-up, over all resolvers and tries


@dataclass(slots=True)
class DnsName:
    """The addresses behind one name."""

    config: DnsSource
    _seen: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """See Source."""
        return f"dns {self.config.name}"

    async def follow(self, tell: Tell) -> None:
        """See Source."""
        reader = Reader(self.name, self.config)
        resolver = _resolver(self.config)
        while True:
            now = clock.now()
            for address in await self._look(resolver):
                self._seen[address] = now
            self._seen = {a: at for a, at in self._seen.items() if now - at < self.config.forget_after_s}
            tell(reader.read([Found(host, port) for host, port in sorted(self._seen)]))
            await asyncio.sleep(self.config.refresh_s)

    async def _look(self, resolver: Resolver) -> set[tuple[str, int]]:
        if self.config.type == "srv":
            records = await _records(resolver, self.config.name, "SRV")
            return {(str(r.target).rstrip("."), r.port) for r in records if r.port}
        port = self.config.port
        assert port is not None  # its settings see to that
        found = set()
        for kind in ("A", "AAAA"):
            found |= {(r.address, port) for r in await _records(resolver, self.config.name, kind)}
        return found


def _resolver(config: DnsSource) -> Resolver:
    try:
        from dns.asyncresolver import Resolver  # noqa: PLC0415 - of an extra
        from dns.nameserver import Do53Nameserver  # noqa: PLC0415
        from dns.resolver import NoResolverConfiguration  # noqa: PLC0415
    except ImportError:
        raise ConfigError("discovery.dns needs dnspython: pip install 'headwater[discovery]'") from None
    try:
        resolver = Resolver(configure=not config.nameservers)
    except NoResolverConfiguration as error:
        raise SourceUnavailable(str(error)) from None
    if config.nameservers:
        places = [n.rpartition(":") for n in config.nameservers]
        resolver.nameservers = [Do53Nameserver(host.strip("[]"), int(port)) for host, _, port in places]
    resolver.lifetime = TIMEOUT_S
    return resolver


async def _records(resolver: Resolver, name: str, kind: str) -> Iterable[Any]:
    """The records of a name; none if it has none of this kind, or does not exist. Raises SourceUnavailable."""
    from dns.exception import DNSException  # noqa: PLC0415
    from dns.resolver import NXDOMAIN, NoAnswer  # noqa: PLC0415

    try:
        return await resolver.resolve(name, kind, search=True)
    except (NXDOMAIN, NoAnswer):
        return ()
    except (DNSException, OSError) as error:
        raise SourceUnavailable(f"{kind} {name}: {error}"[:300]) from None
