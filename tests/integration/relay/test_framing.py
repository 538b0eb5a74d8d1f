"""Framing attacks, hop-by-hop headers, upgrades (C10): what is ambiguous is refused, one request is one request."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, body_of, chat, events, get, post
from tests.integration.relay.cases import PATH, LaxEngine, exchange, seen, statuses, streamed
from tests.integration.system import tiers
from tests.servers import eventually

BODY = chat(MODEL)
SIZE = len(BODY)
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n".encode()
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n"


def chunked(body: bytes = BODY, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"%x\r\n%b\r\n%b" % (len(body), body, end)


def sized(*lines: bytes, body: bytes = BODY) -> bytes:
    return HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


LENGTH = b"content-length: %d" % SIZE
CHUNKED = b"transfer-encoding: chunked"
REFUSED: dict[str, tuple[bytes, int]] = {
    "a length and chunks": (sized(LENGTH, CHUNKED, body=chunked() + SMUGGLED), 400),
    "chunks and a length": (sized(CHUNKED, LENGTH, body=chunked() + SMUGGLED), 400),
    "two lengths": (sized(LENGTH, b"content-length: 1"), 400),
    "the same length twice": (sized(LENGTH, LENGTH), 400),
    "a list of lengths": (sized(b"content-length: %d, %d" % (SIZE, SIZE)), 400),
    "an empty length": (sized(b"content-length:", body=SMUGGLED), 400),
    "a length of blanks": (sized(b"content-length:  ", body=SMUGGLED), 400),
    "a signed length": (sized(b"content-length: +%d" % SIZE), 400),
    "a negative length": (sized(b"content-length: -1"), 400),
    "a hexadecimal length": (sized(b"content-length: 0x10"), 400),
    "a length with a blank in it": (sized(b"content-length: 1 0"), 400),
    "a length beyond 64 bits": (sized(b"content-length: 99999999999999999999999"), 400),
    "chunked and a tab": (sized(b"transfer-encoding: chunked\t", body=chunked() + SMUGGLED), 400),
    "gzip, chunked": (sized(b"transfer-encoding: gzip, chunked", body=chunked()), 501),
    "chunked, gzip": (sized(b"transfer-encoding: chunked, gzip", body=chunked()), 400),
    "chunked twice": (sized(CHUNKED, CHUNKED, body=chunked()), 400),
    "chunked, then identity": (sized(CHUNKED, b"transfer-encoding: identity", body=chunked()), 400),
    "xchunked": (sized(b"transfer-encoding: xchunked", body=chunked() + SMUGGLED), 400),
    "chunked in quotes": (sized(b'transfer-encoding: "chunked"', body=chunked() + SMUGGLED), 400),
    "no coding at all": (sized(b"transfer-encoding:", body=chunked() + SMUGGLED), 400),
    "chunks in HTTP/1.0": (sized(CHUNKED, body=chunked()).replace(b"HTTP/1.1", b"HTTP/1.0", 1), 400),
    "a line that ends with LF": (sized(LENGTH).replace(b"host: t\r\n", b"host: t\n"), 400),
    "lines that end with LF": (sized(LENGTH).replace(b"\r\n", b"\n"), 400),
    "a line that ends with CR": (sized(LENGTH).replace(b"host: t\r\n", b"host: t\r"), 400),
    "a blank before the colon": (sized(b"content-length : %d" % SIZE), 400),
    "a blank before the name": (sized(b" x: y", LENGTH), 400),
    "a folded line": (sized(b"x: y\r\n z", LENGTH), 400),
    "a folded coding": (sized(b"transfer-encoding:\r\n chunked", body=chunked()), 400),
    "a field without a name": (sized(b": x", LENGTH), 400),
    "a zero byte in a value": (sized(b"x: a\0b", LENGTH), 400),
    "a zero byte in a name": (sized(b"x\0: a", LENGTH), 400),
    "a control byte in a value": (sized(b"x: a\x0bb", LENGTH), 400),
    "two hosts": (sized(b"host: other", LENGTH), 400),
    "no host": (sized(LENGTH).replace(b"host: t\r\n", b""), 400),
    "a chunk of 0x5": (sized(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"), 400),
    "a chunk of +5": (sized(CHUNKED, body=b"+5\r\nhello\r\n0\r\n\r\n"), 400),
    "a chunk of -1": (sized(CHUNKED, body=b"-1\r\nhello\r\n0\r\n\r\n"), 400),
    "a chunk beyond 64 bits": (sized(CHUNKED, body=b"fffffffffffffffff\r\nhello"), 400),
    "a chunk without a size": (sized(CHUNKED, body=b"\r\nhello\r\n0\r\n\r\n"), 400),
    "a chunk that is longer than it says": (sized(CHUNKED, body=b"5\r\nhelloX\r\n0\r\n\r\n"), 400),
    "a chunk's head that ends with LF": (sized(CHUNKED, body=b"5\nhello\n0\n\n"), 400),
    "an extension with LF": (sized(CHUNKED, body=b"5;a\nb\r\nhello\r\n0\r\n\r\n"), 400),
    "a length in the trailer": (sized(CHUNKED, body=chunked(end=b"0\r\ncontent-length: 9\r\n\r\n")), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 505),
    "HTTP/2.0 by name": (sized(LENGTH).replace(b"HTTP/1.1", b"HTTP/2.0", 1), 505),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n", 505),
    "HTTP/1.2": (sized(LENGTH).replace(b"HTTP/1.1", b"HTTP/1.2", 1), 400),
    "an unknown method": (sized(LENGTH).replace(b"POST", b"FOO", 1), 400),
    "a method in lower case": (sized(LENGTH).replace(b"POST", b"post", 1), 400),
    "a blank in the target": (sized(LENGTH).replace(b"completions", b"comple tions", 1), 400),
    "a byte beyond ASCII in the target": (sized(LENGTH).replace(b"completions", b"comple\xfftions", 1), 400),
    "a tunnel": (b"CONNECT 10.0.0.1:80 HTTP/1.1\r\nhost: 10.0.0.1:80\r\n\r\n" + SMUGGLED, 501),
    "a WebSocket": (
        b"GET /v1/realtime HTTP/1.1\r\nhost: t\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n" + SMUGGLED,
        501,
    ),
    "an expectation nobody has": (sized(LENGTH, b"expect: 200-ok"), 417),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, 400),
}


async def test_what_is_ambiguous_is_refused_and_the_connection_ends(depth: int) -> None:
    engine = LaxEngine()
    async with tiers(engine, depth=depth) as world:
        for name, (data, status) in REFUSED.items():
            received = await exchange(world.url, data)
            assert statuses(received) == [status], (name, received)
            assert b"connection: close" in received, name
            assert "error" in json.loads(received.split(b"\r\n\r\n", 1)[1]), name
        assert engine.lines == []
        await eventually(world.idle, 5.0)


async def test_the_refusal_comes_also_byte_by_byte(depth: int) -> None:
    """As a parser may see a fault at another place when it comes in another read."""
    engine = LaxEngine()
    async with tiers(engine, depth=depth) as world:
        for name in ("a length and chunks", "chunked and a tab", "a chunk of 0x5", "a folded line", "a WebSocket"):
            data, status = REFUSED[name]
            async with await Raw.connect(world.url) as raw:
                for i in range(0, len(data), 7):
                    raw.send(data[i : i + 7])
                    await asyncio.sleep(0)
                assert statuses(await raw.to_end(5.0)) == [status], name
        assert engine.lines == []


SERVED = {
    "a length": sized(LENGTH),
    "a length and blanks": sized(b"content-length:  %d\t " % SIZE),
    "chunks": sized(CHUNKED, body=chunked()),
    "chunks of one byte": sized(CHUNKED, body=b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n"),
    "CHUNKED": sized(b"Transfer-Encoding: CHUNKED", body=chunked()),
    "a tab before chunked": sized(b"transfer-encoding:\tchunked", body=chunked()),
    "an extension": sized(CHUNKED, body=b'%x;a=b;c="d"\r\n%b\r\n0\r\n\r\n' % (SIZE, BODY)),
    "a trailer": sized(CHUNKED, body=chunked(end=b"0\r\nx-checksum: 1\r\nexpires: never\r\n\r\n")),
    "leading blank lines": b"\r\n\r\n" + sized(LENGTH),
    "the absolute form": sized(LENGTH).replace(b"POST /", b"POST http://t/", 1),
    "bytes beyond ASCII in a value": sized(b"x: caf\xc3\xa9 \xff", LENGTH),
    "HTTP/1.0": sized(LENGTH).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
}


async def test_what_is_legal_passes_with_one_framing_header(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world:
        for name, data in SERVED.items():
            async with await Raw.connect(world.url) as raw:
                raw.send(data)
                assert (await raw.response()).status == 200, name
            last = engine.seen[-1]
            assert last.body == BODY, name
            framing = [(k, v) for k, v in last.headers if k in ("content-length", "transfer-encoding", "trailer")]
            assert framing == [("content-length", str(SIZE))], name
            assert [k for k, _ in last.headers].count("host") == 1, name
        assert len(engine.seen) == len(SERVED)


async def test_an_offer_of_h2c_is_ignored_and_the_request_served(depth: int) -> None:
    """Java's HttpClient makes one with its first request, body and all; what follows is still HTTP/1.1."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA")
    upgrade = b"Upgrade: h2c"
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world:
        for framed in (sized(*offer, upgrade, LENGTH), sized(upgrade, *offer, CHUNKED, body=chunked())):
            async with await Raw.connect(world.url) as raw:
                raw.send(framed + sized(LENGTH) + sized(*offer, upgrade, LENGTH))
                assert [(await raw.response()).status for _ in range(3)] == [200] * 3
        for cut in (30, 120, len(sized(*offer, upgrade, LENGTH)) - 20):
            async with await Raw.connect(world.url) as raw:
                data = sized(*offer, upgrade, LENGTH)
                raw.send(data[:cut])
                await asyncio.sleep(0.02)
                raw.send(data[cut:])
                assert (await raw.response()).status == 200, cut
        assert [s.body for s in engine.seen] == [BODY] * 9
        assert not [k for s in engine.seen for k, _ in s.headers if k in ("upgrade", "http2-settings", "connection")]
        get_ = b"GET /v1/models HTTP/1.1\r\nhost: t\r\n" + b"\r\n".join((*offer, upgrade)) + b"\r\n\r\n"
        async with await Raw.connect(world.url) as raw:
            raw.send(get_ + get_)
            assert [(await raw.response()).status for _ in range(2)] == [200, 200]


async def test_a_pipelined_request_is_served_after_the_first(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        engine.choose = lambda s: Script.whole(s.header("x-word") or "", delay_s=float(s.header("x-delay") or 0))
        raw.send(
            post(PATH, BODY, "x-word: one", "x-delay: 0.3")
            + b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n"
            + post(PATH, BODY, "x-word: two", framing="transfer-encoding: chunked").removesuffix(BODY)
            + chunked()
            + post(PATH, BODY, "x-word: three", "connection: close")
            + post(PATH, BODY, "x-word: never")
        )
        answers = [(await raw.response()).json() for _ in range(4)]
        assert [a["choices"][0]["message"]["content"] for a in answers if "choices" in a] == ["one", "two", "three"]
        assert [a["object"] for a in answers] == ["chat.completion", "list", "chat.completion", "chat.completion"]
        await raw.to_end()
        assert raw.how == "fin"  # after `Connection: close` nothing is taken
        assert [s.header("x-word") for s in engine.seen] == ["one", "two", "three"]


async def test_what_is_refused_comes_after_what_is_under_way(depth: int) -> None:
    engine = FakeEngine("a", Script.whole("first", delay_s=0.2))
    async with tiers(engine, depth=depth) as world:
        received = await exchange(world.url, sized(LENGTH) + REFUSED["a length and chunks"][0])
        assert statuses(received) == [200, 400]
        assert b"first" in received
        assert seen(world) == 1


async def test_many_pipelined_requests_are_all_answered_in_order(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        engine.choose = lambda s: Script.whole(s.header("x-word") or "")
        raw.send(b"".join(post(PATH, BODY, f"x-word: {i}") for i in range(60)))
        words = [(await raw.response()).json()["choices"][0]["message"]["content"] for _ in range(60)]
        assert words == [str(i) for i in range(60)]


HOP_BY_HOP = [
    "connection: close, x-first",
    "connection: x-second",
    "x-first: 1",
    "x-second: 1",
    "keep-alive: timeout=5",
    "proxy-connection: keep-alive",
    "proxy-authorization: Basic Og==",
    "proxy-features: none",
    "te: trailers",
    "trailer: x-checksum",
]


async def test_hop_by_hop_headers_go_no_further_in_either_direction(depth: int) -> None:
    back = (
        ("Connection", "X-Hop, Keep-Alive"),
        ("X-Hop", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Proxy-Authenticate", "Basic"),
        ("Upgrade", "h2c"),
        ("Trailer", "x-sum"),
        ("X-Kept", "yes"),
    )
    engine = FakeEngine("a", Script.whole(headers=back))
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(post(PATH, BODY, *HOP_BY_HOP, "x-kept: yes"))
        response = await raw.response()
        (there,) = engine.seen
        gone = {"connection", "x-first", "x-second", "keep-alive", "te", "trailer", "x-hop", "upgrade"}
        assert not gone & {k for k, _ in there.headers}
        assert not [k for k, _ in there.headers if k.startswith("proxy-")]
        assert there.header("x-kept") == "yes"
        assert [v for k, v in response.headers if k == "connection"] == ["close"]  # our own, since it was asked for
        assert not (gone - {"connection"}) & {k for k, _ in response.headers}
        assert not [k for k, _ in response.headers if k.startswith("proxy-")]
        assert response.header("x-kept") == "yes"


async def test_a_client_cannot_drop_what_is_added_here(depth: int) -> None:
    names = "host, content-length, traceparent, via, x-headwater-route, transfer-encoding, content-type"
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world:
        async with await Raw.connect(world.url) as raw:
            raw.send(post(PATH, BODY, f"connection: {names}"))
            response = await raw.response()
        assert response.status == 200
        assert response.header("x-headwater-decision")
        (there,) = engine.seen
        assert there.body == BODY
        for name in ("host", "content-length", "traceparent", "via"):
            assert [k for k, _ in there.headers].count(name) == 1, name
        for tier in world.chain[1:]:  # the tiers below were told by their peer, whatever the client named
            listed = (await get(f"http://127.0.0.1:{tier.admin_port}/admin/v1/requests")).json()
            assert [r["from_peer"] for r in listed] == [True]


ANSWERS: dict[str, tuple[bytes, int]] = {
    "a length and chunks": (b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 502),
    "two lengths": (b"content-length: 5\r\ncontent-length: 7\r\n\r\nhello", 502),
    "a bad length": (b"content-length: five\r\n\r\nhello", 502),
    "a folded line": (b"x: y\r\n z\r\ncontent-length: 5\r\n\r\nhello", 502),
    "a bad chunk": (b"transfer-encoding: chunked\r\n\r\nfive\r\nhello\r\n0\r\n\r\n", 502),
    "no end of its head": (b"x: %b\r\n" % (b"y" * 400_000), 502),
    "a length": (b"content-length: 5\r\n\r\nhello", 200),
    "a length and more": (b"content-length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", 200),
    "chunks and more": (b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", 200),
    "until its end": (b"\r\nhello", 200),
}


async def test_answers_that_are_ambiguous_are_502_and_never_reach_the_next_client(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, health={"eject_after": 1000}) as world:
        for name, (answer, status) in ANSWERS.items():
            engine.then(Script(framing="raw", chunks=(b"HTTP/1.1 200 OK\r\n" + answer,), cut="fin"))
            async with await Raw.connect(world.url) as raw:
                raw.send(post(PATH, BODY, "connection: close"))
                received = await raw.to_end()
            assert statuses(received) == [status], (name, received[:300])
            assert b"bad" not in received, name
            if status == 200:
                body = body_of(received) if b"chunked" in received else received.split(b"\r\n\r\n", 1)[1]
                assert body == b"hello", name
            assert (await world.chat()).json()["choices"][0]["message"]["content"] == "Hello.", name


async def test_informational_answers_are_passed_over(depth: int) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    engine = FakeEngine("a", Script(framing="raw", chunks=(whole, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")))
    async with tiers(engine, depth=depth) as world:
        response = await world.chat()
        assert (response.status, response.body) == (200, b"ok")
        assert response.header("link") is None
        engine.script = Script(framing="raw", chunks=(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\nraw",))
        assert (await world.chat()).status == 502  # nobody asked for another protocol


async def test_old_clients_keep_their_connection_when_they_ask_for_it(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for _ in range(2):
            raw.send(sized(LENGTH, b"connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            response = await raw.response()
            assert response.header("connection") == "keep-alive"
        engine.script = Script.stream("a ", "b ")
        raw.send(streamed("connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        received = (await raw.to_end())[raw._read :]
        assert b"transfer-encoding" not in received
        assert events(received.split(b"\r\n\r\n", 1)[1])[-1] == b"[DONE]"


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
async def test_no_framing_of_a_server_is_the_clients_business(depth: int, framing: str) -> None:
    script = Script.stream("one ", "two ").but(framing=framing)
    async with tiers(FakeEngine("a", script), depth=depth) as world:
        received = await exchange(world.url, streamed("connection: close"))
        payload = received.split(b"\r\n\r\n", 1)[1] if framing == "length" else body_of(received)
        assert payload == b"".join(script.chunks)
