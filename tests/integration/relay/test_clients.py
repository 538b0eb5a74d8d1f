"""Clients that drip, flood, half-close or leave: C25, C30, C31, C32."""

from __future__ import annotations

import asyncio
import time
from random import Random

import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, body_of, chat, events, post
from tests.integration.relay.cases import PATH, exchange, is_error, records, seen, statuses, streamed
from tests.integration.relay.process import alone
from tests.integration.system import tiers
from tests.servers import eventually

QUICK = {"limits": {"header_timeout_s": 0.8, "body_timeout_s": 0.8, "keepalive_timeout_s": 0.8}}
BODY = chat(MODEL)


# -- drips and floods (C30) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the head", "the body", "chunks"])
async def test_what_drips_in_is_ended_at_a_time_that_bytes_do_not_put_off(where: str) -> None:
    begin, piece = {
        "the head": (b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-drip: ", b"d"),
        "the body": (post(PATH, b"", framing="content-length: 5000"), b" "),
        "chunks": (post(PATH, b"", framing="transfer-encoding: chunked"), b"1\r\n \r\n"),
    }[where]
    async with tiers(FakeEngine("a"), **QUICK) as world:
        clients = [await Raw.connect(world.url) for _ in range(30)]
        for raw in clients:
            raw.send(begin)
        began = time.monotonic()

        async def drip(raw: Raw) -> bytes:
            reading = asyncio.create_task(raw.to_end(10.0))
            while not reading.done():
                raw.send(piece)
                await asyncio.sleep(0.1)
            return await reading

        dripping = asyncio.gather(*(drip(raw) for raw in clients))
        while not dripping.done():
            assert (await world.chat()).status == 200  # a normal client never fails
            await asyncio.sleep(0.05)
        received = await dripping
        assert time.monotonic() - began < 6.0
        assert {statuses(r)[0] for r in received} == {408}
        assert all(s.body == BODY for s in world.engines[0].seen)


async def test_a_connection_that_sends_nothing_or_rests_is_closed_without_a_word() -> None:
    async with tiers(FakeEngine("a"), **QUICK) as world:
        assert await exchange(world.url, b"") == b""
        async with await Raw.connect(world.url) as raw:
            raw.send(post(PATH, BODY))
            assert (await raw.response()).status == 200
            before = len(raw.received)
            await raw.to_end(5.0)
            assert len(raw.received) == before
        await eventually(lambda: not world.top.relay.connections, 5.0)


async def test_a_long_answer_is_no_slow_request() -> None:
    script = Script.stream(*"abcdef", gap_s=0.3)
    async with tiers(FakeEngine("a", script), **QUICK) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"), 15.0)) == b"".join(script.chunks)


HUGE = {
    "a thousand fields": (b"".join(b"x-%d: 1\r\n" % i for i in range(1000)), 431),
    "a field of a megabyte": (b"x: %b\r\n" % (b"y" * (1 << 20)), 431),
    "a name of a megabyte": (b"%b: y\r\n" % (b"x" * (1 << 20)), 431),
}


async def test_heads_that_are_too_large_are_refused_and_nothing_goes_on(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        for name, (fields, status) in HUGE.items():
            data = post(PATH, BODY).replace(b"host: test\r\n", b"host: test\r\n" + fields, 1)
            assert statuses(await exchange(world.url, data)) == [status], name
        line = post(PATH, BODY).replace(b" HTTP/1.1", b"?x=" + b"y" * 100_000 + b" HTTP/1.1", 1)
        assert statuses(await exchange(world.url, line)) == [414]
        assert seen(world) == 0
        assert (await world.chat()).status == 200


async def test_without_file_descriptors_it_answers_503_and_recovers() -> None:
    async with alone(FakeEngine("a"), files=200) as world:
        held = [await Raw.connect(world.url) for _ in range(120)]
        begun = post(PATH, b"", framing="content-length: 50")
        for raw in held:
            raw.send(begun)  # none of them idles, so none can be closed for another one
        await asyncio.sleep(0.2)
        refused = 0
        for _ in range(20):
            raw = await Raw.connect(world.url)
            raw.send(post(PATH, BODY))
            refused += b" 503 " in await raw.to_end(10.0)
        assert refused >= 15
        log = world.process.log
        assert len(log) < 100_000  # no flood
        for raw in held:
            raw.rst()

        async def well() -> bool:
            try:
                return (await world.chat()).status == 200
            except (OSError, AssertionError):
                return False

        await eventually(well, 10.0)
        await eventually(lambda: world.open_files < 80, 10.0)


async def test_idle_streams_cost_little_and_leave_together() -> None:
    """Two hundred of what CASES asks for five thousand of; `bench/soak.py` has the number as a parameter."""
    count = 200
    engine = FakeEngine("a")
    async with alone(engine) as world:
        await world.chat()
        engine.script = Script.stream("a ", "b ", gap_s=600.0)
        before, files = world.resident_kb, world.open_files
        clients = [await Raw.connect(world.url) for _ in range(count)]
        for raw in clients:
            raw.send(streamed())
        await asyncio.gather(*(raw.until(b"data:", timeout_s=30.0) for raw in clients))
        each_kb = (world.resident_kb - before) / count
        busy = world.cpu_s
        await asyncio.sleep(0.5)
        print(f"{each_kb:.0f} KB a stream, {(world.cpu_s - busy) * 200:.0f} % CPU")
        assert each_kb < 100
        began = time.monotonic()
        for raw in clients:
            raw.rst()
        await eventually(lambda: len(engine.ended("aborted")) == count, 5.0 + 10.0)
        print(f"all gone after {time.monotonic() - began:.2f} s")
        await eventually(world.idle, 5.0)
        await eventually(lambda: world.open_files <= files + 5, 10.0)


# -- half-closed clients (C31) -----------------------------------------------------------------------------------------

HONOURED = {"upstream": {"half_close": True}}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_side_gets_its_answer_where_that_is_asked_for(depth: int, stream: bool) -> None:
    script = Script.stream(*"abcd", delay_s=0.7, gap_s=0.05) if stream else Script.whole(delay_s=0.7)
    async with tiers(FakeEngine("a", script), depth=depth, **HONOURED) as world:
        raw = await Raw.connect(world.url)
        raw.send(streamed() if stream else post(PATH, BODY))
        raw.half_close()
        received = await raw.to_end()
        assert statuses(received) == [200]
        if stream:
            assert events(body_of(received))[-1] == b"[DONE]"
        await eventually(world.idle, 5.0)


async def test_without_that_a_client_that_closes_its_side_is_gone(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=20.0))
    async with tiers(engine, depth=depth) as world:
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, BODY))
        await eventually(lambda: len(engine.seen) == 1, 5.0)
        raw.half_close()
        await eventually(lambda: engine.ended("aborted"), 3.0)
        assert await raw.to_end() == b""
        await eventually(world.idle, 3.0)
        assert [r["ending"] for r in await records(world)] == ["client_left"]


async def test_a_half_closed_client_that_leaves_is_noticed(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=20.0))
    async with tiers(engine, depth=depth, **HONOURED) as world:
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, BODY))
        raw.half_close()
        await eventually(lambda: len(engine.seen) == 1, 5.0)
        await asyncio.sleep(0.3)
        assert not engine.ended("aborted")
        raw.rst()
        await eventually(lambda: engine.ended("aborted"), 5.0)
        await eventually(world.idle, 3.0)


async def test_a_health_checker_that_half_closes_is_answered() -> None:
    async with tiers(FakeEngine("a")) as world:
        for path in ("/health", "/v1/models"):
            raw = await Raw.connect(world.url)
            raw.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
            raw.half_close()
            assert statuses(await raw.to_end()) == [200]


# -- clients that leave early (C25, C32) -------------------------------------------------------------------------------


async def test_requests_that_wait_here_and_are_given_up_reach_no_server(depth: int) -> None:
    engine = FakeEngine("a", Script.stream("a ", "b ", gap_s=3.0))
    async with tiers(engine, depth=depth, upstream={"max_in_flight": 1}, queue={"timeout_s": 30.0}) as world:
        first = await Raw.connect(world.url)
        first.send(streamed())
        await first.until(b"data:")
        waiting = [await Raw.connect(world.url) for _ in range(50)]
        for raw in waiting:
            raw.send(post(PATH, BODY))
        await asyncio.sleep(0.3)
        assert len(engine.seen) == 1
        for raw in waiting:
            raw.rst()
        await asyncio.sleep(0.2)
        first.rst()
        await eventually(world.idle, 5.0)
        assert len(engine.seen) == 1
        engine.script = Script.whole()
        assert (await world.chat()).status == 200
        assert len(engine.seen) == 2


async def test_aborts_leave_no_place_taken(depth: int) -> None:
    engine = FakeEngine("a", Script.stream("a ", "b ", gap_s=20.0))
    async with tiers(engine, depth=depth, upstream={"max_in_flight": 1}) as world:
        for _ in range(20):
            raw = await Raw.connect(world.url)
            raw.send(streamed())
            await raw.until(b"data:")
            raw.rst()
        engine.script = Script.whole()
        assert (await world.chat()).status == 200
        await eventually(world.idle, 5.0)


async def test_a_pool_survives_requests_that_are_given_up_at_once(depth: int) -> None:
    rng = Random(7)
    engine = FakeEngine("a")
    engine.choose = lambda s: Script.whole(delay_s=rng.uniform(0.0, 0.02))
    async with tiers(engine, depth=depth, upstream={"max_connections": 10}) as world:
        until = time.monotonic() + 1.0

        async def abort() -> None:
            while time.monotonic() < until:
                raw = await Raw.connect(world.url)
                raw.send(post(PATH, BODY))
                await asyncio.sleep(rng.uniform(0.0, 0.01))
                raw.rst()

        await asyncio.gather(*(abort() for _ in range(20)))
        await eventually(world.idle, 60.0)  # those in the listener's backlog are looked at one by one
        assert [(await world.chat()).status for _ in range(10)] == [200] * 10
        pools = list(world.bottom.relay._pools.values())
        assert all(len(p._open) <= 10 for p in pools)
        assert all(len(p._idle) == len(p._open) for p in pools if p.port == engine.port)


async def test_a_dial_that_gets_no_answer_is_given_up_with_its_client() -> None:
    """An address that drops what it is sent: nothing of it may stay when the client leaves or the time is over."""
    async with tiers(FakeEngine("a"), upstream={"connect_timeout_s": 0.5}) as world:
        (engine,) = world.engines
        engine.refuse()
        assert is_error(await world.chat(), 503)
        await eventually(world.idle, 5.0)
        assert not any(p._open - set(p._idle) for p in world.bottom.relay._pools.values())
