"""Streams that break and are carried on by another server, where that is asked for (`retry.continue_streams`)."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.fake_engine import ALL, BEFORE_HEAD, FakeEngine, Script, Seen
from tests.integration.clients import Raw, Response, body_of, events, post
from tests.integration.relay.cases import GONE_S, failures, records, seen, streamed
from tests.integration.system import Tiers, tiers
from tests.servers import eventually

FIRST = Script.stream("one ", "two ", "three ", "four ", "five ", gap_s=0.02, cut_after=3)
REST = Script.stream("four ", "five ", gap_s=0.01)
WHOLE = "one two three four five "
DEATHS = {
    "fin": FIRST.but(cut="fin"),
    "rst": FIRST.but(cut="rst"),
    "half an event": FIRST.but(cut="rst", last_bytes=b'f\r\ndata: {"choices'),
    "no final chunk": FIRST.but(cut="fin", cut_after=ALL, chunks=FIRST.chunks[:3]),
    "stall": FIRST.but(cut="stall"),
}


def world_of(
    first: Script, *rest: Script, depth: int, engines: int = 2, **settings: Any
) -> AbstractAsyncContextManager[Tiers]:
    """Servers of which the first one asked does one thing, and those that carry on the others, in turn."""
    servers = [FakeEngine(name, engine="vllm") for name in "abc"[:engines]]

    def choose(_: Seen) -> Script:
        asked = sum(len(server.seen) for server in servers) - 1
        return (first, *rest)[min(asked, len(rest))]

    for server in servers:
        server.choose = choose
    retry = {"continue_streams": ["/v1/chat/completions", "/v1/completions"], **settings.pop("retry", {})}
    return tiers(*servers, depth=depth, retry=retry, upstream={"stall_timeout_s": 1.0}, **settings)


def text_of(response: Response) -> str:
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events(response.body) if isinstance(e, dict))


@pytest.mark.parametrize("how", list(DEATHS))
async def test_a_stream_that_breaks_is_carried_on(depth: int, how: str) -> None:
    async with world_of(DEATHS[how], REST, depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed(max_tokens=9))
        response = await raw.response(timeout_s=10.0)
        assert response.header("x-headwater-continuation") == "on"
        assert text_of(response) == WHOLE
        assert response.body.count(b"[DONE]") == 1
        assert b": continued by " in response.body
        first, follower = (s for engine in sorted(world.engines, key=lambda e: e.seen[0].at) for s in engine.seen)
        asked = json.loads(follower.body)
        assert asked["messages"][-1] == {"role": "assistant", "content": "one two three "}
        assert (asked["continue_final_message"], asked["max_tokens"]) == (True, 6)
        assert b"continue_final_message" not in first.body
        await eventually(world.idle, 5.0)
        (record,) = await records(world)
        assert (record["ending"], record["output_tokens"]) == ("complete", 5)
        assert await failures(world) == 1  # the server that broke is charged all the same
        raw.send(streamed())  # on the same connection
        assert (await raw.response()).status == 200


async def test_a_completion_is_carried_on(depth: int) -> None:
    def words(*texts: str) -> tuple[bytes, ...]:
        made = [{"id": "cmpl-1", "choices": [{"index": 0, "text": t, "finish_reason": None}]} for t in texts]
        return tuple(b"data: %b\n\n" % json.dumps(m).encode() for m in made)

    first = FIRST.but(chunks=words("1, ", "2, ", "3, ", "4"), cut="rst", cut_after=2)
    rest = REST.but(chunks=(*words("3, ", "4"), b"data: [DONE]\n\n"))
    body = json.dumps({"model": "fake-model", "prompt": "Count: ", "stream": True}).encode()
    async with world_of(first, rest, depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(post("/v1/completions", body))
        response = await raw.response()
        said = [e["choices"][0]["text"] for e in events(response.body) if isinstance(e, dict)]
        assert "".join(said) == "1, 2, 3, 4"
        prompts = sorted(json.loads(s.body)["prompt"] for engine in world.engines for s in engine.seen)
        assert prompts == ["Count: ", "Count: 1, 2, "]


async def broken(world: Tiers, asked: int, **fields: Any) -> None:
    """A stream ends in an error event, after so many requests to servers."""
    async with await Raw.connect(world.url) as raw:
        raw.send(streamed(**fields))
        received = await raw.to_end(10.0)
    assert not received.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in received
    *_, error = events(body_of(received))
    assert error["error"]["code"] == "stream_broken"
    assert seen(world) == asked
    await eventually(world.idle, 5.0)
    assert [r["ending"] for r in await records(world)] == ["broke_after_first_byte"]


async def test_with_nobody_else_it_ends_in_an_error_event(depth: int) -> None:
    async with world_of(DEATHS["rst"], REST, depth=depth, engines=1) as world:
        await broken(world, 1)


@pytest.mark.parametrize(
    "follower", [Script.error(500), Script.error(503), Script.whole(), FIRST.but(cut="rst", cut_after=BEFORE_HEAD)]
)
async def test_a_follower_that_cannot_is_not_taken_for_the_rest(depth: int, follower: Script) -> None:
    async with world_of(DEATHS["rst"], follower, depth=depth) as world:
        await broken(world, 2)


async def test_only_so_many_servers_are_asked(depth: int) -> None:
    async with world_of(DEATHS["rst"], REST, depth=depth, retry={"attempts": 1}) as world:
        await broken(world, 1)


async def test_it_may_break_more_than_once(depth: int) -> None:
    second = Script.stream("four ", "x", gap_s=0.02, cut="fin", cut_after=1)
    last = Script.stream("five ", gap_s=0.02)
    settings = {"retry": {"attempts": 3}, "engines": 3}
    async with (
        world_of(DEATHS["rst"], second, last, depth=depth, **settings) as world,
        await Raw.connect(world.url) as raw,
    ):
        raw.send(streamed())
        response = await raw.response(timeout_s=10.0)
        assert text_of(response) == WHOLE
        assert response.body.count(b": continued by ") == 2


async def test_what_cannot_be_carried_on_ends_as_ever(depth: int) -> None:
    async with world_of(DEATHS["rst"], REST, depth=depth) as world:
        await broken(world, 1, tools=[])


async def test_a_client_that_leaves_ends_the_follower_as_well(depth: int) -> None:
    silent = REST.but(cut="stall", cut_after=BEFORE_HEAD)
    async with world_of(DEATHS["rst"], silent, depth=depth) as world:
        raw = await Raw.connect(world.url)
        raw.send(streamed())
        await eventually(lambda: seen(world) == 2, 10.0)
        await asyncio.sleep(0.1)
        raw.rst()
        await eventually(lambda: sum(len(e.ended("aborted")) for e in world.engines) == 1, GONE_S + 3.0)
        await eventually(world.idle, 5.0)
        assert [r["ending"] for r in await records(world)] == ["client_left"]


async def test_a_process_that_leaves_between_two_servers_cuts_the_stream() -> None:
    silent = REST.but(cut="stall", cut_after=BEFORE_HEAD)
    async with world_of(DEATHS["rst"], silent, depth=1) as world, await Raw.connect(world.url) as raw:
        raw.send(streamed())
        await eventually(lambda: seen(world) == 2, 10.0)
        await world.chain[0].relay.close(0.1)
        received = await raw.to_end(5.0)
        assert b"three" in received
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
