"""How many requests a second one client address may send: a token bucket for each, of which a bounded number is kept.

An IPv6 client has a /64 to itself, so that is what counts as one address (RFC 6177). What is forgotten to stay bounded
starts again with a full bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

MAX_ADDRESSES: Final = 10_000
BURST_S: Final = 2.0  # a client that was quiet may send so many seconds' worth at once


@lru_cache(maxsize=MAX_ADDRESSES)
def client_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 one; "" for what is no address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped is not None else str(ip_network((parsed, 64), strict=False))
    return str(parsed)


@lru_cache(maxsize=MAX_ADDRESSES)
def within(address: str, networks: tuple[str, ...]) -> bool:
    """Whether an address is in one of these networks, as in 10.0.0.0/8."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in ip_network(network) for network in networks)


class AddressRates:
    """The buckets. `rate` is passed in with each question, for it may be configured anew."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (requests left, as of)

    def take(self, client: str, rate: float, now: float) -> float:
        """0 if a request may pass, of at most `rate` a second; else the seconds until one may."""
        most = max(1.0, rate * BURST_S)
        left, at = self._buckets.pop(client, (most, now))
        left = min(most, left + (now - at) * rate)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / rate
        self._buckets[client] = (left if wait_s else left - 1.0, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return wait_s
