"""The stages this process can run: one Balancer for each pool it knows of, and which peers are alive to hand over to.

Membership gives pools, load reports and round trips come in beside them, `serving` asks for routes. All of it is
synchronous: a route with its reservations is one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

from common import clock, orca
from common.policy.balancer import Balancer, Policy
from common.policy.candidate import Limits
from common.policy.health import Breaker, State
from common.policy.stages import Route, descend
from common.policy.versions import matches
from common.types import (
    Endpoint,
    InferenceRequest,
    LoadReport,
    Outcome,
    Path,
    Peer,
    Phase,
    Pool,
    Shed,
)

PEER_COOLDOWN_S = 1.0  # a peer that could not be reached gets a trial after this, then after twice as long, …
MODEL_MEMORY_S = 600.0  # a model that nobody serves any more is an outage for this long, and unknown afterwards
MODELS_REMEMBERED = 10_000
NOBODY = ("no_endpoints", "model_not_found")  # why a request for a model without instances is shed
STARTING_S = 5.0  # a client is told to come back after so long while a model is being started


class Balancing:
    """Balancers by pool, kept in step with membership."""

    def __init__(
        self,
        process_id: str,
        serves: Callable[[Path], bool],
        policy: Callable[[Path], Policy],
        limits: Limits,
        rng: Random,
        on_demand: Callable[[str], bool] = lambda model: False,
    ) -> None:
        self.on_demand = on_demand  # whether a model is started when it is asked for
        self.process_id = process_id
        self.serves = serves
        self.rng = rng
        self.balancers: dict[Path, Balancer] = {}
        self._policy = policy
        self.limits = limits
        self._peers: dict[str, Breaker] = {}
        self._peer_in_flight: dict[str, int] = {}
        self._models: dict[str, float] = {}  # model -> last served by somebody
        self._pools: dict[Path, Pool] = {}  # as the balancers were told last

    # -- what is told ------------------------------------------------------------------------------------------------

    def update(self, pools: Mapping[Path, Pool]) -> None:
        """All pools as membership knows them now."""
        now = clock.now()
        for path, pool in pools.items():
            if pool is self._pools.get(path):
                continue  # of thousands of endpoints, few change at a time
            balancer = self.balancers.get(path)
            if balancer is None:
                balancer = self.balancers[path] = Balancer(path, self._policy(path), self.limits)
            self._remember_models((balancer,), now)  # those served until now, some of them for the last time
            balancer.update(pool, now)
            self._remember_models((balancer,), now)
        for path in self.balancers.keys() - pools.keys():
            balancer = self.balancers[path]
            self._remember_models((balancer,), now)
            balancer.update(Pool(path), now)
            if not balancer.in_flight:
                del self.balancers[path]
        self._pools = dict(pools)
        self._forget_models(now)
        alive = {peer.id for pool in pools.values() for e in pool.endpoints for peer in e.balancers}
        for gone in self._peers.keys() - alive:
            del self._peers[gone]

    def reconfigure(self, policy: Callable[[Path], Policy], limits: Limits) -> None:
        """Choose by another policy and within other bounds from now on."""
        self._policy, self.limits = policy, limits
        for path, balancer in self.balancers.items():
            balancer.reconfigure(policy(path), limits)

    def _remember_models(self, balancers: Iterable[Balancer], now: float) -> None:
        for balancer in balancers:
            if len(balancer.parent) == 2:
                for candidate in balancer.candidates.values():
                    for model in candidate.endpoint.offers:
                        self._models[model] = now

    def _forget_models(self, now: float) -> None:
        """Bound what is remembered; what is served goes last."""
        if len(self._models) > MODELS_REMEMBERED:
            self._remember_models(self.balancers.values(), now)
            oldest = sorted(self._models, key=lambda m: self._models[m])
            for model in oldest[: len(oldest) - MODELS_REMEMBERED]:
                del self._models[model]

    def replicas(self, node: Path, ids: frozenset[str]) -> None:
        """The other balancers of a node that are alive."""
        balancer = self.balancers.get(node)
        if balancer is not None:
            balancer.replicas(ids, clock.now())

    def report(self, parent: Path, report: LoadReport) -> None:
        """An endpoint's report on its load."""
        balancer = self.balancers.get(parent)
        if balancer is not None:
            balancer.report(report, clock.now())

    def engine_load(self, route: Route, load: orca.EngineLoad) -> None:
        """What the server of a route said of its own load when it answered."""
        id_ = route.endpoint.id
        said = LoadReport(id_, kv_utilization=load.kv_utilization, running=load.running, waiting=load.waiting)
        self.balancers[route.hops[-1].path].answered_with(id_, said, clock.now())

    def round_trip(self, path: Path, seconds: float) -> None:
        """A measured round trip to an endpoint."""
        balancer = self.balancers.get(path[:-1])
        if balancer is not None:
            balancer.round_trip(path[-1], seconds, clock.now())

    # -- peers -------------------------------------------------------------------------------------------------------

    def peer_of(self, path: Path, endpoint: Endpoint) -> Peer | None:
        """A live balancer of that endpoint to hand over to, the one with least in flight from here; None: run it here.

        A node that this process serves itself is never handed over.
        """
        ready = self.peers_of(path, endpoint)
        if not ready:
            return None
        least = min(self._peer_in_flight.get(p.id, 0) for p in ready)
        ties = [p for p in ready if self._peer_in_flight.get(p.id, 0) == least]
        return ties[0] if len(ties) == 1 else self.rng.choice(ties)

    def peers_of(self, path: Path, endpoint: Endpoint) -> list[Peer]:
        """All live balancers of that endpoint to hand over to."""
        if self.serves(path):
            return []
        now = clock.now()
        return [p for p in endpoint.balancers if self._ready(p, now)]

    def _ready(self, peer: Peer, now: float) -> bool:
        if peer.id == self.process_id or peer.phase is not Phase.SERVING:
            return False
        breaker = self._peers.get(peer.id)
        return breaker is None or breaker.ready(now)

    def peer_lost(self, peer_id: str) -> None:
        """A peer could not be reached: its stage is run here until it can."""
        breaker = self._peers.setdefault(peer_id, Breaker(1, PEER_COOLDOWN_S, max_cooldown_s=10.0))
        breaker.ended(Outcome.FAILED, clock.now(), unreachable=True)

    def peer_back(self, peer_id: str) -> None:
        """A peer's reports come again: it is handed its stage back."""
        breaker = self._peers.get(peer_id)
        if breaker is not None:
            breaker.ended(Outcome.SUCCESS, clock.now())

    def peer_sent(self, peer_id: str) -> None:
        """A request goes to a peer."""
        self._peer_in_flight[peer_id] = self._peer_in_flight.get(peer_id, 0) + 1
        breaker = self._peers.get(peer_id)
        if breaker is not None:
            breaker.picked()

    def peer_done(self, peer_id: str, *, reached: bool) -> None:
        """It came back, or broke; `reached`: the peer answered."""
        left = self._peer_in_flight.get(peer_id, 1) - 1
        if left:
            self._peer_in_flight[peer_id] = left
        else:
            self._peer_in_flight.pop(peer_id, None)
        breaker = self._peers.get(peer_id)
        if breaker is not None:
            breaker.ended(Outcome.SUCCESS if reached else Outcome.IGNORED, clock.now())

    def answers(self, member: Peer | Endpoint) -> bool:
        """Whether a balancer or instance is alive as far as requests to it tell: its breaker is not open."""
        if isinstance(member, Peer):
            breaker = self._peers.get(member.id)
            return breaker is None or breaker.state is not State.OPEN
        candidates = [b.candidates.get(member.id) for path, b in self.balancers.items() if len(path) == 2]
        return all(c is None or c.endpoint != member or c.breaker.state is not State.OPEN for c in candidates)

    # -- what is decided ---------------------------------------------------------------------------------------------

    def route(self, request: InferenceRequest, node: Path, exclude: frozenset[Path]) -> Route | Shed:
        """Run stages from `node` down; every pick of the route holds a reservation."""
        found = descend(request, node, self.balancers, self.peer_of, self.serves, clock.now(), self.rng, exclude)
        if isinstance(found, Shed) and found.reason in NOBODY and self._is_started(request.model):
            return Shed("loading", STARTING_S, found.removed)
        return found

    def _is_started(self, model: str) -> bool:
        """Whether nobody has a model that is started when it is asked for, or only who is about to leave."""
        if not self.on_demand(model):
            return False
        instances = (c for path, b in self.balancers.items() if len(path) == 2 for c in b.candidates.values())
        return not any(c.endpoint.serves(model) and c.phase is not Phase.DRAINING for c in instances)

    def release(
        self,
        route: Route,
        outcome: Outcome,
        *,
        output_tokens: float | None = None,
        cached_tokens: float | None = None,
        unreachable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        """Give a route's reservations back. Only the last pick is judged by a failure; those above it only chose it."""
        now = clock.now()
        *above, last = route.hops
        for hop in above:
            said = outcome if outcome is Outcome.SUCCESS else Outcome.IGNORED
            self.balancers[hop.path].release(hop.pick.reservation, said, now, output_tokens=output_tokens)
        self.balancers[last.path].release(
            last.pick.reservation,
            outcome,
            now,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            unreachable=unreachable,
            retry_after_s=retry_after_s,
        )

    def ran_out(self, route: Route, request: InferenceRequest, *, certain: bool) -> frozenset[Path]:
        """The instance of a route ran out of memory over a request, or died over it. Those that are no better."""
        parent = route.target[:-1]
        ids = self.balancers[parent].ran_out(route.target[-1], request, clock.now(), certain=certain)
        return frozenset((*parent, id_) for id_ in ids)

    def first_token(self, route: Route) -> None:
        """The first byte of a route's answer came."""
        now = clock.now()
        for hop in route.hops:
            self.balancers[hop.path].first_token(hop.pick.reservation, now)

    def under_way(self, path: Path) -> int:
        """Requests of this process that are under way at a region, cluster or instance."""
        balancer = self.balancers.get(path[:-1])
        candidate = balancer.candidates.get(path[-1]) if balancer is not None else None
        return candidate.in_flight if candidate is not None else 0

    def remaining_s(self, path: Path) -> float:
        """Seconds until what this process has under way there is predicted to end; 0: nothing that it predicts."""
        balancer = self.balancers.get(path[:-1])
        return balancer.remaining_s(path[-1], clock.now()) if balancer is not None else 0.0

    def models(self) -> frozenset[str]:
        """All models that some instance serves now."""
        found: set[str] = set()
        for path, balancer in self.balancers.items():
            if len(path) == 2:
                for candidate in balancer.candidates.values():
                    if candidate.phase is Phase.SERVING:
                        found |= candidate.endpoint.offers
        return frozenset(found)

    def has_version(self, model: str, version: str) -> bool:
        """Whether an instance that has a model in this version takes work."""
        return any(
            c.phase is Phase.SERVING
            and c.breaker.state is State.CLOSED
            and c.endpoint.serves(model)
            and matches(version, c.endpoint.labels)
            for path, b in self.balancers.items()
            if len(path) == 2
            for c in b.candidates.values()
        )

    @property
    def serving(self) -> bool:
        """Whether some instance takes work."""
        return any(
            c.phase is Phase.SERVING
            for path, b in self.balancers.items()
            if len(path) == 2
            for c in b.candidates.values()
        )

    @property
    def empty(self) -> bool:
        """Whether no instance has ever been seen, so that nothing can be said of any model."""
        return not self._models and not self.any_model()

    def known(self, model: str) -> bool:
        """Whether somebody serves this model, or did of late."""
        now, seen = clock.now(), self._models.get(model)
        if seen is None or now - seen < MODEL_MEMORY_S:
            return seen is not None
        # Membership speaks up only when something changes, so an old entry may well be served to this day.
        del self._models[model]
        self._remember_models(self.balancers.values(), now)
        self._forget_models(now)
        return model in self._models

    def any_model(self) -> bool:
        """Whether some instance serves whatever it is asked for (it lists no models)."""
        return any(
            not c.endpoint.models for path, b in self.balancers.items() if len(path) == 2 for c in b.candidates.values()
        )
