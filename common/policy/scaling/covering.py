"""Which replicas to add or to give up, by what they cost: a covering problem, solved to within one server of the least.

A group is a set of like replicas that can be made more or fewer: one model on one class of GPU in one cluster. What is
needed is a rate; what a replica of a group bears of it is its capacity, both in requests a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple


class Offer(NamedTuple):
    """What can be had of one group."""

    name: str
    capacity: float  # requests a second of one replica; 0: it cannot keep the service level
    price: float  # of one replica, in any one unit
    most: int  # replicas that may be added


def cheapest(offers: Sequence[Offer], rate: float) -> dict[str, int]:
    """The cheapest replicas that together bear `rate`, as near to it as the offers go; ties by name.

    Groups are taken by price for capacity, as many whole replicas of each as are needed; the rest that is left after
    each is covered by one replica more of that group, or by the groups after it, whichever is cheaper. O(2^groups).
    """
    usable = [o for o in offers if o.capacity > 0.0 and o.most > 0]
    return _cover(sorted(usable, key=lambda o: (o.price / o.capacity, o.name)), rate)[2]


def _cover(offers: Sequence[Offer], rate: float) -> tuple[float, float, dict[str, int]]:
    """(rate that stays uncovered, price, replicas), the least of the first and then of the second."""
    if rate <= 0.0 or not offers:
        return max(0.0, rate), 0.0, {}
    first, rest = offers[0], offers[1:]
    whole = min(first.most, int(rate / first.capacity))
    up = min(first.most, ceil(rate / first.capacity))
    best: tuple[float, float, dict[str, int]] = (inf, inf, {})
    for count in sorted({whole, up}):
        short, price, replicas = _cover(rest, rate - count * first.capacity)
        made = (short, price + count * first.price, {first.name: count, **replicas} if count else replicas)
        if made[:2] < best[:2]:
            best = made
    return best


def dearest(
    have: Mapping[str, int], offers: Mapping[str, Offer], least: Mapping[str, int], rate: float
) -> dict[str, int]:
    """Replicas to give up, the dearest for their capacity first, so that those left still bear `rate`.

    `have` is what there is of each group, `least` what must stay.
    """
    left = sum(offers[name].capacity * count for name, count in have.items())
    order = sorted(have, key=lambda name: (-_price_of(offers[name]), name))
    given: dict[str, int] = {}
    for name in order:
        offer = offers[name]
        while have[name] - given.get(name, 0) > least.get(name, 0) and left - offer.capacity >= rate:
            given[name] = given.get(name, 0) + 1
            left -= offer.capacity
    return given


def _price_of(offer: Offer) -> float:
    return offer.price / offer.capacity if offer.capacity > 0.0 else inf
