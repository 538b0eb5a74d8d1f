"""Servers and clients that misbehave, against one tier and through three: CASES C01, C02, C04, C05, C07, C24."""

from __future__ import annotations

import asyncio
import json
import time
from hashlib import sha256
from typing import Any

import pytest

from tests.fake_engine import ALL, BEFORE_HEAD, MODEL, FakeEngine, Script, token
from tests.integration.clients import Raw, body_of, chat, events, metrics, post, total
from tests.integration.relay.cases import GONE_S, PATH, failures, is_error, records, seen, streamed
from tests.integration.system import CLUSTER, Tiers, open_files, tiers
from tests.servers import eventually

WORDS = tuple(f"w{i} " for i in range(200))
LONG = Script.stream(*WORDS, gap_s=0.1)


@pytest.fixture(params=[1, 3], ids=["one tier", "three tiers"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# -- C01: the client leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rst", "fin"])
async def test_a_client_that_leaves_mid_stream_ends_the_work_at_once(depth: int, how: str) -> None:
    async with FakeEngine("other") as other, tiers(FakeEngine("a", LONG), depth=depth) as world:
        del other
        raw = await Raw.connect(world.url)
        raw.send(streamed())
        await raw.until(b"data:", 3)
        raw.rst() if how == "rst" else raw.fin()
        took = await eventually(lambda: world.engines[0].ended("aborted"), GONE_S)
        print(f"the server saw it after {took * 1000:.0f} ms")
        await eventually(world.idle, GONE_S)
        assert seen(world) == 1  # never tried again
        assert world.engines[0].seen[0].chunks < 50
        assert [r["ending"] for r in await records(world)] == ["client_left"]
        assert world.candidate(world.engines[0]).breaker.failures == 0
        assert await failures(world) == 0


@pytest.mark.parametrize("how", ["rst", "fin"])
async def test_a_client_that_leaves_before_the_answer_ends_the_work_at_once(depth: int, how: str) -> None:
    a = FakeEngine("a", Script.whole(delay_s=20.0))
    async with tiers(a, FakeEngine("b"), depth=depth) as world:
        for engine in world.engines:
            engine.script = a.script
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, chat(MODEL)))
        await eventually(lambda: seen(world) == 1, 5.0)
        raw.rst() if how == "rst" else raw.fin()
        await eventually(lambda: any(e.ended("aborted") for e in world.engines), GONE_S)
        await eventually(world.idle, GONE_S)
        assert seen(world) == 1
        (record,) = await records(world)
        assert (record["ending"], record["status"]) == ("client_left", 0)


async def test_fifty_clients_that_leave_leave_nothing_behind(depth: int) -> None:
    async with tiers(FakeEngine("a", LONG), FakeEngine("b", LONG), depth=depth) as world:
        clients = [await Raw.connect(world.url) for _ in range(50)]
        for raw in clients:
            raw.send(streamed())
        await asyncio.gather(*(raw.until(b"data:", 3) for raw in clients))
        for raw in clients:
            raw.rst()
        await eventually(lambda: sum(len(e.ended("aborted")) for e in world.engines) == 50, 2 * GONE_S)
        await eventually(world.idle, GONE_S)
        samples = await metrics(world.admin_url)
        assert total(samples, "headwater_in_flight_requests") == 0
        assert total(samples, "headwater_requests_total", ending="client_left") == 50
        assert all(e.open == 0 or not e.in_flight for e in world.engines)


# -- C02: the server dies in the middle --------------------------------------------------------------------------------

THREE = Script.stream("one ", "two ", "three ", "four ", "five ", gap_s=0.02, cut_after=3)
DEATHS = {
    "fin": THREE.but(cut="fin"),
    "rst": THREE.but(cut="rst"),
    "half a chunk's head": THREE.but(cut="fin", last_bytes=b"1f"),
    "half an event": THREE.but(cut="rst", last_bytes=b'f\r\ndata: {"choices'),
    "no final chunk": THREE.but(cut="fin", cut_after=ALL, chunks=THREE.chunks[:3]),
}


@pytest.mark.parametrize("how", list(DEATHS))
async def test_a_stream_that_breaks_never_looks_complete(depth: int, how: str) -> None:
    async with tiers(FakeEngine("a", DEATHS[how]), FakeEngine("b", DEATHS[how]), depth=depth) as world:
        raw = await Raw.connect(world.url)
        raw.send(streamed(response_format={"type": "json_schema"}, tools=[], n=2))
        received = await raw.to_end()
        assert received.startswith(b"HTTP/1.1 200")
        assert not received.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in received
        assert b'"finish_reason": "stop"' not in received
        *words, error = events(body_of(received))  # half an event is not passed on
        assert [w["choices"][0]["delta"]["content"] for w in words] == ["one ", "two ", "three "]
        assert error["error"]["code"] == "stream_broken"
        assert seen(world) == 1  # no replay
        await eventually(world.idle, 5.0)
        assert [r["ending"] for r in await records(world)] == ["broke_after_first_byte"]
        assert await failures(world) == 1  # counted once, by the tier that called the server


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_a_whole_answer_that_stops_short_is_a_502_that_says_so(depth: int, cut: Any) -> None:
    short = Script.whole("Half.", cut=cut, cut_after=ALL)
    short = short.but(declared=len(short.chunks[0]) + 1)
    async with tiers(FakeEngine("a", short), FakeEngine("b", short), depth=depth) as world:
        for _ in range(3):  # the first on new connections, the others perhaps on used ones
            response = await world.chat()
            assert is_error(response, 502)
            assert f"{short.declared - 1} of {short.declared} bytes" in response.json()["error"]["message"]
        assert seen(world) == 3  # it may have been executed, so never twice
        await eventually(world.idle, 5.0)


async def test_a_large_answer_that_stops_short_is_cut_too(depth: int) -> None:
    large = Script(chunks=(b"x" * 100_000,), declared=100_001, cut="fin")
    async with tiers(FakeEngine("a", large), depth=depth) as world:
        raw = await Raw.connect(world.url)
        raw.send(post(PATH, chat(MODEL)))
        received = await raw.to_end()
        assert b"content-length: 100001" in received
        assert len(received.split(b"\r\n\r\n", 1)[1]) < 100_001


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_an_old_client_can_tell_too(depth: int, cut: Any) -> None:
    """To a client of HTTP/1.0 the end of the connection is the end of the answer, so a cut has to be a reset."""
    text = Script(content_type="text/plain", framing="chunked", chunks=(b"some ", b"text "), cut=cut)
    engine = FakeEngine("a", text)
    async with tiers(engine, depth=depth) as world:
        request = post(PATH, chat(MODEL)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        raw = await Raw.connect(world.url)
        raw.send(request)
        await raw.to_end()
        assert raw.how == "rst"
        engine.script = THREE.but(cut=cut)
        raw = await Raw.connect(world.url)
        raw.send(request)
        assert events((await raw.to_end()).split(b"\r\n\r\n", 1)[1])[-1]["error"]["code"] == "stream_broken"


# -- C04: when it is safe to try again ---------------------------------------------------------------------------------


async def test_a_refused_connection_is_tried_elsewhere_with_the_same_bytes(depth: int) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, policy={"name": "round_robin"}) as world:
        a.refuse()
        body = chat(MODEL, text="Grüße, \U0001f30a " * 5000, temperature=0.70000000000000001)
        for _ in range(4):
            async with await Raw.connect(world.url) as raw:
                raw.send(post(PATH, body))
                assert (await raw.response()).status == 200
        assert [s.sha256 for s in b.seen] == [sha256(body).hexdigest()] * 4
        assert not a.seen
        assert world.candidate(a).breaker.state.value == "open"


async def test_a_port_that_takes_connections_and_resets_them_is_no_server(depth: int) -> None:
    """As a container's port does when nobody listens inside: whether the reset comes before the request is chance."""
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth) as world:
        a.slams = True
        statuses = [(await world.chat()).status for _ in range(40)]
        assert set(statuses) <= {200, 502}
        assert statuses.count(502) <= 6
        assert statuses[-10:] == [200] * 10  # ejected by now, after fewer and fewer tries
        assert not a.seen
        await eventually(world.idle, 5.0)


async def test_a_server_that_took_the_request_and_broke_is_not_replayed(depth: int) -> None:
    accepted = Script.whole(delay_s=1.0, cut="rst", cut_after=BEFORE_HEAD)
    async with tiers(FakeEngine("a", accepted), FakeEngine("b", accepted), depth=depth) as world:
        response = await world.chat()
        assert is_error(response, 502)
        assert response.json()["error"]["code"] == "upstream_reset"
        assert seen(world) == 1


async def test_a_server_that_is_gone_with_the_request_is_replaced(depth: int) -> None:
    """Nobody listens there any more, so nobody works on it: kill -9 of a server fails no request in one piece."""
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth) as world:
        a.script = b.script = Script.whole(delay_s=20.0)
        asked = asyncio.create_task(world.chat())
        await eventually(lambda: seen(world) == 1, 5.0)
        a.script = b.script = Script.whole()
        victim = a if a.seen else b
        victim.kill()
        assert (await asked).status == 200
        assert seen(world) == 2
        assert len({s.sha256 for e in world.engines for s in e.seen}) == 1


async def test_the_last_server_of_a_cluster_dies_with_a_request(depth: int) -> None:
    async with tiers(FakeEngine("a", Script.whole(delay_s=20.0)), depth=depth) as world:
        asked = asyncio.create_task(world.chat())
        await eventually(lambda: seen(world) == 1, 5.0)
        world.engines[0].kill()
        response = await asked
        assert response.status in (502, 503)
        assert is_error(response, response.status)
        await eventually(world.idle, 5.0)


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_a_used_connection_that_breaks_within_an_answer_is_no_lost_race(depth: int, cut: Any) -> None:
    """The keep-alive race is over as soon as a byte of an answer came: what follows is the server's own failure."""
    a = FakeEngine("a")
    async with tiers(a, depth=depth) as world:
        assert (await world.chat()).status == 200  # leaves connections to be used again
        short = Script.whole("Half.", cut=cut, cut_after=ALL)
        a.script = short.but(declared=len(short.chunks[0]) + 1)
        assert is_error(await world.chat(), 502)
        assert [s.turn for s in a.seen] == [0, 1]
        assert len(a.seen) == 2


# -- C03: connections that the server closes when idle -----------------------------------------------------------------


async def test_servers_that_close_used_connections_cost_nothing(depth: int) -> None:
    engines = FakeEngine("a", Script.whole(close="silent")), FakeEngine("b", Script.whole(close="announced"))
    async with tiers(*engines, depth=depth) as world:
        for _ in range(40):
            assert (await world.chat()).status == 200
        assert seen(world) == 40


async def test_requests_that_cross_with_an_idle_close_are_not_lost(depth: int) -> None:
    engines = FakeEngine("a", idle_close_s=0.02), FakeEngine("b", idle_close_s=0.02)
    async with tiers(*engines, depth=depth) as world:
        for i in range(60):
            await asyncio.sleep(0.017 + 0.0001 * i)  # just before, at, and just after the close
            responses = await asyncio.gather(world.chat(), world.chat())
            assert [r.status for r in responses] == [200, 200]


# -- servers that refuse for load --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_is_full_is_passed_over(depth: int, status: int) -> None:
    full = Script.error(status, headers=(("retry-after", "30"),))
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth) as world:
        a.choose = lambda s: full
        responses = [await world.chat() for _ in range(10)]
        assert [r.status for r in responses] == [200] * 10
        assert len(a.seen) <= 1  # Retry-After: asked once, and then left alone
        assert world.candidate(a).breaker.state.value == "closed"  # load is no failure
        assert await failures(world) == 0


async def test_retry_after_ends(depth: int) -> None:
    a = FakeEngine("a")
    async with tiers(a, depth=depth) as world:
        a.then(Script.error(429, headers=(("retry-after", "1"),)))
        began = time.monotonic()
        first = await world.chat()
        assert first.status == 429
        assert first.header("retry-after") == "1"
        second = await world.chat()
        if time.monotonic() - began < 0.9:
            assert is_error(second, 429)
            assert second.header("retry-after") == "1"
            assert len(a.seen) == 1
        await asyncio.sleep(1.1)
        assert (await world.chat()).status == 200


async def test_a_few_full_servers_do_not_take_their_cluster_out(depth: int) -> None:
    """One request may meet two full servers and be refused; that says nothing of the third."""
    full = Script.error(503, headers=(("retry-after", "30"),))
    engines = [FakeEngine(name) for name in "abc"]
    async with tiers(*engines, depth=depth) as world:
        for engine in engines:
            engine.choose = lambda s: full if seen(world) <= 2 else Script.whole()
        first = await world.chat()
        assert first.status == 503
        assert b"refused on command" in first.body  # the server's own words
        assert first.header("retry-after") == "30"
        assert [(await world.chat()).status for _ in range(10)] == [200] * 10
        assert sorted(len(e.seen) for e in engines) == [1, 1, 10]


async def test_when_all_refuse_the_storm_is_bounded_and_ends_with_the_overload(depth: int) -> None:
    engines = [FakeEngine(name, Script.error(503)) for name in "abcd"]
    async with tiers(*engines, depth=depth, queue={"max_requests": 0}) as world:
        responses = await asyncio.gather(*(world.chat() for _ in range(100)))
        assert {r.status for r in responses} <= {429, 503}
        assert all(is_error(r, r.status) or r.header("x-engine-id") for r in responses)
        assert seen(world) <= 200
        per_request = max(r["attempts"] for r in await records(world))
        assert per_request <= 3
        for engine in engines:
            engine.script = Script.whole()
        began = time.monotonic()

        async def served() -> bool:
            return all(r.status == 200 for r in await asyncio.gather(*(world.chat() for _ in range(8))))

        await eventually(served, 10.0)
        print(f"all served again after {time.monotonic() - began:.1f} s")
        await eventually(world.idle, 5.0)


# -- servers that are silent -------------------------------------------------------------------------------------------


async def test_a_server_without_a_first_byte_is_given_up_within_the_budget(depth: int) -> None:
    silent = Script.whole(cut="stall", cut_after=BEFORE_HEAD)
    engines = [FakeEngine(name, silent) for name in "abcd"]
    upstream = {"first_byte_timeout_s": 0.5}
    async with tiers(*engines, depth=depth, upstream=upstream) as world:
        response = await world.chat()
        assert is_error(response, 504)
        assert 1 <= seen(world) <= 2  # `retry.attempts`, over all tiers together
        assert await failures(world) == seen(world)
        await eventually(world.idle, 5.0)


async def test_a_silent_server_is_passed_over(depth: int) -> None:
    a, b = FakeEngine("a"), FakeEngine("b")
    async with tiers(a, b, depth=depth, upstream={"first_byte_timeout_s": 0.5}) as world:
        a.script = Script.whole(cut="stall", cut_after=BEFORE_HEAD)
        assert [(await world.chat()).status for _ in range(4)] == [200] * 4
        assert await failures(world) >= 1


async def test_a_stream_that_stalls_is_ended_and_counted(depth: int) -> None:
    stalls = THREE.but(cut="stall")
    async with tiers(FakeEngine("a", stalls), depth=depth, upstream={"stall_timeout_s": 0.6}) as world:
        raw = await Raw.connect(world.url)
        raw.send(streamed())
        received = await raw.to_end()
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n")
        *words, error = events(body_of(received))
        assert len(words) == 3
        assert error["error"]["code"] == "stream_broken"
        await eventually(lambda: world.engines[0].ended("aborted"), GONE_S)
        await eventually(world.idle, 5.0)
        assert await failures(world) == 1


# -- two balancers of one node -----------------------------------------------------------------------------------------


async def test_when_one_of_two_balancers_is_gone_the_other_one_is_followed() -> None:
    async with tiers(FakeEngine("a"), depth=3, more=[CLUSTER[:1]]) as world:
        both = {t.id: f"127.0.0.1:{t.reports.port}" for t in (world.chain[1], world.spare[0])}
        followed = [address for address in both.values() if address in world.top.quotes._following]
        assert len(followed) == 1
        (gone,) = [t for t in (world.chain[1], world.spare[0]) if both[t.id] == followed[0]]
        gone.abort()
        await gone.reports.close()
        (other,) = set(both.values()) - set(followed)
        took = await eventually(lambda: other in world.top.quotes._following, 3.0)
        print(f"the other one is followed after {took:.2f} s")
        assert [(await world.chat()).status for _ in range(5)] == [200] * 5


# -- C07: bodies that are refused here ---------------------------------------------------------------------------------

GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
ODD_BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "brace": (b"{", 400),
    "list": (b"[]", 400),
    "text": (b'"hi"', 400),
    "utf-16": (json.dumps(GOOD).encode("utf-16"), 400),
    "not utf-8": (b'{"model":"%b","messages":"\xff"}' % MODEL.encode(), 400),
    "mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), 400),
    "no model": (b'{"messages":[]}', 400),
    "null model": (b'{"model":null}', 400),
    "number": (b'{"model":7}', 400),
    "no name": (b'{"model":""}', 400),
    "unknown": (b'{"model":"nobody-has-this"}', 404),
    "deep": (b'{"model":"m","messages":' + b"[" * 3000 + b"]" * 3000 + b"}", 404),
    "two models": (b'{"model":"%b","model":"x"}' % MODEL.encode(), 400),
}


async def test_what_is_no_request_is_refused_without_asking_a_server(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world, await Raw.connect(world.url) as raw:
        for name, (body, status) in ODD_BODIES.items():
            raw.send(post(PATH, body))  # on one connection: a refusal is no reason to lose it
            response = await raw.response()
            assert response.status in (status, 400), (name, response)
            assert is_error(response, response.status), name
        for field in ("null", "false", "0"):
            raw.send(post(PATH, b'{"model":"%b","messages":[],"stream":%b,"n":3}' % (MODEL.encode(), field.encode())))
            assert (await raw.response()).status == 200
        chunked = post(PATH, b"", framing="transfer-encoding: chunked")
        piece = json.dumps(GOOD).encode()
        raw.send(chunked + b"%x\r\n%b\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(piece), piece))
        assert (await raw.response()).status == 200
        assert seen(world) == 4
        assert world.engines[0].seen[-1].body == piece
        await eventually(world.idle, 5.0)


# -- C24: nothing leaks ------------------------------------------------------------------------------------------------


async def test_after_every_kind_of_ending_nothing_is_left(depth: int) -> None:
    scripts = [
        Script.whole(),
        Script.error(500),
        Script.error(429),
        THREE.but(cut="rst"),
        THREE.but(cut="fin"),
        Script.whole(cut="rst", cut_after=BEFORE_HEAD),
        Script.stream("a ", "b "),
        Script.whole(cut="stall", cut_after=BEFORE_HEAD),  # its client leaves
        Script.stream(*WORDS, gap_s=0.05),  # this one's too
    ]
    a, b = FakeEngine("a"), FakeEngine("b")
    settings = {"health": {"eject_after": 1000}, "policy": {"name": "least_connections"}}
    async with tiers(a, b, depth=depth, **settings) as world:
        await _mixed(world, scripts, 2)  # whatever is made once is made now
        await eventually(world.idle, 5.0)
        files = open_files()
        await _mixed(world, scripts, 10)
        await eventually(world.idle, 5.0)
        for engine in world.engines:
            engine.script, engine.choose = Script.whole(), None
        await asyncio.sleep(1.2)  # the pause after a 429
        before = [len(e.seen) for e in world.engines]
        assert [(await world.chat()).status for _ in range(40)] == [200] * 40
        served = [len(e.seen) - n for e, n in zip(world.engines, before, strict=True)]
        assert min(served) >= 5, served  # neither looks better than it is
        await eventually(lambda: open_files() <= files + 20, 10.0)
        for tier in world.chain:
            assert total(await metrics(f"http://127.0.0.1:{tier.admin_port}"), "headwater_in_flight_requests") == 0


async def _mixed(world: Tiers, scripts: list[Script], times: int) -> None:
    async def one(number: int) -> None:
        raw = await Raw.connect(world.url)
        patient = number % len(scripts) < len(scripts) - 2
        script = f"x-script: {number % len(scripts)}"
        raw.send(post(PATH, chat(MODEL, stream=number % 2 == 0), script, "connection: close"))
        if patient:
            await raw.to_end()
        else:
            await asyncio.sleep(0.2)
        raw.rst()

    for engine in world.engines:
        engine.choose = lambda s: scripts[int(s.header("x-script") or 0)]
    for _ in range(times):
        await asyncio.gather(*(one(n) for n in range(2 * len(scripts))))


def test_the_fake_engines_words_are_events() -> None:
    """Guards the tests above against a fake that speaks in another shape than servers do."""
    (value,) = events(token("x"))
    assert value["choices"][0]["delta"] == {"content": "x"}
