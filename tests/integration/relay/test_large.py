"""Large bodies (C11) and readers that stop (C16): nobody else waits, and memory is what is under way."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from hashlib import sha256
from urllib.parse import urlsplit

import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, chat, get, post
from tests.integration.relay.cases import PATH, exchange, records, seen, statuses, streamed
from tests.integration.relay.process import alone
from tests.integration.system import tiers
from tests.servers import eventually

SMALL = {"limits": {"max_body_bytes": 4096, "body_timeout_s": 0.6, "header_timeout_s": 0.6}}
MB = 1 << 20


def image(megabytes: int) -> bytes:
    """A chat with an image of so many megabytes in it."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (megabytes * MB // 8)}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}
    return json.dumps(body).encode()


# -- Expect: 100-continue (C11) ----------------------------------------------------------------------------------------


async def test_a_body_that_is_too_large_is_refused_before_it_is_invited(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth, **SMALL) as world:
        head = post(PATH, b"", "expect: 100-continue", framing="content-length: 5000")
        received = await exchange(world.url, head)
        assert statuses(received) == [413]
        assert b" 100 " not in received
        assert b"connection: close" in received
        assert seen(world) == 0


async def test_a_body_is_invited_and_taken(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth, **SMALL) as world, await Raw.connect(world.url) as raw:
        body = chat(MODEL)
        for _ in range(2):
            raw.send(post(PATH, body, "Expect: 100-Continue").removesuffix(body))
            assert await raw._upto(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.send(body)
            assert (await raw.response()).status == 200
        assert world.engines[0].seen[0].header("expect") is None


async def test_a_pipelined_body_is_invited_when_its_turn_comes(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=0.2))
    async with tiers(engine, depth=depth, **SMALL) as world, await Raw.connect(world.url) as raw:
        body = chat(MODEL)
        raw.send(post(PATH, body) + post(PATH, body, "expect: 100-continue").removesuffix(body))
        assert (await raw.response()).status == 200
        assert await raw._upto(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(body)
        assert (await raw.response()).status == 200


async def test_a_body_that_never_comes_is_a_408(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth, **SMALL) as world:
        began = time.monotonic()
        received = await exchange(world.url, post(PATH, b"", "expect: 100-continue", framing="content-length: 50"))
        assert statuses(received) == [100, 408]
        assert 0.5 < time.monotonic() - began < 2.0
        assert seen(world) == 0


async def test_an_expectation_of_an_old_client_is_none(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        data = post(PATH, chat(MODEL), "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        assert statuses(await exchange(world.url, data)) == [200]


# -- sizes (C11) -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_the_limit_itself_passes_and_a_byte_more_is_refused_at_once(depth: int, framing: str) -> None:
    async with tiers(FakeEngine("a"), depth=depth, **SMALL) as world:

        def sized(size: int) -> bytes:
            body = chat(MODEL, text="")
            body = body.replace(b'"content": ""', b'"content": "%b"' % (b"x" * (size - len(body))))
            assert len(body) == size
            if framing == "length":
                return post(PATH, body, "connection: close")
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (body[:1000], body[1000:]))
            return post(PATH, b"", "connection: close", framing="transfer-encoding: chunked") + chunks

        end = b"0\r\n\r\n" if framing == "chunked" else b""
        assert statuses(await exchange(world.url, sized(4096) + end)) == [200]
        began = time.monotonic()
        received = await exchange(world.url, sized(4097))  # and no end of it
        assert statuses(received) == [413]
        assert is_error_body(received)
        assert time.monotonic() - began < 1.5
        assert seen(world) == 1


def is_error_body(received: bytes) -> bool:
    return "message" in json.loads(received.split(b"\r\n\r\n", 1)[1])["error"]


async def test_a_client_that_goes_on_sending_still_reads_why_it_was_refused(depth: int) -> None:
    """A reset while the refusal is on its way would take it from the client's socket."""
    async with tiers(FakeEngine("a"), depth=depth, **SMALL) as world:
        for framing in ("content-length: 30000000", "transfer-encoding: chunked"):
            async with await Raw.connect(world.url) as raw:
                raw.send(post(PATH, b"", framing=framing))
                for _ in range(40):
                    raw.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
                    await asyncio.sleep(0.002)
                    if raw._writer.is_closing():
                        break
                assert statuses(await raw.to_end()) == [413]


async def test_trailers_and_framing_without_end_are_refused(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        begin = post(PATH, b"", framing="transfer-encoding: chunked")
        piece = chat(MODEL)
        chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
        floods = {
            "a long trailer": begin + chunk + b"0\r\nx: " + b"y" * 800_000,
            "many trailers": begin + chunk + b"0\r\n" + b"x: y\r\n" * 130_000,
            "a long extension": begin + b"%x;" % len(piece) + b"e" * 800_000,
        }
        for name, data in floods.items():
            assert statuses(await exchange(world.url, data)) == [400], name
        assert seen(world) == 0


async def test_twenty_megabytes_are_tried_elsewhere_byte_for_byte(depth: int) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, policy={"name": "round_robin"}) as world:
        a.refuse()
        body = image(20)
        for _ in range(2):
            async with await Raw.connect(world.url) as raw:
                raw.send(post(PATH, body))
                assert (await raw.response()).status == 200
        assert {s.sha256 for s in b.seen} == {sha256(body).hexdigest()}
        assert max(r["attempts"] for r in await records(world)) == (2 if depth == 1 else 1)


async def test_twenty_large_images_stop_nobody_and_cost_twice_their_size_at_most() -> None:
    engine = FakeEngine("a", Script.whole(delay_s=0.5))
    body = image(20)
    async with alone(engine) as world:
        for _ in range(3):
            await world.chat()
        before, highest, gaps = world.resident_kb, 0, []
        done = asyncio.Event()

        async def probe() -> None:
            nonlocal highest
            while not done.is_set():
                began = time.monotonic()
                assert (await get(f"{world.url}/health")).status == 200
                gaps.append(time.monotonic() - began)
                highest = max(highest, world.resident_kb)
                await asyncio.sleep(0.05)

        async def upload() -> int:
            """In a thread, so that what the client costs on this loop is not measured."""

            def send() -> bytes:
                parts = urlsplit(world.url)
                with socket.create_connection((parts.hostname, parts.port)) as sock:
                    sock.sendall(post(PATH, body, "connection: close"))
                    answer = b""
                    while data := sock.recv(65536):
                        answer += data
                return answer

            return statuses(await asyncio.to_thread(send))[0]

        probing = asyncio.create_task(probe())
        began = time.monotonic()
        assert set(await asyncio.gather(*(upload() for _ in range(20)))) == {200}
        took = time.monotonic() - began
        done.set()
        await probing
        p99 = sorted(gaps)[int(len(gaps) * 0.99)]
        live_kb = 20 * len(body) // 1024
        print(f"20 x 20 MB in {took:.1f} s; probe p99 {p99 * 1000:.0f} ms of {len(gaps)}; {highest - before} KB more")
        assert {s.sha256 for s in engine.seen if len(s.body) > MB} == {sha256(body).hexdigest()}
        assert p99 < 2.0  # 0.25 on a machine with nothing else to do; a loop that reads each body takes ten times this
        assert highest - before < 2.2 * live_kb
        await eventually(lambda: world.resident_kb - before < 0.5 * live_kb, 5.0)


# -- readers that stop (C16) -------------------------------------------------------------------------------------------

FLOOD = Script(framing="chunked", content_type="text/event-stream", chunks=(b"data: %b\n\n" % (b"x" * 65_526),) * 8000)


async def deaf(url: str) -> socket.socket:
    """A client that asks for a stream, reads its head, and then no more."""
    parts = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (parts.hostname, parts.port))
    await loop.sock_sendall(sock, streamed("x-flood: 1"))
    assert b"200" in await loop.sock_recv(sock, 64)
    return sock


async def test_readers_that_stop_hold_their_servers_back_and_nobody_else() -> None:
    engine = FakeEngine("a")
    engine.choose = lambda s: FLOOD if s.header("x-flood") else Script.stream("a ", "b ", "c ")
    async with alone(engine, limits={"write_timeout_s": 3.0}) as world:
        for _ in range(5):
            await world.chat(stream=True)
        before = world.resident_kb
        stopped = [await deaf(world.url) for _ in range(20)]
        await eventually(lambda: sum(1 for s in engine.seen if s.header("x-flood")) == 20, 5.0)
        took, highest = [], 0
        for _ in range(30):
            began = time.monotonic()
            response = await world.chat(stream=True)
            took.append(time.monotonic() - began)
            assert response.body.endswith(b"[DONE]\n\n")
            highest = max(highest, world.resident_kb)
            await asyncio.sleep(0.03)
        floods = [s for s in engine.seen if s.header("x-flood")]
        print(
            f"{(highest - before) / 20:.0f} KB a stopped stream, {max(s.written for s in floods) / MB:.1f} MB written "
            f"by a server at most, normal p50 {sorted(took)[15] * 1000:.0f} ms, slowest {max(took) * 1000:.0f} ms"
        )
        assert (highest - before) / 20 < 2048
        assert max(s.written for s in floods) < 6 * MB  # of which four are in its own socket
        assert sorted(took)[15] < 0.2
        await eventually(lambda: len(engine.ended("aborted")) == 20, 8.0)  # after `limits.write_timeout_s`
        await eventually(world.idle, 5.0)
        for sock in stopped:
            sock.close()


@pytest.mark.parametrize("what", ["a stream", "a whole answer"])
async def test_a_client_that_takes_nothing_is_dropped(depth: int, what: str) -> None:
    whole = Script(chunks=(b"x" * 65_536,) * 256)
    engine = FakeEngine("a", FLOOD if what == "a stream" else whole)
    async with tiers(engine, depth=depth, limits={"write_timeout_s": 0.6}) as world:
        sock = await deaf(world.url)
        await eventually(lambda: engine.ended("aborted"), 4.0)
        await eventually(world.idle, 3.0)
        assert [r["ending"] for r in await records(world)] == ["client_left"]
        assert world.candidate(engine).breaker.failures == 0
        await eventually(lambda: not world.top.relay.connections, 3.0)
        sock.close()


async def test_a_slow_reader_gets_everything(depth: int) -> None:
    """Slower than its server, and never for so long that it would be dropped."""
    chunks = tuple(b"data: %d %b\n\n" % (i, b"x" * 50_000) for i in range(20))
    script = Script(framing="chunked", content_type="text/event-stream", chunks=chunks)
    async with tiers(FakeEngine("a", script), depth=depth, limits={"write_timeout_s": 1.0}) as world:
        sock = await deaf(world.url)
        loop = asyncio.get_running_loop()
        received = b""
        async with asyncio.timeout(60.0):
            while not received.endswith(b"0\r\n\r\n"):
                data = await loop.sock_recv(sock, 262_144)
                assert data, f"dropped after {len(received)} bytes"
                received += data
                await asyncio.sleep(0.01)
        assert received.count(b"data: ") == 20
        sock.close()
        await eventually(world.idle, 3.0)
