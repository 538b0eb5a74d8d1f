"""The quarter of an hour that the console draws."""

from __future__ import annotations

from typing import Any

import pytest

from common.history import STEP_S, STEPS, History, Step, together
from common.records import Ending
from tests.common.build import BEGAN, attempt, record, stage


def history(*records: Any) -> History:
    made = History()
    for r in records:
        made.see(r)
    return made


def test_a_request_counts_in_the_step_in_which_it_ended():
    made = history(record(), record(ended_at=BEGAN + 2.0 + STEP_S))
    assert [(age, step.ok) for age, step in made.steps(BEGAN + 2.0 + STEP_S)] == [(1, 1), (0, 1)]


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({}, "ok"),
        ({"status": 500}, "failed"),
        ({"ending": Ending.BROKE_AFTER}, "failed"),
        ({"status": 404}, "refused"),
        ({"ending": Ending.REFUSED, "status": 503}, "refused"),
        ({"ending": Ending.CLIENT_LEFT, "status": 0}, "left"),
    ],
)
def test_it_is_counted_by_how_it_ended(fields: dict[str, Any], counted: str):
    [(_, step)] = history(record(**fields)).steps(BEGAN + 2.0)
    assert {n: getattr(step, n) for n in ("ok", "failed", "refused", "left") if getattr(step, n)} == {counted: 1}
    assert sum(step.ttft) == (counted == "ok")


def test_what_was_predicted_stands_beside_what_was_seen():
    made = history(
        record(stages=[stage((), "eu", {"eu": 1.0})], attempts=[attempt(("eu",))], predicted_output_tokens=26.0)
    )
    [(_, step)] = made.steps(BEGAN + 2.0)
    assert [sum(x) for x in (step.ttft, step.ttft_predicted, step.tpot, step.tpot_predicted)] == [1, 1, 1, 1]
    # first token after 0.5 s where 0.25 s were predicted; 50 ms a token both
    assert step.ttft.index(1) > step.ttft_predicted.index(1)
    assert step.tpot.index(1) == step.tpot_predicted.index(1)


def test_it_forgets_what_is_older_than_a_quarter_of_an_hour():
    made = history(*(record(ended_at=BEGAN + n * STEP_S) for n in range(STEPS + 50)))
    now = BEGAN + (STEPS + 49) * STEP_S
    assert len(made.steps(now)) == STEPS
    assert made.steps(now + STEPS * STEP_S) == []


def test_those_of_several_tiers_are_added_by_age():
    one, two = Step(ok=1, ttft=[1] * 19), Step(ok=2, failed=1, ttft=[0] * 18 + [5])
    assert [(age, s.ok, s.failed, s.ttft[-1]) for age, s in together([[(3, one)], [(3, two), (0, Step(left=1))]])] == [
        (3, 3, 1, 6),
        (0, 0, 0, 0),
    ]
