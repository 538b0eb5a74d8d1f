from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from common import balancing as balancing_module
from common import clock
from common.balancing import MODEL_MEMORY_S, PEER_COOLDOWN_S, Balancing
from common.policy.balancer import Limits
from common.policy.stages import Route, predicted_completion
from common.types import Endpoint, InferenceRequest, LoadReport, Outcome, Path, Peer, Phase, Pool, Shed

EU1 = ("eu", "c1")


class Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(clock, "now", found)
    return found


@pytest.fixture
def balancing(now: Clock) -> Balancing:
    """Of a regional tier of `eu`."""
    return Balancing("me", lambda path: path == ("eu",), lambda _: predicted_completion(), Limits(), Random(1))


def peer(id_: str, phase: Phase = Phase.SERVING) -> Peer:
    return Peer(id_, f"http://{id_}:80", f"{id_}:81", phase=phase)


def instance(id_: str, *models: str) -> Endpoint:
    return Endpoint(id_, url=f"http://{id_}:8000", gpu="h100", models=frozenset(models))


def pools(
    *, clusters: dict[str, list[Endpoint]] | None = None, peers: dict[Path, list[Peer]] | None = None
) -> dict[Path, Pool]:
    """One region `eu` with these clusters, and balancers of the nodes."""
    clusters, peers = {"c1": [instance("i1", "m")]} if clusters is None else clusters, peers or {}
    found = {
        (): Pool((), (Endpoint("eu", balancers=tuple(peers.get(("eu",), ()))),)),
        ("eu",): Pool(("eu",), tuple(Endpoint(c, balancers=tuple(peers.get(("eu", c), ()))) for c in clusters)),
    }
    return found | {("eu", c): Pool(("eu", c), tuple(instances)) for c, instances in clusters.items()}


def ask(model: str = "m") -> InferenceRequest:
    return InferenceRequest("0" * 32, model, stream=True, input_tokens=100, output_tokens=50.0)


def routed(balancing: Balancing, node: Path = ("eu",), model: str = "m") -> Route:
    route = balancing.route(ask(model), node, frozenset())
    assert isinstance(route, Route), route
    return route


def cluster_peer(balancing: Balancing) -> Peer | None:
    """Who would get a request for cluster eu/c1 now."""
    return balancing.peer_of(EU1, balancing.balancers["eu",].candidates["c1"].endpoint)


# -- pools -----------------------------------------------------------------------------------------------------------


def test_there_is_a_balancer_for_each_pool(balancing: Balancing) -> None:
    balancing.update(pools())
    assert balancing.balancers.keys() == {(), ("eu",), EU1}
    route = routed(balancing)
    assert route.target == (*EU1, "i1")
    assert {p: b.in_flight for p, b in balancing.balancers.items()} == {(): 0, ("eu",): 1, EU1: 1}
    balancing.first_token(route)
    balancing.release(route, Outcome.SUCCESS, output_tokens=50)
    assert not any(b.in_flight for b in balancing.balancers.values())


def test_an_update_keeps_the_balancers_it_has(balancing: Balancing) -> None:
    balancing.update(pools())
    before = dict(balancing.balancers)
    balancing.update(pools(clusters={"c1": [instance("i2")], "c2": []}))
    assert all(balancing.balancers[path] is before[path] for path in before)
    assert balancing.balancers.keys() == {*before, ("eu", "c2")}


def test_only_pools_that_changed_are_looked_at(balancing: Balancing) -> None:
    before = pools(clusters={"c1": [instance("i1", "m")], "c2": [instance("i2", "n")]})
    balancing.update(before)
    for balancer in balancing.balancers.values():
        balancer.stale = True  # what an update would set right
    balancing.update(before | {EU1: Pool(EU1, (instance("i3", "m"),))})
    assert sorted(balancing.balancers[EU1].candidates) == ["i3"]
    assert {path: b.stale for path, b in balancing.balancers.items()} == {
        path: path != EU1 for path in balancing.balancers
    }
    balancing.update({path: pool for path, pool in before.items() if path != EU1})
    assert EU1 not in balancing.balancers
    balancing.update(before)
    assert sorted(balancing.balancers[EU1].candidates) == ["i1"]


def test_a_pool_that_vanishes_is_forgotten(balancing: Balancing) -> None:
    balancing.update(pools())
    balancing.update({(): Pool(())})
    assert balancing.balancers.keys() == {()}
    assert balancing.route(ask(), ("eu",), frozenset()) == Shed("no_endpoints", 1.0)


def test_a_pool_that_vanishes_with_requests_in_flight_stays_until_they_have_ended(balancing: Balancing) -> None:
    balancing.update(pools())
    route = routed(balancing)
    balancing.update({(): Pool(())})
    assert isinstance(balancing.route(ask(), ("eu",), frozenset()), Shed)  # but takes nothing new
    balancing.first_token(route)
    balancing.release(route, Outcome.SUCCESS, output_tokens=50)
    assert not any(b.in_flight for b in balancing.balancers.values())
    balancing.update({(): Pool(())})
    assert balancing.balancers.keys() == {()}


def test_a_pool_that_comes_back_before_its_requests_ended_counts_them(balancing: Balancing) -> None:
    balancing.update(pools())
    route = routed(balancing)
    balancing.update({})
    balancing.update(pools())
    candidate = balancing.balancers[EU1].candidates["i1"]
    assert candidate.in_flight == 1
    balancing.release(route, Outcome.FAILED)
    assert candidate.in_flight == 0


def test_reports_and_round_trips_reach_their_endpoint_and_strays_go_nowhere(balancing: Balancing) -> None:
    balancing.update(pools())
    balancing.report(EU1, LoadReport("i1", running=4.0))
    balancing.round_trip(("eu",), 0.25)
    assert balancing.balancers[EU1].candidates["i1"].report is not None
    assert balancing.balancers[()].candidates["eu"].round_trip_s == 0.25
    balancing.report(("us", "c9"), LoadReport("i1"))
    balancing.report(EU1, LoadReport("i9"))
    balancing.round_trip(("us", "c9"), 0.1)
    balancing.round_trip(("us",), 0.1)
    assert balancing.balancers.keys() == {(), ("eu",), EU1}


# -- what a release says, and of whom --------------------------------------------------------------------------------


def test_a_failure_is_the_last_picks_and_not_of_those_that_chose_it(balancing: Balancing) -> None:
    balancing.update(pools())
    for _ in range(5):
        balancing.release(routed(balancing, ()), Outcome.FAILED)
    assert not balancing.balancers[EU1].candidates["i1"].breaker.ready(clock.now())
    assert balancing.balancers["eu",].candidates["c1"].breaker.failures == 0
    assert balancing.balancers[()].candidates["eu"].breaker.failures == 0


def test_a_success_is_everybodys(balancing: Balancing) -> None:
    balancing.update(pools())
    route = routed(balancing, ())
    for path in ((), ("eu",), EU1):
        (candidate,) = balancing.balancers[path].candidates.values()
        candidate.breaker.failures = 3
    balancing.release(route, Outcome.SUCCESS)
    for path in ((), ("eu",), EU1):
        (candidate,) = balancing.balancers[path].candidates.values()
        assert candidate.breaker.failures == 0


def test_a_refusal_and_a_connection_that_could_not_be_made_are_the_instances(balancing: Balancing, now: Clock) -> None:
    balancing.update(pools())
    balancing.release(routed(balancing), Outcome.OVERLOADED, retry_after_s=5.0)
    shed = balancing.route(ask(), ("eu",), frozenset())
    assert isinstance(shed, Shed)
    assert (shed.reason, shed.retry_after_s) == ("saturated", 5.0)
    assert balancing.balancers["eu",].candidates["c1"].busy_until == 0.0
    now.at += 5.0
    balancing.release(routed(balancing), Outcome.FAILED, unreachable=True)
    assert not balancing.balancers[EU1].candidates["i1"].breaker.ready(now.at)


def test_excluded_targets_are_not_taken_again(balancing: Balancing) -> None:
    balancing.update(pools(clusters={"c1": [instance("i1"), instance("i2")]}))
    route = balancing.route(ask(), ("eu",), frozenset({(*EU1, "i1")}))
    assert isinstance(route, Route)
    assert route.target == (*EU1, "i2")


# -- peers -----------------------------------------------------------------------------------------------------------


def test_a_live_peer_is_handed_its_stage(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    route = routed(balancing)
    assert (route.peer, route.target) == (peer("a"), EU1)


def test_a_node_of_our_own_is_never_handed_over(balancing: Balancing) -> None:
    balancing.update(pools(peers={("eu",): [peer("other"), peer("me")]}))
    assert balancing.peer_of(("eu",), balancing.balancers[()].candidates["eu"].endpoint) is None
    assert routed(balancing, ()).target == (*EU1, "i1")


def test_ourselves_and_those_that_leave_are_no_peers(balancing: Balancing) -> None:
    leaving = [peer("me"), peer("a", Phase.DRAINING), peer("b", Phase.LOADING)]
    balancing.update(pools(peers={EU1: leaving}))
    assert cluster_peer(balancing) is None
    balancing.update(pools(peers={EU1: [*leaving, peer("c")]}))
    assert cluster_peer(balancing) == peer("c")


def test_peers_are_chosen_by_what_they_have_under_way_from_here(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a"), peer("b"), peer("c")]}))
    sent = Counter[str]()
    for _ in range(30):
        chosen = cluster_peer(balancing)
        assert chosen is not None
        balancing.peer_sent(chosen.id)
        sent[chosen.id] += 1
    assert sent == {"a": 10, "b": 10, "c": 10}
    for _ in range(3):
        balancing.peer_done("b", reached=True)
    assert {p.id for _ in range(20) if (p := cluster_peer(balancing))} == {"b"}
    for id_, n in (("a", 10), ("b", 7), ("c", 10)):
        for _ in range(n):
            balancing.peer_done(id_, reached=True)
    assert balancing._peer_in_flight == {}


def test_idle_peers_share_evenly(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a"), peer("b")]}))
    shares = Counter(p.id for _ in range(400) if (p := cluster_peer(balancing)))
    assert 140 <= shares["a"] <= 260


def test_a_lost_peer_is_done_without_and_tried_again_after_a_cool_down(balancing: Balancing, now: Clock) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    balancing.peer_sent("a")
    balancing.peer_done("a", reached=False)
    balancing.peer_lost("a")
    assert routed(balancing).target == (*EU1, "i1")  # its stage is run here
    now.at += PEER_COOLDOWN_S - 0.01
    assert cluster_peer(balancing) is None
    now.at += 0.01
    assert cluster_peer(balancing) == peer("a")
    balancing.peer_sent("a")
    assert cluster_peer(balancing) is None  # one trial at a time
    balancing.peer_done("a", reached=True)
    assert cluster_peer(balancing) == peer("a")


def test_a_lost_peer_leaves_its_requests_to_the_others(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a"), peer("b")]}))
    balancing.peer_lost("a")
    assert {p.id for _ in range(20) if (p := cluster_peer(balancing))} == {"b"}


def test_a_peer_that_stays_away_is_tried_ever_more_rarely(balancing: Balancing, now: Clock) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    gaps = []
    for _ in range(7):
        balancing.peer_lost("a")
        lost_at = now.at
        while cluster_peer(balancing) is None:
            now.at += 0.25
        gaps.append(now.at - lost_at)
        balancing.peer_sent("a")
        balancing.peer_done("a", reached=False)
    assert gaps == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]


def test_a_peer_can_be_away_for_a_day(balancing: Balancing, now: Clock) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    for _ in range(24 * 360):
        balancing.peer_lost("a")
        now.at += 10.0
        assert cluster_peer(balancing) is not None


def test_reports_that_come_again_bring_a_peer_back_at_once(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    balancing.peer_lost("a")
    balancing.peer_back("a")
    assert cluster_peer(balancing) == peer("a")
    balancing.peer_back("never lost")
    assert balancing._peers.keys() == {"a"}


def test_many_requests_that_fail_at_once_are_one_loss(balancing: Balancing, now: Clock) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    for _ in range(50):
        balancing.peer_lost("a")
    now.at += PEER_COOLDOWN_S
    assert cluster_peer(balancing) == peer("a")


def test_a_peer_that_registers_anew_starts_with_a_clean_slate(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    balancing.peer_lost("a")
    balancing.update(pools())
    assert balancing._peers == {}
    balancing.update(pools(peers={EU1: [peer("a")]}))
    assert cluster_peer(balancing) == peer("a")


def test_a_peer_that_left_with_requests_under_way_ends_at_zero(balancing: Balancing) -> None:
    balancing.update(pools(peers={EU1: [peer("a")]}))
    balancing.peer_sent("a")
    balancing.update(pools())
    balancing.peer_done("a", reached=True)
    assert balancing._peer_in_flight == {}


# -- models ----------------------------------------------------------------------------------------------------------


def test_models_are_those_that_some_serving_instance_has(balancing: Balancing) -> None:
    loading = Endpoint("i3", models=frozenset({"z"}), phase=Phase.LOADING)
    balancing.update(pools(clusters={"c1": [instance("i1", "m", "n"), instance("i2", "n")], "c2": [loading]}))
    assert balancing.models() == {"m", "n"}
    assert [balancing.known(model) for model in ("m", "n", "z", "x", "")] == [True, True, True, False, False]


def test_a_model_stays_known_for_a_while_after_the_last_instance_left(balancing: Balancing, now: Clock) -> None:
    """An outage is a 503; only what nobody has had for long is a 404."""
    balancing.update(pools())
    now.at += 5.0
    balancing.update({})
    assert balancing.models() == frozenset()
    now.at += MODEL_MEMORY_S - 0.1
    assert balancing.known("m")
    now.at += 0.1
    assert not balancing.known("m")
    assert not balancing.known("m")
    balancing.update(pools())
    assert balancing.known("m")


def test_a_model_that_is_served_stays_known_though_membership_has_nothing_new_to_say(
    balancing: Balancing, now: Clock
) -> None:
    balancing.update(pools())
    for _ in range(10):
        now.at += MODEL_MEMORY_S * 3
        assert balancing.known("m")
    # And it is remembered from its end, not from the last time that somebody asked.
    now.at += MODEL_MEMORY_S * 3
    balancing.update({})
    now.at += MODEL_MEMORY_S - 1.0
    assert balancing.known("m")


def test_models_remembered_are_bounded(balancing: Balancing, now: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing_module, "MODELS_REMEMBERED", 10)
    for n in range(50):
        now.at += 1.0
        balancing.update(pools(clusters={"c1": [instance("i1", f"m{n}")]}))
    assert len(balancing._models) == 10
    assert [balancing.known(f"m{n}") for n in (0, 39, 40, 49)] == [False, False, True, True]


def test_an_instance_without_a_list_serves_any_model(balancing: Balancing) -> None:
    balancing.update(pools())
    assert not balancing.any_model()
    balancing.update(pools(clusters={"c1": [instance("i1", "m"), instance("i2")]}))
    assert balancing.any_model()
    assert routed(balancing, model="whatever").target == (*EU1, "i2")
    assert balancing.models() == {"m"}
