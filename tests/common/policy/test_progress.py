"""When an instance hangs, and when it is merely slow or busy."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from common.policy.candidate import Limits
from common.policy.health import State
from common.policy.progress import NO_SIGNS, Progress, Signs
from common.types import LoadReport, Outcome, Pick
from tests.common.policy.build import ask, balancer_of, instance, picked

STALL_S = 3.0
SENT = ((100.0, 0.5),)  # one request at 100 s, to be silent for half a second


def counter(value: float | None) -> LoadReport:
    return LoadReport("i", running=1.0, progress=value)


def found(progress: Progress, signs: Signs, until: float, due: tuple[tuple[float, float], ...] = SENT) -> float:
    """When it is found to hang, looked at four times a second; inf: never."""
    now = 100.0
    while now < until:
        if progress.hangs(signs, due, now, STALL_S):
            return now
        now += 0.25
    return inf


def test_silence_beyond_what_was_predicted_is_a_hang() -> None:
    assert found(Progress(), NO_SIGNS, 200.0) == pytest.approx(104.5, abs=0.5)  # 3 s and three times 0.5 s
    assert found(Progress(), NO_SIGNS, 200.0, ((100.0, 10.0),)) == pytest.approx(133.0, abs=0.5)


def test_whatever_moves_is_busy() -> None:
    progress = Progress()
    for second in range(100, 200):
        progress.told(counter(float(second)), float(second))
        assert not progress.hangs(NO_SIGNS, SENT, second + 0.5, STALL_S)
    progress = Progress()
    for second in range(100, 200):
        assert not progress.hangs(Signs(moved_at=second - 1.0), SENT, float(second), STALL_S)


def test_counters_that_stand_still_are_no_excuse() -> None:
    progress = Progress()
    now = 100.0
    while not progress.hangs(NO_SIGNS, SENT, now, STALL_S):
        progress.told(counter(5.0), now)
        now += 0.25
    assert now < 106.0
    assert progress.counts(now)
    progress.told(counter(None), now + 60.0)
    assert not progress.counts(now + 60.0)


def test_a_long_silence_that_ended_well_is_given_twice_the_next_time() -> None:
    progress = Progress()
    assert found(progress, NO_SIGNS, 120.0) < 105.0
    for tick in range(40):  # on the whole it was silent for 20 s, then it went on
        progress.hangs(NO_SIGNS, SENT, 110.0 + 0.25 * tick, STALL_S)
    assert not progress.hangs(Signs(moved_at=120.0), SENT, 120.0, STALL_S)
    assert not progress.hangs(Signs(moved_at=120.0), SENT, 145.0, STALL_S)
    assert progress.hangs(Signs(moved_at=120.0), SENT, 170.0, STALL_S)


def test_streams_that_all_stall_are_a_hang_though_new_ones_begin() -> None:
    young = (103.9, 103.9)
    stalled = Signs(103.9, streams=((100.0, 100.2), (100.1, 100.2), young))
    assert Progress().hangs(stalled, SENT, 104.0, STALL_S)
    one_goes_on = Signs(103.9, streams=((100.0, 100.2), (100.1, 103.9), young))
    assert not Progress().hangs(one_goes_on, SENT, 104.0, STALL_S)
    one_ended = Signs(103.9, completed_at=103.0, streams=((100.0, 100.2), (100.1, 100.2)))
    assert not Progress().hangs(one_ended, SENT, 104.0, STALL_S)
    alone = Signs(103.9, streams=((100.0, 100.2),))  # one stream may be held back by its server
    assert not Progress().hangs(alone, SENT, 104.0, STALL_S)


def test_what_hangs_is_left_alone_and_comes_back_by_going_on() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    request = ask(stream=True)
    first = picked(balancer, request, now=100.0)
    id_ = first.endpoint.id
    signs = {id_: NO_SIGNS}
    assert balancer.hung(signs, 101.0, STALL_S) == []
    assert balancer.hung(signs, 110.0, STALL_S) == [(id_, False)]
    assert balancer.hung(signs, 110.5, STALL_S) == []  # said once
    assert {picked(balancer, request, now=111.0).endpoint.id for _ in range(5)} == {"a", "b"} - {id_}
    assert balancer.candidates[id_].breaker.state is State.OPEN
    balancer.hung({id_: Signs(moved_at=111.5)}, 111.5, STALL_S)
    assert balancer.candidates[id_].breaker.state is State.CLOSED


def test_the_last_one_left_is_never_suspected() -> None:
    balancer = balancer_of(instance("a"))
    picked(balancer, ask(stream=True), now=100.0)
    assert balancer.hung({"a": NO_SIGNS}, 200.0, STALL_S) == []
    assert balancer.candidates["a"].breaker.state is State.CLOSED


@pytest.mark.parametrize(("ratio", "ejected"), [(0.1, 0), (0.34, 1), (0.67, 2), (1.0, 3)])
def test_failures_never_eject_more_than_the_cap_counted_after_ejection(ratio: float, ejected: int) -> None:
    balancer = balancer_of(*map(instance, "abc"), limits=Limits(max_ejected_ratio=ratio))
    for _ in range(100):
        pick = balancer.pick(ask(), 100.0, Random(1))
        if isinstance(pick, Pick):
            balancer.release(pick.reservation, Outcome.FAILED, 100.0)
    states = [c.breaker.state for c in balancer.candidates.values()]
    assert states.count(State.OPEN) == ejected


def test_where_nobody_listens_no_cap_helps() -> None:
    balancer = balancer_of(*map(instance, "abc"), limits=Limits(max_ejected_ratio=0.1))
    pick = picked(balancer, ask(), now=100.0)
    balancer.release(pick.reservation, Outcome.FAILED, 100.0, unreachable=True)
    assert balancer.candidates[pick.endpoint.id].breaker.state is State.OPEN


def test_another_process_behind_the_address_starts_without_its_predecessors_record() -> None:
    balancer = balancer_of(instance("a", boot="1"), instance("b"))
    candidate = balancer.candidates["a"]
    candidate.breaker.hangs(100.0)
    candidate.adopt(instance("a", boot="2"))
    assert candidate.breaker.state is State.CLOSED


def test_one_that_answers_its_agent_again_gets_its_trial_at_once() -> None:
    balancer = balancer_of(instance("a"), instance("b"))
    breaker = balancer.candidates["a"].breaker
    for at in (100.0, 103.0, 108.0):
        breaker.ended(Outcome.FAILED, at, unreachable=True)
        breaker.state = State.HALF_OPEN
    breaker.ended(Outcome.FAILED, 120.0, unreachable=True)
    assert not breaker.ready(121.0)
    balancer.report(LoadReport("a", running=0.0), 121.0)
    assert breaker.ready(121.0)
