"""How records add up to pools."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

from common.membership.pools import Member, Tree, grow
from common.membership.records import Place
from common.types import Endpoint, Kind, Path, Peer, Phase, Pool

EU_A: Path = ("eu", "a")


def instance(path: Path, id_: str, **kwargs: object) -> tuple[Place, Member]:
    return Place(path, id_, instance=True), Endpoint(id_, f"http://{id_}:8000", **kwargs)  # type: ignore[arg-type]


def balancer(path: Path, id_: str, phase: Phase = Phase.SERVING) -> tuple[Place, Member]:
    return Place(path, id_), Peer(id_, f"http://{id_}:8080", phase=phase)


def grown(*members: tuple[Place, Member], before: Tree | None = None, stale: bool = False, revision: int = 1) -> Tree:
    return grow(members, revision, lambda path: stale, before or Tree())


def test_nothing_is_an_empty_pool_of_regions() -> None:
    assert grown().pools == {(): Pool(())}


def test_every_level_has_its_pool_in_id_order() -> None:
    tree = grown(
        instance(("us", "b"), "i9"),
        instance(EU_A, "i2"),
        instance(EU_A, "i1"),
        balancer((), "g1"),
        balancer(("eu",), "r2"),
        balancer(("eu",), "r1"),
        balancer(EU_A, "c1"),
    )
    assert {path: [e.id for e in pool.endpoints] for path, pool in tree.pools.items()} == {
        (): ["eu", "us"],
        ("eu",): ["a"],
        ("us",): ["b"],
        EU_A: ["i1", "i2"],
        ("us", "b"): ["i9"],
    }
    assert all(pool.parent == path and pool.revision == 1 for path, pool in tree.pools.items())
    eu, us = tree.pools[()].endpoints
    assert [p.id for p in eu.balancers] == ["r1", "r2"]
    assert us.balancers == ()
    assert [p.id for p in tree.pools[("eu",)].endpoints[0].balancers] == ["c1"]
    assert [p.id for p in tree.balancers[()]] == ["g1"]


def test_a_balancer_alone_makes_a_cluster_and_its_region() -> None:
    tree = grown(balancer(EU_A, "c1"))
    assert [e.id for e in tree.pools[()].endpoints] == ["eu"]
    assert tree.pools[("eu",)].endpoints == (Endpoint("a", balancers=(Peer("c1", "http://c1:8080"),)),)
    assert tree.pools[EU_A] == Pool(EU_A, (), 1)


def test_a_parent_sums_up_what_is_below() -> None:
    tree = grown(
        instance(EU_A, "i1", gpu="h100", models=frozenset({"x"}), price_usd_per_hour=4.0),
        instance(EU_A, "i2", gpu="h100", models=frozenset({"x", "y"}), price_usd_per_hour=4.0),
        instance(("eu", "b"), "i3", gpu="l4", models=frozenset({"z"}), price_usd_per_hour=1.0),
    )
    a, b = tree.pools[("eu",)].endpoints
    assert (a.models, a.fleet, a.price_usd_per_hour) == (frozenset({"x", "y"}), (("h100", 2),), 4.0)
    assert (b.models, b.fleet, b.price_usd_per_hour) == (frozenset({"z"}), (("l4", 1),), 1.0)
    (eu,) = tree.pools[()].endpoints
    assert (eu.models, eu.fleet, eu.price_usd_per_hour) == (frozenset("xyz"), (("h100", 2), ("l4", 1)), 3.0)


def test_a_parent_knows_each_kind_below_it_once() -> None:
    edge, big = frozenset({"site=edge"}), frozenset({"x"})
    tree = grown(
        instance(EU_A, "i1", gpu="l4", labels=edge, models=big),
        instance(EU_A, "i2", gpu="l4", labels=edge, models=big),
        instance(EU_A, "i3", gpu="h100", memory_gb=160.0, models=big, loadable=frozenset({"lora"})),
    )
    (a,) = tree.pools[("eu",)].endpoints
    assert a.kinds == (Kind("h100", 160.0, frozenset(), frozenset({"x", "lora"})), Kind("l4", None, edge, big))
    assert a.models == frozenset({"x", "lora"})
    assert tree.pools[()].endpoints[0].kinds == a.kinds


def test_too_many_kinds_are_taken_together_by_class() -> None:
    many = [instance(EU_A, f"i{n}", gpu="l4", labels=frozenset({f"host=n{n}"}), memory_gb=float(n)) for n in range(65)]
    (a,) = grown(*many).pools[("eu",)].endpoints
    (kind,) = a.kinds
    assert (kind.gpu, kind.memory_gb, len(kind.labels)) == ("l4", 64.0, 65)


def test_one_instance_that_takes_any_model_makes_the_whole_take_any() -> None:
    tree = grown(instance(EU_A, "i1", models=frozenset({"x"})), instance(EU_A, "i2"))
    assert tree.pools[()].endpoints[0].serves("anything")


def test_a_parent_drains_when_all_below_it_does() -> None:
    draining = Phase.DRAINING
    one = grown(instance(EU_A, "i1", phase=draining), instance(EU_A, "i2"), balancer(EU_A, "c1", draining))
    assert one.pools[("eu",)].endpoints[0].phase is Phase.SERVING
    all_ = grown(instance(EU_A, "i1", phase=draining), instance(EU_A, "i2", phase=draining), balancer(EU_A, "c1"))
    assert all_.pools[("eu",)].endpoints[0].phase is draining
    assert all_.pools[()].endpoints[0].phase is draining
    peers = grown(balancer(("eu",), "r1", draining), balancer(("eu",), "r2", draining))
    assert peers.pools[()].endpoints[0].phase is draining
    loading = grown(instance(EU_A, "i1", phase=Phase.LOADING))
    assert loading.pools[()].endpoints[0].phase is Phase.SERVING


def test_what_did_not_change_keeps_its_object() -> None:
    members = [instance(EU_A, "i1"), instance(("us", "b"), "i2"), balancer(("eu",), "r1")]
    before = grown(*members)
    assert grown(*members, before=before, revision=2) is before
    after = grown(*members, instance(EU_A, "i3", gpu="h100"), before=before, revision=2)
    assert after.pools[("us", "b")] is before.pools[("us", "b")]
    assert after.pools[("us",)] is before.pools[("us",)]
    assert after.pools[EU_A] is not before.pools[EU_A]
    assert after.pools[EU_A].revision == 2
    assert after.pools[()].endpoints[1] is before.pools[()].endpoints[1]
    assert after.pools[()].endpoints[0] is not before.pools[()].endpoints[0]
    global_ = grown(*members, balancer((), "g1"), before=before)
    assert global_ is not before
    assert global_.pools == before.pools


def test_a_drain_comes_and_goes_though_its_members_are_the_same() -> None:
    members = [instance(EU_A, "i1"), instance(EU_A, "i2"), balancer(("eu",), "r1")]
    tree = grown(*members)
    for drained, phase in (({EU_A}, Phase.DRAINING), (set(), Phase.SERVING), ({EU_A}, Phase.DRAINING)):
        tree = grow(members, 1, lambda path: False, tree, drained)
        assert tree.pools[("eu",)].endpoints[0].phase is phase
        assert tree.pools[()].endpoints[0].phase is phase
    assert [e.phase for e in tree.pools[EU_A].endpoints] == [Phase.SERVING] * 2
    tree = grow(members, 1, lambda path: False, tree, {("eu", "a", "i1")})
    assert [e.phase for e in tree.pools[EU_A].endpoints] == [Phase.DRAINING, Phase.SERVING]
    assert tree.pools[("eu",)].endpoints[0].phase is Phase.SERVING


def test_step_by_step_it_comes_to_the_same_as_at_once() -> None:
    rng = Random(1)
    members: dict[tuple[Path, str], tuple[Place, Member]] = {}
    tree = Tree()
    for step in range(300):
        path = (rng.choice(("eu", "us")), rng.choice("ab"))
        id_ = f"i{rng.randrange(4)}"
        if rng.random() < 0.4:
            members.pop((path, id_), None)
        else:
            models = frozenset(rng.sample("xyz", rng.randint(1, 2)))
            phase = rng.choice((Phase.SERVING, Phase.DRAINING))
            members[path, id_] = instance(path, id_, gpu=rng.choice(("h100", "l4")), models=models, phase=phase)
        drained = {p for p in (("eu",), ("us", "a"), (*path, id_)) if rng.random() < 0.3}
        tree = grow(members.values(), step, lambda path: False, tree, drained)
        fresh = grow(members.values(), step, lambda path: False, Tree(), drained)
        assert {p: pool.endpoints for p, pool in tree.pools.items()} == {
            p: pool.endpoints for p, pool in fresh.pools.items()
        }
        assert tree.balancers == fresh.balancers


def test_staleness_is_passed_on_without_new_endpoints() -> None:
    members = [instance(EU_A, "i1")]
    before = grown(*members)
    after = grown(*members, before=before, stale=True)
    assert all(pool.stale for pool in after.pools.values())
    assert after.pools[EU_A].endpoints == before.pools[EU_A].endpoints
    assert after.pools[()].endpoints[0] is before.pools[()].endpoints[0]


def test_what_is_gone_has_no_pool() -> None:
    before = grown(instance(EU_A, "i1"), instance(("us", "b"), "i2"))
    after = grown(instance(("us", "b"), "i2"), before=before)
    assert after.pools.keys() == {(), ("us",), ("us", "b")}


def test_a_thousand_instances_cost_some_milliseconds() -> None:
    members = [
        instance((f"r{n % 4}", f"c{n % 20}"), f"i{n:04}", gpu="h100", models=frozenset({"x", "y"})) for n in range(1000)
    ]
    tree = grown(*members)
    place, endpoint = members[500]
    assert isinstance(endpoint, Endpoint)
    best = 1.0
    for weight in range(2, 12):
        members[500] = (place, replace(endpoint, weight=float(weight)))
        begin = time.perf_counter()
        tree = grown(*members, before=tree)
        best = min(best, time.perf_counter() - begin)
    assert best < 0.02
