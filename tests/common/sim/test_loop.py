from __future__ import annotations

import pytest

from common.sim.loop import Loop


def run(loop: Loop, steps: int = 1_000) -> None:
    while steps and loop.step():
        steps -= 1


def test_what_is_due_runs_in_order_of_time_and_then_of_asking() -> None:
    loop, seen = Loop(), []
    for time_s, name in [(2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")]:
        loop.at(time_s, lambda name=name: seen.append((loop.now, name)))
    run(loop)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert loop.events == 4
    assert not loop.step()


def test_without_a_delay_it_happens_at_once() -> None:
    loop, seen = Loop(), []
    loop.after(0.0, seen.append, "now")
    assert seen == ["now"]
    loop.after(1.0, seen.append, "later")
    assert seen == ["now"]
    run(loop)
    assert (seen, loop.now) == (["now", "later"], 1.0)


def test_what_recurs_does_not_drift() -> None:
    loop, seen = Loop(), []
    loop.every(0.1, lambda: seen.append(loop.now), first_s=0.5)
    run(loop, 1_000)
    assert seen[0] == 0.5
    assert seen[999] == pytest.approx(0.5 + 99.9, abs=1e-9)


def test_the_past_is_over() -> None:
    loop = Loop()
    loop.at(1.0, lambda: None)
    run(loop)
    with pytest.raises(AssertionError, match=r"asked at 1\.0"):
        loop.at(0.5, lambda: None)
