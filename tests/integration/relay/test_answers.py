"""What servers' answers mean, end to end: where a request goes next, and what is thought of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_engine import MODEL, FakeEngine, Script, event, token
from tests.integration.clients import chat, post
from tests.integration.relay.cases import exchange, is_error, records, seen, statuses, streamed
from tests.integration.system import tiers
from tests.servers import eventually

EVEN = {"policy": {"name": "round_robin"}, "queue": {"max_requests": 0}}
LARGE = "word " * 4000
MOVED = {
    "overloaded": Script.error(503, "the server is overloaded"),
    "too many requests": Script.error(429),
    "loading": Script.error(503, "Loading model"),
    "another model": Script.error(404, "The model `fake-model` does not exist."),
    "out of memory": Script.error(500, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "a dead engine": Script.error(500, "EngineCore encountered an issue. See stack trace (above)."),
    "out of resources": Script.error(507, "Out of resources"),
}
KEPT = {
    "the client's mistake": (Script.error(400, "max_tokens is too large"), 0),
    "the client's mistake, as a 500": (Script.error(500, "This model's maximum context length is 4096 tokens"), 0),
    "a path it has not": (Script.error(404, "Not Found"), 0),
    "a failure": (Script.error(500, "Internal server error"), 1),
}


@pytest.mark.parametrize("what", list(MOVED))
async def test_what_another_server_may_answer_goes_there_once(depth: int, what: str) -> None:
    engines = FakeEngine("a"), FakeEngine("b")
    async with tiers(*engines, depth=depth, **EVEN) as world:
        for engine in engines:
            engine.choose = lambda s: MOVED[what] if seen(world) == 1 else Script.whole()
        response = await world.chat()
        assert response.status == 200
        assert [len(e.seen) for e in engines] == [1, 1]
        (record,) = await records(world)
        assert (record["ending"], record["status"]) == ("complete", 200)
        failed = sum(world.candidate(e).breaker.failures for e in engines)
        assert failed == (1 if what.startswith("out of") else 0)


@pytest.mark.parametrize("what", list(MOVED))
async def test_when_all_say_so_the_servers_own_words_come_back(what: str) -> None:
    engines = FakeEngine("a", MOVED[what]), FakeEngine("b", MOVED[what])
    async with tiers(*engines, depth=3, **EVEN) as world:
        response = await world.chat()
        assert response.status == MOVED[what].status
        assert response.body == MOVED[what].chunks[0]
        assert seen(world) == 2
        await eventually(world.idle, 5.0)


@pytest.mark.parametrize("what", list(KEPT))
async def test_what_no_other_server_would_answer_better_is_the_answer(what: str) -> None:
    script, failures = KEPT[what]
    engines = FakeEngine("a", script), FakeEngine("b", script)
    async with tiers(*engines, depth=3, **EVEN) as world:
        response = await world.chat()
        assert (response.status, response.body) == (script.status, script.chunks[0])
        assert response.header("x-headwater-rejected") is None
        assert (response.header("x-headwater-served-by") or "").startswith("r/c/")
        assert seen(world) == 1
        assert sum(world.candidate(e).breaker.failures for e in engines) == failures
        (record,) = await records(world)
        assert (record["ending"], record["status"]) == ("complete", script.status)


async def test_a_large_error_passes_whole() -> None:
    large = Script(status=500, chunks=(b"x" * 100_000,))
    async with tiers(FakeEngine("a", large), depth=3) as world:
        response = await world.chat()
        assert (response.status, len(response.body)) == (500, 100_000)
        assert world.candidate(world.engines[0]).breaker.failures == 1


async def test_a_size_that_did_not_fit_is_remembered(depth: int) -> None:
    """The next request as large does not meet the same fate, and a smaller one still goes there."""
    fine = Script(chunks=(b'{"choices": []}',))
    small, big = FakeEngine("a", fine), FakeEngine("b", fine)
    small.choose = lambda s: MOVED["out of memory"] if len(s.body) > 10_000 else fine
    async with tiers(small, big, depth=depth, **EVEN) as world:
        for i in range(6):
            assert (await world.chat(text=f"{i} {LARGE}")).status == 200
        assert sum(len(s.body) > 10_000 for s in small.seen) == 1
        before = len(small.seen)
        for _ in range(4):
            assert (await world.chat()).status == 200
        assert len(small.seen) > before


async def test_a_request_that_ran_two_servers_out_of_memory_meets_no_third(depth: int) -> None:
    engines = [FakeEngine(name, MOVED["out of memory"]) for name in "abc"]
    async with tiers(*engines, depth=depth, **EVEN) as world:
        assert (await world.chat(text=LARGE)).status == 500
        assert seen(world) == 2
        again = await world.chat(text=LARGE)
        assert is_error(again, 413)
        assert again.json()["error"]["code"] == "prompt_quarantined"
        assert seen(world) == 2
        for engine in engines:
            engine.script = Script.whole()
        assert (await world.chat(text="another one")).status == 200


# -- errors under status 200 -------------------------------------------------------------------------------------------

ERROR = {"error": {"message": "CUDA error: an illegal memory access", "type": "InternalServerError", "code": 500}}
FALSE_200: dict[str, tuple[Script, int]] = {
    "an error": (Script(chunks=(json.dumps(ERROR).encode(),)), 1),
    "a page of another program": (Script(content_type="text/html", chunks=(b"<html>Bad gateway</html>",)), 1),
    "an event, then [DONE]": (Script.stream("a ").but(chunks=(token("a "), event(ERROR) + event("[DONE]"))), 1),
    "an event at the end": (Script.stream("a ").but(chunks=(token("a "), event(ERROR))), 1),
    "the client's mistake in an event": (
        Script.stream("a ").but(chunks=(event({"error": {"message": "bad grammar", "code": 400}}), event("[DONE]"))),
        0,
    ),
}


@pytest.mark.parametrize("what", list(FALSE_200))
async def test_a_200_that_is_an_error_counts_as_one(what: str) -> None:
    script, failures = FALSE_200[what]
    engine = FakeEngine("a", script)
    async with tiers(engine, depth=1) as world:
        is_stream = script.framing == "chunked"
        data = streamed("connection: close") if is_stream else post("/v1/chat/completions", chat(MODEL))
        received = await exchange(world.url, data.replace(b"host: test", b"host: test\r\nconnection: close", 1))
        assert statuses(received) == [200]
        for chunk in script.chunks:
            assert chunk in received
        assert seen(world) == 1
        assert world.candidate(engine).breaker.failures == failures
        await eventually(world.idle, 5.0)


@pytest.mark.parametrize("text", ['{"error": "x"}', "an error: data: {", "error"])
async def test_a_model_that_writes_of_errors_is_well(text: str) -> None:
    engine = FakeEngine("a", Script.whole(text))
    async with tiers(engine, depth=1) as world:
        assert (await world.chat()).status == 200
        engine.script = Script.stream(text, text)
        assert (await world.chat(stream=True)).status == 200
        listed: list[dict[str, Any]] = await records(world)
        assert not any(r["error"] for r in listed)
        assert world.candidate(engine).breaker.failures == 0
