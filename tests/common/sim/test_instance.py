"""A server in virtual time: its callers hear at the engine's times, and of its death."""

from __future__ import annotations

import pytest

from common.policy.prediction import class_speed
from common.sim.engine import EngineModel
from common.sim.instance import End, Instance, as_fast_as
from common.sim.loop import Loop
from common.types import Endpoint, Speed

TINY = Speed(0.01, 1e-3, 1e-6, 1000.0, attention_tokens=2000.0, chunk_tokens=64, slots=3, kv_tokens=600)


class Heard:
    """A caller that writes down what it hears, and when."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.first_s: float | None = None
        self.end: End | None = None
        self.end_s = 0.0

    def first(self) -> None:
        assert self.first_s is None
        assert self.end is None
        self.first_s = self.loop.now

    def ended(self, end: End, cached_tokens: int | None = None) -> None:
        assert self.end is None
        self.end, self.end_s = end, self.loop.now


def made(speed: Speed = TINY) -> tuple[Loop, Instance]:
    loop = Loop()
    return loop, Instance(Endpoint("a"), speed, loop)


def send(loop: Loop, instance: Instance, id_: int, at_s: float, input_tokens: int = 50, output: int = 20) -> Heard:
    heard = Heard(loop)
    loop.at(at_s, instance.submit, id_, input_tokens, output, (), heard)
    return heard


def drain(loop: Loop) -> None:
    while loop.step():
        pass


def test_callers_hear_at_the_times_of_the_engine_model() -> None:
    loop, instance = made(class_speed("l4"))
    asked = [(i * 0.137, 300 + 211 * i, 20 + 37 * (i % 7)) for i in range(60)]
    heard = [send(loop, instance, i, *row) for i, row in enumerate(asked)]
    drain(loop)
    engine = EngineModel(class_speed("l4"), max_queue=1_000, prefix_fraction=0.0)
    sequences = [engine.submit(str(i), p, o, (), at_s) for i, (at_s, p, o) in enumerate(asked)]
    engine.run_until(1e9)
    assert [h.first_s for h in heard] == pytest.approx([s.first_token_s for s in sequences])  # type: ignore[union-attr]
    assert [h.end_s for h in heard] == pytest.approx([s.finished_s for s in sequences])  # type: ignore[union-attr]
    assert {h.end for h in heard} == {End.COMPLETE}
    assert instance.in_flight == 0
    assert instance.work_s == 0.0


def test_half_the_speed_takes_twice_as_long() -> None:
    loop, instance = made()
    instance.runs_at(0.5)
    slow = send(loop, instance, 0, 0.0)
    drain(loop)
    loop, instance = made()
    fast = send(loop, instance, 0, 0.0)
    drain(loop)
    assert slow.end_s == pytest.approx(2.0 * fast.end_s)
    assert as_fast_as(TINY, 1.0) == TINY


def test_a_change_of_speed_takes_effect_after_the_step_under_way() -> None:
    loop, instance = made()
    heard = send(loop, instance, 0, 0.0, 10, 100)
    loop.at(0.5, instance.runs_at, 0.1)
    loop.at(1.0, instance.runs_at, 1.0)
    drain(loop)
    loop, instance = made()
    plain = send(loop, instance, 0, 0.0, 10, 100)
    drain(loop)
    assert plain.end_s + 0.3 < heard.end_s < plain.end_s + 0.6  # half a second at a tenth, and a slow step more


def test_death_loses_all_and_a_new_process_is_empty() -> None:
    loop, instance = made()
    lost = [send(loop, instance, i, 0.0) for i in range(5)]
    loop.at(0.1, instance.die)
    refused = send(loop, instance, 9, 0.2)
    loop.at(0.3, instance.revive)
    fresh = send(loop, instance, 10, 0.4)
    drain(loop)
    assert {h.end for h in lost} == {End.LOST}
    assert {h.end_s for h in lost} == {0.1}
    assert (refused.end, refused.end_s) == (End.UNREACHABLE, 0.2)
    assert fresh.end is End.COMPLETE
    assert instance.endpoint.boot == "1"
    assert instance.engine.finished == 1


def test_what_can_never_fit_and_what_is_too_much_is_refused() -> None:
    loop, instance = made()
    assert send(loop, instance, 0, 0.0, 500, 200).end is None
    drain(loop)
    too_long = Heard(loop)
    instance.submit(1, 500, 200, (), too_long)
    assert too_long.end is End.TOO_LONG


def test_a_report_says_what_the_agent_last_saw() -> None:
    loop, instance = made()
    for i in range(5):
        send(loop, instance, i, 0.0)
    while loop.now < 0.05 and loop.step():
        pass
    assert instance.report(0.0).running == 0.0
    instance.look()
    report = instance.report(0.25)
    assert (report.running, report.waiting, report.age_s) == (3.0, 2.0, 0.25)


def test_work_left_falls_to_nothing() -> None:
    loop, instance = made()
    send(loop, instance, 0, 0.0, 60, 50)
    seen = []
    for at_s in (0.0, 0.1, 0.3, 0.5):
        loop.at(at_s + 1e-9, lambda: (instance.catch_up(), seen.append(instance.work_s)))
    drain(loop)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == pytest.approx(0.06 + 50 * (1e-3 + 0.02 / 3), rel=0.02)
    assert instance.work_s == 0.0
