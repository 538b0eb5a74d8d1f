"""Servers that refuse or err: Retry-After in all its forms (C17), and what opens a breaker and what does not (C38)."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

import pytest

from tests.fake_engine import FakeEngine, Script
from tests.integration.relay.cases import is_error, seen
from tests.integration.system import CLUSTER, Tiers, tiers
from tests.servers import eventually

EVEN = {"policy": {"name": "round_robin"}}
AT_ONCE = {"queue": {"max_requests": 0}}  # refused rather than held until somebody has room


def full(*values: str, status: int = 429, message: str = "the queue is full", **more: str) -> Script:
    lines = (*(("retry-after", value) for value in values), *more.items())
    return Script.error(status, message, headers=lines)


# -- Retry-After (C17) -------------------------------------------------------------------------------------------------


async def test_one_that_asks_for_a_pause_gets_it_and_the_other_serves(depth: int) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, **EVEN) as world:
        a.then(full("2"))
        began = time.monotonic()
        while not a.seen:
            assert (await world.chat()).status == 200
        refused_at = a.seen[0].at
        responses = [await world.chat() for _ in range(50)]
        assert [r.status for r in responses] == [200] * 50
        if time.monotonic() - began < 1.5:
            assert len(a.seen) == 1
        await eventually(lambda: _asked_again(world, a), 6.0, step_s=0.05)
        assert 1.9 <= a.seen[1].at - refused_at < 4.0
        assert world.candidate(a).breaker.state.value == "closed"


async def _asked_again(world: Tiers, engine: FakeEngine) -> bool:
    await world.chat()
    return len(engine.seen) > 1


async def test_when_all_are_full_the_shortest_pause_and_the_servers_words_come_back(depth: int) -> None:
    engines = FakeEngine("a", full("2", message="A is full")), FakeEngine("b", full("7", message="B is full"))
    async with tiers(*engines, depth=depth, **AT_ONCE) as world:
        response = await world.chat()
        assert response.status == 429
        assert response.header("retry-after") == "2"
        assert response.json()["error"]["message"] == "A is full"
        assert [len(e.seen) for e in engines] == [1, 1]
        again = await world.chat()  # nobody is asked: both have said when
        assert is_error(again, 429)
        assert again.header("retry-after") in ("1", "2")
        assert seen(world) == 2


def date(offset_s: float) -> str:
    return formatdate(time.time() + offset_s, usegmt=True)


FORMS: dict[str, tuple[Script, tuple[float, float]]] = {
    "seconds": (full("1"), (0.5, 1.1)),
    "a fraction": (full("1.5"), (1.0, 1.6)),
    "a date": (full(date(3), date=date(0)), (1.5, 3.1)),
    "a date by a clock that is wrong": (full(date(-9997), date=date(-10_000)), (1.5, 3.1)),
    "a date that is past": (full(date(-60), date=date(0)), (0.0, 1.1)),
    "a date without another": (full(date(3)), (0.0, 1.1)),
    "a negative number": (full("-5"), (0.0, 1.1)),
    "a very large number": (full("99999999"), (50.0, 60.1)),
    "a larger one than any": (full("9" * 400), (0.0, 60.1)),
    "no number": (full("abc"), (0.0, 1.1)),
    "nothing": (full(""), (0.0, 1.1)),
    "infinity": (full("inf"), (0.0, 1.1)),
    "two": (full("1", "3"), (1.5, 3.1)),
    "two in one": (full("1, 3"), (1.5, 3.1)),
    "a word of another coding": (full("caf\xe9"), (0.0, 1.1)),
    "none at all": (full(), (0.0, 1.1)),
}


async def test_every_form_is_understood_or_passed_over(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, **AT_ONCE) as world:
        candidate = world.candidate(engine)
        for name, (script, (least, most)) in FORMS.items():
            for tier in world.chain:
                for balancer in tier.balancing.balancers.values():
                    for known in balancer.candidates.values():
                        known.busy_until = 0.0
            engine.then(script)
            response = await world.chat()
            assert response.status == 429, (name, response)
            assert response.json()["error"]["message"] == "the queue is full"
            left = candidate.busy_until - asyncio.get_running_loop().time()
            assert least <= left <= most, (name, left)
        assert candidate.breaker.state.value == "closed"
        assert candidate.breaker.failures == 0


async def test_a_full_queue_as_torchserve_has_it_moves_work_and_kills_nobody(depth: int) -> None:
    words = "Model 'x' has no worker to serve inference request. Please use scale workers API to add workers."
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, **EVEN) as world:
        a.choose = lambda s: full(status=503, message=words)
        responses = [await world.chat() for _ in range(50)]
        assert [r.status for r in responses] == [200] * 50
        assert len(b.seen) == 50
        assert 1 <= len(a.seen) <= 10
        assert world.candidate(a).breaker.state.value == "closed"


# -- the breaker (C38) -------------------------------------------------------------------------------------------------

FIVE = {"health": {"eject_after": 5, "cooldown_s": 0.4}}


def breaker(world: Tiers, engine: FakeEngine) -> str:
    """As the admin API and its metric tell it: by the tier next to the server."""
    return str(world.bottom.balancing.balancers[CLUSTER].candidates[engine.name].breaker.state.value)


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_what_is_the_clients_fault_opens_nothing(depth: int, status: int) -> None:
    engine = FakeEngine("a", Script.error(status, "maximum context length"))
    async with tiers(engine, depth=depth, **AT_ONCE, **FIVE) as world:
        assert [(await world.chat()).status for _ in range(50)] == [status] * 50
        assert breaker(world, engine) == "closed"
        assert world.candidate(engine).breaker.failures == 0


async def test_load_opens_nothing_and_the_server_is_used_again_at_once(depth: int) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, **AT_ONCE, **FIVE, **EVEN) as world:
        a.choose = lambda s: full(status=503)
        for _ in range(50):
            assert (await world.chat()).status == 200
        assert breaker(world, a) == "closed"
        a.choose = None
        count = len(a.seen)
        began = time.monotonic()
        while len(a.seen) == count:
            await world.chat()
            await asyncio.sleep(0.02)
        print(f"used again after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 1.5


async def test_five_failures_open_it_whatever_comes_between(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, **AT_ONCE, **FIVE) as world:
        for count in range(1, 6):
            engine.then(Script.error(500), Script.error(400))
            assert breaker(world, engine) == "closed"
            assert (await world.chat()).status == 500
            if count < 5:
                assert (await world.chat()).status == 400
        assert breaker(world, engine) == "open"
        assert (await world.chat()).status == 503
        assert len(engine.seen) == 9


async def opened(world: Tiers, engine: FakeEngine) -> None:
    """Open it by failures, and wait until it lets a trial through."""
    for _ in range(5):
        engine.then(Script.error(500))
        await world.chat()
    assert breaker(world, engine) == "open"
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("trial", ["a 400", "a 429", "a client that leaves"])
async def test_a_trial_that_says_nothing_neither_closes_nor_opens(depth: int, trial: str) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, **AT_ONCE, **FIVE) as world:
        await opened(world, engine)
        openings = world.candidate(engine).breaker.openings
        if trial == "a client that leaves":
            engine.then(Script.whole(delay_s=20.0))
            asked = asyncio.create_task(world.chat())
            await eventually(lambda: len(engine.seen) == 6, 5.0)
            assert breaker(world, engine) == "half_open"
            assert (await world.chat()).status == 503  # one trial at a time
            asked.cancel()
            await eventually(lambda: engine.ended("aborted"), 2.0)
        else:
            engine.then(Script.error(int(trial.split()[1]), headers=(("retry-after", "0"),)))
            assert (await world.chat()).status in (400, 429)
        await eventually(world.idle, 5.0)
        assert breaker(world, engine) == "half_open"
        assert world.candidate(engine).breaker.openings == openings
        await asyncio.sleep(0.05)
        world.candidate(engine).busy_until = 0.0
        assert (await world.chat()).status == 200  # the trial's place was given back
        assert breaker(world, engine) == "closed"


async def test_a_trial_that_fails_opens_it_again(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, **AT_ONCE, **FIVE) as world:
        await opened(world, engine)
        engine.then(Script.error(500))
        assert (await world.chat()).status == 500
        assert breaker(world, engine) == "open"


async def test_a_poison_prompt_opens_nobody(depth: int) -> None:
    """Some servers say 500 where they mean 400; a client that sends it again and again must not shut the fleet."""
    poison = Script.error(500, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens")
    engines = [FakeEngine(name, poison) for name in "abc"]
    async with tiers(*engines, depth=depth, **AT_ONCE, **FIVE, **EVEN) as world:
        responses = [await world.chat() for _ in range(30)]
        assert [r.status for r in responses] == [500] * 30
        assert seen(world) <= 60
        assert {breaker(world, e) for e in engines} == {"closed"}


async def test_out_of_memory_is_a_failure_of_the_server(depth: int) -> None:
    engine = FakeEngine("a", Script.error(500, "CUDA out of memory. Tried to allocate 2.00 GiB"))
    async with tiers(engine, depth=depth, **AT_ONCE, **FIVE) as world:
        for i in range(5):  # five requests: one that did it twice would be refused here
            await world.chat(text=f"{i}")
        assert breaker(world, engine) == "open"
