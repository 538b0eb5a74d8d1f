"""The classic loads: what each counts, and how a balancer shares by it."""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random

import pytest

from common.policy.balancer import Balancer
from common.policy.stages import policy_named
from common.types import LoadReport, Shed
from tests.common.policy.build import ROUND, ask, balancer_of, busy, done, idle, instance, picked, region

STRONG, WEAK = instance("strong", weight=3.0), instance("weak", weight=1.0)


def shares(balancer: Balancer, count: int, *, release: bool = True) -> Counter[str]:
    rng = Random(1)
    chosen: Counter[str] = Counter()
    for turn in range(count):
        pick = picked(balancer, now=float(turn), rng=rng)
        chosen[pick.endpoint.id] += 1
        if release:
            done(balancer, pick, float(turn))
    return chosen


def test_weighted_round_robin_gives_turns_by_weight_and_spreads_them() -> None:
    balancer = balancer_of(STRONG, WEAK, policy=policy_named("weighted_round_robin"))
    order = [picked(balancer).endpoint.id for _ in range(8)]
    assert Counter(order) == {"strong": 6, "weak": 2}
    assert "weak" in order[:4]
    assert "weak" in order[4:]


def test_weighted_round_robin_among_equals_is_round_robin() -> None:
    balancer = balancer_of(*(instance(x) for x in "abc"), policy=policy_named("weighted_round_robin"))
    order = [picked(balancer).endpoint.id for _ in range(9)]
    assert order[:3] == order[3:6] == order[6:]
    assert set(order[:3]) == set("abc")


def test_a_weight_of_zero_has_no_turn() -> None:
    off = instance("off", weight=0.0)
    for name in ("weighted_round_robin", "weighted_least_connections"):
        balancer = balancer_of(STRONG, off, policy=policy_named(name))
        assert shares(balancer, 20, release=False) == {"strong": 20}
        assert isinstance(balancer_of(off, policy=policy_named(name)).pick(ask(), 0.0, Random(1)), Shed)


def test_what_another_model_takes_does_not_cost_a_server_its_turns() -> None:
    a, b, c = (
        instance("a", models=frozenset({"m"}), weight=1.0),
        instance("b", models=frozenset({"m", "n"}), weight=1.0),
        instance("c", models=frozenset({"n"}), weight=1.0),
    )
    balancer = balancer_of(a, b, c, policy=policy_named("weighted_round_robin"))
    chosen: Counter[str] = Counter()
    for turn in range(60):
        chosen[picked(balancer, ask(model="mn"[turn % 2])).endpoint.id] += 1
    assert chosen.keys() == {"a", "b", "c"}
    assert max(chosen.values()) <= 3 * min(chosen.values())


def test_weighted_least_connections_fills_by_weight() -> None:
    balancer = balancer_of(STRONG, WEAK, policy=policy_named("weighted_least_connections"))
    assert shares(balancer, 40, release=False) == {"strong": 30, "weak": 10}


def test_weighted_least_connections_sends_a_lone_request_to_the_strongest() -> None:
    balancer = balancer_of(WEAK, STRONG, policy=policy_named("weighted_least_connections"))
    assert shares(balancer, 10) == {"strong": 10}


def test_least_work_left_counts_gpu_seconds_and_not_requests() -> None:
    fast, slow = instance("fast", "h100"), instance("slow", "t4")
    balancer = balancer_of(fast, slow, policy=policy_named("least_work_left"))
    chosen = shares(balancer, 200, release=False)
    work = {id_: c.server.costs().backlog_s for id_, c in balancer.candidates.items()}
    assert chosen["fast"] > 5 * chosen["slow"] > 0
    assert work["fast"] == pytest.approx(work["slow"], rel=0.2)


def test_least_work_left_sees_the_least_laden_server_of_a_quoted_region() -> None:
    balancer = balancer_of(
        region("far", ("h100", 2)), region("near", ("h100", 2)), parent=(), policy=policy_named("least_work_left")
    )
    balancer.report(LoadReport("near", servers=(busy(30.0), busy(30.0))), 0.0)
    balancer.report(LoadReport("far", servers=(busy(60.0), idle())), 0.0)
    assert picked(balancer).endpoint.id == "far"


def test_no_cost_is_below_zero_or_unknown() -> None:
    for name in ("weighted_round_robin", "weighted_least_connections", "least_work_left"):
        balancer = balancer_of(STRONG, WEAK, policy=policy_named(name))
        for _ in range(10):
            assert all(0.0 <= total < inf for total in picked(balancer).totals)
    assert ROUND.slots > 0
