"""Worlds: wired as a service is, the same from the same seed, and true through what goes wrong in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from common.policy.balancer import Balancer, Policy
from common.policy.candidate import Limits
from common.policy.stages import policy_named
from common.sim.checkers import CheckFailed
from common.sim.faults import Fault
from common.sim.fleet import FLEETS, machine, weighted
from common.sim.node import Node
from common.sim.records import Ending, RunRecord
from common.sim.scenarios.traffic import at_load, drawn
from common.sim.traces import TraceRow
from common.sim.workload import scaled
from common.sim.world import CLUSTER, Network, Setup, cluster, simulate
from common.types import Outcome, Path, Slo, Tier

PAIR = (machine("h100"), machine("a100"))
QUIET = Network(look_s=None)


def ours(path: Path) -> Policy:
    return policy_named("predicted_completion", tier=Tier.of(path))


def setup_of(fleet: tuple[object, ...] = PAIR, **fields: object) -> Setup:
    return replace(Setup(fleet, ours), **fields)  # type: ignore[arg-type]


def endings(run: RunRecord) -> Counter[tuple[str, str]]:
    return Counter((r.ending.value, r.reason) for r in run.records if r.ending is not None)


def outcome(run: RunRecord) -> list[tuple[str, float | None, float | None]]:
    return [(r.instance, r.ttft_s, r.e2e_s) for r in run.records]


def traffic(requests: int, rate: float, seed: int = 1) -> list[TraceRow]:
    return scaled(list(drawn(seed, requests)), rate=rate)


def test_a_lone_request_takes_what_its_server_takes() -> None:
    run = simulate(setup_of(network=QUIET), [TraceRow(3.0, 400, 100)], 0)
    record = run.records[0]
    assert (record.instance, record.at_s, record.ending) == ("h100-0", 3.0, Ending.COMPLETE)
    assert record.ttft_s == pytest.approx(0.007 + 400 / 25_000 * (1 + 200 / 30_500))
    assert record.e2e_s == pytest.approx(record.ttft_s + 99 * 0.00706, rel=0.02)
    assert record.expected_tokens == 128.0  # nothing has been learned yet, and the true length is nobody's business


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    rows = traffic(400, 12.0)
    same = [outcome(simulate(setup_of(), rows, seed)) for seed in (5, 5, 6)]
    assert same[0] == same[1]
    assert same[0] != same[2]


def test_lengths_reach_the_policy_only_as_guesses() -> None:
    rows = traffic(300, 8.0)
    swapped = [replace(row, output_tokens=1 + (7 * row.output_tokens) % 900) for row in rows]
    first = [simulate(setup_of(network=QUIET), r, 0).records[:8] for r in (rows, swapped)]
    # Until an answer has ended nobody can tell the two apart.
    early = sum(record.at_s < min(r.at_s + (r.e2e_s or 0.0) for r in first[0]) for record in first[0])
    assert [r.instance for r in first[0][:early]] == [r.instance for r in first[1][:early]]
    assert {r.expected_tokens for r in first[0][:early]} == {128.0}


def test_the_network_takes_its_time_both_ways() -> None:
    row = [TraceRow(0.0, 400, 100)]
    near = simulate(setup_of(network=QUIET), row, 0).records[0]
    far = simulate(setup_of(network=replace(QUIET, one_way_s=0.1)), row, 0).records[0]
    assert far.ttft_s == pytest.approx((near.ttft_s or 0.0) + 0.2)
    assert far.e2e_s == pytest.approx((near.e2e_s or 0.0) + 0.2)


def test_replicas_are_dealt_requests_in_turn_and_each_learns_alone() -> None:
    run = simulate(setup_of(replicas=3), traffic(300, 8.0), 0)
    assert Counter(r.node for r in run.records) == {f"balancer-{i}": 100 for i in range(3)}


def test_replicas_that_tell_each_other_choose_about_as_well_as_one() -> None:
    fleet = (machine("a100", 2), machine("l4", 2))
    strong, rows = at_load(fleet, 0.8, 60.0, 2)
    one = setup_of(strong, network=QUIET, policy=ours)
    four = replace(one, replicas=4)
    told = replace(four, network=replace(QUIET, exchange_s=0.05))

    def mean_e2e(setup: Setup) -> float:
        times = [r.e2e_s for r in simulate(setup, rows, 0).records if r.e2e_s is not None]
        return sum(times) / len(times)

    assert mean_e2e(told) < 1.15 * mean_e2e(one)
    assert mean_e2e(told) < 1.05 * mean_e2e(four)  # who hears nothing counts its own four times over, which is coarser


def test_what_does_not_generate_is_served_too() -> None:
    rows = [TraceRow(0.01 * i, 200, 0) for i in range(200)]
    run = simulate(setup_of(), rows, 0)
    assert endings(run) == {("complete", ""): 200}
    assert all(r.ttft_s is None for r in run.records)


def test_a_full_fleet_rejects_what_it_has_no_place_for() -> None:
    run = simulate(setup_of(limits=Limits(max_in_flight=4)), traffic(200, 200.0), 0)
    assert set(endings(run)) == {("complete", ""), ("rejected", "saturated")}


def test_what_nobody_can_hold_is_rejected_at_once() -> None:
    rows = [TraceRow(0.0, 500_000, 10), TraceRow(1.0, 100, 10)]
    assert endings(simulate(setup_of(), rows, 0)) == {("rejected", "too_large"): 1, ("complete", ""): 1}


def test_a_models_requests_go_to_the_servers_that_have_it() -> None:
    fleet = (replace(machine("h100"), models=frozenset({"big"})), replace(machine("l4"), models=frozenset({"small"})))
    rows = [replace(row, model="big" if i % 2 else "small") for i, row in enumerate(traffic(60, 1.0))]
    run = simulate(setup_of(fleet), rows, 0)
    assert {(rows[r.index].model, r.instance) for r in run.records} == {("big", "h100-0"), ("small", "l4-0")}
    unknown = simulate(setup_of(fleet), [TraceRow(0.0, 5, 5, model="other")], 0)
    assert endings(unknown) == {("rejected", "model_not_found"): 1}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_death_breaks_what_has_begun_and_what_has_not_runs_elsewhere() -> None:
    faults = (Fault("die", 10.0, "h100-0"),)
    run = simulate(setup_of(faults=faults), traffic(300, 10.0), 0)
    broken = [r for r in run.records if r.ending is Ending.BROKEN]
    assert broken
    assert all(r.instance == "h100-0" and r.ttft_s is not None for r in broken)
    retried = [r for r in run.records if r.attempts > 1]
    assert all(r.instance == "a100-0" for r in retried)
    assert {r.instance for r in run.records if r.at_s > 10.0} == {"a100-0"}


def test_nothing_is_sent_to_the_dead_after_the_first_refused_connection() -> None:
    faults = (Fault("die", 10.0, "h100-0"),)
    world = cluster(setup_of(faults=faults), 0)
    refused = []
    plain = world.instances[(*CLUSTER, "h100-0")].submit

    class Watched:
        def __init__(self) -> None:
            self.submit = lambda *a: (world.loop.now > 10.0 and refused.append(world.loop.now), plain(*a))

    real = world.instance
    world.instance = lambda path: Watched() if path[-1] == "h100-0" else real(path)  # type: ignore[assignment,return-value]
    world.run(traffic(300, 10.0))
    assert len(refused) <= 3  # one trial each time a cool-down is over, until membership has taken it out


def test_a_restarted_server_starts_over_and_is_used_again() -> None:
    faults = (Fault("die", 10.0, "h100-0"), Fault("return", 12.0, "h100-0", 5.0))
    run = simulate(setup_of(faults=faults), traffic(400, 10.0), 0)
    assert not [r for r in run.records if r.instance == "h100-0" and 12.0 < r.at_s < 17.0]
    assert [r for r in run.records if r.instance == "h100-0" and r.at_s > 17.1]


def test_one_that_joins_loads_first_and_one_that_drains_gets_nothing_more() -> None:
    faults = (Fault("join", 5.0, "h100", 10.0), Fault("drain", 5.0, "h100-0"))
    run = simulate(setup_of(faults=faults), traffic(300, 8.0), 0)
    assert not [r for r in run.records if r.instance == "h100-0" and r.at_s > 5.1]
    joined = [r.at_s for r in run.records if r.instance == "h100-new0"]
    assert 15.0 <= min(joined) < 17.0
    assert len(run.load.in_flight[0]) == 2
    assert len(run.load.in_flight[-1]) == 3


def test_slow_servers_get_less() -> None:
    fleet = (machine("a100", 2),)
    faults = (Fault("slow", 15.0, "a100-0", 0.4),)
    run = simulate(setup_of(fleet, faults=faults), traffic(500, 7.0), 0)
    late = Counter(r.instance for r in run.records if r.at_s > 30.0)
    assert late["a100-0"] < 0.6 * late["a100-1"]


def test_a_fault_of_nobody_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="no instance h100-9"):
        simulate(setup_of(faults=(Fault("slow", 1.0, "h100-9", 0.5),)), traffic(30, 8.0), 0)


# -- the checkers have teeth -------------------------------------------------------------------------------------------


def test_a_leaked_reservation_is_found_with_seed_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = Balancer.release, count()

    def forgets(self: Balancer, reservation: object, outcome: Outcome, now: float, **said: object) -> None:
        if next(calls) != 20:
            release(self, reservation, outcome, now, **said)  # type: ignore[arg-type]

    monkeypatch.setattr(Balancer, "release", forgets)
    with pytest.raises(CheckFailed, match=r"holds \d+ reservations for \d+ requests \(seed 7, at \d+\.\d+ s\)"):
        simulate(setup_of(), traffic(100, 10.0), 7)


def test_a_sum_that_does_not_return_to_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.policy.candidate import Candidate
    from common.policy.server import Server

    ended = Server.ended
    monkeypatch.setattr(Server, "ended", lambda self, p, o, k, now, **how: ended(self, p, o - 1.0, k, now, **how))
    monkeypatch.setattr(Candidate, "emptied", lambda self, now: None)
    with pytest.raises(CheckFailed, match="still counts"):
        simulate(setup_of(network=QUIET), traffic(100, 10.0), 0)


def test_a_choice_of_what_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "update", _deaf_after_the_first(Node.update))
    faults = (Fault("drain", 5.0, "h100-0"),)
    world = cluster(setup_of(faults=faults), 0)
    node = world.nodes["balancer-0"]
    world.loop.at(6.0, lambda: setattr(node.balancers[CLUSTER].candidates["h100-0"], "phase", "gone"))
    monkeypatch.setattr("common.policy.balancer._plain", lambda c, now: True)
    with pytest.raises(CheckFailed, match="sent a request to h100-0, which is gone"):
        world.run(traffic(200, 10.0))


def _deaf_after_the_first(update: object) -> object:
    told: set[int] = set()

    def once(self: Node, pool: object) -> None:
        if id(self) not in told:
            told.add(id(self))
            update(self, pool)  # type: ignore[operator]

    return once


def test_a_request_that_ends_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.sim.instance import End
    from common.sim.node import Client

    ended = Client.ended

    def twice(self: Client, end: End, cached_tokens: int | None = None) -> None:
        ended(self, end)
        ended(self, end)

    monkeypatch.setattr(Client, "ended", twice)
    with pytest.raises(CheckFailed, match=r"request \d+ ended twice"):
        simulate(setup_of(), traffic(20, 10.0), 0)


# -- the engine's price ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["predicted_completion", "weighted_least_connections", "round_robin"])
def test_every_policy_runs_under_the_checkers(name: str) -> None:
    strong, rows = at_load(FLEETS["mixed16"], 0.5, 20.0, 1)
    setup = Setup(weighted(strong, {}), lambda path: policy_named(name), slo=Slo(2.0, 0.1))
    run = simulate(setup, rows, 0)
    assert endings(run) == {("complete", ""): len(rows)}


def test_servers_that_cache_prompts_are_told_blocks_and_tell_what_they_had() -> None:
    rows = [TraceRow(0.2 * i, 1_100, 20, prefix_hashes=(7, 8, 100 + i)) for i in range(60)]
    cached = simulate(setup_of((machine("a100", 4),), prefix_fraction=0.9, network=QUIET), rows, 0)
    assert cached.prefix_hits / cached.prefix_queries > 0.8
    # What shares a prompt goes where it is; without a cache nobody is told, and it goes everywhere.
    assert max(Counter(r.instance for r in cached.records).values()) > 30
    blind = simulate(setup_of((machine("a100", 4),), network=QUIET), rows, 0)
    assert blind.prefix_hits == 0
    assert max(Counter(r.instance for r in blind.records).values()) < 30
