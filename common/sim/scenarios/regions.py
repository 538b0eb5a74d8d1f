"""Several regions behind several global balancers: all three stages, quotes between them, and the distance.

The smallest world of that kind, to build on: one cluster a region, every tier with a balancer process of its own, and
clients next to the first region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from common.sim.fleet import Machine, singles
from common.sim.lengths import lengths_named
from common.sim.node import Node
from common.sim.records import RunRecord
from common.sim.scenarios.recovery import PolicyOf
from common.sim.traces import TraceRow
from common.sim.world import World
from common.types import Endpoint, Path, Peer

QUOTE_S = 0.2  # the default of `reports.interval_s`


@dataclass(frozen=True, slots=True)
class Region:
    """One region: its servers, and how far it is from the clients, one way (seconds)."""

    fleet: tuple[Machine, ...]
    one_way_s: float = 0.0


def regions_world(regions: Mapping[str, Region], policy: PolicyOf, seed: int, balancers: int = 1) -> World:
    """A world of these regions with `balancers` global balancers, which are dealt requests in turn."""
    world = World(seed)
    rng = Random(f"{seed}/regions")

    def node(id_: str, path: Path) -> Node:
        lengths = lengths_named("learned")(Random(f"{seed}/{id_}/lengths"))
        return Node(id_, path, world.loop, world, policy, lengths, Random(rng.getrandbits(64)))

    for name, region in regions.items():
        path = (name, "main")
        for id_, kind in singles(region.fleet):
            world.add_instance((*path, f"{name}-{id_}"), kind)
        classes = tuple(Counter(kind.gpu for _, kind in singles(region.fleet)).items())
        for parent, id_ in (((name,), "main"), ((), name)):
            peer = Peer(f"{'/'.join((*parent, id_))}-balancer", "")
            world.register(parent, Endpoint(id_, balancers=(peer,), fleet=classes), 0.0)
        world.link((), (name,), region.one_way_s)
        world.add_node(node(f"{name}/main-balancer", path), (path,), entry=False)
        world.add_node(node(f"{name}-balancer", (name,)), ((name,),), entry=False)
    for number in range(balancers):
        world.add_node(node(f"global-{number}", ()), ((),))
    for name in regions:
        world.start_quotes(world.nodes[f"{name}/main-balancer"], QUOTE_S)
        world.start_quotes(world.nodes[f"{name}-balancer"], QUOTE_S)
    return world


def shares(run: RunRecord, region_of: Mapping[str, str]) -> dict[str, float]:
    """Share of the requests that each region served; `region_of`: instance id -> region."""
    counts = Counter(region_of[record.instance] for record in run.records if record.instance)
    return {name: count / len(run.records) for name, count in counts.items()}


def run_regions(
    regions: Mapping[str, Region], policy: PolicyOf, rows: Sequence[TraceRow], seed: int, balancers: int = 1
) -> RunRecord:
    """One run. Raises CheckFailed."""
    return regions_world(regions, policy, seed, balancers).run(rows)
