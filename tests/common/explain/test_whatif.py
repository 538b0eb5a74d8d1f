"""Asking again touches nothing, and replays come to what the policies are known for."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.explain import whatif
from common.explain.whatif import Case, Counterfactual, cases_of, counterfactual, dry_run, together, weigh
from common.policy.candidate import Limits
from common.policy.stages import POLICIES, policy_named
from common.records import RequestRecord
from common.types import Peer, Phase, Pick, Pool, Shed, Tier
from tests.common.build import BEGAN
from tests.common.explain.build import AT, answered, learn, pool
from tests.common.policy.build import ask, balancer_of, instance, region


def state_of(balancer):
    """Everything that a decision could have changed."""
    return [
        (
            id_,
            c.in_flight,
            c.last_turn,
            c.server.sums,
            c.breaker.state,
            c.breaker.trial,
            len(c.sent),
            len(c.prefix._blocks),
        )
        for id_, c in balancer.candidates.items()
    ] + [balancer._turn, balancer._next, dict(balancer._held)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_dry_run_says_what_a_pick_would_and_changes_nothing(name):
    policy = policy_named(name)
    endpoints = [instance("a", gpu="h100"), instance("b", gpu="l4"), instance("c", gpu="h100")]
    balancer = balancer_of(*endpoints, policy=policy)
    for seed in range(5):
        balancer.pick(ask(), 1.0, Random(seed))
    before = state_of(balancer)
    weighed = weigh(balancer, ask(prefix_hashes=(1, 2, 3)), 1.1)
    assert isinstance(weighed, Pick)
    assert state_of(balancer) == before
    assert weigh(balancer, ask(prefix_hashes=(1, 2, 3)), 1.1) == weighed  # the same answer however often it is asked
    real = balancer.pick(ask(prefix_hashes=(1, 2, 3)), 1.1, Random(0))
    assert isinstance(real, Pick)
    assert list(weighed.totals) == pytest.approx(list(real.totals))
    assert weighed.candidates == real.candidates
    if real.predicted_ttft_s is not None and weighed.endpoint == real.endpoint:
        assert weighed.predicted_ttft_s == pytest.approx(real.predicted_ttft_s)


def test_who_is_left_out_is_named():
    balancer = pool("a", "b", "c")
    balancer.candidates["b"].phase = Phase.DRAINING
    weighed = weigh(balancer, ask(), AT)
    assert isinstance(weighed, Pick)
    assert [(r.filter, r.endpoints) for r in weighed.removed] == [("not_draining", ("b",))]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: setattr(c, "phase", Phase.DRAINING), "no_endpoints"),
        (lambda c: setattr(c, "phase", Phase.LOADING), "loading"),
        (lambda c: setattr(c, "busy_until", AT + 9.0), "saturated"),
    ],
)
def test_a_shed_says_why(change, reason):
    balancer = pool("a", "b")
    for c in balancer.candidates.values():
        change(c)
    assert isinstance(weighed := weigh(balancer, ask(), AT), Shed)
    assert weighed.reason == reason


def test_an_unknown_model_and_one_that_is_too_large():
    balancer = pool("a")
    assert weigh(balancer, ask(model="nobody's"), AT).reason == "model_not_found"  # type: ignore[union-attr]
    assert weigh(balancer, ask(input_tokens=10_000_000), AT).reason == "too_large"  # type: ignore[union-attr]


def tree():
    top = balancer_of(region("eu"), region("us"), parent=())
    eu = balancer_of(region("c1"), region("c2"), parent=("eu",))
    us = balancer_of(region("c3"), parent=("us",))
    leaves = [
        balancer_of(instance("i1"), instance("i2"), parent=path) for path in (("eu", "c1"), ("eu", "c2"), ("us", "c3"))
    ]
    return {b.parent: b for b in (top, eu, us, *leaves)}


def test_the_stages_run_down_to_the_instance_where_nobody_else_runs_them():
    answer, peer = dry_run(ask(), (), tree(), lambda path: path == (), lambda path, e: [], 1.0)
    assert peer is None
    assert [s.tier for s in answer.stages] == ["global", "region", "instance"]
    assert [s.takeover for s in answer.stages] == [False, True, True]
    assert answer.target == "/".join((*answer.stages[2].node.split("/"), answer.stages[2].chosen))
    assert (answer.handed_to, answer.shed) == ("", "")


def test_it_is_handed_over_where_a_peer_lives():
    there = Peer("region-1", "http://x")
    answer, peer = dry_run(ask(), (), tree(), lambda path: path == (), lambda path, e: [there], 1.0)
    assert peer is there
    assert (len(answer.stages), answer.handed_to) == (1, "region-1")


def test_nowhere_to_go():
    answer, peer = dry_run(ask(), ("mars",), tree(), lambda path: True, lambda path, e: [], 1.0)
    assert (answer.stages, answer.shed, peer) == ([], "no_endpoints", None)


# -- other policies ----------------------------------------------------------------------------------------------------


def replay(balancer, cases, *policies) -> Counterfactual:
    for answer in counterfactual(balancer, cases, policies or tuple(POLICIES)):
        if answer is not None:
            return answer
    raise AssertionError


def burst(n=200, every_s=0.02, **fields) -> list[Case]:
    return [Case(BEGAN + i * every_s, ask(id=f"{i:032x}", **fields), "fast", 100.0, None, None) for i in range(n)]


def mixed():
    return balancer_of(instance("fast", gpu="h100"), instance("slow", gpu="t4"))


def test_every_policy_is_given_the_same_requests():
    answer = replay(mixed(), burst(100))
    assert {p.policy for p in answer.policies} == set(POLICIES)
    assert {p.requests for p in answer.policies} == {90}  # the first tenth fills the servers
    assert all(sum(p.shares.values()) == pytest.approx(1.0, abs=1e-3) for p in answer.policies)
    assert answer.in_force == "predicted_completion"


def test_on_unlike_servers_prediction_costs_less_than_turns():
    by_name = {p.policy: p for p in replay(mixed(), burst()).policies}
    assert by_name["predicted_completion"].cost_s < by_name["round_robin"].cost_s
    assert by_name["round_robin"].shares == pytest.approx({"fast": 0.5, "slow": 0.5}, abs=0.02)
    assert by_name["predicted_completion"].shares["fast"] > 0.7
    assert by_name["round_robin"].elsewhere == pytest.approx(90, abs=3)


def test_it_starts_from_the_speeds_that_were_learned():
    balancer = balancer_of(instance("a"), instance("b"))
    learn(balancer, "b", 4.0)
    (result,) = replay(balancer, burst(every_s=0.1), "predicted_completion").policies
    assert result.shares["a"] > 0.6


def test_the_same_question_has_the_same_answer_and_leaves_the_balancer_alone():
    balancer = mixed()
    before = state_of(balancer)
    assert replay(balancer, burst()) == replay(balancer, burst())
    assert state_of(balancer) == before


def test_a_session_returns_to_where_the_replay_sent_it():
    cases = burst(60, every_s=2.0, session="s", input_tokens=2000)
    for case in cases:
        case.request = _warm(case.request, "slow")
    (result,) = replay(balancer_of(instance("a"), instance("b")), cases, "predicted_completion").policies
    assert max(result.shares.values()) == 1.0


def _warm(request, id_):
    return replace(request, warm=("eu", "c1", id_), warm_tokens=1900)


def test_what_a_policy_refuses_is_counted():
    balancer = balancer_of(instance("a"), limits=Limits(max_in_flight=1))
    (result,) = replay(balancer, burst(every_s=0.3), "round_robin").policies
    assert 0 < result.refused < 180


def test_the_work_of_one_replay_is_bounded(monkeypatch):
    monkeypatch.setattr(whatif, "MOST_WORK", 600)
    assert replay(mixed(), burst(200), "round_robin").requests == 200
    assert replay(mixed(), burst(200), "round_robin", "hash", "power_of_two").requests == 100  # the latest
    monkeypatch.setattr(whatif, "MOST_WORK", 1)
    assert replay(mixed(), burst(200), "round_robin").requests == 0


def test_it_lets_others_run_in_between():
    steps = list(counterfactual(mixed(), burst(100), ("round_robin", "hash")))
    assert sum(step is None for step in steps) == 8
    assert steps[-1] is not None


def test_cases_are_the_requests_that_went_to_an_instance_from_here():
    balancer = pool("a", "b")
    well, broken = answered(balancer), answered(balancer, status=500)
    above: RequestRecord = answered(balancer)
    above.stages[0].path = ()
    first, second = cases_of([well, broken, above], balancer.parent)
    assert (first.went_to, first.output_tokens) == (well.stages[0].chosen, 31.0)
    assert first.ttft_s == pytest.approx(0.49)
    assert first.completion_s == pytest.approx(1.99)
    assert (second.ttft_s, second.completion_s) == (None, None)


def test_several_clusters_together_are_weighted_by_their_requests():
    one, other = replay(mixed(), burst(100), "hash", "round_robin"), replay(mixed(), burst(300), "hash", "round_robin")
    both = together([one, other])
    assert (both.requests, both.in_force) == (400, "predicted_completion")
    for p in both.policies:
        a, b = (next(x for x in c.policies if x.policy == p.policy) for c in (one, other))
        assert p.cost_s == pytest.approx((90 * a.cost_s + 270 * b.cost_s) / 360)
        assert p.elsewhere == a.elsewhere + b.elsewhere


def test_a_pool_without_endpoints_refuses_everything():
    balancer = mixed()
    balancer.update(Pool(balancer.parent, (), 2), BEGAN)
    (result,) = replay(balancer, burst(20), "round_robin").policies
    assert (result.refused, result.shares) == (18, {})
    assert Tier.of(balancer.parent) is Tier.INSTANCE
