from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from common.policy.balancer import HEARD_S, LOADING_S, LOOK_EVERY_S, SAMPLED, Balancer
from common.policy.candidate import (
    FOREIGN_CONTEXT_TOKENS,
    FOREIGN_REST_TOKENS,
    MIN_UNCACHED,
    QUOTE_STALE_S,
    SENT_KEPT,
    Candidate,
    Limits,
)
from common.policy.pickers import TIE_BAND
from common.policy.prediction import CLASS_SPEED, class_speed, marginal_cost
from common.policy.prefix import PREFIX_BLOCK_TOKENS, TOLD_BLOCKS, TOLD_S
from common.policy.quote import QUOTE_INSTANCES, class_means
from common.policy.server import Server
from common.policy.stages import least_connections, predicted_completion, round_robin
from common.types import (
    Endpoint,
    InferenceRequest,
    LoadReport,
    Outcome,
    Path,
    Phase,
    Pick,
    Pool,
    Removed,
    Reservation,
    ServerLoad,
    Shed,
)
from tests.common.policy.build import CLUSTER, ROUND, ask, balancer_of, busy, done, idle, instance, picked, region

ALL = (predicted_completion, least_connections, round_robin)


def sums(candidate: Candidate) -> tuple[float, ...]:
    """n, w, P, K and R of all servers below, as sent from here."""
    return tuple(sum(getattr(s, name) for s in candidate.own) for name in ("n", "w", "p", "k", "r"))


def cost(pick: Pick, endpoint: str) -> float:
    return next(s.total for s in pick.scores if s.endpoint == endpoint)


def term(pick: Pick, endpoint: str, name: str) -> float:
    if name not in pick.terms:
        return 0.0  # a term that is the same for all is left out
    return next(s.terms for s in pick.scores if s.endpoint == endpoint)[pick.terms.index(name)]


# -- reservations ----------------------------------------------------------------------------------------------------


def test_a_pick_holds_what_the_request_will_take_and_release_gives_it_back() -> None:
    balancer = balancer_of(instance("a"))
    candidate = balancer.candidates["a"]
    pick = picked(balancer, ask(input_tokens=400, output_tokens=100.0))
    assert (candidate.in_flight, balancer.in_flight) == (1, 1)
    assert sums(candidate) == (0, 1, 400, 0, 100)
    balancer.first_token(pick.reservation, 0.5)
    assert sums(candidate) == (1, 0, 0, 450, 100)  # the prompt, and half of the answer on average
    done(balancer, pick, outcome=Outcome.SUCCESS, output_tokens=90)
    assert (candidate.in_flight, balancer.in_flight) == (0, 0)
    assert sums(candidate) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_way_a_request_ends_nothing_is_left_of_it(outcome: Outcome, begun: bool, stream: bool) -> None:
    balancer = balancer_of(instance("a"))
    pick = picked(balancer, ask(stream=stream))
    if begun:
        balancer.first_token(pick.reservation, 0.5)
    done(balancer, pick, 1.0, outcome, output_tokens=50, unreachable=outcome is Outcome.FAILED)
    assert sums(balancer.candidates["a"]) == (0, 0, 0, 0, 0)
    assert balancer.candidates["a"].in_flight == balancer.in_flight == 0
    assert balancer._held == {}
    assert balancer._unseen == []


def test_a_second_release_is_a_bug_and_raises() -> None:
    balancer = balancer_of(instance("a"))
    first, second = picked(balancer), picked(balancer)
    done(balancer, first)
    with pytest.raises(KeyError):
        done(balancer, first)
    assert balancer.candidates["a"].in_flight == 1
    done(balancer, second)


def test_a_first_token_that_is_told_twice_counts_once() -> None:
    balancer = balancer_of(instance("a"))
    pick = picked(balancer)
    balancer.first_token(pick.reservation, 0.5)
    before = sums(balancer.candidates["a"])
    balancer.first_token(pick.reservation, 0.9)
    assert sums(balancer.candidates["a"]) == before


def test_only_the_first_of_them_is_the_time_to_the_first_token() -> None:
    def learned(*told: float) -> float:
        balancer = balancer_of(instance("a", capacity=ROUND))
        pick = picked(balancer)
        for at in told:
            balancer.first_token(pick.reservation, at)
        done(balancer, pick, 1.0, Outcome.SUCCESS)
        return balancer.candidates["a"].own[0].speed.prefill_tokens_per_s

    assert learned(0.05, 0.9) == learned(0.05) != learned(0.9)


def test_rounding_leaves_nothing_behind() -> None:
    balancer = balancer_of(region("c1", ("h100", 3), ("l4", 7)), parent=("eu",))
    rng = Random(3)
    picks = [
        picked(balancer, ask(input_tokens=rng.randrange(1, 9_000), output_tokens=rng.uniform(1, 900)))
        for _ in range(300)
    ]
    for pick in picks[::2]:
        balancer.first_token(pick.reservation, 0.1)
    rng.shuffle(picks)
    for pick in picks:
        done(balancer, pick)
    assert sums(balancer.candidates["c1"]) == (0, 0, 0, 0, 0)


def test_an_endpoint_that_leaves_with_requests_running_is_never_below_zero_and_comes_back_even() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    on_a = [picked(balancer, exclude=("b",)) for _ in range(10)]
    balancer.update(Pool(CLUSTER, (instance("b"),)), 1.0)
    assert balancer.in_flight == 10
    balancer.update(Pool(CLUSTER, (instance("a"), instance("b"))), 2.0)
    assert balancer.candidates["a"].in_flight == 10  # it is the same one, with its requests
    balancer.update(Pool(CLUSTER, (instance("b"),)), 3.0)
    for pick in on_a:
        done(balancer, pick, 4.0)
    assert balancer._gone == {}
    balancer.update(Pool(CLUSTER, (instance("a"), instance("b"))), 5.0)
    assert balancer.candidates["a"].in_flight == 0
    shares = Counter(picked(balancer, now=6.0).endpoint.id for _ in range(400))
    assert shares == {"a": 200, "b": 200}


def test_requests_of_a_process_that_restarted_do_not_burden_the_new_one() -> None:
    balancer = balancer_of(instance("a", boot="1"))
    candidate = balancer.candidates["a"]
    old = picked(balancer)
    balancer.update(Pool(CLUSTER, (instance("a", boot="2"),)), 1.0)
    assert sums(candidate) == (0, 0, 0, 0, 0)
    new = picked(balancer, ask(input_tokens=200, output_tokens=10.0), now=1.0)
    balancer.first_token(old.reservation, 1.1)
    done(balancer, old, 1.2, Outcome.FAILED)
    assert sums(candidate) == (0, 1, 200, 0, 10)
    done(balancer, new, 1.3)
    assert (candidate.in_flight, *sums(candidate)) == (0, 0, 0, 0, 0, 0)


def test_an_answer_in_one_piece_is_taken_for_begun_when_its_first_token_was_due() -> None:
    balancer = balancer_of(instance("a"))
    candidate = balancer.candidates["a"]
    pick = picked(balancer, ask(stream=False), now=10.0)
    assert pick.predicted_ttft_s is not None
    due = 10.0 + pick.predicted_ttft_s
    balancer.quote(due - 1e-6)
    assert sums(candidate)[:2] == (0, 1)
    balancer.quote(due)
    assert sums(candidate) == (1, 0, 0, 450, 100)
    balancer.first_token(pick.reservation, due + 1.0)  # all of it came
    assert sums(candidate) == (1, 0, 0, 450, 100)
    done(balancer, pick, due + 1.0, Outcome.SUCCESS, output_tokens=100)
    assert sums(candidate) == (0, 0, 0, 0, 0)


def test_an_answer_in_one_piece_that_comes_early_counts_once() -> None:
    balancer = balancer_of(instance("a"))
    pick = picked(balancer, ask(stream=False), now=10.0)
    balancer.first_token(pick.reservation, 10.0)
    balancer.quote(1_000.0)
    assert sums(balancer.candidates["a"]) == (1, 0, 0, 450, 100)


def test_a_streamed_answer_is_not_taken_for_begun_before_it_has() -> None:
    balancer = balancer_of(instance("a"))
    picked(balancer, ask(stream=True), now=10.0)
    balancer.quote(1_000.0)
    assert sums(balancer.candidates["a"])[:2] == (0, 1)


def test_what_does_not_generate_is_never_decoding() -> None:
    balancer = balancer_of(instance("a"))
    pick = picked(balancer, ask(stream=False, output_tokens=0.0), now=10.0)
    balancer.quote(1_000.0)
    assert sums(balancer.candidates["a"]) == (0, 1, 400, 0, 0)
    done(balancer, pick, 1_000.0, Outcome.SUCCESS)
    assert sums(balancer.candidates["a"]) == (0, 0, 0, 0, 0)


# -- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_eight_at_once_over_two_equals_are_four_and_four(policy: object) -> None:
    balancer = balancer_of(instance("a"), instance("b"), policy=policy())  # type: ignore[operator]
    rng = Random(5)
    assert Counter(picked(balancer, rng=rng).endpoint.id for _ in range(8)) == {"a": 4, "b": 4}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ALL)
def test_equals_share_evenly_when_nothing_is_under_way(policy: object, seed: int) -> None:
    balancer = balancer_of(instance("a"), instance("b"), policy=policy())  # type: ignore[operator]
    rng, shares = Random(seed), Counter[str]()
    for second in range(400):
        pick = picked(balancer, now=float(second), rng=rng)
        shares[pick.endpoint.id] += 1
        done(balancer, pick, second + 0.5)
    assert 140 <= shares["a"] <= 260


def test_same_seed_same_answers() -> None:
    def choices(seed: int) -> list[str]:
        balancer = balancer_of(*(instance(name) for name in "abcdef"))
        rng, running, chosen = Random(seed), [], []
        for step in range(200):
            pick = picked(balancer, ask(input_tokens=100 + step), now=float(step), rng=rng)
            chosen.append(pick.endpoint.id)
            running.append(pick)
            if len(running) > 5:
                done(balancer, running.pop(rng.randrange(5)), float(step))
        return chosen

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_the_order_of_the_pool_favours_nobody() -> None:
    names = "abc"
    shares = Counter(
        picked(balancer_of(*(instance(name) for name in names)), rng=Random(seed)).endpoint.id for seed in range(600)
    )
    assert all(150 <= shares[name] <= 250 for name in names)


def test_a_faster_server_takes_more_but_not_all() -> None:
    balancer = balancer_of(instance("fast", gpu="h100"), instance("slow", gpu="a100"))
    shares = Counter(picked(balancer).endpoint.id for _ in range(60))
    assert shares["fast"] > shares["slow"] > 5


def test_costs_that_are_told_are_the_ones_it_was_chosen_by() -> None:
    balancer = balancer_of(instance("a", gpu="h100"), instance("b", gpu="l4", price_usd_per_hour=1.0))
    request = ask()
    pick = picked(balancer, request)
    assert pick.terms == ("completion_s", "price_usd")  # no round trip is measured
    assert [s.endpoint for s in pick.scores] == ["a", "b"]
    assert pick.endpoint.id == "a"
    by_hand = marginal_cost(Server(class_speed("l4")), 400, 400, 100.0)
    assert term(pick, "b", "completion_s") == pytest.approx(sum(by_hand))
    v = class_speed("l4")
    dollars = (400 / v.prefill_tokens_per_s + 100 * (v.alpha_s / v.slots + v.beta_s)) / 3600
    assert term(pick, "b", "price_usd") == pytest.approx(dollars)
    assert cost(pick, "b") == pytest.approx(sum(by_hand) + 1e4 * dollars)
    best = marginal_cost(Server(class_speed("h100")), 400, 400, 100.0)
    assert pick.predicted_ttft_s == pytest.approx(best.ttft)
    assert pick.predicted_total_s == pytest.approx(best.ttft + best.decode)


def test_price_decides_between_equals_and_weighs_what_it_is_told_to() -> None:
    pool = instance("cheap", price_usd_per_hour=1.0), instance("dear", price_usd_per_hour=4.0)
    assert {picked(balancer_of(*pool), rng=Random(s)).endpoint.id for s in range(20)} == {"cheap"}
    for_nothing = predicted_completion(price_weight_s_per_usd=0.0)
    assert len({picked(balancer_of(*pool, policy=for_nothing), rng=Random(s)).endpoint.id for s in range(20)}) == 2


def test_a_round_trip_counts_in_seconds_once_it_is_measured() -> None:
    balancer = balancer_of(region("near"), region("far"), parent=())
    assert term(picked(balancer), "far", "round_trip_s") == 0.0
    balancer.round_trip("far", 0.25, now=1.0)
    balancer.round_trip("gone", 0.25, now=1.0)  # no longer there: nothing happens
    pick = picked(balancer, now=1.0)
    assert (term(pick, "far", "round_trip_s"), term(pick, "near", "round_trip_s")) == (0.25, 0.0)
    balancer.round_trip("near", 3.0, now=1.0)
    assert picked(balancer, now=1.0).endpoint.id == "far"


def test_round_robin_takes_each_in_turn_and_a_newcomer_does_not_catch_up() -> None:
    balancer = balancer_of(instance("a"), instance("b"), policy=round_robin())
    first = [picked(balancer).endpoint.id for _ in range(4)]
    assert sorted(first[:2]) == ["a", "b"]
    assert first[2:] == first[:2]
    balancer.update(Pool(CLUSTER, (instance("a"), instance("b"), instance("c"))), 1.0)
    assert Counter(picked(balancer).endpoint.id for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_least_connections_evens_out_what_is_under_way() -> None:
    balancer = balancer_of(instance("a"), instance("b"), instance("c"), policy=least_connections())
    held = [picked(balancer, exclude=("b", "c")) for _ in range(4)]
    assert Counter(picked(balancer).endpoint.id for _ in range(8)) == {"b": 4, "c": 4}
    assert len(held) == 4


# -- sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", [(), ("eu",), CLUSTER])
def test_a_warm_path_lowers_the_cost_of_exactly_what_lies_on_it(parent: Path) -> None:
    balancer = balancer_of(*(Endpoint(name, gpu="h100") for name in "ab"), parent=parent)
    path = ("eu", "c1", "a")
    warm = ask(input_tokens=4_000, warm=(*parent, "a", *path[len(parent) + 1 :]), warm_tokens=3_900)
    cold = picked(balancer, ask(input_tokens=4_000))
    done(balancer, cold)
    pick = picked(balancer, warm)
    assert pick.endpoint.id == "a"
    assert cost(pick, "b") == pytest.approx(cost(cold, "b"))
    assert cost(pick, "a") < cost(cold, "a")
    assert sums(balancer.candidates["a"])[2] == 100  # what it has to read is what is charged


def test_a_warm_path_elsewhere_warms_nothing_here() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    for warm in [("us", "c1", "a"), ("eu", "c2", "a"), ("eu", "c1", "x"), ("eu", "c1"), ()]:
        pick = picked(balancer, ask(input_tokens=4_000, warm=warm, warm_tokens=4_000))
        assert cost(pick, "a") == cost(pick, "b")
        done(balancer, pick)


def test_even_a_prompt_that_is_all_cached_has_its_last_block_read() -> None:
    balancer = balancer_of(instance("a"))
    picked(balancer, ask(input_tokens=4_000, warm=(*CLUSTER, "a"), warm_tokens=10_000))
    assert sums(balancer.candidates["a"])[2] == MIN_UNCACHED


def test_a_session_leaves_its_place_when_that_is_much_busier() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    for _ in range(40):
        picked(balancer, exclude=("b",))
    pick = picked(balancer, ask(input_tokens=1_000, warm=(*CLUSTER, "a"), warm_tokens=900))
    assert pick.endpoint.id == "b"


# -- who qualifies, and what is said when nobody does ----------------------------------------------------------------


def shed(balancer: Balancer, request: InferenceRequest | None = None, now: float = 0.0, exclude: str = "") -> Shed:
    decision = balancer.pick(request or ask(), now, Random(1), exclude)
    assert isinstance(decision, Shed)
    return decision


def test_an_empty_pool_has_no_endpoints() -> None:
    assert shed(balancer_of()) == Shed("no_endpoints", 1.0)


def test_a_pool_that_is_all_excluded_has_no_endpoints() -> None:
    assert shed(balancer_of(instance("a"), instance("b")), exclude="ab") == Shed("no_endpoints", 1.0)


def test_a_model_that_nobody_serves_is_not_found() -> None:
    balancer = balancer_of(instance("a", models=frozenset({"x"})), instance("b", models=frozenset({"y"})))
    assert shed(balancer) == Shed("model_not_found", None, (Removed("serves_model", 2, ("a", "b")),))


@pytest.mark.parametrize(
    ("phase", "alone"),
    [
        (Phase.LOADING, Shed("loading", LOADING_S, (Removed("not_loading", 1, ("a",)),))),
        (Phase.DRAINING, Shed("no_endpoints", 1.0, (Removed("not_draining", 1, ("a",)),))),
    ],
)
def test_what_does_not_serve_yet_or_any_more_gets_nothing(phase: Phase, alone: Shed) -> None:
    balancer = balancer_of(instance("a", phase=phase), instance("b"))
    assert {picked(balancer).endpoint.id for _ in range(20)} == {"b"}
    balancer.update(Pool(CLUSTER, (instance("a", phase=phase),)), 1.0)
    assert shed(balancer) == alone


def test_a_full_pool_is_saturated_until_one_ends() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(max_in_flight=3, busy_s=0.5))
    picks = [picked(balancer) for _ in range(6)]
    assert shed(balancer) == Shed("saturated", 0.5, (Removed("has_capacity", 2, ("a", "b")),))
    done(balancer, picks[0])
    assert picked(balancer).endpoint == picks[0].endpoint


def test_what_refused_for_load_is_left_alone_and_the_wait_is_told() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(busy_s=1.0))
    for name, wait in (("a", 5.0), ("b", 8.0)):
        pick = picked(balancer, exclude=tuple({"a", "b"} - {name}))
        done(balancer, pick, 10.0, Outcome.OVERLOADED, retry_after_s=wait)
    assert shed(balancer, now=10.0) == Shed("saturated", 5.0, (Removed("has_capacity", 2, ("a", "b")),))
    assert picked(balancer, now=15.0).endpoint.id == "a"
    assert balancer.candidates["a"].breaker.ready(15.0)  # refusing is no failure


def test_a_pool_that_is_all_ejected_tells_when_the_first_is_tried_again() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(cooldown_s=4.0))
    for name, at in (("a", 10.0), ("b", 12.0)):
        pick = picked(balancer, now=at, exclude=tuple({"a", "b"} - {name}))
        done(balancer, pick, at, Outcome.FAILED, unreachable=True)
    assert shed(balancer, now=12.0) == Shed("no_endpoints", 2.0, (Removed("not_ejected", 2, ("a", "b")),))
    assert picked(balancer, now=14.0).endpoint.id == "a"
    assert shed(balancer, now=14.0).reason == "no_endpoints"  # one trial at a time


def test_a_trial_that_is_cancelled_gives_its_place_to_the_next() -> None:
    balancer = balancer_of(instance("a"), limits=Limits(cooldown_s=4.0))
    done(balancer, picked(balancer), 0.0, Outcome.FAILED, unreachable=True)
    done(balancer, picked(balancer, now=4.0), 5.0, Outcome.IGNORED)
    done(balancer, picked(balancer, now=5.0), 6.0, Outcome.SUCCESS)
    assert len([picked(balancer, now=6.0) for _ in range(5)]) == 5


def test_streams_from_before_the_ejection_end_without_making_room_for_more_trials() -> None:
    balancer = balancer_of(instance("a"), limits=Limits(cooldown_s=4.0))
    before, broke = picked(balancer), picked(balancer)
    done(balancer, broke, 0.0, Outcome.FAILED, unreachable=True)
    picked(balancer, now=4.0)
    done(balancer, before, 4.5, Outcome.IGNORED)
    assert shed(balancer, now=4.5).reason == "no_endpoints"


def test_a_request_that_fits_nowhere_is_too_large() -> None:
    balancer = balancer_of(instance("a", capacity=ROUND), instance("b", capacity=replace(ROUND, kv_tokens=1_000.0)))
    assert shed(balancer, ask(input_tokens=30_000)) == Shed("too_large")
    assert picked(balancer, ask(input_tokens=10_000)).endpoint.id == "a"


def test_a_request_whose_model_no_quoted_server_has_is_not_called_too_large() -> None:
    both = frozenset({"m", "n"})
    balancer = balancer_of(region("eu", models=both), region("us", models=both), parent=())
    # The only server of the model is ejected down there, and so left out of the quote.
    for name in ("eu", "us"):
        balancer.report(LoadReport(name, servers=(idle(models=frozenset({"n"})),)), now=1.0)
    assert shed(balancer, ask(model="m"), now=1.0) == Shed("no_endpoints", 1.0)
    assert shed(balancer, ask(model="n", input_tokens=10**6), now=1.0) == Shed("too_large")


def test_an_only_region_is_taken_without_a_cost_and_judges_for_itself() -> None:
    balancer = regions("eu")
    balancer.report(LoadReport("eu", servers=(busy(3, models=frozenset({"n"})),)), 0.0)
    pick = picked(balancer, ask(model="m"), now=1.0)
    assert (pick.endpoint.id, pick.predicted_ttft_s, pick.columns) == ("eu", None, ())
    assert balancer.in_flight == 1


def test_a_bound_on_what_is_under_way_grows_with_the_fleet() -> None:
    balancer = balancer_of(Endpoint("c1"), parent=("eu",), limits=Limits(max_in_flight=10))
    assert balancer.candidates["c1"].max_in_flight == 10
    balancer.update(Pool(("eu",), (region("c1", ("h100", 3), ("l4", 2)),)), 1.0)
    assert balancer.candidates["c1"].max_in_flight == 50
    balancer.update(Pool(("eu",), (region("c1", ("h100", 1)),)), 2.0)
    assert balancer.candidates["c1"].max_in_flight == 10


# -- the pool --------------------------------------------------------------------------------------------------------


def test_survivors_of_an_update_keep_what_was_learned() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    for _ in range(20):
        pick = picked(balancer, exclude=("b",))
        balancer.first_token(pick.reservation, 1.0)
        done(balancer, pick, 60.0, Outcome.SUCCESS, output_tokens=100)
    slow = balancer.candidates["a"].own[0].speed
    assert slow.alpha_s > class_speed("h100").alpha_s * 1.5
    balancer.update(Pool(CLUSTER, (instance("a", weight=2.0), instance("c")), 7, stale=True), 2.0)
    assert balancer.candidates["a"].own[0].speed == slow
    assert balancer.candidates["a"].endpoint.weight == 2.0
    assert (balancer.revision, balancer.stale) == (7, True)
    assert list(balancer.candidates) == ["a", "c"]


@pytest.mark.parametrize("change", [{"boot": "2"}, {"gpu": "l4"}, {"capacity": ROUND}])
def test_another_process_under_the_same_name_starts_over(change: dict[str, object]) -> None:
    balancer = balancer_of(instance("a", boot="1"))
    taught(balancer, times=6.0)
    times = balancer.candidates["a"].own[0].speed.alpha_s / class_speed("h100").alpha_s
    assert times > 3.0
    after = replace(instance("a", boot="1"), **change)
    balancer.update(Pool(CLUSTER, (after,)), 2.0)
    candidate = balancer.candidates["a"]
    assert candidate.estimates[0].samples == 0
    if "gpu" in change:  # nothing is known of that class, but that the model is a large one
        assert candidate.own[0].speed.alpha_s == pytest.approx(times * class_speed("l4").alpha_s, rel=0.2)


def taught(balancer: Balancer, *, times: float, requests: int = 20) -> None:
    """Requests one after the other, each taking so many times what its class is said to take."""
    now = 0.0
    for _ in range(requests):
        pick = picked(balancer, now=now)
        v = class_speed(pick.endpoint.gpu)
        balancer.first_token(pick.reservation, now + 0.1)
        now += 0.1 + times * 99 * (v.alpha_s + v.beta_s + 450 * v.gamma_s)
        done(balancer, pick, now, Outcome.SUCCESS, output_tokens=100)


def test_a_class_nothing_is_known_of_is_scaled_as_the_others_proved_to_be() -> None:
    models = frozenset({"m"})
    balancer = balancer_of(instance("a", gpu="h100", models=models), instance("b", gpu="h100", models=models))
    taught(balancer, times=8.0)
    known = balancer.candidates["a"].own[0].speed
    newcomers = instance("slow", gpu="l4", models=models), instance("other", gpu="l4", models=frozenset({"s"}))
    balancer.update(Pool(CLUSTER, (*(c.endpoint for c in balancer.candidates.values()), *newcomers)), 500.0)
    slow, other = (balancer.candidates[name].own[0].speed for name in ("slow", "other"))
    assert slow.alpha_s / class_speed("l4").alpha_s == pytest.approx(
        known.alpha_s / class_speed("h100").alpha_s, rel=0.3
    )
    assert slow.kv_tokens == class_speed("l4").kv_tokens
    assert other == class_speed("l4")  # of another model they say nothing


def test_the_first_answer_says_of_all_classes_how_far_off_they_are() -> None:
    """Else the first to answer looks slow beside those that have not answered yet, and these are flooded."""
    balancer = balancer_of(instance("a", gpu="h100"), instance("b", gpu="a100"), instance("c", gpu="l4"))
    before = {id_: c.own[0].speed.alpha_s for id_, c in balancer.candidates.items()}
    taught(balancer, times=6.0, requests=1)
    for id_, c in balancer.candidates.items():
        assert c.own[0].speed.alpha_s / before[id_] == pytest.approx(6.0, rel=0.2)


def test_requests_that_were_under_way_when_the_class_taught_it_still_teach_an_instance() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    v = class_speed("h100")
    picks = [picked(balancer) for _ in range(8)]
    for pick in picks:
        balancer.first_token(pick.reservation, 0.1)
    for number, pick in enumerate(picks):
        done(balancer, pick, 0.1 + (4.0 + 0.1 * number) * 99 * v.alpha_s, Outcome.SUCCESS, output_tokens=100)
    for c in balancer.candidates.values():
        assert c.estimates[0].samples == 4
        assert c.own[0].speed == c.estimates[0].speed


def test_an_instance_whose_prior_is_far_too_slow_is_tried_and_then_known() -> None:
    """`b` is as fast as `a`, and nobody would ever see it: alone it never comes first."""
    slow_prior = replace(class_speed("h100"), alpha_s=0.014, prefill_tokens_per_s=12_000)
    balancer = balancer_of(instance("a", gpu="h100"), instance("b", gpu="h100-pcie", capacity=slow_prior))
    shares: Counter[str] = Counter()
    now = 0.0
    for _ in range(300):
        pick = picked(balancer, now=now)
        shares[pick.endpoint.id] += 1
        v = class_speed("h100")
        balancer.first_token(pick.reservation, now + 0.1)
        now += 0.1 + 99 * (v.alpha_s + v.beta_s + 450 * v.gamma_s)
        done(balancer, pick, now, Outcome.SUCCESS, output_tokens=100)
    assert balancer.candidates["b"].own[0].speed.alpha_s < 0.011
    assert shares["b"] > 50


def test_a_trial_does_not_go_where_it_would_take_far_too_long() -> None:
    balancer = balancer_of(instance("a", gpu="h100"), instance("b", gpu="cpu"))
    for i in range(200):
        pick = picked(balancer, now=float(i))
        assert pick.endpoint.id == "a"
        done(balancer, pick, i + 0.5, Outcome.SUCCESS, output_tokens=100)


def test_what_is_known_of_the_server_counts_more_than_its_class() -> None:
    balancer = balancer_of(instance("a", gpu="h100", capacity=ROUND))
    assert balancer.candidates["a"].own[0].speed == ROUND


def test_a_report_of_what_is_not_in_the_pool_is_dropped() -> None:
    balancer = balancer_of(instance("a"))
    balancer.report(LoadReport("x", running=100.0), 1.0)
    assert list(balancer.candidates) == ["a"]


def test_an_update_for_another_parent_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        balancer_of(instance("a")).update(Pool(("us", "c1")), 0.0)


# -- reports of instances --------------------------------------------------------------------------------------------


def test_load_of_an_instance_that_is_not_told_is_unknown_and_not_zero() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    balancer.report(LoadReport("a", running=10.0), 0.0)
    loaded = sums(balancer.candidates["a"])
    assert loaded == (10, 0, 0, 10 * FOREIGN_CONTEXT_TOKENS, 10 * FOREIGN_REST_TOKENS)
    balancer.report(LoadReport("a", waiting=3.0), 1.0)  # its engine was not asked this time
    assert sums(balancer.candidates["a"]) == loaded
    balancer.report(LoadReport("b"), 1.0)
    assert sums(balancer.candidates["b"]) == (0, 0, 0, 0, 0)


def test_what_others_sent_there_counts_and_what_was_sent_from_here_does_not_count_twice() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    ours = [picked(balancer, exclude=("b",)) for _ in range(4)]
    before = sums(balancer.candidates["a"])
    balancer.report(LoadReport("a", running=3.0, waiting=1.0), 0.0)
    assert sums(balancer.candidates["a"]) == before
    for second in range(1, 40):
        balancer.report(LoadReport("a", running=24.0), float(second))
    assert sums(balancer.candidates["a"])[0] == pytest.approx(20.0, rel=0.01)
    for pick in ours:
        done(balancer, pick, 41.0)
    assert sums(balancer.candidates["a"])[0] == pytest.approx(20.0, rel=0.01)  # theirs go on
    assert {picked(balancer, now=42.0, rng=Random(s)).endpoint.id for s in range(4)} == {"b"}
    for second in range(42, 100):
        balancer.report(LoadReport("a", running=0.0), float(second))
    assert sums(balancer.candidates["a"]) == (0, 0, 0, 0, 0)


def test_less_than_half_a_request_of_others_is_the_delay_of_the_report() -> None:
    balancer = balancer_of(instance("a"))
    for second in range(20):
        balancer.report(LoadReport("a", running=0.4), float(second))
    assert sums(balancer.candidates["a"]) == (0, 0, 0, 0, 0)


def test_a_report_that_lags_behind_our_own_picks_never_counts_below_zero() -> None:
    balancer = balancer_of(instance("a"))
    for _ in range(10):
        picked(balancer)
    balancer.report(LoadReport("a", running=0.0), 0.0)
    assert sums(balancer.candidates["a"])[:2] == (0, 10)


# -- quotes of regions and clusters ----------------------------------------------------------------------------------


def regions(*names: str) -> Balancer:
    return balancer_of(*(region(name) for name in names), parent=())


def test_a_quote_says_what_is_under_way_there() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(busy(3),)), 0.0)
    balancer.report(LoadReport("us", servers=(idle(),)), 0.0)
    pick = picked(balancer)
    assert pick.endpoint.id == "us"
    by_hand = marginal_cost(Server.of(busy(3), 0.0), 400, 400, 100.0)
    assert term(pick, "eu", "completion_s") == pytest.approx(sum(by_hand))


def test_a_region_costs_what_its_cheapest_server_costs() -> None:
    balancer = regions("eu", "us")
    for name in ("eu", "us"):
        balancer.report(LoadReport(name, servers=(busy(3), idle(), busy(9))), 0.0)
    by_hand = marginal_cost(Server(ROUND), 400, 400, 100.0)
    assert term(picked(balancer), "eu", "completion_s") == pytest.approx(sum(by_hand))


def test_a_server_without_the_model_is_not_the_cheapest() -> None:
    balancer = regions("eu", "us")
    servers = idle(models=frozenset({"other"})), busy(3, models=frozenset({"m"}))
    balancer.report(LoadReport("eu", servers=servers), 0.0)
    balancer.report(LoadReport("us", servers=(busy(2),)), 0.0)
    assert picked(balancer, ask(model="m")).endpoint.id == "us"
    assert picked(balancer, ask(model="other")).endpoint.id == "eu"


def test_without_a_quote_load_is_unknown_and_not_zero_so_all_are_compared_by_what_was_sent() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(busy(3),)), 0.0)
    # By quotes, silent `us` would look idle and take all; by what was sent from here, both are alike.
    assert Counter(picked(balancer).endpoint.id for _ in range(20)) == {"eu": 10, "us": 10}


def test_a_quote_that_has_gone_stale_is_not_believed() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(busy(3),)), 0.0)
    balancer.report(LoadReport("us", servers=(idle(),)), 0.0)
    late = QUOTE_STALE_S - 0.01
    pick = picked(balancer, now=late)
    assert cost(pick, "eu") > cost(pick, "us") * 1.1
    done(balancer, pick, late)
    balancer.report(LoadReport("eu", servers=(busy(3),)), QUOTE_STALE_S)  # one goes on, the other is silent
    pick = picked(balancer, now=QUOTE_STALE_S)
    assert cost(pick, "eu") == cost(pick, "us")


def test_a_quote_is_as_old_as_it_says() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("us", servers=(idle(),)), 10.0)
    balancer.report(LoadReport("eu", servers=(busy(3),), age_s=QUOTE_STALE_S + 0.1), 10.0)
    pick = picked(balancer, now=10.0)
    assert cost(pick, "eu") == cost(pick, "us")


def test_between_quotes_picks_are_added_to_what_was_quoted() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(idle(),)), 0.0)
    balancer.report(LoadReport("us", servers=(idle(),)), 0.0)
    assert Counter(picked(balancer, now=0.1).endpoint.id for _ in range(40)) == {"eu": 20, "us": 20}


def test_the_same_request_at_the_same_moment_sees_what_was_chosen_and_quoted_meanwhile() -> None:
    balancer, request = regions("eu", "us"), ask()
    for name in ("eu", "us"):
        balancer.report(LoadReport(name, servers=(idle(),)), now=1.0)
    first, second = picked(balancer, request, now=1.0), picked(balancer, request, now=1.0)
    assert {first.endpoint.id, second.endpoint.id} == {"eu", "us"}
    balancer.report(LoadReport(first.endpoint.id, servers=(busy(30),)), now=1.0)
    third = picked(balancer, request, now=1.0)
    assert third.endpoint.id == second.endpoint.id
    costs = dict(zip(third.candidates, third.totals, strict=True))
    assert costs[first.endpoint.id] > costs[second.endpoint.id] > 0.0


def test_picks_that_a_new_quote_cannot_contain_yet_are_played_on_it_again() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(idle(),)), 0.0)
    balancer.round_trip("eu", 0.2, 0.0)
    for at in (1.0, 1.5, 2.0):
        picked(balancer, ask(input_tokens=300), now=at, exclude=("us",))
    quoted = lambda: (balancer.candidates["eu"].quoted[0].w, balancer.candidates["eu"].quoted[0].p)  # noqa: E731
    assert quoted() == (3, 900)
    # Made at 1.9, when the picks of 1.0 and 1.5 had arrived there: of ours only the one of 2.0 is missing.
    balancer.report(LoadReport("eu", servers=(idle(waiting=2.0, prompt_tokens=600.0),), age_s=0.1), 2.0)
    assert quoted() == (3, 900)
    # Made at 2.1: the pick of 2.0 left a round trip of 0.2 too late to be in it.
    balancer.report(LoadReport("eu", servers=(idle(waiting=2.0, prompt_tokens=600.0),)), 2.1)
    assert quoted() == (3, 900)
    balancer.report(LoadReport("eu", servers=(idle(waiting=3.0, prompt_tokens=900.0),)), 2.3)
    assert quoted() == (3, 900)


def test_a_quote_replaces_what_was_thought_and_releases_do_not_touch_it() -> None:
    balancer = regions("eu")
    balancer.report(LoadReport("eu", servers=(idle(),)), 0.0)
    pick = picked(balancer, now=1.0)
    balancer.report(LoadReport("eu", servers=(busy(5),)), 2.0)
    assert balancer.candidates["eu"].quoted[0].n == 5
    done(balancer, pick, 2.5)
    assert balancer.candidates["eu"].quoted[0].n == 5  # nothing is drained from a quote by guessing
    assert sums(balancer.candidates["eu"]) == (0, 0, 0, 0, 0)


def test_picks_kept_for_replay_are_bounded() -> None:
    balancer = balancer_of(region("eu"), region("us"), parent=(), limits=Limits(max_in_flight=10**6))
    balancer.report(LoadReport("eu", servers=(idle(),)), 0.0)
    for _ in range(SENT_KEPT + 10):
        done(balancer, picked(balancer, now=1.0, exclude=("us",)), 1.0)
    assert len(balancer.candidates["eu"].sent) == SENT_KEPT


def test_a_region_that_quotes_nothing_takes_nothing_until_it_quotes_again() -> None:
    balancer = regions("eu", "us")
    balancer.report(LoadReport("eu", servers=(busy(1),)), 0.0)
    balancer.report(LoadReport("us", servers=(busy(9),)), 0.0)
    balancer.report(LoadReport("eu"), 1.0)
    assert picked(balancer, now=1.0).endpoint.id == "us"
    balancer.report(LoadReport("us"), 1.0)
    assert balancer.pick(ask(), 1.0, Random(1)) == Shed("no_endpoints", 1.0)
    balancer.report(LoadReport("eu", servers=(busy(1),)), 2.0)
    assert picked(balancer, now=2.0).endpoint.id == "eu"


def test_a_fleet_that_changes_keeps_what_is_under_way() -> None:
    balancer = balancer_of(region("eu", ("h100", 2)), parent=())
    pick = picked(balancer)
    total = sums(balancer.candidates["eu"])[1] * 2
    balancer.update(Pool((), (region("eu", ("h100", 4), ("l4", 1)),)), 1.0)
    h100, l4 = balancer.candidates["eu"].own
    assert (h100.count * h100.w, l4.w) == (total, 0.0)
    done(balancer, pick, 2.0)
    assert sums(balancer.candidates["eu"]) == (0, 0, 0, 0, 0)


# -- learning --------------------------------------------------------------------------------------------------------


def served(balancer: Balancer, ttft_s: float, decode_s: float, times: int, **request: object) -> None:
    """One request after the other, each with its first token and its end after so long."""
    for _ in range(times):
        pick = picked(balancer, ask(**request))  # type: ignore[arg-type]
        if request.get("stream", True):
            balancer.first_token(pick.reservation, ttft_s)
        done(balancer, pick, ttft_s + decode_s, Outcome.SUCCESS, output_tokens=100)


def test_an_instance_that_takes_twice_as_long_is_predicted_to() -> None:
    balancer = balancer_of(instance("a", capacity=ROUND))
    first = picked(balancer)
    done(balancer, first)
    assert first.predicted_ttft_s is not None
    assert first.predicted_total_s is not None
    prefill_s, decode_s = first.predicted_ttft_s, first.predicted_total_s - first.predicted_ttft_s
    served(balancer, prefill_s * 2, decode_s * 2, 150)
    later = picked(balancer)
    assert later.predicted_total_s == pytest.approx(first.predicted_total_s * 2, rel=0.1)


def test_an_answer_in_one_piece_teaches_the_time_per_token() -> None:
    balancer = balancer_of(instance("a", capacity=ROUND))
    served(balancer, 0.0, 4.1, 100, stream=False)
    assert balancer.candidates["a"].own[0].speed.alpha_s == pytest.approx(ROUND.alpha_s * 4, rel=0.2)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.IGNORED, Outcome.OVERLOADED])
def test_what_did_not_succeed_teaches_no_speed(outcome: Outcome) -> None:
    balancer = balancer_of(instance("a", capacity=ROUND), limits=Limits(eject_after=1_000))
    for at in range(0, 2_000, 100):
        pick = picked(balancer, now=float(at))
        balancer.first_token(pick.reservation, at + 50.0)
        done(balancer, pick, at + 90.0, outcome, output_tokens=100)
    assert balancer.candidates["a"].own[0].speed == ROUND


@pytest.mark.parametrize("tokens", [None, 0, 7])
def test_an_answer_too_short_or_uncounted_teaches_no_time_per_token(tokens: float | None) -> None:
    balancer = balancer_of(instance("a", capacity=ROUND))
    for _ in range(20):
        pick = picked(balancer)
        balancer.first_token(pick.reservation, 0.05)
        done(balancer, pick, 90.0, Outcome.SUCCESS, output_tokens=tokens)
    # Its first token, at the time it should come, is all that was seen of it; not the ninety seconds.
    assert balancer.candidates["a"].own[0].speed.alpha_s == pytest.approx(ROUND.alpha_s, rel=0.05)


def test_equals_share_evenly_while_their_speed_is_learned() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    rng, shares = Random(1), Counter[str]()
    for second in range(400):
        pick = picked(balancer, now=float(second), rng=rng)
        shares[pick.endpoint.id] += 1
        balancer.first_token(pick.reservation, second + 0.015)  # a little faster than predicted
        done(balancer, pick, second + 0.7, Outcome.SUCCESS, output_tokens=100)
    assert 140 <= shares["a"] <= 260


# -- quoting upwards -------------------------------------------------------------------------------------------------


def test_a_quote_lists_what_takes_work_with_what_is_under_way() -> None:
    balancer = balancer_of(
        instance("a", models=frozenset({"m"}), price_usd_per_hour=2.0),
        instance("b", phase=Phase.DRAINING),
        instance("c", gpu="l4", models=frozenset({"n"})),
        instance("d"),
    )
    done(balancer, picked(balancer, exclude=("a", "c")), 0.0, Outcome.FAILED, unreachable=True)
    picked(balancer, ask(model="m"), exclude=("c",))
    a, c = balancer.quote(1.0)
    assert (a.gpu, a.count, a.waiting, a.prompt_tokens, a.remaining_tokens) == ("h100", 1, 1, 400, 100)
    assert (a.models, a.price_usd_per_hour) == (frozenset({"m"}), 2.0)
    assert a.prefill_share > 0
    assert (c.gpu, c.waiting, c.models) == ("l4", 0, frozenset({"n"}))


def test_a_region_passes_on_fresh_quotes_and_its_own_count_of_silent_clusters() -> None:
    balancer = balancer_of(region("c1"), region("c2", ("l4", 3)), parent=("eu",))
    balancer.report(LoadReport("c1", servers=(busy(2), busy(3))), 0.0)
    picked(balancer, exclude=("c1",))
    one, two, silent = balancer.quote(1.0)
    assert (one.decoding, two.decoding) == (2, 3)
    assert (silent.gpu, silent.count) == ("l4", 3)
    assert silent.waiting == pytest.approx(1 / 3)
    assert [load.gpu for load in balancer.quote(QUOTE_STALE_S + 1.0)] == ["h100", "l4"]


def test_a_long_quote_shrinks_to_the_mean_of_each_class() -> None:
    pool = [instance(f"i{n:02}", gpu="l4" if n % 4 == 0 else "h100") for n in range(QUOTE_INSTANCES + 1)]
    balancer = balancer_of(*pool)
    for _ in range(30):
        picked(balancer)
    full = [s.load(1.0) for c in balancer.candidates.values() for s in c.own]
    quote = {load.gpu: load for load in balancer.quote(1.0)}
    assert {gpu: load.count for gpu, load in quote.items()} == {"l4": 5, "h100": 12}
    for gpu, load in quote.items():
        those = [x for x in full if x.gpu == gpu]
        assert load.waiting * load.count == pytest.approx(sum(x.waiting for x in those))
        assert load.prompt_tokens * load.count == pytest.approx(sum(x.prompt_tokens for x in those))
        assert load.speed.alpha_s == pytest.approx(CLASS_SPEED[gpu].alpha_s)


def test_as_many_as_a_quote_lists_are_listed() -> None:
    assert len(balancer_of(*(instance(f"i{n}") for n in range(QUOTE_INSTANCES))).quote(0.0)) == QUOTE_INSTANCES


def test_means_weigh_by_count_and_keep_models_apart() -> None:
    m, n = frozenset({"m"}), frozenset({"n"})
    loads = (
        ServerLoad(ROUND, "h100", 1, decoding=8.0, models=m, price_usd_per_hour=1.0),
        ServerLoad(replace(ROUND, alpha_s=0.05, slots=8.0), "h100", 3, decoding=4.0, models=m, price_usd_per_hour=5.0),
        ServerLoad(ROUND, "h100", 1, decoding=1.0, models=n),
    )
    of_m, of_n = class_means(loads)
    assert (of_m.count, of_m.decoding, of_m.price_usd_per_hour, of_m.models) == (4, 5.0, 4.0, m)
    assert (of_m.speed.alpha_s, of_m.speed.slots) == (pytest.approx(0.04), 7.0)
    assert (of_n.count, of_n.decoding, of_n.models) == (1, 1.0, n)
    assert class_means(()) == ()


# -- whatever happens ------------------------------------------------------------------------------------------------

NAMES = "abcd"


class Life(RuleBasedStateMachine):
    """Any order of updates, reports, picks, first tokens, releases and restarts: the books always balance."""

    running = Bundle("running")
    parent: Path = CLUSTER

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rng = Random(1)
        self.balancer = Balancer(self.parent, predicted_completion(), Limits(max_in_flight=5, eject_after=2))
        self.held: dict[int, str] = {}
        self.update(set(NAMES), 0, 1)

    def endpoint(self, name: str, boot: int, size: int) -> Endpoint:
        fleet = (("h100", size), ("l4", 1))
        models = frozenset({"m", "n"}) if name == "a" else frozenset({"m"})
        return Endpoint(name, gpu="h100", models=models, boot=str(boot), fleet=fleet if len(self.parent) < 2 else ())

    @rule(names=st.sets(st.sampled_from(NAMES)), boot=st.integers(0, 2), size=st.integers(1, 3))
    def update(self, names: set[str], boot: int, size: int) -> None:
        pool = tuple(self.endpoint(name, boot, size) for name in sorted(names))
        self.balancer.update(Pool(self.parent, pool), self.now)

    @rule(name=st.sampled_from(NAMES), running=st.none() | st.floats(0, 30), age_s=st.floats(0, 6))
    def report(self, name: str, running: float | None, age_s: float) -> None:
        servers = () if running is None else (busy(running), idle("l4", models=frozenset({"m"})))
        self.balancer.report(LoadReport(name, age_s, servers, running=running), self.now)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 3.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), seconds=st.floats(0.0, 0.5))
    def round_trip(self, name: str, seconds: float) -> None:
        self.balancer.round_trip(name, seconds, self.now)

    @rule(
        target=running,
        stream=st.booleans(),
        model=st.sampled_from(["m", "n", "x", ""]),
        input_tokens=st.sampled_from([1, 333, 7_001, 10**6]),
        output_tokens=st.sampled_from([0.0, 1.0, 33.3, 1e4]),
        exclude=st.sets(st.sampled_from(NAMES), max_size=2),
        warm=st.sampled_from([(), ("eu",), ("eu", "c1", "a"), ("a", "c1", "a")]),
    )
    def pick(
        self,
        stream: bool,
        model: str,
        input_tokens: int,
        output_tokens: float,
        exclude: set[str],
        warm: Path,
    ) -> object:
        request = ask(
            stream=stream,
            model=model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            warm=warm,
            warm_tokens=200,
        )
        before = self.balancer.in_flight
        decision = self.balancer.pick(request, self.now, self.rng, exclude)
        if isinstance(decision, Shed):
            assert self.balancer.in_flight == before
            return multiple()
        assert decision.endpoint.id not in exclude
        assert not model or decision.endpoint.serves(model)
        assert cost(decision, decision.endpoint.id) <= min(s.total for s in decision.scores) * (1 + TIE_BAND) < inf
        self.held[decision.reservation.id] = decision.endpoint.id
        return decision.reservation

    @rule(reservation=running)
    def first_token(self, reservation: Reservation) -> None:
        if reservation.id in self.held:
            self.balancer.first_token(reservation, self.now)

    @rule(
        reservation=consumes(running),
        outcome=st.sampled_from(Outcome),
        tokens=st.none() | st.integers(0, 500),
        unreachable=st.booleans(),
        retry_after_s=st.none() | st.floats(0.0, 5.0),
    )
    def release(
        self,
        reservation: Reservation,
        outcome: Outcome,
        tokens: int | None,
        unreachable: bool,
        retry_after_s: float | None,
    ) -> None:
        del self.held[reservation.id]
        self.balancer.release(
            reservation,
            outcome,
            self.now,
            output_tokens=tokens,
            unreachable=unreachable,
            retry_after_s=retry_after_s,
        )
        with pytest.raises(KeyError):
            self.balancer.release(reservation, outcome, self.now)

    @rule()
    def quote(self) -> None:
        for load in self.balancer.quote(self.now):
            assert load.count >= 1
            assert 0.0 <= load.prefill_share <= 0.9

    @invariant()
    def every_request_is_counted_once(self) -> None:
        there, gone = self.balancer.candidates, self.balancer._gone
        assert self.balancer.in_flight == len(self.held)
        assert there.keys().isdisjoint(gone)
        counts = Counter(self.held.values())
        for name, candidate in (*there.items(), *gone.items()):
            assert candidate.in_flight == counts.pop(name, 0)
            assert name in there or candidate.in_flight > 0  # what is gone and empty is forgotten
        assert not counts

    @invariant()
    def sums_are_what_is_held(self) -> None:
        for candidate in (*self.balancer.candidates.values(), *self.balancer._gone.values()):
            ours = [h for h in self.balancer._held.values() if h.server in candidate.own]
            theirs = candidate.foreign_seen
            n, w, p, k, r = (
                sum(getattr(s, name) * s.count for s in candidate.own) for name in ("n", "w", "p", "k", "r")
            )
            assert n == pytest.approx(sum(h.decoding for h in ours) + theirs, abs=1e-6)
            assert w == pytest.approx(sum(not h.decoding for h in ours), abs=1e-6)
            assert p == pytest.approx(sum(h.prompt for h in ours if not h.decoding), abs=1e-3)
            held_context = sum(h.context for h in ours if h.decoding)
            assert k == pytest.approx(held_context + theirs * FOREIGN_CONTEXT_TOKENS, abs=1e-3)
            assert r == pytest.approx(sum(h.output for h in ours) + theirs * FOREIGN_REST_TOKENS, abs=1e-3)
            if not candidate.in_flight and not theirs:
                assert (n, w, p, k, r) == (0, 0, 0, 0, 0)

    def teardown(self) -> None:
        for id_, name in list(self.held.items()):
            self.balancer.release(Reservation(id_, name, self.parent), Outcome.IGNORED, self.now)
        self.held.clear()
        self.every_request_is_counted_once()
        self.sums_are_what_is_held()
        assert self.balancer._held == {}
        assert self.balancer._gone == {}
        assert self.balancer._unseen == []


class LifeOfRegions(Life):
    """The same of a stage whose endpoints quote."""

    parent = ()


bounds = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLife = Life.TestCase
TestLife.settings = bounds
TestLifeOfRegions = LifeOfRegions.TestCase
TestLifeOfRegions.settings = bounds


# -- other balancers of the same cluster -----------------------------------------------------------------------------


def two_balancers() -> tuple[Balancer, Balancer]:
    one, other = (balancer_of(instance("a"), instance("b")) for _ in range(2))
    one.replicas(["other"], 0.0)
    other.replicas(["one"], 0.0)
    return one, other


def test_what_another_balancer_tells_counts_as_if_it_were_here() -> None:
    one, other = two_balancers()
    for _ in range(6):
        picked(one, exclude=("b",))
    other.hear("one", one.tell(1.0), 1.0)
    assert {picked(other, now=1.0).endpoint.id for _ in range(5)} == {"b"}
    assert other.tell(1.0).keys() == {"b"}  # what it heard it does not tell


def test_all_that_was_told_is_taken_back_when_it_is_over() -> None:
    one, other = two_balancers()
    picks = [picked(one) for _ in range(6)]
    other.hear("one", one.tell(1.0), 1.0)
    for pick in picks:
        done(one, pick, 2.0)
    other.hear("one", one.tell(2.0), 2.0)
    for candidate in other.candidates.values():
        assert sums(candidate) == pytest.approx((0, 0, 0, 0, 0), abs=1e-9)


def test_a_balancer_that_falls_silent_is_forgotten_and_counted_as_a_copy_while_it_lives() -> None:
    one, other = two_balancers()
    for _ in range(6):
        picked(one)
    other.hear("one", one.tell(1.0), 1.0)
    assert other.candidates["a"].server.copies == 1.0
    picked(other, now=1.0 + HEARD_S + LOOK_EVERY_S)
    assert other.candidates["a"].server.copies == 2.0  # it lives and tells nothing: as busy as we are
    assert sum(sums(c)[1] for c in other.candidates.values()) == 1
    other.replicas([], 9.0)
    assert other.candidates["a"].server.copies == 1.0


def test_what_is_heard_survives_an_idle_moment_of_our_own() -> None:
    one, other = two_balancers()
    for _ in range(4):
        picked(one, exclude=("b",))
    other.hear("one", one.tell(1.0), 1.0)
    done(other, picked(other, now=1.0, exclude=("b",)), 1.5)
    assert sums(other.candidates["a"])[1] == 4


def test_prompts_that_another_balancer_sent_are_cached_where_it_sent_them() -> None:
    one, other = two_balancers()
    blocks = tuple(range(20))
    picked(one, ask(input_tokens=10_240, prefix_hashes=blocks), exclude=("a",))
    told = one.tell_prompts(0.1)
    assert told == (0, [("b", blocks)])
    other.hear_prompts("one", told)
    assert picked(other, ask(input_tokens=10_752, prefix_hashes=(*blocks, 20)), 0.2).endpoint.id == "b"
    assert [id_ for id_, _ in other.tell_prompts(0.2)[1]] == ["b"]  # its own, and not what it heard
    assert one.tell_prompts(TOLD_S + 0.01)[1] == []


def test_a_prompt_is_heard_once_and_again_from_a_balancer_that_began_anew() -> None:
    one, other = two_balancers()
    mirror = other.candidates["b"].prefix
    for n in range(3):
        picked(one, ask(prefix_hashes=(n,)), exclude=("a",))
        other.hear_prompts("one", one.tell_prompts(0.0))
        assert list(mirror._blocks) == list(range(n + 1))
        mirror.insert((0,))  # used here since: what is told again does not make the others newer than it
        other.hear_prompts("one", one.tell_prompts(0.0))
        assert next(reversed(mirror._blocks)) == 0
        mirror._blocks.clear()
        mirror.insert(tuple(range(n, -1, -1)))
    other.hear_prompts("one", (0, [("b", (9,)), ("gone", (8,))]))
    assert 9 in mirror
    other.replicas([], 1.0)
    assert not other._prompts._heard


def test_what_is_told_of_prompts_is_bounded_and_nothing_is_kept_alone() -> None:
    alone = balancer_of(instance("a"))
    picked(alone, ask(prefix_hashes=(1,)))
    assert alone.tell_prompts(0.0)[1] == []
    one, other = two_balancers()
    for n in range(12):
        picked(one, ask(prefix_hashes=tuple(range(1000 * n, 1000 * n + 1000))))
    told = first, sent = one.tell_prompts(0.0)
    assert sum(len(hashes) for _, hashes in sent) <= TOLD_BLOCKS
    assert first + len(sent) == 12
    other.hear_prompts("one", told)
    assert sum(11_999 in c.prefix or 11_000 in c.prefix for c in other.candidates.values()) == 1


def test_prompts_of_others_do_not_make_a_server_look_slow_at_decoding() -> None:
    """Two balancers share a server; one sends it long prompts, the other sees its streams pause meanwhile."""
    one, other = (balancer_of(instance("a", capacity=ROUND)) for _ in range(2))
    for mine, theirs in ((one, "other"), (other, "one")):
        mine.replicas([theirs], 0.0)
    now = 0.0
    for _ in range(60):
        stream = picked(other, ask(input_tokens=100, output_tokens=100.0), now)
        other.first_token(stream.reservation, now + 0.02)
        long = picked(one, ask(input_tokens=5_000), now + 0.05)
        other.hear("one", one.tell(now + 0.05), now + 0.05)
        one.first_token(long.reservation, now + 0.6)
        done(one, long, now + 1.0)
        other.hear("one", one.tell(now + 0.6), now + 0.6)
        now += 2.0
        done(other, stream, now - 0.4, Outcome.SUCCESS, output_tokens=100.0)  # 100 steps of 10 ms, and the reading
        other.hear("one", one.tell(now), now)
    assert other.candidates["a"].estimates[0].speed.alpha_s < 1.15 * ROUND.alpha_s


def test_what_is_under_way_is_predicted_to_end_and_what_is_late_to_take_as_long_again() -> None:
    balancer = balancer_of(instance("a", capacity=ROUND), instance("b", capacity=ROUND))
    assert balancer.remaining_s("a", 0.0) == 0.0
    short, long = (picked(balancer, ask(output_tokens=o), exclude=("b",)) for o in (100.0, 1000.0))
    assert balancer.remaining_s("a", 0.0) == pytest.approx(long.predicted_total_s)
    assert balancer.remaining_s("b", 0.0) == 0.0
    balancer.first_token(long.reservation, 5.0)  # later than predicted: so is its end
    ends = 5.0 + (long.predicted_total_s or 0.0) - (long.predicted_ttft_s or 0.0)
    assert balancer.remaining_s("a", 5.0) == pytest.approx(ends - 5.0)
    assert balancer.remaining_s("a", ends + 3.0) >= 3.0
    for pick in (short, long):
        done(balancer, pick, ends + 3.0)
    assert balancer.remaining_s("a", ends + 3.0) == 0.0


# -- newcomers, failures, prefixes -----------------------------------------------------------------------------------


def test_a_newcomer_gets_no_more_than_twice_its_share() -> None:
    balancer = balancer_of(*(instance(f"i{n}") for n in range(9)))
    for n in range(180):
        picked(balancer, now=n / 100.0)
    balancer.update(Pool(CLUSTER, tuple(instance(f"i{n}") for n in range(10)), 2), 2.0)
    shares = Counter(picked(balancer, now=2.0 + n / 100.0).endpoint.id for n in range(200))
    assert 20 <= shares["i9"] <= 2 * 2 * 10 + 6  # two seconds, a hundred requests each, a tenth is fair


def test_what_a_process_hears_of_as_it_begins_is_no_newcomer() -> None:
    """Servers are found one by one, and a tenth of a second apart: that makes none of them new."""
    balancer = balancer_of(instance("a"))
    assert not balancer._new
    balancer.update(Pool(CLUSTER, (instance("a"), instance("b")), 2), 1.0)
    assert not balancer._new
    balancer.update(Pool(CLUSTER, (instance("a"), instance("b"), instance("c")), 3), 5.0)
    assert balancer._new == {"c"}


def test_failures_cost_share_and_are_forgiven() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(eject_after=100))
    for _ in range(5):
        done(balancer, picked(balancer, exclude=("b",)), 1.0, Outcome.FAILED)
    assert balancer.candidates["a"].handicap > 2.0
    shares = Counter()
    for _ in range(20):
        pick = picked(balancer, now=1.0)
        shares[pick.endpoint.id] += 1
        done(balancer, pick, 1.0)
    assert shares["b"] == 20
    picked(balancer, now=200.0)
    assert balancer.candidates["a"].handicap == 1.0


def test_a_cached_prefix_draws_its_follow_up_until_the_queue_costs_more() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    blocks = tuple(range(100, 120))
    first = picked(balancer, ask(input_tokens=10_240, prefix_hashes=blocks), exclude=("b",))
    done(balancer, first, 1.0)
    follow_up = ask(input_tokens=10_752, prefix_hashes=(*blocks, 7))
    for _ in range(5):
        pick = picked(balancer, follow_up, now=1.0)
        assert pick.endpoint.id == "a"
        done(balancer, pick, 1.0)
    for _ in range(60):
        picked(balancer, ask(input_tokens=2_000), now=1.0, exclude=("b",))
    balancer.candidates["b"].prefix.insert(())
    assert picked(balancer, follow_up, now=1.0).endpoint.id == "b"


def test_a_server_that_had_less_cached_than_believed_shrinks_the_mirror() -> None:
    balancer = balancer_of(instance("a"))
    mirror = balancer.candidates["a"].prefix
    before, blocks = mirror.capacity, tuple(range(8))
    done(balancer, picked(balancer, ask(input_tokens=4_096, prefix_hashes=blocks)), 1.0)
    again = picked(balancer, ask(input_tokens=4_096, prefix_hashes=blocks))
    done(balancer, again, 1.0, Outcome.SUCCESS, output_tokens=9, cached_tokens=0)
    assert mirror.capacity < before
    for _ in range(30):
        again = picked(balancer, ask(input_tokens=4_096, prefix_hashes=blocks))
        done(balancer, again, 1.0, Outcome.SUCCESS, output_tokens=9, cached_tokens=4_080)
    assert mirror.capacity == before


# -- what does not generate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 150_000])
def test_of_servers_that_do_not_generate_the_service_time_is_learned(size: int) -> None:
    """One serves an input of `size` in 10 ms and the other in 40 ms, one after the other; nothing else is told."""
    balancer, rng = balancer_of(instance("fast", gpu="t4"), instance("slow", gpu="t4")), Random(1)
    takes = {"fast": 0.01, "slow": 0.04}
    free_at = dict.fromkeys(takes, 0.0)
    under_way: list[tuple[float, Pick]] = []
    shares: Counter[str] = Counter()
    for i in range(2000):
        now = i * 0.009
        for at, pick in sorted((u for u in under_way if u[0] <= now), key=lambda u: u[0]):
            done(balancer, pick, at, Outcome.SUCCESS)
        under_way = [u for u in under_way if u[0] > now]
        pick = picked(balancer, ask(stream=False, input_tokens=size, output_tokens=0.0), now=now, rng=rng)
        id_ = pick.endpoint.id
        free_at[id_] = max(free_at[id_], now) + takes[id_]
        under_way.append((free_at[id_], pick))
        if i >= 1000:
            shares[id_] += 1
    assert 0.7 < shares["fast"] / 1000 < 0.97
    assert max(free_at.values()) < 18.0 + 0.5  # neither is drowned


# -- large pools -------------------------------------------------------------------------------------------------------


def large(count: int = 1000) -> Balancer:
    return balancer_of(*(instance(f"i{k}") for k in range(count)))


def test_of_a_large_pool_a_part_is_compared_and_all_get_their_share() -> None:
    balancer, rng = large(), Random(1)
    picks = [picked(balancer, rng=rng) for _ in range(3000)]
    assert {len(p.candidates) for p in picks} == {SAMPLED}
    in_flight = Counter(p.endpoint.id for p in picks)
    assert len(in_flight) == 1000
    assert max(in_flight.values()) <= 6


def test_of_a_large_pool_the_one_that_has_the_prompt_is_always_compared() -> None:
    balancer, rng = large(), Random(1)
    before = ""
    for turn in range(1, 20):
        hashes = tuple(range(turn))
        pick = picked(balancer, ask(input_tokens=turn * PREFIX_BLOCK_TOKENS, prefix_hashes=hashes), rng=rng)
        done(balancer, pick, 1.0, Outcome.SUCCESS, output_tokens=100)
        if turn > 1:
            assert pick.endpoint.id == before
        before = pick.endpoint.id
    warm = picked(balancer, ask(input_tokens=20_000, warm=(*CLUSTER, "i77"), warm_tokens=20_000), rng=rng)
    assert warm.endpoint.id == "i77"


def test_of_a_large_pool_the_last_that_can_take_it_is_found() -> None:
    balancer, rng = large(), Random(1)
    balancer.update(
        Pool(CLUSTER, (*(instance(f"i{k}", phase=Phase.DRAINING) for k in range(999)), instance("i999"))), 1.0
    )
    assert {picked(balancer, now=1.0, rng=rng).endpoint.id for _ in range(20)} == {"i999"}
