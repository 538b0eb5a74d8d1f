from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.balancer import Balancer
from common.policy.candidate import Limits
from common.policy.stages import (
    MAX_SIBLINGS,
    POLICIES,
    Route,
    descend,
    policy_named,
    predicted_completion,
)
from common.types import Endpoint, Outcome, Path, Peer, Phase, Pool, Shed, Tier
from tests.common.policy.build import ask, done, instance

Tree = Mapping[str, Mapping[str, list[Endpoint]]]
"""region -> cluster -> instances"""

SMALL: Tree = {
    "eu": {"c1": [instance("a"), instance("b")], "c2": [instance("d")]},
    "us": {"c1": [instance("e")]},
}


def balancers_of(tree: Tree, limits: Limits | None = None) -> dict[Path, Balancer]:
    """A balancer of every node, as a process has them that may have to run any stage."""
    pools: dict[Path, tuple[Endpoint, ...]] = {(): tuple(Endpoint(region) for region in tree)}
    for region, clusters in tree.items():
        pools[region,] = tuple(Endpoint(cluster) for cluster in clusters)
        for cluster, instances in clusters.items():
            pools[region, cluster] = tuple(instances)
    found = {}
    for path, endpoints in pools.items():
        found[path] = Balancer(path, predicted_completion(), limits)
        found[path].update(Pool(path, endpoints), 0.0)
    return found


def peers_at(*paths: Path) -> Callable[[Path, Endpoint], Peer | None]:
    """Balancers live at these nodes and at no other."""
    return lambda path, endpoint: Peer("-".join(path), f"http://{'-'.join(path)}:80") if path in paths else None


def down(
    balancers: Mapping[Path, Balancer],
    start: Path = (),
    *,
    live: tuple[Path, ...] = (),
    mine: Path = (),
    exclude: frozenset[Path] = frozenset(),
    seed: int = 1,
) -> Route | Shed:
    return descend(ask(), start, balancers, peers_at(*live), lambda path: path == mine, 0.0, Random(seed), exclude)


def routed(balancers: Mapping[Path, Balancer], start: Path = (), **how: object) -> Route:
    route = down(balancers, start, **how)  # type: ignore[arg-type]
    assert isinstance(route, Route), route
    return route


def held(balancers: Mapping[Path, Balancer]) -> dict[Path, int]:
    return {path: b.in_flight for path, b in balancers.items() if b.in_flight}


def saturate(balancer: Balancer, *names: str) -> None:
    """Let these endpoints refuse for load, for a long time."""
    for name in names:
        pick = balancer.pick(ask(), 0.0, Random(1), balancer.candidates.keys() - {name})
        done(balancer, pick, 0.0, Outcome.OVERLOADED, retry_after_s=1_000.0)  # type: ignore[arg-type]


# -- how far it goes -------------------------------------------------------------------------------------------------


def test_it_stops_at_a_live_peer() -> None:
    balancers = balancers_of(SMALL)
    route = routed(balancers, live=(("eu",), ("us",), ("eu", "c1")))
    assert len(route.hops) == 1
    region = route.endpoint.id
    assert route.target == (region,)
    assert route.peer == Peer(region, f"http://{region}:80")
    assert route.url == f"http://{region}:80"
    assert held(balancers) == {(): 1}


def test_where_no_peer_lives_it_runs_the_stages_below_too_down_to_the_instance() -> None:
    balancers = balancers_of(SMALL)
    route = routed(balancers)
    assert [hop.path for hop in route.hops] == [(), route.target[:1], route.target[:2]]
    assert [hop.tier for hop in route.hops] == [Tier.GLOBAL, Tier.REGION, Tier.INSTANCE]
    assert route.peer is None
    assert route.url == f"http://{route.target[2]}:8000"
    assert held(balancers) == {(): 1, route.target[:1]: 1, route.target[:2]: 1}


def test_only_the_stages_of_others_are_takeovers() -> None:
    assert [hop.takeover for hop in routed(balancers_of(SMALL), mine=()).hops] == [False, True, True]
    assert [hop.takeover for hop in routed(balancers_of(SMALL), ("eu",), mine=("eu",)).hops] == [False, True]
    # A regional tier that got a request without a route starts at the top, for a global tier that is gone.
    assert [hop.takeover for hop in routed(balancers_of(SMALL), live=(("us",), ("eu",)), mine=("eu",)).hops] == [True]


def test_it_stops_at_the_first_peer_on_the_way_and_takes_over_what_is_above() -> None:
    balancers = balancers_of({"eu": SMALL["eu"]})
    route = routed(balancers, live=(("eu", "c1"), ("eu", "c2")))
    assert route.peer is not None
    assert route.target[:1] == ("eu",)
    assert [hop.path for hop in route.hops] == [(), ("eu",)]


def test_from_a_cluster_it_takes_one_step() -> None:
    balancers = balancers_of(SMALL)
    route = routed(balancers, ("eu", "c1"))
    assert route.target in {("eu", "c1", "a"), ("eu", "c1", "b")}
    assert held(balancers) == {("eu", "c1"): 1}


def test_an_instance_is_never_handed_to_a_peer() -> None:
    route = routed(balancers_of(SMALL), ("us", "c1"), live=(("us", "c1", "e"),))
    assert route.peer is None


@pytest.mark.parametrize("start", [("eu", "c9"), ("xx",)])
def test_a_node_that_is_not_known_has_no_endpoints(start: Path) -> None:
    assert down(balancers_of(SMALL), start) == Shed("no_endpoints", 1.0)


# -- when the stage below sheds --------------------------------------------------------------------------------------


def test_a_sibling_is_tried_and_the_pick_above_given_back() -> None:
    balancers = balancers_of(SMALL)
    saturate(balancers["eu", "c1"], "a", "b")
    saturate(balancers["us", "c1"], "e")
    for seed in range(10):
        route = routed(balancers, seed=seed)
        assert route.target == ("eu", "c2", "d")
        assert held(balancers) == {(): 1, ("eu",): 1, ("eu", "c2"): 1}
        for hop in route.hops:
            done(balancers[hop.path], hop.pick)
    assert held(balancers) == {}
    # A sibling's shedding is no failure of what was picked above it.
    assert all(c.breaker.failures == 0 for c in balancers[()].candidates.values())


def test_when_all_below_shed_their_word_is_passed_on_and_nothing_is_held() -> None:
    balancers = balancers_of(SMALL)
    for path in [("eu", "c1"), ("eu", "c2"), ("us", "c1")]:
        saturate(balancers[path], *balancers[path].candidates)
    shed = down(balancers)
    assert isinstance(shed, Shed)
    assert (shed.reason, shed.retry_after_s) == ("saturated", 1_000.0)
    assert held(balancers) == {}
    assert all(c.in_flight == 0 for b in balancers.values() for c in b.candidates.values())


def test_a_pool_below_that_is_gone_is_passed_by() -> None:
    balancers = balancers_of(SMALL)
    del balancers["us", "c1"]
    balancers["eu", "c1"].update(Pool(("eu", "c1")), 0.0)
    assert {routed(balancers, seed=seed).target for seed in range(10)} == {("eu", "c2", "d")}


def test_a_live_peer_is_not_second_guessed() -> None:
    """Whether the stage below sheds is for its own balancer to say."""
    balancers = balancers_of(SMALL)
    for path in [("eu", "c1"), ("eu", "c2"), ("us", "c1")]:
        saturate(balancers[path], *balancers[path].candidates)
    assert routed(balancers, live=(("eu",), ("us",))).peer is not None


def test_siblings_tried_are_bounded() -> None:
    tree = {f"r{r}": {f"c{c}": [instance("a", phase=Phase.DRAINING)] for c in range(10)} for r in range(10)}
    balancers = balancers_of(tree)
    asked = Counter[int]()
    for path, balancer in balancers.items():
        balancer.pick = _counting(balancer.pick, asked, len(path))  # type: ignore[method-assign]
    shed = down(balancers)
    assert isinstance(shed, Shed)
    assert shed.reason == "no_endpoints"
    assert asked == {0: MAX_SIBLINGS, 1: MAX_SIBLINGS**2, 2: MAX_SIBLINGS**2}
    assert held(balancers) == {}


def _counting(pick: Callable[..., object], asked: Counter[int], depth: int) -> Callable[..., object]:
    def counted(*args: object) -> object:
        asked[depth] += 1
        return pick(*args)

    return counted


# -- exclusion -------------------------------------------------------------------------------------------------------


def test_what_is_excluded_is_not_picked_again() -> None:
    balancers = balancers_of(SMALL)
    exclude: set[Path] = set()
    for _ in range(4):
        route = routed(balancers, exclude=frozenset(exclude))
        assert route.target not in exclude
        exclude.add(route.target)
    assert exclude == {("eu", "c1", "a"), ("eu", "c1", "b"), ("eu", "c2", "d"), ("us", "c1", "e")}
    assert isinstance(down(balancers, exclude=frozenset(exclude)), Shed)


def test_an_excluded_region_takes_all_below_it_with_it() -> None:
    for seed in range(10):
        assert routed(balancers_of(SMALL), exclude=frozenset({("eu",)}), seed=seed).target == ("us", "c1", "e")


def test_exclusion_goes_by_the_full_path_and_not_by_the_name() -> None:
    balancers = balancers_of(SMALL)
    exclude = frozenset({("us", "c1"), ("eu", "c2"), ("eu", "c1", "a"), ("us", "c1", "b")})
    for seed in range(10):
        assert routed(balancers, exclude=exclude, seed=seed).target == ("eu", "c1", "b")


# -- whatever the tree -----------------------------------------------------------------------------------------------

phases = st.sampled_from([Phase.SERVING, Phase.SERVING, Phase.DRAINING])
trees = st.dictionaries(
    st.sampled_from("xyz"),
    st.dictionaries(st.sampled_from("pqr"), st.dictionaries(st.sampled_from("abc"), phases), max_size=3),
    max_size=3,
).map(lambda t: {r: {c: [instance(i, phase=p) for i, p in b.items()] for c, b in a.items()} for r, a in t.items()})
paths = st.tuples(st.sampled_from("xyz")) | st.tuples(st.sampled_from("xyz"), st.sampled_from("pqr"))


@given(trees, st.frozensets(paths), st.frozensets(paths), st.integers(0, 100))
def test_a_route_holds_one_pick_a_hop_and_shedding_holds_none(
    tree: Tree, live: frozenset[Path], exclude: frozenset[Path], seed: int
) -> None:
    balancers = balancers_of(tree)
    answer = down(balancers, live=tuple(live), exclude=exclude, seed=seed)
    serving = {(r, c, i.id) for r, a in tree.items() for c, b in a.items() for i in b if i.phase is Phase.SERVING}
    if isinstance(answer, Shed):
        assert held(balancers) == {}
        reachable = {p for p in serving if not {p[:1], p[:2]} & exclude}
        assert not reachable
        return
    assert held(balancers) == {hop.path: 1 for hop in answer.hops}
    assert answer.target in live if answer.peer else answer.target in serving
    assert all(answer.target[: n + 1] not in exclude for n in range(len(answer.target)))
    assert [hop.path for hop in answer.hops] == [answer.target[:n] for n in range(len(answer.hops))]


# -- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_found_by_their_name(name: str) -> None:
    assert policy_named(name).name == name


def test_an_unknown_policy_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        policy_named("best")


def test_the_price_weight_reaches_the_policy() -> None:
    weights = {name: weight for name, weight, _ in policy_named("predicted_completion", 123.0).scorers}
    assert weights == {"completion_s": 1.0, "round_trip_s": 1.0, "price_usd": 123.0}


@pytest.mark.parametrize(("regions", "left"), [((), {"eu", "us"}), (("us",), {"us"}), (("us", "ap"), {"us"})])
def test_only_regions_that_may_serve_it_are_chosen(regions: tuple[str, ...], left: set[str]) -> None:
    balancers = balancers_of(SMALL)
    chosen = set()
    for seed in range(20):
        route = descend(ask(regions=regions), (), balancers, peers_at(), lambda path: True, float(seed), Random(seed))
        assert isinstance(route, Route)
        chosen.add(route.hops[0].pick.endpoint.id)
    assert chosen <= left
    nowhere = descend(ask(regions=("ap",)), (), balancers, peers_at(), lambda path: True, 30.0, Random(1))
    assert isinstance(nowhere, Shed)
