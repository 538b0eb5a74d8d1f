"""What is asked of the choice of a region beyond seconds and GPU hours: where data may go, what traffic costs.

Rules of residency are hard: a region they do not allow is never chosen, whatever becomes of the request. Prices of
tokens and of traffic that leaves a region are dollars like those of GPU time, weighed by the same seconds a dollar. A
region that is there for want of others takes part only when those cannot serve in time, or at all. The share cap keeps
traffic from gathering in one region between two quotes; it binds only where a region is more than half full, for an
idle one may well take everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from common.policy.filters import has_capacity, residency
from common.types import InferenceRequest

if TYPE_CHECKING:
    from common.policy.balancer import Policy
    from common.policy.candidate import Candidate

ANSWER_BYTES_PER_TOKEN: Final = 5.0  # of an answer in one piece
EVENT_BYTES_PER_TOKEN: Final = 250.0  # of a stream: one event a token, most of which is its envelope
SHARE_CAP: Final = 1.3
SHARE_FROM: Final = 20.0  # requests in the last second: a share of fewer says nothing
HALF_FULL: Final = 0.5  # requests a slot
NO_REGION: Final = "~"  # what is allowed when rules leave nothing: no region has that name


@dataclass(frozen=True, slots=True)
class Region:
    """One region's terms. Dollars; `None`: no bound."""

    usd_per_million_input_tokens: float = 0.0
    usd_per_million_output_tokens: float = 0.0
    egress_usd_per_gb: float = 0.0  # of answers to clients whose location is another one, 10^9 bytes
    max_in_flight: int | None = None  # of all balancers together
    fallback_after_s: float | None = None  # it is there for when no other one gives a first token within this


@dataclass(frozen=True, slots=True)
class Rule:
    """Which regions some requests may be served in. What is left out holds for all."""

    tenants: tuple[str, ...] = ()  # names, with * and ?
    value: str = ""  # of the header
    locations: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()  # empty: all
    deny: frozenset[str] = frozenset()

    def holds(self, tenant: str, location: str, value: str) -> bool:
        """Whether it is about a request of this tenant, from there, with this header."""
        return (
            (not self.tenants or any(fnmatchcase(tenant, pattern) for pattern in self.tenants))
            and (not self.value or self.value == value)
            and (not self.locations or location in self.locations)
        )


def allowed(rules: Sequence[Rule], tenant: str, location: str, value: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(only these, never these) regions by all rules that hold together; ((), ()) without any."""
    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()
    for rule in rules:
        if rule.holds(tenant, location, value):
            if rule.allow:
                only = rule.allow if only is None else only & rule.allow
            never |= rule.deny
    if only is None:
        return (), tuple(sorted(never))
    return tuple(sorted(only - never)) or (NO_REGION,), ()


@dataclass(frozen=True, slots=True)
class Regions:
    """The terms of all regions, and how much of the traffic one may have; 0: no cap."""

    terms: Mapping[str, Region] = field(default_factory=dict)
    share_cap: float = 0.0

    def below_limit(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Below its bound of requests in flight, as far as this balancer knows."""
        return [c for c in candidates if self._room(c)]

    def _room(self, c: Candidate) -> bool:
        terms = self.terms.get(c.endpoint.id)
        return terms is None or terms.max_in_flight is None or c.in_flight * c.server.copies < terms.max_in_flight

    def not_fallback(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Is no last resort, unless the others are too slow, or there are none."""
        after = {c.endpoint.id: self._after(c) for c in candidates}
        first = [c for c in candidates if after[c.endpoint.id] is None]
        if not first or len(first) == len(candidates):
            return list(candidates)
        best = min(c.round_trip_s + c.cheapest(request, now, blind=not c.fresh(now))[2].ttft for c in first)
        return [c for c in candidates if (limit := after[c.endpoint.id]) is None or best > limit]

    def _after(self, c: Candidate) -> float | None:
        terms = self.terms.get(c.endpoint.id)
        return terms.fallback_after_s if terms is not None else None

    def within_share(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Has not had more of the last second's requests than its share of what all can do, times the cap."""
        # One that takes nothing now has no part, or the others were to keep below shares that it leaves to nobody.
        taking = [c for c in candidates if c.offers(request)]
        total = sum(c.recent.value_at(now) for c in taking)
        if total < SHARE_FROM or len(taking) < 2:
            return list(candidates)
        can = {c.endpoint.id: sum(s.speed.prefill_tokens_per_s * s.count for s in c.quoted or c.own) for c in taking}
        most = self.share_cap * (total + 1.0) / sum(can.values())
        left = [
            c for c in taking if c.recent.value_at(now) + 1.0 <= most * can[c.endpoint.id] or _occupancy(c) < HALF_FULL
        ]
        return left or list(candidates)

    def tokens_usd(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        """Dollars for the tokens of a request, where a region asks for that."""
        costs = []
        for c in candidates:
            t = self.terms.get(c.endpoint.id, NO_TERMS)
            per_million = request.input_tokens * t.usd_per_million_input_tokens
            costs.append((per_million + request.output_tokens * t.usd_per_million_output_tokens) * 1e-6)
        return costs if any(costs) else None

    def egress_usd(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        """Dollars for an answer's way out of a region that is not the client's."""
        size = request.output_tokens * (EVENT_BYTES_PER_TOKEN if request.stream else ANSWER_BYTES_PER_TOKEN)
        costs = [
            0.0
            if c.endpoint.id == request.location
            else size * 1e-9 * self.terms.get(c.endpoint.id, NO_TERMS).egress_usd_per_gb
            for c in candidates
        ]
        return costs if any(costs) else None


NO_TERMS: Final = Region()


def _occupancy(c: Candidate) -> float:
    """Requests a slot, as quoted, or as sent from here."""
    servers = c.quoted or c.own
    slots = sum(s.speed.slots * s.count for s in servers)
    return sum((s.n + s.w) * s.count for s in servers) / slots if slots else 1.0


def regional(policy: Policy, regions: Regions, price_weight_s_per_usd: float) -> Policy:
    """A policy of the region stage with all of this; what is not configured costs nothing but its check."""
    filters = [policy.filters[0], residency, *policy.filters[1:]]
    bounds = any(t.max_in_flight is not None for t in regions.terms.values())
    fallbacks = any(t.fallback_after_s is not None for t in regions.terms.values())
    if bounds:
        filters.insert(filters.index(has_capacity), regions.below_limit)
    if fallbacks:
        filters.append(regions.not_fallback)
    if regions.share_cap:
        filters.append(regions.within_share)
    scorers = policy.scorers
    prices: tuple[tuple[str, Callable[..., list[float] | None], Callable[[Region], float]], ...] = (
        ("tokens_usd", regions.tokens_usd, lambda t: t.usd_per_million_input_tokens + t.usd_per_million_output_tokens),
        ("egress_usd", regions.egress_usd, lambda t: t.egress_usd_per_gb),
    )
    if policy.in_seconds:
        for name, scorer, rate in prices:
            if any(rate(t) for t in regions.terms.values()):
                scorers = (*scorers, (name, price_weight_s_per_usd, scorer))
    compares = fallbacks or regions.share_cap > 0.0
    return replace(policy, filters=tuple(filters), scorers=scorers, compares=compares, bounds=bounds)
