"""Where a client is, and so where its data may go: by its address, or by the word of a trusted proxy.

Headers of anybody else are not believed. Source: RFC 7239 for the chain of proxies, read from its end.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

from common.config import Clients, Residency, ResidencyRule
from common.errors import BadRequest
from common.policy.regions import Rule, allowed
from common.relay import heads

ADDRESSES_CACHED: Final = 65_536
FORWARDED_FOR: Final = b"x-forwarded-for"


class Whereabouts:
    """The configured networks and rules of one tier. `home`: the region it stands in, "" if in none."""

    def __init__(self, clients: Clients, residency: Residency, home: str) -> None:
        self._default = clients.default or home
        self._header = clients.location_header.encode()
        pairs = [(network, entry.location) for entry in clients.locations for network in entry.networks]
        self._networks = sorted(pairs, key=lambda pair: -pair[0].prefixlen)
        self._trusted = clients.trusted_proxies
        self._cached: dict[str, tuple[str, bool]] = {}  # address -> (location, trusted)
        self._residency_header = residency.header.encode()
        self._rules = tuple(_rule(rule) for rule in residency.rules)
        self._values = frozenset(rule.value for rule in self._rules if rule.value)
        self.plain = not self._networks and not self._header and not self._rules  # nothing depends on the client

    def location(self, address: str, headers: heads.Headers) -> str:
        """The region a client is in or near; "" when nothing says."""
        if self.plain:
            return self._default
        found, trusted = self._of(address)
        if trusted:
            said = heads.find(headers, self._header) if self._header else None
            if said:
                return said.decode("latin-1").strip()[:64]
            found = self._of(self._client(headers) or address)[0]
        return found or self._default

    def _client(self, headers: heads.Headers) -> str:
        """The last address in the chain of proxies that is none of ours; "" without one."""
        chain = b",".join(value for key, value in headers if key == FORWARDED_FOR).decode("latin-1")
        for hop in reversed(chain.split(",")):
            address = hop.strip()
            if address and not self._of(address)[1]:
                return address
        return ""

    def _of(self, address: str) -> tuple[str, bool]:
        known = self._cached.get(address)
        if known is None:
            if len(self._cached) >= ADDRESSES_CACHED:
                self._cached.clear()
            known = self._cached[address] = self._look_up(address)
        return known

    def _look_up(self, address: str) -> tuple[str, bool]:
        try:
            ip = ip_address(address)
        except ValueError:  # a Unix socket, or whatever a header holds
            return "", False
        location = next((name for network, name in self._networks if ip in network), "")
        return location, any(ip in network for network in self._trusted)

    def regions(self, tenant: str, location: str, headers: heads.Headers) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(only these, never these) regions; ((), ()): any. Raises BadRequest for a header that no rule knows."""
        if not self._rules:
            return (), ()
        said = heads.find(headers, self._residency_header) if self._residency_header else None
        value = said.decode("latin-1").strip() if said is not None else ""
        if value and value not in self._values:
            name = self._residency_header.decode()
            raise BadRequest(f"no rule of residency knows the {name} {value[:64]!r}", code="unknown_residency")
        return allowed(self._rules, tenant, location, value)


def _rule(rule: ResidencyRule) -> Rule:
    return Rule(rule.tenants, rule.value, rule.locations, rule.allow, rule.deny)
