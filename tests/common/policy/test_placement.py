"""What requests need, and whom that leaves, by every policy and at every level."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.policy.balancer import Balancer, Policy
from common.policy.filters import serves_model
from common.policy.placement import CLASS_MEMORY_GB, Needs, Rule, memory_gb, placed
from common.policy.prediction import CLASS_SPEED
from common.policy.stages import POLICIES, policy_named
from common.types import Endpoint, InferenceRequest, Kind, LoadReport, Pick, Pool, Priority, Shed
from tests.common.policy.build import CLUSTER, ask, balancer_of, done, idle, instance, picked, region

EDGE, REALTIME = frozenset({"site=edge"}), frozenset({"pool=realtime"})
CRITICAL = Rule(priorities=frozenset({Priority.CRITICAL}), fastest=True)


def rule(**fields: Any) -> Rule:
    for name in ("gpus", "labels", "prefer_gpus", "prefer_labels", "avoid_gpus", "priorities"):
        if name in fields:
            fields[name] = frozenset(fields[name])
    return Rule(**fields)


def cluster_of(*endpoints: Endpoint, rules: tuple[Rule, ...], policy: str = "predicted_completion") -> Balancer:
    return balancer_of(*endpoints, policy=placed(policy_named(policy), Needs(rules)))


def chosen(balancer: Balancer, request: InferenceRequest, times: int = 20) -> set[str]:
    """Whom so many requests go to, all of them kept under way."""
    rng = Random(7)
    return {picked(balancer, request, rng=rng).endpoint.id for _ in range(times)}


# -- what rules amount to --------------------------------------------------------------------------------------------


def test_all_rules_that_speak_of_a_request_hold_together() -> None:
    needs = Needs(
        [
            rule(models=("llama-*",), min_memory_gb=24.0, gpus={"h100", "a100"}),
            rule(models=("*-70b",), min_memory_gb=80.0, gpus={"h100", "h200"}, labels={"site=edge"}),
            rule(tenants=("acme",), labels={"pool=realtime"}),
        ]
    )
    need = needs.of(ask(model="llama-70b", tenant="acme"))
    assert (need.min_memory_gb, need.gpus, need.labels) == (80.0, {"h100"}, EDGE | REALTIME)
    assert needs.of(ask(model="llama-8b")).gpus == {"h100", "a100"}
    assert not needs.of(ask(model="mistral")).hard


@pytest.mark.parametrize(
    ("of", "request_fields", "speaks"),
    [
        ({"models": ("llama-*",)}, {"model": "llama-8b"}, True),
        ({"models": ("llama-*",)}, {"model": "qwen"}, False),
        ({"models": ("*[70]b",)}, {"model": "llama-8b"}, False),
        ({"apis": ("kserve",)}, {"api": "kserve"}, True),
        ({"apis": ("kserve",)}, {"api": "openai"}, False),
        ({"operations": ("image_*", "speech")}, {"operation": "image_edit"}, True),
        ({"operations": ("image_*", "speech")}, {"operation": "chat"}, False),
        ({"tenants": ("a?",)}, {"tenant": "ab"}, True),
        ({"tenants": ("a?",)}, {"tenant": ""}, False),
        ({"priorities": {Priority.CRITICAL}}, {"priority": Priority.CRITICAL}, True),
        ({"priorities": {Priority.CRITICAL}}, {"priority": Priority.BATCH}, False),
        ({}, {}, True),
    ],
)
def test_whom_a_rule_speaks_of(of: dict[str, Any], request_fields: dict[str, Any], speaks: bool) -> None:
    assert rule(**of).speaks_of(ask(**request_fields)) is speaks


def test_the_same_need_has_the_same_number_and_another_one_another() -> None:
    needs = Needs([rule(models=("big",), gpus={"h100"}), rule(priorities={Priority.CRITICAL}, labels=EDGE)])
    assert needs.key(ask(model="big")) == needs.key(ask(model="big", tenant="t"))
    assert needs.key(ask(model="small")) == "small"
    keys = {needs.key(ask(model=m, priority=p)) for m in ("big", "small") for p in Priority}
    assert len(keys) == 4


def test_memory_is_known_or_its_class_and_never_made_up() -> None:
    assert memory_gb(Kind("h100", 160.0)) == 160.0
    assert memory_gb(Kind("h100")) == 80.0
    assert memory_gb(Kind("a100")) == 40.0  # of the two that are sold
    assert memory_gb(Kind("nobody-knows")) == 0.0
    assert CLASS_MEMORY_GB.keys() >= CLASS_SPEED.keys() - {"cpu"}


# -- hard needs ------------------------------------------------------------------------------------------------------

POOL = (
    instance("big", "h100"),
    instance("edge", "l4", labels=EDGE),
    instance("pair", "l4", memory_gb=48.0),
    instance("rt", "h100", labels=REALTIME),
    instance("what", ""),
)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("of", "left"),
    [
        ({"min_memory_gb": 40.0}, {"big", "pair", "rt"}),
        ({"gpus": {"l4"}}, {"edge", "pair"}),
        ({"labels": EDGE}, {"edge"}),
        ({"gpus": {"h100"}, "min_memory_gb": 80.0, "labels": REALTIME}, {"rt"}),
    ],
)
def test_every_policy_honours_what_is_needed(name: str, of: dict[str, Any], left: set[str]) -> None:
    balancer = cluster_of(*POOL, rules=(rule(**of),), policy=name)
    assert chosen(balancer, ask()) <= left


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_dedicated_serves_nobody_else(name: str) -> None:
    pinned = rule(operations=("speech",), labels=REALTIME, exclusive=True)
    balancer = cluster_of(*POOL, rules=(pinned,), policy=name)
    assert chosen(balancer, ask(operation="speech")) == {"rt"}
    assert "rt" not in chosen(balancer, ask(operation="chat"), 40)


def test_nobody_who_meets_the_need_is_said_as_that() -> None:
    balancer = cluster_of(instance("i", "l4", models=frozenset({"m"})), rules=(rule(gpus={"h100"}),))
    refused = balancer.pick(ask(), 0.0, Random(1))
    assert isinstance(refused, Shed)
    assert (refused.reason, refused.removed[0].filter, refused.removed[0].endpoints) == (
        "no_placement",
        "meets_need",
        ("i",),
    )
    unknown = balancer.pick(ask(model="other"), 0.0, Random(1))
    assert isinstance(unknown, Shed)
    assert unknown.reason == "model_not_found"


def test_lists_are_remembered_by_need_and_made_anew_with_the_pool() -> None:
    """The same model with another priority must not get the other's remembered list."""
    rules = (rule(priorities={Priority.CRITICAL}, gpus={"h100"}), rule(priorities={Priority.BATCH}, gpus={"l4"}))
    balancer = cluster_of(instance("a", "h100"), instance("b", "l4"), rules=rules)
    for _ in range(3):
        assert chosen(balancer, ask(priority=Priority.CRITICAL), 3) == {"a"}
        assert chosen(balancer, ask(priority=Priority.BATCH), 3) == {"b"}
    balancer.update(Pool(CLUSTER, (instance("a", "l4"), instance("b", "h100")), 2), 1.0)
    assert chosen(balancer, ask(priority=Priority.CRITICAL), 3) == {"b"}
    assert chosen(balancer, ask(priority=Priority.BATCH), 3) == {"a"}


def test_a_sampled_pool_honours_needs_for_warm_ones_too() -> None:
    many = [instance(f"i{n:03d}", "l4" if n % 2 else "h100") for n in range(400)]
    balancer = cluster_of(*many, rules=(rule(models=("m",), gpus={"h100"}),))
    warm = replace(ask(session="s"), warm=(*CLUSTER, "i001"), warm_tokens=400)
    for _ in range(50):
        assert picked(balancer, warm).endpoint.gpu == "h100"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("h100", "l4", "t4", "")),
            st.none() | st.floats(1.0, 200.0),
            st.sets(st.sampled_from(("site=edge", "pool=realtime"))),
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(
        st.builds(
            rule,
            priorities=st.sets(st.sampled_from(Priority)),
            min_memory_gb=st.sampled_from((0.0, 24.0, 80.0)),
            gpus=st.sets(st.sampled_from(("h100", "l4", "t4"))),
            labels=st.sets(st.sampled_from(("site=edge", "pool=realtime"))),
            exclusive=st.booleans(),
            prefer_gpus=st.sets(st.sampled_from(("h100", "t4"))),
            fastest=st.booleans(),
        ),
        max_size=3,
    ),
    st.sampled_from(tuple(POLICIES)),
    st.sampled_from(Priority),
)
def test_whoever_is_picked_meets_the_need_and_somebody_is_if_anybody_does(
    servers: list[tuple[str, float | None, set[str]]], rules: list[Rule], policy: str, priority: Priority
) -> None:
    endpoints = tuple(
        instance(f"i{n}", gpu, memory_gb=memory, labels=frozenset(labels))
        for n, (gpu, memory, labels) in enumerate(servers)
    )
    balancer = cluster_of(*endpoints, rules=tuple(rules), policy=policy)
    request = ask(priority=priority)
    mine = [r for r in rules if not r.priorities or priority in r.priorities]
    pins = frozenset[str]().union(*(r.labels for r in mine))
    closed = [r.labels for r in rules if r.exclusive and r.labels and r not in mine and not r.labels <= pins]

    def meets(e: Endpoint) -> bool:
        size = e.memory_gb if e.memory_gb is not None else CLASS_MEMORY_GB.get(e.gpu, 0.0)
        return all(
            size >= r.min_memory_gb and (not r.gpus or e.gpu in r.gpus) and r.labels <= e.labels for r in mine
        ) and not any(labels <= e.labels for labels in closed)

    fit = {e.id for e in endpoints if meets(e)}
    decision = balancer.pick(request, 0.0, Random(3))
    assert isinstance(decision, Pick) == bool(fit)
    if isinstance(decision, Pick):
        assert decision.endpoint.id in fit
        assert not any(isnan(total) for total in decision.totals)


# -- preferences -----------------------------------------------------------------------------------------------------


def test_a_preference_is_worth_its_seconds_and_no_more() -> None:
    rules = (rule(models=("m",), prefer_labels=EDGE, prefer_s=8.0),)
    balancer = cluster_of(instance("cloud", "h100"), instance("edge", "l4", labels=EDGE), rules=rules)
    assert picked(balancer).endpoint.id == "edge"  # a slower one, and yet
    assert picked(balancer, ask(model="other")).endpoint.id == "cloud"
    gone = set()
    for _ in range(300):
        gone.add(picked(balancer).endpoint.id)
    assert gone == {"edge", "cloud"}  # until waiting there costs more than it is worth
    pick = picked(balancer)
    assert "placement_s" in pick.terms


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in ("predicted_completion", "earliest_completion")])
def test_policies_that_count_otherwise_take_the_preferred_while_one_is_free(name: str) -> None:
    rules = (rule(prefer_labels=EDGE),)
    slots = int(CLASS_SPEED["l4"].slots)
    balancer = cluster_of(instance("cloud", "h100"), instance("edge", "l4", labels=EDGE), rules=rules, policy=name)
    assert chosen(balancer, ask(), slots) == {"edge"}
    full = {picked(balancer, ask(id=f"{n:032x}")).endpoint.id for n in range(20)}  # each its own, for what hashes
    assert "cloud" in full


@pytest.mark.parametrize("name", POLICIES)
def test_a_preference_that_nobody_meets_rules_nobody_out(name: str) -> None:
    balancer = cluster_of(instance("a", "l4"), instance("b", "t4"), rules=(rule(prefer_gpus={"h200"}),), policy=name)
    assert chosen(balancer, ask(), 3) <= {"a", "b"}


@pytest.mark.parametrize("name", POLICIES)
def test_small_models_stay_off_big_gpus_unless_idle(name: str) -> None:
    small = rule(models=("small",), avoid_gpus={"h100"}, prefer_s=30.0)
    balancer = cluster_of(instance("big", "h100"), instance("small", "l4"), rules=(small,), policy=name)
    work = picked(balancer, ask(model="large"), exclude=("small",))  # the big one has something to do
    assert chosen(balancer, ask(model="small"), 10) == {"small"}
    done(balancer, work)
    # Idle, it may help: by least connections it is its turn now.
    if name in ("least_connections", "predicted_completion", "weighted_least_connections", "least_work_left"):
        assert picked(balancer, ask(model="small")).endpoint.id == "big"


def test_critical_ones_go_to_the_fastest_that_is_free() -> None:
    servers = (instance("h200", "h200"), instance("h100", "h100"), instance("l4", "l4"))
    balancer = cluster_of(*servers, rules=(CRITICAL,))
    critical = ask(priority=Priority.CRITICAL, input_tokens=200, output_tokens=100.0)
    for _ in range(25):  # under way there, so that a standard request would rather not delay them
        work = picked(balancer, ask(output_tokens=400.0), exclude=("h100", "l4"))
        balancer.first_token(work.reservation, 0.0)
    assert picked(balancer, ask(input_tokens=200, output_tokens=100.0)).endpoint.id == "h100"
    assert picked(balancer, critical).endpoint.id == "h200"
    for _ in range(200):  # and now its batch is full, with a queue before it
        picked(balancer, ask(output_tokens=400.0), exclude=("h100", "l4"))
    assert picked(balancer, critical).endpoint.id == "h100"


@pytest.mark.parametrize("name", ["least_connections", "round_robin", "power_of_two", "model_aware"])
def test_critical_ones_go_to_the_fastest_that_is_free_by_any_policy(name: str) -> None:
    balancer = cluster_of(instance("h200", "h200"), instance("l4", "l4"), rules=(CRITICAL,), policy=name)
    critical = ask(priority=Priority.CRITICAL)
    assert chosen(balancer, critical, 100) == {"h200"}
    for _ in range(60):
        picked(balancer, exclude=("l4",))
    assert picked(balancer, critical).endpoint.id == "l4"


# -- adapters --------------------------------------------------------------------------------------------------------

BASE = frozenset({"base"})
HAS = instance("has", "l4", models=BASE | {"french"})
LOADS = instance("loads", "l4", models=BASE, loadable=frozenset({"french"}))
CANNOT = instance("cannot", "h100", models=BASE)


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_for_an_adapter_goes_where_it_is_or_can_be_loaded(name: str) -> None:
    balancer = cluster_of(HAS, LOADS, CANNOT, rules=(), policy=name)
    first = picked(balancer, ask(model="french"))
    assert first.endpoint.id == "has"
    assert "cannot" not in chosen(balancer, ask(model="french"), 200)
    if name not in ("hash", "prefix_affinity"):
        assert "loads" in chosen(balancer, ask(model="french"), 200)  # when the one that has it is busy
    alone = cluster_of(LOADS, CANNOT, rules=(), policy=name)
    assert chosen(alone, ask(model="french"), 5) == {"loads"}


def test_loading_has_its_price() -> None:
    balancer = cluster_of(HAS, replace(LOADS, gpu="h100"), rules=())
    pick = picked(balancer, ask(model="french"))
    assert dict(pick.columns)["adapter_s"] == [0.0, 1.0]
    plain = cluster_of(HAS, CANNOT, rules=())
    assert "adapter_s" not in picked(plain, ask(model="base")).terms


# -- regions and clusters --------------------------------------------------------------------------------------------


def above(*kinds: Kind, id_: str, fleet: tuple[tuple[str, int], ...]) -> Endpoint:
    return region(id_, *fleet, kinds=kinds)


def test_a_cluster_qualifies_by_what_is_below_it() -> None:
    m = frozenset({"m"})
    mixed = above(
        Kind("l4", None, EDGE, m), Kind("h100", None, frozenset(), m), id_="mixed", fleet=(("h100", 1), ("l4", 1))
    )
    small = above(Kind("l4", None, frozenset(), m), id_="small", fleet=(("l4", 4),))
    other = above(Kind("h100", None, EDGE, frozenset({"x"})), id_="other", fleet=(("h100", 1),))

    def left(**of: Any) -> set[str]:
        policy = placed(policy_named("round_robin"), Needs([rule(**of)]))
        balancer = balancer_of(mixed, small, other, parent=("eu",), policy=policy)
        decisions = [balancer.pick(ask(), 0.0, Random(n)) for n in range(8)]
        return {d.endpoint.id for d in decisions if isinstance(d, Pick)}

    assert left(gpus={"h100"}) == {"mixed"}
    assert left(min_memory_gb=20.0) == {"mixed", "small"}
    assert left(labels=EDGE) == {"mixed"}
    assert left(labels=EDGE, gpus={"h100"}) == set()  # there is each, but no single instance that is both


def test_a_cluster_is_priced_by_the_servers_that_may_serve() -> None:
    """What is idle and of the wrong class says nothing of the wait."""
    mixed = region("mixed", ("h100", 1), ("l4", 1))
    plain = region("plain", ("h100", 1))
    policy = placed(policy_named("predicted_completion"), Needs([rule(models=("m",), gpus={"h100"})]))
    balancer = balancer_of(mixed, plain, parent=("eu",), policy=policy)
    busy = idle("h100", CLASS_SPEED["h100"], decoding=200.0, waiting=60.0, prompt_tokens=9e5, context_tokens=4e5)
    busy = replace(busy, remaining_tokens=1e5)
    balancer.report(LoadReport("mixed", servers=(busy, idle("l4", CLASS_SPEED["l4"]))), 0.0)
    balancer.report(LoadReport("plain", servers=(replace(busy, waiting=30.0, prompt_tokens=4e5),)), 0.0)
    assert picked(balancer).endpoint.id == "plain"
    assert picked(balancer, ask(model="free")).endpoint.id == "mixed"


def test_a_quote_without_the_class_is_no_prompt_that_is_too_large() -> None:
    mixed = region("mixed", ("h100", 1), ("l4", 1))
    policy = placed(policy_named("predicted_completion"), Needs([rule(gpus={"h100"})]))
    balancer = balancer_of(mixed, region("gone", ("h100", 1)), parent=("eu",), policy=policy)
    balancer.report(LoadReport("mixed", servers=(idle("l4"),)), 0.0)
    balancer.report(LoadReport("gone", servers=()), 0.0)
    refused = balancer.pick(ask(), 0.0, Random(1))
    assert isinstance(refused, Shed)
    assert refused.reason == "no_endpoints"


# -- without rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_without_rules_a_policy_is_what_it_was(name: str) -> None:
    policy = policy_named(name)
    same = placed(policy, Needs([]))
    assert (same.filters, same.scorers, same.needs) == (policy.filters, policy.scorers, None)
    assert placed(policy, None) == same


def test_the_first_filter_still_goes_by_the_model() -> None:
    policy: Policy = placed(policy_named("predicted_completion"), Needs([CRITICAL]))
    balancer = balancer_of(instance("a", models=frozenset({"m"})), policy=policy)
    everyone = list(balancer.candidates.values())
    assert policy.filters[0](ask(), everyone, 0.0) == serves_model(ask(), everyone, 0.0) == everyone
    assert policy.filters[0](ask(model="x"), everyone, 0.0) == []
    assert "placement_s" not in picked(balancer).terms


def test_other_rules_hold_from_the_next_choice_on() -> None:
    policy = policy_named("round_robin")
    balancer = balancer_of(instance("a", gpu="h100"), instance("b", gpu="l4"), policy=placed(policy, Needs([])))
    for needs, allowed in (
        (Needs([rule(gpus={"l4"})]), {"b"}),
        (Needs([rule(gpus={"h100"})]), {"a"}),
        (Needs([]), {"a", "b"}),
    ):
        balancer.reconfigure(placed(policy, needs), balancer.limits)
        assert {picked(balancer, ask(), rng=Random(n)).endpoint.id for n in range(8)} == allowed
