"""The three stages and `descend`, which runs them one below the other until somebody else takes over.

A tier's process normally runs one stage: it picks a child of its own node and hands the request to the child's
balancer. Where the child has no live balancer, the process runs the child's stage too, and so on down to an instance:
takeover is this loop's bound and not a mode. A stage that sheds gives the pick above back and tries a sibling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from common.policy import classic, filters, pickers, scorers
from common.policy.balancer import Balancer, Policy
from common.types import Endpoint, InferenceRequest, Outcome, Path, Peer, Pick, Shed, Tier

QUALIFIES = (
    filters.serves_model,
    filters.not_draining,
    filters.not_loading,
    filters.not_ejected,
    filters.fits_memory,
    filters.has_capacity,
    filters.in_time,
)

lowest, near = pickers.lowest_cost, pickers.near_lowest_cost

PRICE_WEIGHT_S_PER_USD = 1e4  # a typical request costs about 1e-4 $, so its price weighs about a second


def predicted_completion(price_weight_s_per_usd: float = PRICE_WEIGHT_S_PER_USD, tier: Tier = Tier.INSTANCE) -> Policy:
    """Least predicted cost in seconds: completion of everybody, round trip, and price at so many seconds a dollar.

    Among instances, whose speeds are learned one by one, those that cost about the same share evenly.
    """
    terms = (
        ("completion_s", 1.0, scorers.completion),
        ("round_trip_s", 1.0, scorers.round_trip),
        ("price_usd", price_weight_s_per_usd, scorers.price),
    )
    picker = near if tier is Tier.INSTANCE else lowest
    return Policy("predicted_completion", QUALIFIES, terms, picker, learns=True, in_seconds=True)


def earliest_completion() -> Policy:
    """Where this request itself would be complete first: the literal reading, which herds on the fastest servers."""
    terms = (("own_completion_s", 1.0, classic.own_completion),)
    return Policy("earliest_completion", QUALIFIES, terms, near, learns=True, in_seconds=True)


def round_robin() -> Policy:
    """Each in turn."""
    return Policy("round_robin", QUALIFIES, (("turn", 1.0, classic.turn),), lowest)


def weighted_round_robin() -> Policy:
    """Each in turn, by weight."""
    terms = (("turn", 1.0, classic.WeightedTurns()),)
    return Policy("weighted_round_robin", QUALIFIES, terms, lowest, weighted=True)


def least_connections() -> Policy:
    """Fewest requests under way from here."""
    return Policy("least_connections", QUALIFIES, (("in_flight", 1.0, classic.in_flight),), lowest)


def weighted_least_connections() -> Policy:
    """Fewest requests under way from here for its weight."""
    terms = (("in_flight_per_weight", 1.0, classic.weighted_in_flight),)
    return Policy("weighted_least_connections", QUALIFIES, terms, lowest, weighted=True)


def weighted_response_time() -> Policy:
    """Shortest response time of late, times what is under way, for its weight."""
    terms = (("response_s", 1.0, classic.weighted_response_time),)
    return Policy("weighted_response_time", QUALIFIES, terms, lowest, weighted=True)


def least_load() -> Policy:
    """Least of its resources in use, by its own report."""
    return Policy("least_load", QUALIFIES, (("load", 1.0, classic.resources),), lowest)


def least_work_left() -> Policy:
    """Least GPU time under way, as predicted."""
    return Policy("least_work_left", QUALIFIES, (("work_left_s", 1.0, classic.work_left),), lowest)


def power_of_two() -> Policy:
    """The less busy of two drawn at random."""
    return Policy("power_of_two", QUALIFIES, (("in_flight", 1.0, classic.in_flight),), pickers.power_of_two)


def hash_() -> Policy:
    """The same session, or prompt prefix, to the same endpoint."""
    return Policy("hash", QUALIFIES, (("distance", 1.0, classic.rendezvous),), lowest)


def prefix_affinity() -> Policy:
    """Where most of the prompt is cached, unless load is uneven."""
    return Policy("prefix_affinity", QUALIFIES, (("uncached", 1.0, classic.prefix_match),), lowest)


def model_aware() -> Policy:
    """By what requests need (`placement`): enough memory, the preferred class while it has room; then by weight."""
    return Policy("model_aware", QUALIFIES, (("fits_per_weight", 1.0, classic.fits),), lowest, weighted=True)


def policy_named(
    name: str, price_weight_s_per_usd: float = PRICE_WEIGHT_S_PER_USD, tier: Tier = Tier.INSTANCE
) -> Policy:
    """The policy of that name, for the stage of a tier. Raises KeyError for a name not in `POLICIES`."""
    if name == "predicted_completion":
        return predicted_completion(price_weight_s_per_usd, tier)
    return POLICIES[name]()


POLICIES: dict[str, Callable[[], Policy]] = {
    "predicted_completion": predicted_completion,
    "earliest_completion": earliest_completion,
    "round_robin": round_robin,
    "weighted_round_robin": weighted_round_robin,
    "least_connections": least_connections,
    "weighted_least_connections": weighted_least_connections,
    "weighted_response_time": weighted_response_time,
    "least_load": least_load,
    "least_work_left": least_work_left,
    "power_of_two": power_of_two,
    "hash": hash_,
    "prefix_affinity": prefix_affinity,
    "model_aware": model_aware,
}


class Hop(NamedTuple):
    """One stage's pick on the way down, and whether this process ran it for a balancer that is gone."""

    path: Path
    pick: Pick
    takeover: bool

    @property
    def tier(self) -> Tier:
        """Whose stage it was."""
        return Tier.of(self.path)


class Route(NamedTuple):
    """Where a request goes next: to a peer that runs the rest, or (peer None) to the instance itself."""

    hops: tuple[Hop, ...]
    peer: Peer | None

    @property
    def endpoint(self) -> Endpoint:
        """The last pick."""
        return self.hops[-1].pick.endpoint

    @property
    def url(self) -> str:
        """The base URL to send it to."""
        return self.peer.url if self.peer else self.endpoint.url

    @property
    def target(self) -> Path:
        """Full path of the last pick."""
        return (*self.hops[-1].path, self.endpoint.id)


MAX_SIBLINGS = 4  # children of one node tried when the stage below sheds, so that a descent stays bounded

PeerChoice = Callable[[Path, Endpoint], Peer | None]
"""(path of the endpoint, endpoint) -> a live balancer of it to hand over to; None: run its stage here."""


def descend(
    request: InferenceRequest,
    start: Path,
    balancers: Mapping[Path, Balancer],
    peer_of: PeerChoice,
    serves: Callable[[Path], bool],
    now: float,
    rng: Random,
    exclude: frozenset[Path] = frozenset(),
) -> Route | Shed:
    """Run stages from the node `start` down. `serves(path)`: this process is a balancer of that node itself.

    Every pick of the returned route holds a reservation, to be released with the outcome; on Shed none is held.
    `exclude` has full paths of endpoints that must not be picked again for this request. Regions that may not serve it
    are excluded where a region is chosen, and so for whoever gets it from there.
    """
    balancer = balancers.get(start)
    if balancer is None:
        return Shed("no_endpoints", 1.0)
    tried = {path[-1] for path in exclude if path[:-1] == start} if exclude else set()
    if request.regions and not start:
        tried |= balancer.candidates.keys() - set(request.regions)
    shed: Shed | None = None
    for _ in range(MAX_SIBLINGS):
        decision = balancer.pick(request, now, rng, tried)
        if isinstance(decision, Shed):
            # What the siblings below said is closer to the truth than "nothing left" after they were excluded.
            return shed or decision
        child = (*start, decision.endpoint.id)
        hop = Hop(start, decision, takeover=not serves(start))
        peer = peer_of(child, decision.endpoint) if len(child) < 3 else None
        if len(child) == 3 or peer is not None:
            return Route((hop,), peer)
        below = descend(request, child, balancers, peer_of, serves, now, rng, exclude)
        if isinstance(below, Route):
            return Route((hop, *below.hops), below.peer)
        balancer.release(decision.reservation, Outcome.IGNORED, now)
        tried.add(decision.endpoint.id)
        shed = below
    return shed or Shed("no_endpoints", 1.0)
