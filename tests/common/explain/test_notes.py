from __future__ import annotations

from random import Random

from common.explain.notes import LOOK_EVERY_S, Notes, unheard_of
from common.policy.stages import Hop
from common.types import LoadReport, Outcome, Pick
from tests.common.explain.build import AT, decided, pool
from tests.common.policy.build import ask


def test_a_record_holds_the_pick_and_what_it_was_made_by():
    balancer = pool("a", "b", "c")
    stage = decided(balancer)
    assert (stage.path, stage.pool_size, stage.pool_stale, stage.attempt) == (("eu", "c1"), 3, False, 0)
    assert stage.weights["completion_s"] == 1.0
    assert {s.endpoint for s in stage.scores} == {"a", "b", "c"}
    assert stage.terms == tuple(name for name, _ in stage.pick.columns)


def test_whose_report_is_missing_or_old_is_named():
    balancer = pool("a", "b")
    assert unheard_of(balancer, AT) == ("a", "b")
    balancer.report(LoadReport("a", running=1.0), AT)
    assert unheard_of(balancer, AT) == ("b",)
    assert unheard_of(balancer, AT + 5.1) == ("a", "b")
    balancer.report(LoadReport("b", age_s=9.0, running=1.0), AT)
    assert unheard_of(balancer, AT) == ("b",)


def test_reports_are_looked_at_twice_a_second_and_not_a_request_at_a_time():
    balancer, notes, looked = pool("a", "b"), Notes(), []

    class Counting(dict):  # type: ignore[type-arg]
        def items(self):  # type: ignore[no-untyped-def]
            looked.append(1)
            return super().items()

    balancer.candidates = Counting(balancer.candidates)
    for n in range(1000):
        pick = balancer.pick(ask(), AT, Random(n))
        assert isinstance(pick, Pick)
        notes.stage(Hop(balancer.parent, pick, takeover=False), balancer, 0, AT + n / 1000, "b" * 16)
        balancer.release(pick.reservation, Outcome.IGNORED, AT)
    assert len(looked) == 1.0 / LOOK_EVERY_S


def test_pools_that_are_gone_are_forgotten():
    notes, balancer = Notes(), pool("a", "b")
    pick = balancer.pick(ask(), AT, Random(1))
    assert isinstance(pick, Pick)
    notes.stage(Hop(balancer.parent, pick, takeover=False), balancer, 0, AT, "b" * 16)
    notes.keep_only(frozenset({()}))
    assert not notes._unheard
