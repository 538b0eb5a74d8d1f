"""How records add up to the tree of pools: regions, their clusters, their instances. Pure.

A region or cluster exists as soon as it has a balancer or an instance. It serves what anything below it serves, and
drains when all below it does, or an operator says so. What did not change keeps its object, so whoever watches can
compare by identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from common.membership.records import Place
from common.types import Endpoint, Kind, Path, Peer, Phase, Pool

Member = Peer | Endpoint


@dataclass(frozen=True, slots=True)
class Tree:
    """All pools by parent, () being the pool of regions, and the balancers of each node in id order.

    A parent that is not in `pools` has nothing below it (any more); () always is.
    """

    pools: Mapping[Path, Pool] = field(default_factory=lambda: {(): Pool(())})
    balancers: Mapping[Path, tuple[Peer, ...]] = field(default_factory=dict)
    nodes: Mapping[Path, _Node] = field(default_factory=dict)  # what they were made of


@dataclass(slots=True)
class _Node:
    peers: list[Peer] = field(default_factory=list)
    instances: list[Endpoint] = field(default_factory=list)  # of a cluster, or of all clusters of a region
    children: set[Path] = field(default_factory=set)
    drained: bool = False


def grow(
    members: Iterable[tuple[Place, Member]],
    revision: int,
    stale: Callable[[Path], bool],
    previous: Tree,
    drained: Set[Path] = frozenset(),
) -> Tree:
    """The tree of these members. Returns `previous` itself when nothing but the revision is new.

    Costs O(members), but little for those below nodes where nothing changed. `drained`: paths of what operators want to
    take no new work.
    """
    nodes: dict[Path, _Node] = {(): _Node()}
    for place, member in members:
        node = _reach(nodes, place.path)
        if isinstance(member, Peer):
            node.peers.append(member)
        else:
            endpoint = _draining(member) if drained and (*place.path, member.id) in drained else member
            node.instances.append(endpoint)
            # Its region drains when all of it does, and a drained cluster is drained as a whole.
            below = _draining(endpoint) if drained and place.path in drained else endpoint
            nodes[place.path[:1]].instances.append(below)
    for path, node in nodes.items():
        node.peers.sort(key=_id)
        node.instances.sort(key=_id)
        node.drained = path in drained

    pools: dict[Path, Pool] = {}
    for path, node in nodes.items():
        if len(path) == 2:
            pools[path] = Pool(path, tuple(node.instances), revision, stale(path))
        else:
            known = {e.id: e for e in previous.pools.get(path, Pool(path)).endpoints}
            children = (
                _kept(known.get(child[-1]), child[-1], nodes[child], previous.nodes.get(child))
                for child in sorted(node.children)
            )
            pools[path] = Pool(path, tuple(children), revision, stale(path))
    pools = {path: _same(previous.pools.get(path), pool) for path, pool in pools.items()}
    balancers = {path: tuple(node.peers) for path, node in nodes.items() if node.peers}
    unchanged = pools.keys() == previous.pools.keys() and all(pools[p] is previous.pools[p] for p in pools)
    return previous if unchanged and balancers == previous.balancers else Tree(pools, balancers, nodes)


def _reach(nodes: dict[Path, _Node], path: Path) -> _Node:
    """The node at `path`, made with all those above it where it is new."""
    node = nodes.get(path)
    if node is None:
        node = nodes[path] = _Node()
        _reach(nodes, path[:-1]).children.add(path)
    return node


def _draining(endpoint: Endpoint) -> Endpoint:
    return endpoint if endpoint.phase is Phase.DRAINING else replace(endpoint, phase=Phase.DRAINING)


def _above(id_: str, node: _Node) -> Endpoint:
    """A region or cluster as an endpoint."""
    below = node.instances
    # One instance that takes any model makes the whole take any.
    models = frozenset[str]().union(*(e.offers for e in below)) if all(e.models for e in below) else frozenset[str]()
    phases = {e.phase for e in below} or {p.phase for p in node.peers}
    return Endpoint(
        id=id_,
        balancers=tuple(node.peers),
        models=models,
        price_usd_per_hour=sum(e.price_usd_per_hour for e in below) / len(below) if below else 0.0,
        phase=Phase.DRAINING if node.drained or phases == {Phase.DRAINING} else Phase.SERVING,
        fleet=tuple(sorted(Counter(e.gpu for e in below).items())),
        kinds=_kinds(below),
    )


def _kinds(below: Iterable[Endpoint]) -> tuple[Kind, ...]:
    """Each kind of instance once, in an order of its own; of too many those of one class are taken together."""
    kinds = {Kind(e.gpu, e.memory_gb, e.labels, e.offers) for e in below}
    if len(kinds) > MOST_KINDS:
        # More than there is: a cluster may be chosen in which no single instance has it all, and then gives it back.
        united: dict[str, Kind] = {}
        for kind in kinds:
            one = united.get(kind.gpu, kind)
            most = max((m for m in (one.memory_gb, kind.memory_gb) if m is not None), default=None)
            models = one.models | kind.models if one.models and kind.models else frozenset[str]()
            united[kind.gpu] = Kind(kind.gpu, most, one.labels | kind.labels, models)
        kinds = set(united.values())
    return tuple(sorted(kinds, key=lambda k: (k.gpu, k.memory_gb or 0.0, sorted(k.labels), sorted(k.models))))


MOST_KINDS = 64  # of one region or cluster, for each is looked at when a list of candidates is made


def _kept(old: Endpoint | None, id_: str, node: _Node, before: _Node | None) -> Endpoint:
    """A region or cluster as an endpoint, the old one if nothing that it is made of changed, or nothing of it."""
    if old is None:
        return _above(id_, node)
    if before is not None and (node.peers, node.instances, node.drained) == (
        before.peers,
        before.instances,
        before.drained,
    ):
        return old
    new = _above(id_, node)
    return old if old == new else new


def _same(old: Pool | None, new: Pool) -> Pool:
    """The old pool if the new one differs in its revision alone."""
    return old if old is not None and (old.endpoints, old.stale) == (new.endpoints, new.stale) else new


def _id(member: Member) -> str:
    return member.id
