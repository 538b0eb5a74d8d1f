"""HEAD, OPTIONS and CORS, GETs with and without a body, addresses of IPv6 (C13), and what is answered here."""

from __future__ import annotations

import json
import socket

import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, Response, body_of, chat, events, post
from tests.integration.relay.cases import PATH, exchange, seen, statuses, streamed
from tests.integration.system import tiers
from tests.servers import eventually

ORIGIN = "https://app.example.com"
ALLOWED = {"cors": {"allowed_origins": [ORIGIN]}}


def ask_for(method: str, target: str, *lines: str, body: bytes = b"") -> bytes:
    length = [f"content-length: {len(body)}"] if body else []
    head = "\r\n".join([f"{method} {target} HTTP/1.1", "host: t", *lines, *length])
    return f"{head}\r\n\r\n".encode() + body


async def one(url: str, data: bytes) -> Response:
    async with await Raw.connect(url) as raw:
        raw.send(data)
        return await raw.response()


PREFLIGHT = (
    f"origin: {ORIGIN}",
    "access-control-request-method: POST",
    "access-control-request-headers: authorization, content-type",
)


async def test_a_preflight_is_answered_here_and_the_stream_after_it_is_allowed(depth: int) -> None:
    engine = FakeEngine("a", Script.stream("a ", headers=(("Access-Control-Allow-Origin", "*"), ("Vary", "x"))))
    async with tiers(engine, depth=depth, **ALLOWED) as world:
        for path in (PATH, "/v1/messages", f"/predictions/{MODEL}", f"/v2/models/{MODEL}/infer", "/v1/models"):
            response = await one(world.url, ask_for("OPTIONS", path, *PREFLIGHT))
            assert response.status == 204
            assert response.header("access-control-allow-origin") == ORIGIN
            assert "POST" in (response.header("access-control-allow-methods") or "")
            assert response.header("access-control-allow-headers") == "authorization, content-type"
        assert seen(world) == 0
        received = await exchange(world.url, streamed(f"origin: {ORIGIN}", "connection: close"))
        assert received.lower().count(b"access-control-allow-origin") == 1
        assert f"access-control-allow-origin: {ORIGIN}\r\n".encode() in received
        assert events(body_of(received))[-1] == b"[DONE]"


async def test_no_other_origin_is_allowed_nor_reflected(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, **ALLOWED) as world:
        for origin in ("https://evil.example", "null", "http://app.example.com", f"{ORIGIN}.evil.example", ""):
            lines = (f"origin: {origin}", *PREFLIGHT[1:])
            response = await one(world.url, ask_for("OPTIONS", PATH, *lines))
            assert response.status == 403, origin
            assert response.header("access-control-allow-origin") is None
            response = await one(world.url, post(PATH, chat(MODEL), f"origin: {origin}"))
            assert response.status == 200
            assert response.header("access-control-allow-origin") is None
            refused = await one(world.url, post(PATH, b"{", f"origin: {origin}"))
            assert refused.header("access-control-allow-origin") is None
        told = await one(world.url, post(PATH, b"{", f"origin: {ORIGIN}"))
        assert told.status == 400
        assert told.header("access-control-allow-origin") == ORIGIN  # or the page could not read why
        admin = await one(world.admin_url, ask_for("OPTIONS", "/admin/v1/pools", *PREFLIGHT))
        assert admin.header("access-control-allow-origin") is None


async def test_a_refusal_of_a_server_is_allowed_to_be_read_as_well(depth: int) -> None:
    async with tiers(FakeEngine("a", Script.error(503)), depth=depth, **ALLOWED) as world:
        response = await one(world.url, post(PATH, chat(MODEL), f"origin: {ORIGIN}"))
        assert response.status == 503
        assert [v for k, v in response.headers if k == "access-control-allow-origin"] == [ORIGIN]


async def test_without_configured_origins_a_servers_own_answer_stands(depth: int) -> None:
    engine = FakeEngine("a", Script.whole(headers=(("access-control-allow-origin", "https://theirs"),)))
    async with tiers(engine, depth=depth) as world:
        response = await one(world.url, post(PATH, chat(MODEL), f"origin: {ORIGIN}"))
        assert response.header("access-control-allow-origin") == "https://theirs"
        response = await one(world.url, ask_for("OPTIONS", PATH, *PREFLIGHT))
        assert (response.status, response.header("access-control-allow-origin")) == (403, None)


async def test_options_that_are_no_preflight_go_to_who_describes_itself(depth: int) -> None:
    engine = FakeEngine("a", Script(chunks=(b'{"openapi":"3.0.1"}',)))
    async with tiers(engine, depth=depth) as world:
        response = await one(world.url, ask_for("OPTIONS", f"/predictions/{MODEL}"))
        assert (response.status, response.body) == (200, b'{"openapi":"3.0.1"}')
        assert engine.seen[0].method == "OPTIONS"
        assert (await one(world.url, ask_for("OPTIONS", PATH))).status in (404, 405)


HERE = ["/v1/models", f"/v1/models/{MODEL}", "/v1/models/nobody", "/health", "/ping", "/v2", "/v2/health/live"]
HERE += ["/v2/health/ready", "/api/tags", "/nothing/here"]


async def test_head_has_the_headers_of_get_and_no_body(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world, await Raw.connect(world.url) as raw:
        for path in HERE:
            raw.send(ask_for("GET", path))
            got = await raw.response()
            raw.send(ask_for("HEAD", path) + ask_for("GET", "/health"))
            head = (await raw._upto(b"\r\n\r\n")).decode()
            assert int(head.split(" ")[1]) == got.status, path
            assert f"content-length: {len(got.body)}\r\n" in head
            assert (await raw.response()).body == b"ok"  # what follows is the next answer, and no body


async def test_head_of_a_server_has_no_body_either(depth: int) -> None:
    engine = FakeEngine("a", Script(declared=1234, headers=(("x-model", "yes"),)))
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for path in (f"/v2/models/{MODEL}/ready", f"/v2/models/{MODEL}"):
            raw.send(ask_for("HEAD", path) + ask_for("HEAD", path) + ask_for("GET", "/health"))
            for _ in range(2):
                head = await raw._upto(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                assert b"content-length: 1234\r\n" in head
                assert b"x-model: yes" in head
            assert (await raw.response()).body == b"ok"
        assert {s.method for s in engine.seen} == {"HEAD"}
        engine.script = Script(framing="chunked")
        raw.send(ask_for("HEAD", f"/v2/models/{MODEL}") + ask_for("GET", "/health"))
        await raw._upto(b"\r\n\r\n")
        assert (await raw.response()).body == b"ok"


async def test_answers_without_a_body_are_passed_on_as_such(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for status in (204, 304):
            engine.script = Script(framing="raw", chunks=(b"HTTP/1.1 %d X\r\netag: 1\r\n\r\n" % status,))
            raw.send(ask_for("GET", f"/v2/models/{MODEL}/ready") + ask_for("GET", "/health"))
            head = await raw._upto(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d" % status)
            assert b"etag: 1" in head
            assert b"transfer-encoding" not in head
            assert (await raw.response()).body == b"ok"


async def test_a_get_with_a_body_is_one_request(depth: int) -> None:
    inner = ask_for("GET", "/v1/models")
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world:
        received = await exchange(
            world.url, ask_for("GET", "/v1/models", body=inner) + ask_for("GET", "/health", "connection: close")
        )
        assert statuses(received) == [200, 200]
        async with await Raw.connect(world.url) as raw:
            raw.send(ask_for("GET", f"/v2/models/{MODEL}/config", body=inner))
            assert (await raw.response()).status == 200
            raw.send(ask_for("GET", f"/v2/models/{MODEL}/config"))
            assert (await raw.response()).status == 200
        assert [s.body for s in engine.seen] == [inner, b""]
        assert engine.seen[1].header("content-length") is None


async def test_a_method_that_is_not_served_is_said_to_be(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        for method in ("PUT", "DELETE", "PATCH", "GET", "TRACE"):
            response = await one(world.url, ask_for(method, PATH))
            assert response.status in (404, 405), method
            assert {"message", "type", "param", "code"} <= response.json()["error"].keys()
        assert seen(world) == 0


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6(), reason="no IPv6 on the loopback here")
async def test_an_instance_with_an_address_of_ipv6_gets_requests_on_every_path(depth: int) -> None:
    engine = FakeEngine("six", host="::1")
    async with tiers(engine, depth=depth) as world:
        assert engine.url.startswith("http://[::1]:")
        assert (await world.chat()).status == 200
        assert (await one(world.url, ask_for("GET", f"/v2/models/{MODEL}/ready"))).status == 200
        assert (await one(world.url, post(f"/predictions/{MODEL}", b"x"))).status == 200
        assert {s.header("host") for s in engine.seen} == {f"[::1]:{engine.port}"}
        assert len(engine.seen) == 3


async def test_models_are_those_of_the_live_ones_merged(depth: int) -> None:
    engines = FakeEngine("a", model="one"), FakeEngine("b", model="two"), FakeEngine("c", model="two")
    async with tiers(*engines, depth=depth) as world:
        listed = (await one(world.url, ask_for("GET", "/v1/models"))).json()
        assert [m["id"] for m in listed["data"]] == ["one", "two"]
        engines[1].kill()
        for _ in range(6):  # the dead one is found out by the way, and costs nobody anything
            assert (await one(world.url, ask_for("GET", "/v2/models/two/ready"))).status == 200
        assert (await one(world.url, ask_for("GET", "/v2/health/ready"))).status == 200
        await world.bottom.membership.deregister(("r", "c"), "a")

        async def only_two() -> bool:
            now = json.loads((await one(world.url, ask_for("GET", "/v1/models"))).body)
            return [m["id"] for m in now["data"]] == ["two"]

        await eventually(only_two, 5.0)
