"""Streams: bytes as they were, wherever they are cut (C09, C14), and kept up with comments while silent (C15)."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest

from tests.fake_engine import BEFORE_HEAD, MODEL, FakeEngine, Script, Seen, event, token
from tests.integration.clients import Raw, body_of, chat, events, get, metrics, post, total
from tests.integration.relay.cases import PATH, exchange, is_error, records, resident_kb, seen, statuses, streamed
from tests.integration.system import Tiers, tiers
from tests.servers import eventually

# -- stream_options and the usage chunk (C09) --------------------------------------------------------------------------

USAGE = event({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 2}})
OPTIONS: list[Any] = ["absent", None, {}, {"include_usage": True}, {"include_usage": False}]


def honours(seen: Seen) -> Script:
    asked = json.loads(seen.body)
    if not asked.get("stream"):
        return Script.whole()
    stream = Script.stream("a ", "b ")
    if (asked.get("stream_options") or {}).get("include_usage"):
        *before, last = stream.chunks
        stream = stream.but(chunks=(*before, last.replace(b"data: [DONE]", USAGE + b"data: [DONE]")))
    return stream


def ignores(seen: Seen) -> Script:
    return Script.stream("a ", "b ") if json.loads(seen.body).get("stream") else Script.whole()


def refuses(seen: Seen) -> Script:
    return Script.error(400, "unknown field") if b"stream_options" in seen.body else ignores(seen)


async def test_answers_are_the_same_direct_and_through_the_tiers(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world:
        for choose, stream, options in itertools.product((honours, ignores, refuses), (True, False), OPTIONS):
            engine.choose = choose
            fields = {"stream": stream} | ({} if options == "absent" else {"stream_options": options})
            async with await Raw.connect(engine.url) as direct, await Raw.connect(world.url) as through:
                for raw in (direct, through):
                    raw.send(post(PATH, chat(MODEL, **fields)))
                there, here = await direct.response(), await through.response()
            assert (there.status, there.body) == (here.status, here.body), (choose, fields)
            assert engine.seen[-1].body == engine.seen[-2].body
            ours = {"x-headwater-decision", "x-headwater-served-by"}
            assert sorted(h for h in here.headers if h[0] not in ours) == sorted(there.headers), (choose, fields)
        for record in await records(world):
            assert record["output_tokens"] == (None if record["status"] == 400 else 2)


# -- cut at every byte (C14) -------------------------------------------------------------------------------------------

SCRIPTED = (
    b": ping\r\n\r\n"
    + token("漢字")
    + b'event: delta\r\nid: 7\r\nretry: 10\r\ndata: {"x": "\xf0\x9f\x8c\x8a"}\r\n\r\n'
    + b'data: {"multi":\ndata: 1}\n\n'
    + b'unknown: field\r\rdata:{"choices":[]}\r\r'
    + event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    + b"data:[DONE]"
)


async def test_a_stream_is_the_same_wherever_it_is_cut(depth: int) -> None:
    """Each offset in turn, as an HTTP chunk of its own, and as bytes that come apart within a chunk."""
    engine = FakeEngine("a")
    size = len(SCRIPTED)
    raw_head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % size

    def scripted(seen: Seen) -> Script:
        cut, how = int(seen.header("x-cut") or 0), seen.header("x-how")
        pieces = (SCRIPTED[:cut], SCRIPTED[cut:])
        if how == "bytes":
            raw = (raw_head + pieces[0], pieces[1] + b"\r\n0\r\n\r\n")
            return Script(framing="raw", chunks=raw, gap_s=0.003)
        return Script(content_type="text/event-stream", framing="chunked", chunks=pieces, gap_s=0.003)

    async with tiers(engine, depth=depth) as world:
        engine.choose = scripted
        step = 1 if depth == 1 else 3

        async def some(cuts: range, how: str) -> None:
            async with await Raw.connect(world.url) as raw:
                for cut in cuts:
                    raw.send(streamed(f"x-cut: {cut}", f"x-how: {how}"))
                    response = await raw.response()
                    assert response.body == SCRIPTED, (cut, how)

        jobs = [some(range(1 + k, size, 8 * step), how) for k in range(0, 8 * step, step) for how in ("chunk", "bytes")]
        await asyncio.gather(*jobs)
        assert {r["output_tokens"] for r in await records(world)} == {5.0}


async def test_a_stream_of_single_bytes_is_the_same(depth: int) -> None:
    pieces = tuple(SCRIPTED[i : i + 1] for i in range(len(SCRIPTED)))
    script = Script(content_type="text/event-stream", framing="chunked", chunks=pieces, gap_s=0.001)
    async with tiers(FakeEngine("a", script), depth=depth) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"), 20.0)) == SCRIPTED
        assert [r["output_tokens"] for r in await records(world)] == [5.0]


async def test_a_finished_event_does_not_wait_for_the_next(depth: int) -> None:
    one, two = token("one"), token("two")
    script = Script(content_type="text/event-stream", framing="chunked", gap_s=1.5, chunks=(one + two[:20], two[20:]))
    async with tiers(FakeEngine("a", script), depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed("connection: close"))
        began = time.monotonic()
        await raw.until(b"\n\n")
        assert time.monotonic() - began < 1.4
        assert body_of(raw.received) == one  # and nothing of the one that is not finished
        assert body_of(await raw.to_end()) == one + two


@pytest.mark.parametrize("kind", ["text/event-stream; charset=utf-8", "application/x-ndjson"])
async def test_a_long_event_passes_and_costs_no_more_than_its_length(depth: int, kind: str) -> None:
    end = b"\n" if "ndjson" in kind else b"\n\n"
    begin = b"" if "ndjson" in kind else b"data: "
    long = begin + b'{"x":"' + b"y" * (1 << 20) + b'"}' + end
    short = begin + b'{"x":1}' + end
    text = short + long + short
    pieces = tuple(text[i : i + 10_007] for i in range(0, len(text), 10_007))
    engine = FakeEngine("a", Script(content_type=kind, framing="chunked", chunks=pieces))
    async with tiers(engine, depth=depth) as world:
        for _ in range(3):
            assert body_of(await exchange(world.url, streamed("connection: close"), 20.0)) == text
        before = resident_kb()
        for _ in range(10):
            await exchange(world.url, streamed("connection: close"), 20.0)
        assert resident_kb() - before < 20_000


async def test_lines_of_json_that_break_end_with_a_whole_line(depth: int) -> None:
    lines = (b'{"response":"a"}\n', b'{"response":"b"}\n{"respo')
    script = Script(content_type="application/x-ndjson", framing="chunked", chunks=lines, gap_s=0.02, cut="rst")
    async with tiers(FakeEngine("a", script), depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(post("/api/generate", b'{"model":"%b","prompt":"x"}' % MODEL.encode()))
        said = body_of(await raw.to_end()).splitlines()
        assert [json.loads(line).get("response") for line in said[:2]] == ["a", "b"]
        assert len(said) == 3
        assert isinstance(json.loads(said[2])["error"], str)


async def test_a_break_within_an_event_leaves_whole_events_alone(depth: int) -> None:
    """A client that reads an event as JSON would fall over half of one before it came to the error."""
    chunks = (token("one"), token("two") + token("three")[:30])
    script = Script(content_type="text/event-stream", framing="chunked", chunks=chunks, gap_s=0.02, cut="fin")
    async with tiers(FakeEngine("a", script), depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed())
        *words, error = events(body_of(await raw.to_end()))
        assert [w["choices"][0]["delta"]["content"] for w in words] == ["one", "two"]
        assert error["error"]["code"] == "stream_broken"


# -- before the first token --------------------------------------------------------------------------------------------


async def test_a_server_that_dies_between_head_and_first_token_is_replaced(depth: int) -> None:
    """vLLM sends the head of a stream at once and its first token after the prefill: that is no answer yet."""
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth) as world:
        waits = Script.stream("x ").but(chunks=(), cut="stall", cut_after=0)
        a.script = b.script = waits
        raw = await Raw.connect(world.url)
        raw.send(streamed("connection: close"))
        await eventually(lambda: any(s.answered for e in world.engines for s in e.seen), 5.0)
        assert raw.received == b""
        victim = a if a.seen else b
        a.script = b.script = Script.stream("one ", "two ")
        victim.kill()
        received = await raw.to_end()
        assert statuses(received) == [200]
        assert events(body_of(received))[-1] == b"[DONE]"
        assert seen(world) == 2


async def test_a_head_alone_does_not_begin_the_time_between_tokens(depth: int) -> None:
    """A prefill may take longer than a stream may stall."""
    script = Script(
        framing="raw",
        chunks=(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(token("a")), token("a")),
        ),
        gap_s=0.9,
    )
    limits = {"stall_timeout_s": 0.3, "first_byte_timeout_s": 5.0}
    async with tiers(FakeEngine("a", script), depth=depth, upstream=limits) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"))) == token("a")


# -- keep-alive comments (C15) -----------------------------------------------------------------------------------------

COMMENTS = {"streaming": {"keepalive_comment_s": 0.2}}
PING = b": ping\n\n"
SLOW = Script.stream("one ", "two ")


async def silences(raw: Raw) -> tuple[bytes, float]:
    """All that comes, and the longest time in which nothing came."""
    longest, at = 0.0, time.monotonic()
    while await raw._more():
        now = time.monotonic()
        longest, at = max(longest, now - at), now
    return raw.received, longest


def late_body(seconds: float) -> Script:
    """Its head at once, its body after a while."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in SLOW.chunks) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-engine: yes\r\n\r\n"
    return Script(framing="raw", chunks=(head, framed), gap_s=seconds)


@pytest.mark.parametrize("when", ["before the head", "after the head", "between events"])
async def test_a_silent_stream_is_kept_up(depth: int, when: str) -> None:
    script = {
        "before the head": SLOW.but(delay_s=1.3),
        "after the head": late_body(1.3),
        "between events": SLOW.but(gap_s=0.65),
    }[when]
    async with tiers(FakeEngine("a", script), depth=depth, **COMMENTS) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed("connection: close"))
        received, longest = await silences(raw)
        assert statuses(received) == [200]
        assert b"content-type: text/event-stream" in received.lower()
        assert received.endswith(b"0\r\n\r\n")
        payload = body_of(received)
        assert 3 <= payload.count(PING) <= 8
        assert longest < 0.45
        assert payload.replace(PING, b"") == b"".join(SLOW.chunks)
        (record,) = await records(world)
        assert record["ttft_s"] > (1.2 if when != "between events" else 0.0)  # a comment is no token
        assert (record["ending"], record["status"], record["output_tokens"]) == ("complete", 200, 2)


async def test_without_being_asked_for_there_are_no_comments(depth: int) -> None:
    async with tiers(FakeEngine("a", SLOW.but(delay_s=0.8)), depth=depth) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"))) == b"".join(SLOW.chunks)


@pytest.mark.parametrize("status", [503, 400, 500])
async def test_an_error_that_follows_comments_is_an_event(depth: int, status: int) -> None:
    engine = FakeEngine("a", Script.error(status, "not today", delay_s=0.7))
    async with tiers(engine, depth=depth, **COMMENTS) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed())
        received = await raw.to_end()
        assert statuses(received) == [200]
        assert not received.endswith(b"0\r\n\r\n")
        payload = body_of(received)
        assert payload.startswith(PING)
        (error,) = events(payload)
        assert error["error"]["message"] == "not today"  # the server's own words
        assert error["error"]["code"] == status
        (record,) = await records(world)
        assert record["status"] == status
        assert record["ending"] == "refused_here"
        await eventually(world.idle, 5.0)


async def test_a_failure_after_comments_is_still_tried_elsewhere(depth: int) -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    async with tiers(*engines, depth=depth, **COMMENTS) as world, await Raw.connect(world.url) as raw:
        engines[0].choose = engines[1].choose = lambda s: SLOW if seen(world) == 2 else Script.error(503, delay_s=0.7)
        raw.send(streamed("connection: close"))
        payload = body_of(await raw.to_end())
        assert payload.count(PING) >= 2
        assert payload.replace(PING, b"") == b"".join(SLOW.chunks)
        assert [len(e.seen) for e in engines] == [1, 1]


async def test_nothing_reachable_after_comments_is_an_event(depth: int) -> None:
    silent = Script.whole(cut="stall", cut_after=BEFORE_HEAD)
    limits = {"first_byte_timeout_s": 0.6}
    async with tiers(FakeEngine("a", silent), depth=depth, upstream=limits, **COMMENTS) as world:
        async with await Raw.connect(world.url) as raw:
            raw.send(streamed())
            (error,) = events(body_of(await raw.to_end()))
            assert error["error"]["code"] in ("first_byte_timeout", "no_endpoints")
        await eventually(world.idle, 5.0)


async def test_only_streams_of_events_get_comments(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(delay_s=0.7))
    async with tiers(engine, depth=depth, **COMMENTS) as world:
        assert (await world.chat()).body == Script.whole().chunks[0]
        ndjson = Script(content_type="application/x-ndjson", framing="chunked", chunks=(b"{}\n",), delay_s=0.7)
        engine.script = ndjson
        async with await Raw.connect(world.url) as raw:
            raw.send(post("/api/generate", b'{"model":"%b","prompt":"x"}' % MODEL.encode()))
            assert (await raw.response()).body == b"{}\n"
        engine.script = Script.whole(delay_s=0.7)  # it ignores that a stream was asked for
        async with await Raw.connect(world.url) as raw:
            raw.send(streamed())
            received = await raw.to_end()
        assert body_of(received).startswith(PING)
        assert "the server answered 200" in events(body_of(received))[0]["error"]["message"]


async def test_a_compressed_stream_gets_no_comments_within_it(depth: int) -> None:
    script = Script(
        content_type="text/event-stream",
        framing="chunked",
        headers=(("content-encoding", "gzip"),),
        chunks=(b"\x1f\x8b one", b"two"),
        gap_s=0.7,
    )
    async with tiers(FakeEngine("a", script), depth=depth, **COMMENTS) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"))) == b"\x1f\x8b onetwo"


async def test_an_old_client_gets_comments_too(depth: int) -> None:
    async with tiers(FakeEngine("a", SLOW.but(delay_s=0.7)), depth=depth, **COMMENTS) as world:
        received = await exchange(world.url, streamed().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, payload = received.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert payload.startswith(PING)
        assert payload.replace(PING, b"") == b"".join(SLOW.chunks)


async def test_comments_stop_with_their_request(depth: int) -> None:
    engine = FakeEngine("a", SLOW.but(delay_s=30.0))
    async with tiers(engine, depth=depth, **COMMENTS) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed())
        await raw.until(PING)
        raw.rst()
        await eventually(lambda: engine.ended("aborted"), 2.0)
        await eventually(world.idle, 2.0)
        assert [r["ending"] for r in await records(world)] == ["client_left"]


async def test_a_time_out_here_is_no_time_out_while_nothing_is_due(depth: int) -> None:
    """With comments off nothing ends a long silence before its configured time."""
    limits = {"first_byte_timeout_s": 3.0, "stall_timeout_s": 3.0}
    async with tiers(FakeEngine("a", SLOW.but(delay_s=1.5, gap_s=1.0)), depth=depth, upstream=limits) as world:
        assert body_of(await exchange(world.url, streamed("connection: close"), 10.0)) == b"".join(SLOW.chunks)


async def test_a_server_that_is_silent_for_too_long_is_told_of(depth: int) -> None:
    silent = Script.whole(cut="stall", cut_after=BEFORE_HEAD)
    async with tiers(FakeEngine("a", silent), depth=depth, upstream={"first_byte_timeout_s": 0.4}) as world:
        assert is_error(await world.chat(stream=True), 504)


async def the_metrics(world: Tiers) -> dict[str, float]:
    return await metrics(world.admin_url)


async def test_the_admin_listener_tells_of_streams_as_of_others(depth: int) -> None:
    async with tiers(FakeEngine("a", SLOW), depth=depth) as world:
        await exchange(world.url, streamed("connection: close"))
        found = await the_metrics(world)
        assert total(found, "headwater_time_to_first_token_seconds_count", model=MODEL) == 1
        assert (await get(f"{world.admin_url}/readyz")).status == 200
