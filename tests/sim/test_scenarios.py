"""The production policy through change and trouble, in virtual time: seeded, on generated traffic."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from common.policy.balancer import Policy
from common.policy.stages import POLICIES, policy_named
from common.sim.fleet import FLEETS, machine
from common.sim.instance import as_fast_as
from common.sim.measures import Measures, measure
from common.sim.records import Ending
from common.sim.scenarios.recovery import burst, distance, fresh, slowed
from common.sim.scenarios.regions import Region, regions_world, run_regions
from common.sim.scenarios.storm import storm
from common.sim.scenarios.traffic import at_load, drawn
from common.sim.workload import scaled
from common.sim.world import Network, Setup, simulate
from common.types import Path, Slo, Tier

SLO = Slo(2.0, 0.1)
MODES = pytest.mark.parametrize("slo", [Slo(), SLO], ids=["latency", "slo"])


def ours(path: Path) -> Policy:
    return policy_named("predicted_completion", tier=Tier.of(path))


def served(name: str, fleet: str, load: float, *, slo: Slo | None = None, seconds: float = 60.0) -> Measures:
    strong, rows = at_load(FLEETS[fleet], load, seconds, 1)
    return measure(
        simulate(Setup(strong, lambda path: policy_named(name, tier=Tier.of(path)), slo=slo or Slo()), rows, 1)
    )


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_on_unlike_servers_it_beats_the_best_that_knows_weights_and_by_far_those_that_do_not() -> None:
    ours_, wlc, lc, rr = (
        served(name, "mixed16", 0.8)
        for name in ("predicted_completion", "weighted_least_connections", "least_connections", "round_robin")
    )
    assert (wlc.e2e_s.mean or 0.0) > 1.2 * (ours_.e2e_s.mean or 0.0)
    assert (lc.e2e_s.mean or 0.0) > 1.4 * (ours_.e2e_s.mean or 0.0)
    assert (rr.e2e_s.mean or 0.0) > 4.0 * (ours_.e2e_s.mean or 0.0)
    assert ours_.work_l_s < 0.2 * lc.work_l_s


def test_with_service_levels_it_keeps_them_where_others_do_not() -> None:
    ours_, wlc = (
        served("predicted_completion", "mixed16", 0.9, slo=SLO),
        served("weighted_least_connections", "mixed16", 0.9),
    )
    assert ours_.goodput > 0.97
    assert ours_.goodput >= wlc.goodput
    assert (ours_.e2e_s.mean or 0.0) < (wlc.e2e_s.mean or 0.0)


def test_on_like_servers_it_is_no_worse_than_least_connections() -> None:
    ours_, lc = served("predicted_completion", "homog8", 0.8), served("least_connections", "homog8", 0.8)
    assert (ours_.e2e_s.mean or 0.0) < 1.02 * (lc.e2e_s.mean or 0.0)
    assert (ours_.ttft_s.p99 or 0.0) < 1.05 * (lc.ttft_s.p99 or 0.0)


def test_a_model_that_is_far_larger_than_the_priors_is_served_as_well_from_the_start() -> None:
    def mean_s(pace: float) -> float:
        fleet = tuple(replace(kind, speed=as_fast_as(kind.speed, pace)) for kind in FLEETS["mixed16"])
        strong, rows = at_load(fleet, 0.85, 60.0 / pace, 2)
        return pace * (measure(simulate(Setup(strong, ours), rows, 2), warm_up=0.0).e2e_s.mean or 0.0)

    assert mean_s(0.2) < 1.05 * mean_s(1.0)


@MODES
def test_no_server_starves(slo: Slo) -> None:
    strong, rows = at_load(FLEETS["mixed16"], 0.85, 60.0, 3)
    run = simulate(Setup(strong, ours, slo=slo), rows, 3)
    for half in (run.records[: len(rows) // 2], run.records[len(rows) // 2 :]):
        assert len({record.instance for record in half}) == 16


# -- change ------------------------------------------------------------------------------------------------------------


@MODES
def test_half_a_minute_after_two_servers_have_slowed_down_nothing_is_left_of_it(slo: Slo) -> None:
    assert slowed(ours, 1, slo=slo).ratio < 1.10


@MODES
def test_a_burst_is_spread_within_five_seconds(slo: Slo) -> None:
    found = burst(ours, 1, slo=slo)
    assert found.within_5_s < 0.10
    assert found.noise < 0.05  # which is what five seconds of the steady state itself are off


@pytest.mark.parametrize("restarted", [False, True], ids=["new", "restarted"])
def test_a_server_that_comes_idle_into_a_busy_pool_is_not_flooded(restarted: bool) -> None:
    found = fresh(ours, 1, restarted=restarted)
    assert found.worst <= 2.0
    assert found.first_minute > 0.3  # and is used all the same


def test_distance_is_that_of_total_variation() -> None:
    assert distance({"a": 1.0}, {"b": 1.0}) == 1.0
    assert distance({"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.6}) == pytest.approx(0.1)


# -- several balancers -------------------------------------------------------------------------------------------------


def test_four_balancers_that_exchange_are_as_good_as_one() -> None:
    strong, rows = at_load(FLEETS["mixed16"], 0.85, 40.0, 1)

    def goodput(replicas: int, network: Network) -> float:
        setup = Setup(strong, ours, slo=SLO, replicas=replicas, network=network)
        return measure(simulate(setup, rows, 1), SLO).goodput

    one = goodput(1, Network())
    assert goodput(4, Network(exchange_s=0.03)) >= one - 0.01
    assert goodput(4, Network(look_s=None)) >= one - 0.03  # blind: each counts its own for all


def test_the_nearer_region_serves_until_it_is_full_and_both_keep_their_servers_even() -> None:
    regions = {"eu": Region((machine("h100", 2),)), "us": Region((machine("h100", 2),), one_way_s=0.06)}
    for rate, least, most in ((1.0, 0.9, 1.0), (36.0, 0.4, 0.65)):
        run = run_regions(regions, ours, scaled(list(drawn(1, 900)), rate=rate), 1, balancers=2)
        assert all(record.ending is Ending.COMPLETE for record in run.records)
        near = fmean(record.instance.startswith("eu") for record in run.records)
        assert least <= near <= most


def test_the_way_to_a_region_and_back_is_in_what_its_clients_see() -> None:
    far = {"us": Region((machine("h100"),), one_way_s=0.1)}
    world = regions_world(far, ours, 0)
    run = world.run(scaled(list(drawn(2, 50)), rate=1.0))
    assert min(record.ttft_s or 0.0 for record in run.records) > 0.2


# -- trouble -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 8, 12])
def test_through_a_storm_of_faults_nothing_leaks_and_every_request_ends_once(seed: int) -> None:
    run = storm(ours, seed)
    assert all(record.ending is not None for record in run.records)


def test_a_storm_is_the_same_from_the_same_seed() -> None:
    first, second = (storm(ours, 5) for _ in range(2))
    assert [(r.instance, r.e2e_s, r.ending) for r in first.records] == [
        (r.instance, r.e2e_s, r.ending) for r in second.records
    ]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_stands_a_storm(name: str) -> None:
    storm(lambda path: policy_named(name, tier=Tier.of(path)), 12)
