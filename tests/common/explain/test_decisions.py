from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from common.explain.decisions import Decision, decision_of
from common.records import Ending
from common.types import Pick, Removed, Shed
from tests.common.build import BEGAN, TRACE, attempt, record, stage
from tests.common.explain.build import AT, answered, pool
from tests.common.policy.build import ask, picked


def round_trip(decision: Decision) -> Decision:
    return msgspec.json.decode(msgspec.json.encode(decision), type=Decision)


def test_a_decision_says_what_was_asked_chosen_tried_and_seen():
    balancer = pool("a", "b")
    d = round_trip(decision_of(answered(balancer, ask(output_tokens=30.0)), {balancer.parent: balancer}))
    assert (d.id, d.process, d.tier, d.node, d.model) == (TRACE, "eu-1", "instance", "eu/c1", "m")
    assert d.features is not None
    assert (d.features.input_tokens, d.features.output_tokens, d.features.stream) == (400, 30.0, True)
    (s,) = d.stages
    assert (s.node, s.chooses, s.policy, s.unit, s.pool_size) == ("eu/c1", "instance", "predicted_completion", "s", 2)
    assert {c.id for c in s.candidates} == {"a", "b"}
    assert [c.id for c in s.candidates if c.chosen] == [s.chosen]
    assert s.runner_up in {"a", "b"} - {s.chosen}
    assert s.margin == 0.0
    assert s.predicted_ttft_s is not None
    assert s.seen_ttft_s == pytest.approx(0.49)
    assert s.seen_total_s == pytest.approx(1.99)
    (a,) = d.attempts
    assert (a.target, a.status, a.at_s, a.took_s) == (
        f"eu/c1/{s.chosen}",
        200,
        pytest.approx(0.02),
        pytest.approx(1.97),
    )
    assert (d.outcome.status, d.outcome.ending, d.outcome.served_by) == (200, "complete", f"eu/c1/{s.chosen}")


def test_each_term_is_given_as_computed_and_as_it_counts():
    cheap = stage(("eu",), "c1", {"c1": 0.5, "c2": 0.7})
    cheap.pick = cheap.pick._replace(columns=(("completion_s", [0.4, 0.6]), ("price_usd", [1e-5, 1e-5])))
    cheap.scorers = (("completion_s", 1.0, None), ("price_usd", 1e4, None))
    (s,) = decision_of(record(stages=[cheap]), {}).stages
    assert s.candidates[0].terms == {"completion_s": 0.4, "price_usd": 1e-5}
    assert s.candidates[0].adds == {"completion_s": 0.4, "price_usd": 0.1}
    assert s.margin == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("costs", "chosen", "why", "margin"),
    [
        ({"c1": 1.0}, "c1", "only_candidate", None),
        ({"c1": 1.0, "c2": 2.0}, "c1", "lowest_cost", 1.0),
        ({"c1": 1.0, "c2": 0.97}, "c1", "about_equal", pytest.approx(-0.03)),
        ({"c1": 1.0, "c2": math.inf}, "c1", "lowest_cost", None),
    ],
)
def test_why_it_was_this_one(costs, chosen, why, margin):
    (s,) = round_trip(decision_of(record(stages=[stage(("eu",), chosen, costs)]), {})).stages
    assert (s.why, s.margin) == (why, margin)


def test_a_session_is_the_reason_where_it_was_served_before():
    balancer = pool("a", "b")
    request = ask(warm=("eu", "c1", "b"), warm_tokens=350, input_tokens=400)
    (s,) = decision_of(answered(balancer, request), {}).stages
    assert (s.chosen, s.why) == ("b", "session")


def test_who_was_left_out_and_why():
    """By a filter as noted then; of those that do not serve the model, from what is known of them now."""
    balancer = pool("a", "b", "c")
    balancer.candidates["b"].in_flight = balancer.candidates["b"].max_in_flight
    balancer.candidates["c"].endpoint = replace(balancer.candidates["c"].endpoint, models=frozenset({"other"}))
    balancer._serving.clear()
    balancer._qualified.clear()
    r = answered(balancer)
    (s,) = decision_of(r, {balancer.parent: balancer}).stages
    assert {(left.by, tuple(left.endpoints), left.count) for left in s.left_out} == {
        ("has_capacity", ("b",), 1),
        ("serves_model", ("c",), 1),
    }
    assert all(left.why for left in s.left_out)
    (alone,) = decision_of(r, {}).stages  # the pool is gone
    assert [(left.by, left.count) for left in alone.left_out] == [("has_capacity", 1), ("unknown", 1)]


def test_what_was_tried_before_is_left_out_the_second_time():
    first = stage(("eu", "c1"), "i0", {"i0": 1.0, "i1": 2.0}, pool_size=2)
    second = stage(("eu", "c1"), "i1", {"i1": 2.0}, attempt=1, pool_size=2)
    tries = [
        attempt(("eu", "c1", "i0"), status=0, error="connect_failed", first_byte_at=None),
        attempt(("eu", "c1", "i1")),
    ]
    d = decision_of(record(stages=[first, second], attempts=tries), {})
    assert d.stages[0].left_out == []
    assert [(left.by, left.endpoints) for left in d.stages[1].left_out] == [("tried_already", ["i0"])]
    assert d.stages[0].seen_total_s is None  # it came to nothing
    assert d.stages[1].seen_total_s is not None


def test_of_a_large_pool_those_that_were_not_drawn_are_counted_and_not_named():
    s = stage(("eu", "c1"), "i0", {f"i{n}": 1.0 + n for n in range(64)}, pool_size=1000)
    s.pick = s.pick._replace(removed=(Removed("not_ejected", 20, tuple(f"gone{n}" for n in range(16))),))
    (view,) = decision_of(record(stages=[s]), {}).stages
    assert [(left.by, left.count, len(left.endpoints)) for left in view.left_out] == [
        ("not_ejected", 20, 16),
        ("not_drawn", 916, 0),
    ]


def test_a_refusal_says_why():
    d = decision_of(record(ending=Ending.REFUSED, status=429, shed=Shed("saturated", 1.0), request=ask()), {})
    assert (d.shed, d.stages, d.outcome.ending) == ("saturated", [], "refused_here")
    assert [f.text for f in d.findings] == ["It was refused: every server that could take it was full."]


def test_what_is_infinite_or_unknown_is_null():
    s = stage(("eu",), "c1", {"c1": 0.5, "c2": math.inf}, predicted_ttft_s=math.inf, predicted_total_s=None)
    text = msgspec.json.encode(decision_of(record(stages=[s], first_byte_at=None, output_tokens=None), {}))
    assert b"inf" not in text.lower()
    (view,) = msgspec.json.decode(text, type=Decision).stages
    assert (view.candidates[1].cost, view.predicted_ttft_s, view.predicted_total_s) == (None, None, None)


def test_nothing_in_it_is_a_clients_long_text():
    assert len(decision_of(record(model="x" * 10_000), {}).model) == 200


def test_it_is_made_of_the_record_alone_so_that_asking_later_says_the_same():
    balancer = pool("a", "b")
    r = answered(balancer)
    before = decision_of(r, {balancer.parent: balancer}).stages
    for _ in range(20):
        assert isinstance(picked(balancer, now=AT + 1.0), Pick)
    assert decision_of(r, {balancer.parent: balancer}).stages == before
    assert r.started_at == BEGAN
