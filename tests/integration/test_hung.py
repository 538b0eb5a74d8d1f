"""Health by progress: a server that hangs behind green probes, and servers that are merely slow or busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.fake_engine import BEFORE_HEAD, FakeEngine, Script
from tests.fake_engine import MODEL as FAKE_MODEL
from tests.integration.clients import Raw, ask, chat, get, post
from tests.integration.system import MODEL, PORTS, engine_process
from tests.integration.test_up import PATH, Up, pool, up
from tests.servers import eventually

GOOD = Script.stream("a", "b", "c", gap_s=0.15)
NEVER = Script.stream("a", cut="stall", cut_after=BEFORE_HEAD)
DIES_YOUNG = Script.stream(*"abcdefgh", cut="stall", cut_after=3)
EJECTED_S = 5.0  # the goal; this machine may be busy with other tests as well
BUSY_MACHINE_S = 5.0


@asynccontextmanager
async def fleet(zombie: FakeEngine, *flags: str) -> AsyncIterator[Up]:
    """One server under test and three good ones."""
    async with (
        zombie,
        FakeEngine("b", GOOD) as b,
        FakeEngine("c", GOOD) as c,
        FakeEngine("d", GOOD) as d,
        up(*(a for e in (zombie, b, c, d) for a in ("--instance", e.url)), *flags) as world,
    ):
        await eventually(lambda: _all_known(world), 20.0)
        yield world


async def _all_known(world: Up) -> bool:
    return len(await pool(world)) == 4


async def state_of(world: Up, engine: FakeEngine) -> str:
    """Of its breaker."""
    return str(next(e["breaker"] for e in (await pool(world)).values() if e["url"] == engine.url))


async def stream(url: str) -> bytes:
    """One streamed chat, as it came until its connection ended."""
    async with await Raw.connect(url) as raw:
        raw.send(post(PATH, chat(FAKE_MODEL, stream=True), "connection: close"))
        return await raw.to_end(60.0)


def complete(answer: bytes) -> bool:
    """Whether it is a whole stream."""
    return b" 200 " in answer[:20] and b"[DONE]" in answer


async def traffic(world: Up, rps: float, until: asyncio.Event) -> list[bytes]:
    """Streams at a steady rate until told to stop; what became of them."""
    tasks = []
    while not until.is_set():
        tasks.append(asyncio.create_task(stream(world.url)))
        await asyncio.sleep(1.0 / rps)
    return await asyncio.gather(*tasks)


async def test_a_server_that_answers_probes_and_no_requests_hurts_nobody() -> None:
    zombie = FakeEngine("zombie", GOOD)
    async with fleet(zombie) as world:
        stop = asyncio.Event()
        load = asyncio.create_task(traffic(world, 20.0, stop))
        await eventually(lambda: _has_served(zombie), 30.0)
        zombie.script = NEVER
        began = time.monotonic()
        await eventually(lambda: _is(world, zombie, "open"), 30.0)
        took = time.monotonic() - began
        await asyncio.sleep(2.5)  # past the first cool-down: a green probe alone must not bring it back
        assert await state_of(world, zombie) != "closed"
        stop.set()
        answers = await load
        hurt = [a for a in answers if not complete(a)]
        print(f"ejected after {took:.1f} s; {len(hurt)} of {len(answers)} requests hurt; it got {len(zombie.seen)}")
        assert took < EJECTED_S + BUSY_MACHINE_S
        assert len(hurt) <= 3, hurt
        zombie.script = GOOD
        await eventually(lambda: _answers_until(world, zombie), 60.0)  # a real request brings it back


async def _has_served(engine: FakeEngine) -> bool:
    return bool(engine.seen)


async def _is(world: Up, engine: FakeEngine, state: str) -> bool:
    return await state_of(world, engine) == state


async def _answers_until(world: Up, engine: FakeEngine) -> bool:
    await asyncio.gather(*(stream(world.url) for _ in range(24)))
    return await state_of(world, engine) == "closed"


async def test_streams_that_stall_after_their_first_words_are_a_hang_too() -> None:
    """New streams get their beginning all the while, so that the server is never silent."""
    zombie = FakeEngine("zombie", GOOD)
    async with fleet(zombie) as world:
        stop = asyncio.Event()
        load = asyncio.create_task(traffic(world, 10.0, stop))
        await eventually(lambda: _has_served(zombie), 30.0)
        zombie.script = DIES_YOUNG
        began = time.monotonic()
        await eventually(lambda: _is(world, zombie, "open"), 30.0)
        print(f"ejected after {time.monotonic() - began:.1f} s")
        stop.set()
        zombie.kill()  # else its streams would end at the stall time-out
        answers = await load
        cut = [a for a in answers if not complete(a)]
        assert all(b'"error"' in a for a in cut)  # none of them ends as if it were complete


async def test_a_server_that_trickles_is_kept_and_its_streams_too() -> None:
    """An event in four seconds is slow, and not hung: whoever was taken for it comes back by going on."""
    slow = FakeEngine("slow", Script.stream("a", gap_s=4.5))
    async with fleet(slow) as world:
        answers = await asyncio.gather(*(stream(world.url) for _ in range(12)))
        assert all(map(complete, answers))
        assert slow.seen
        assert await state_of(world, slow) == "closed"


async def test_a_busy_server_is_never_taken_for_dead_by_its_probes() -> None:
    """Its health path never answers and its requests take long; what counts is that tokens come."""
    ports = {"one": PORTS.take(), "two": PORTS.take()}
    async with engine_process("engines", ports, "--slots", "4", "--speed", "3", profile="l4"):
        urls = [f"http://127.0.0.1:{port}" for port in ports.values()]
        async with up(*(a for url in urls for a in ("--instance", url))) as world:
            await eventually(lambda: _serve(world), 30.0)
            await get(f"{urls[0]}/sim/faults", method="POST", body=b'{"hang_health": true}')
            body = chat(MODEL, text="word " * 2000, stream=True, max_tokens=40, ignore_eos=True)
            load = [asyncio.create_task(ask(world.url, PATH, body)) for _ in range(16)]
            states = set()
            while not all(task.done() for task in load):
                states |= {str(e["breaker"]) for e in (await pool(world)).values()}
                await asyncio.sleep(0.2)
            answers = await asyncio.gather(*load)
            assert all(a.status == 200 and b"[DONE]" in a.body for a in answers)
            assert states == {"closed"}


async def _serve(world: Up) -> bool:
    return len(await pool(world)) == 2 and (await ask(world.url, PATH, chat(MODEL, max_tokens=2))).status == 200
