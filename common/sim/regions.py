"""A world of several regions: each with its clients, two clusters, a balancer of its own, and the sea between them.

Clients call the balancer of their region, which begins at the top stage, as any tier does: so the round trips that a
choice sees are those of that region. Day and night go round the regions. What differs between two runs is the policy of
the region stage; clusters and servers are always chosen by the predicting policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import pi, sin
from random import Random

from common.policy.balancer import Policy
from common.sim.fleet import Machine, capacity, machine, saturated_rates, singles
from common.sim.lengths import lengths_named
from common.sim.node import Node
from common.sim.records import Record
from common.sim.traces import TraceRow
from common.sim.world import Network, World
from common.types import Endpoint, Path, Peer, Slo, Tier

USD_PER_HOUR = {"h100": 4.0, "a100": 2.0, "l4": 0.8, "t4": 0.5}
DAY_S = 140.0  # far quicker than a real one: a policy that keeps up with it keeps up with that
SWING = 0.5  # of a region's own capacity, between noon and its mean


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One region: its clusters' fleets, and what its GPU hours cost beside the list price."""

    name: str
    clusters: tuple[tuple[Machine, ...], ...]
    price_factor: float = 1.0


PLANS: tuple[RegionPlan, ...] = (
    RegionPlan(
        "us-east",
        (
            (machine("h100", 2), machine("a100", 2), machine("l4", 4)),
            (machine("a100", 1), machine("l4", 4), machine("t4", 3)),
        ),
    ),
    RegionPlan(
        "eu-west",
        (
            (machine("h100", 1), machine("a100", 3), machine("l4", 4)),
            (machine("a100", 1), machine("l4", 3), machine("t4", 4)),
        ),
        1.3,
    ),
    RegionPlan(
        "ap-south",
        ((machine("a100", 4), machine("l4", 4)), (machine("a100", 1), machine("l4", 3), machine("t4", 4))),
        0.7,
    ),
)
ROUND_TRIPS_S: Mapping[frozenset[str], float] = {
    frozenset({"us-east", "eu-west"}): 0.080,
    frozenset({"eu-west", "ap-south"}): 0.120,
    frozenset({"us-east", "ap-south"}): 0.150,
}


@dataclass(frozen=True, slots=True)
class Outage:
    """All servers of a region are gone from `at_s` on, and back at `back_s`."""

    region: str
    at_s: float
    back_s: float


@dataclass(slots=True)
class RegionsRun:
    """What became of a run: the records, where each came from, where it was served and what that cost."""

    records: list[Record]
    home: list[str]
    served: list[str]  # "" nowhere
    usd: list[float]


class RegionsWorld:
    """Three regions and their traffic. `policy`: of the region stage; `below`: of the other two, by their tier."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        below: Callable[[Tier], Policy],
        rows: Sequence[TraceRow],
        *,
        load: float,
        seed: int = 0,
        quote_s: float = 0.2,
        plans: Sequence[RegionPlan] = PLANS,
    ) -> None:
        self.world = World(seed, Network(one_way_s=0.0005, look_s=None), checked=False)
        self._rng = Random(f"{seed}/regions")
        machines = [m for plan in plans for fleet in plan.clusters for m in fleet]
        self._rates = saturated_rates(machines, rows[:400])
        self.capacity = {p.name: sum(capacity(fleet, self._rates) for fleet in p.clusters) for p in plans}
        self._kinds: dict[str, Machine] = {}
        self._entries: dict[str, Node] = {}
        self._home: list[str] = []
        self._seed = seed
        nodes = [self._add(plan, policy, below) for plan in plans]
        for one in self._entries.values():
            for other in plans:
                if one.path != (other.name,):
                    way_s = ROUND_TRIPS_S[frozenset({one.path[0], other.name})] / 2.0
                    self.world.link(one.path, (other.name,), way_s)
        for quoting in nodes:
            for node in quoting:
                self.world.start_quotes(node, quote_s)
        self._rows = self._traffic(rows, load)
        self.world.enters = lambda index, row: self._entries[self._home[index]]

    def _add(self, plan: RegionPlan, policy: Callable[[], Policy], below: Callable[[Tier], Policy]) -> list[Node]:
        def chosen_by(path: Path) -> Policy:
            return policy() if not path else below(Tier.of(path))

        world, made = self.world, []
        region: Path = (plan.name,)
        fleets: list[tuple[str, int]] = []
        for number, fleet in enumerate(plan.clusters):
            path = (*region, f"{plan.name}-{'ab'[number]}")
            priced = [replace(m, price_usd_per_hour=USD_PER_HOUR[m.gpu] * plan.price_factor) for m in fleet]
            for id_, kind in singles(priced):
                name = f"{path[-1]}/{id_}"
                self._kinds[name] = kind
                world.add_instance((*path, name), kind)
            node = self._node(f"instance-{path[-1]}", path, chosen_by)
            world.add_node(node, (path,), entry=False)
            here = tuple((m.gpu, m.count) for m in fleet)
            fleets += here
            peer = Peer(node.id, f"http://{node.id}:8080")
            weight = capacity(fleet, self._rates)
            world.register(region, Endpoint(path[-1], balancers=(peer,), fleet=here, weight=weight), 0.0)
            made.append(node)
        node = self._node(f"region-{plan.name}", region, chosen_by)
        self._entries[plan.name] = node
        merged = {gpu: sum(n for g, n in fleets if g == gpu) for gpu, _ in fleets}
        peer = Peer(node.id, f"http://{node.id}:8080")
        endpoint = Endpoint(
            plan.name, balancers=(peer,), fleet=tuple(sorted(merged.items())), weight=self.capacity[plan.name]
        )
        world.register((), endpoint, 0.0)
        world.add_node(node, ((), region))
        return [*made, node]

    def _node(self, id_: str, path: Path, policy: Callable[[Path], Policy]) -> Node:
        lengths = lengths_named("learned")(Random(f"{self._seed}/lengths/{id_}"))
        return Node(id_, path, self.world.loop, self.world, policy, lengths, Random(f"{self._seed}/{id_}"))

    def _traffic(self, rows: Sequence[TraceRow], load: float) -> list[TraceRow]:
        """Lengths as in `rows`, arrivals Poisson at `load` of all capacity, each from where it is day."""
        names = list(self.capacity)
        total, now, made = sum(self.capacity.values()), 0.0, []
        for row in rows:
            now += self._rng.expovariate(load * total)
            weights = [
                self.capacity[name] * max(0.0, load + SWING * sin(2.0 * pi * (now / DAY_S + i / len(names))))
                for i, name in enumerate(names)
            ]
            self._home.append(self._rng.choices(names, weights)[0])
            made.append(replace(row, arrival_s=now, prefix_hashes=()))
        return made

    def lose(self, outage: Outage) -> None:
        """Have a region's servers die and come back; membership hears of it as it does of any death."""
        for path, instance in self.world.instances.items():
            if path[0] == outage.region:
                self.world.loop.at(outage.at_s, instance.die)
                self.world.loop.at(outage.back_s, self.world.back, path[:-1], instance)

    def run(self, slo: Slo | None = None) -> RegionsRun:
        """Send all of it, each request asking for `slo`, and wait for the last answer."""
        record = self.world.run(self._rows, slo)
        usd = []
        for r in record.records:
            kind = self._kinds.get(r.instance)
            usd.append(_usd(r, kind) if kind is not None and r.complete else 0.0)
        served = [r.instance.partition("/")[0].rpartition("-")[0] if r.complete else "" for r in record.records]
        return RegionsRun(record.records, self._home, served, usd)


def _usd(record: Record, kind: Machine) -> float:
    """GPU time it takes on a server as busy as it should be, at that server's price."""
    v = kind.speed
    busy_s = record.input_tokens / v.prefill_tokens_per_s + record.output_tokens * (v.alpha_s / v.slots + v.beta_s)
    return busy_s * kind.price_usd_per_hour / 3600.0
