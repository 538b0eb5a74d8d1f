"""Request bodies: odd ones are refused in the shape of the API called (C07), all others arrive byte for byte (C34)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
import zstandard

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, Response, ask, body_of, chat, post
from tests.integration.relay.cases import PATH, exchange, failures, resident_kb, seen, statuses
from tests.integration.system import tiers
from tests.servers import eventually

GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
NAME = json.dumps(MODEL).encode()
ODD: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "empty": (b"", (400,)),
    "blank": (b" \n", (400,)),
    "a brace": (b"{", (400,)),
    "an open string": (b'{"model":"', (400,)),
    "a list": (b"[]", (400,)),
    "a string": (b'"hi"', (400,)),
    "null": (b"null", (400,)),
    "a number": (b"7", (400,)),
    "text": (b"hello", (400,)),
    "a form": (b"model=x&messages=y", (400,)),
    "UTF-16": (json.dumps(GOOD).encode("utf-16"), (400,)),
    "UTF-32": (json.dumps(GOOD).encode("utf-32"), (400,)),
    "a bad byte in a string": (b'{"model":%b,"messages":"\xff"}' % NAME, (400,)),
    "a bad byte in the model": (b'{"model":"a\xff"}', (400,)),
    "half a character": (b'{"model":%b,"messages":"\xe2\x82"}' % NAME, (400,)),
    "a byte order mark": (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), (400,)),
    "two values": (json.dumps(GOOD).encode() * 2, (400,)),
    "no model": (b'{"messages":[]}', (400,)),
    "a null model": (b'{"model":null}', (400,)),
    "a number for a model": (b'{"model":7}', (400,)),
    "a list for a model": (b'{"model":[%b]}' % NAME, (400,)),
    "an object for a model": (b'{"model":{"a":1}}', (400,)),
    "no name": (b'{"model":""}', (400,)),
    "a very long name": (b'{"model":"%b"}' % (b"m" * 100_000), (400,)),
    "unknown": (b'{"model":"nobody-has-this"}', (404,)),
    "unknown, with a trap in it": (b'{"model":"../../etc/passwd\\u0000"}', (404,)),
    "deep": (b'{"model":"nobody","messages":' + b"[" * 3000 + b"]" * 3000 + b"}", (400, 404)),
    "deep, of a known model": (b'{"model":%b,"messages":' % NAME + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)),
    "deep elsewhere": (b'{"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", (400,)),
    "two models": (b'{"model":%b,"model":"x"}' % NAME, (400,)),
    "two models, one escaped": (b'{"model":%b,"mo\\u0064el":"x"}' % NAME, (400,)),
    "two streams": (b'{"model":%b,"stream":false,"stream":true}' % NAME, (400,)),
    "a comma too many": (b'{"model":%b,}' % NAME, (400,)),
    "NaN": (b'{"model":%b,"temperature":NaN}' % NAME, (400,)),
    "a comment": (b'{"model":%b /* x */}' % NAME, (400,)),
    "single quotes": (b"{'model':'x'}", (400,)),
}


def openai(error: Any, status: int) -> bool:
    return set(error["error"]) == {"message", "type", "param", "code"} and isinstance(error["error"]["message"], str)


def anthropic(error: Any, status: int) -> bool:
    return error["type"] == "error" and set(error["error"]) == {"type", "message"}


def torchserve(error: Any, status: int) -> bool:
    return set(error) == {"code", "type", "message"} and error["code"] == status


def bare(error: Any, status: int) -> bool:
    return set(error) == {"error"} and isinstance(error["error"], str)


JSON_APIS: dict[str, Callable[[Any, int], bool]] = {
    "/v1/chat/completions": openai,
    "/v1/completions": openai,
    "/v1/responses": openai,
    "/v1/embeddings": openai,
    "/v1/rerank": openai,
    "/v1/score": openai,
    "/v1/images/generations": openai,
    "/v1/messages": anthropic,
    "/v1/messages/count_tokens": anthropic,
    "/api/chat": bare,
    "/api/generate": bare,
}
OTHERS: dict[str, tuple[str, bytes, Callable[[Any, int], bool], int]] = {
    "/v2/models/nobody/infer": ("application/json", b"{", bare, 404),
    "/v2/models/nobody/generate_stream": ("application/json", b"", bare, 404),
    "/v2/models/../infer": ("application/json", b"{}", bare, 404),
    "/v2/models/%2e%2e/infer": ("application/json", b"{}", bare, 404),
    "/predictions/nobody": ("image/png", b"\x89PNG\r\n", torchserve, 404),
    "/predictions/..": ("image/png", b"", torchserve, 404),
    "/v1/audio/transcriptions": ("multipart/form-data; boundary=x", b"--x--", openai, 400),
    "/v1/images/edits": ("application/json", b'{"model":"x"}', openai, 400),
    "/v1/audio/translations": ("multipart/form-data", b"--x", openai, 400),
    "/v1/no/such/route": ("application/json", b"{}", openai, 404),
    "/v2/no/such/route": ("application/json", b"{}", bare, 404),
    "/api/no-such-route": ("application/json", b"{}", bare, 404),
    "/": ("application/json", b"{}", openai, 404),
}


async def test_what_is_no_request_is_refused_in_the_shape_of_its_api(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world, await Raw.connect(world.url) as raw:
        for path, shape in JSON_APIS.items():
            for name, (body, allowed) in ODD.items():
                raw.send(post(path, body))  # on one connection: a refusal is no reason to lose it
                response = await raw.response()
                assert response.status in allowed, (path, name, response)
                assert response.header("content-type") == "application/json"
                assert shape(response.json(), response.status), (path, name, response)
        for path, (kind, body, shape, status) in OTHERS.items():
            data = post(path, body).replace(b"content-type: application/json", f"content-type: {kind}".encode())
            raw.send(data)
            response = await raw.response()
            assert response.status == status, (path, response)
            assert shape(response.json(), response.status), (path, response)
        assert seen(world) == 0
        assert await failures(world) == 0
        assert world.candidate(world.engines[0]).breaker.failures == 0
        await eventually(world.idle, 5.0)


async def test_what_is_odd_and_legal_passes(depth: int) -> None:
    bodies = [
        b'{"model":%b,"messages":[],"stream":%b,"n":3}' % (NAME, value)
        for value in (b"null", b"false", b"0", b'"false"', b"[]")
    ]
    bodies += [
        b'{"model":%b,"max_tokens":%b}' % (NAME, value)
        for value in (b"-1", b"0", b"null", b'"many"', b"1.5", b"true", b"[]", b"9" * 30, b"1e400")
    ]
    bodies += [
        b'{"messages":[{"model":"x","stream":true}],"model":%b,"metadata":{"model":"y"}}' % NAME,
        b'\n\t {"model" : %b }\r\n ' % NAME,
        b'{"m\\u006fdel":%b}' % NAME,
        b'{"model":%b,"metadata":{"user_id":1e400,"x":[1e400]},"user":1e400,"options":{"num_predict":1e400}}' % NAME,
        b'{"model":%b,"user":7,"conversation":[],"options":"x","prompt_cache_key":{}}' % NAME,
    ]
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for body in bodies:
            raw.send(post(PATH, body))
            response = await raw.response()
            assert response.status == 200, (body, response)
            assert engine.seen[-1].body == body
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ""):
            raw.send(post(PATH, bodies[0]).replace(b"application/json", kind.encode()))
            assert (await raw.response()).status == 200
            assert engine.seen[-1].header("content-type") == kind
        for value in (b"true", b"1", b'"true"'):
            engine.then(Script.stream("a "))
            body = b'{"model":%b,"stream":%b}' % (NAME, value)
            raw.send(post(PATH, body))
            response = await raw.response()
            assert response.body == b"".join(Script.stream("a ").chunks)
            assert engine.seen[-1].body == body


async def test_binary_and_multipart_bodies_arrive_as_they_are(depth: int) -> None:
    tensor = b'{"inputs":[{"name":"x","parameters":{"binary_data_size":1024}}]}' + bytes(range(256)) * 4
    sound = bytes(range(256)) * 40
    form = (
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="model"\r\n\r\n'
        + sound
        + b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n'
        + MODEL.encode()
        + b"\r\n--b--\r\n"
    )
    cases = [
        (f"/v2/models/{MODEL}/infer", "application/octet-stream", tensor),
        (f"/v2/models/{MODEL}/versions/3/infer", "application/octet-stream", tensor),
        (f"/predictions/{MODEL}", "image/png", sound),
        (f"/predictions/{MODEL}/1.0", "application/x-www-form-urlencoded", b"data=%FF&x=1"),
        ("/v1/audio/transcriptions", "multipart/form-data; boundary=b", form),
    ]
    engine = FakeEngine("a", Script(content_type="application/octet-stream", chunks=(bytes(range(256)),)))
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for path, kind, body in cases:
            lines = ("inference-header-content-length: 64", "x-any: thing")
            raw.send(post(path, body, *lines).replace(b"application/json", kind.encode(), 1))
            response = await raw.response()
            assert (response.status, response.body) == (200, bytes(range(256))), path
            there = engine.seen[-1]
            assert (there.target, there.body, there.header("content-type")) == (path, body, kind)
            assert there.header("inference-header-content-length") == "64"


FAITHFUL = [
    b'{"model":%b,"seed":9007199254740993}',
    b'{"model":%b,"seed":18446744073709551616}',
    b'{"model":%b,"temperature":1e400}',
    b'{"model":%b,"temperature":0.1000000000000000055511151231257827}',
    b'{"model":%b,"a":-0,"b":-0.0,"c":1.0,"d":1,"e":1E+2}',
    b'{"model":%b,"prompt":"\\u0000\\/\\u00e9\\ud83c\\udf0a"}',
    '{"model":%b,"prompt":"é\U0001f30a\u2028\u2029\u200d"}'.encode(),
    b'{"zzz":1,"model":%b,"aaa":{"b":[{"c":null,"c":2}]}}',
    b'{"model":%b,"messages":[{"role":"x_new","content":[{"type":"x_new","y":[]}],"z":1}]}',
    b'{"model":%b,"x":1,"x":2,"":3}',
    b'  {\r\n\t"model"\n:\t%b\r\n}\n\n',
    b'{"model":%b,"stream_options":{"include_usage":null},"logit_bias":{"50256":-100}}',
    b'{"model":%b,"prompt":"' + b"x" * 300_000 + b'"}',
]


async def test_bodies_arrive_byte_for_byte(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for text in FAITHFUL:
            body = text.replace(b"%b", NAME)
            raw.send(post(PATH, body))
            assert (await raw.response()).status == 200, body[:100]
            assert engine.seen[-1].sha256 == sha256(body).hexdigest(), body[:100]


async def test_targets_and_headers_arrive_as_they_were(depth: int) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        target = PATH + "?a=%2F&b=+c&a=2&=&x=%E9&y=/../z?"
        lines = ["x-twice: 1", "x-twice: 2", "x-empty:", "Accept: */*", "Cookie: a=b; c=d", "X.Odd~Name: n"]
        raw.send(post(target, chat(MODEL), *lines))
        assert (await raw.response()).status == 200
        (there,) = engine.seen
        assert there.target == target
        assert [v for k, v in there.headers if k == "x-twice"] == ["1", "2"]
        assert there.header("x-empty") == ""
        assert there.header("cookie") == "a=b; c=d"


# -- compressed requests (C06) -----------------------------------------------------------------------------------------


def bomb(target_mb: int) -> bytes:
    """A gzip of zeros that inflates to so many megabytes, and is small."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    block = b"\0" * (1 << 20)
    return b"".join(packer.compress(block) for _ in range(target_mb)) + packer.flush()


async def test_compressed_requests_are_routed_and_arrive_readable(depth: int) -> None:
    plain = chat(MODEL, text="Grüße " * 20_000)
    coded = {
        "gzip": gzip.compress(plain),
        "GZIP": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "zstd": zstandard.compress(plain),
        "gzip, gzip": gzip.compress(gzip.compress(plain)),
        "gzip, zstd": zstandard.compress(gzip.compress(plain)),
        "identity": plain,
    }
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth) as world, await Raw.connect(world.url) as raw:
        for coding, body in coded.items():
            raw.send(post(PATH, body, f"content-encoding: {coding}"))
            assert (await raw.response()).status == 200, coding
            there = engine.seen[-1]
            assert there.body == plain, coding
            assert there.header("content-encoding") is None
            assert there.header("content-length") == str(len(plain))


async def test_codings_that_cannot_be_undone_are_refused(depth: int) -> None:
    plain = chat(MODEL)
    cases: list[tuple[str, bytes, int]] = [
        ("br", plain, 415),
        ("x-unknown", plain, 415),
        ("gzip, gzip, gzip, gzip", plain, 415),
        ("gzip", gzip.compress(plain)[:-9], 400),
        ("gzip", plain, 400),
        ("zstd", zstandard.compress(plain)[:-3], 400),
        ("deflate", b"\xff" * 50, 400),
        ("gzip", gzip.compress(b"not json"), 400),
        ("gzip", bomb(200), 413),
        ("gzip, gzip", gzip.compress(bomb(200)), 413),
        ("zstd", zstandard.compress(b"\0" * (100 << 20)), 413),
    ]
    async with tiers(FakeEngine("a"), depth=depth) as world, await Raw.connect(world.url) as raw:
        before = resident_kb()
        for coding, body, status in cases:
            raw.send(post(PATH, body, f"content-encoding: {coding}"))
            response = await raw.response()
            assert response.status == status, (coding, response)
            assert openai(response.json(), status)
        assert seen(world) == 0
        grown = resident_kb() - before
        print(f"bombs of 500 MB in all: {grown / 1024:.0f} MB more")
        assert grown < 100 * 1024


# -- compressed answers (C06) ------------------------------------------------------------------------------------------


def whole_gzip(status: int, headers: tuple[tuple[str, str], ...] = ()) -> Script:
    body = json.dumps({"error": {"message": "Grüße " * 50, "type": "x", "param": None, "code": status}}).encode()
    return Script(status=status, headers=(("content-encoding", "gzip"), *headers), chunks=(gzip.compress(body),))


@pytest.mark.parametrize("asked", [(), ("accept-encoding: gzip",), ("accept-encoding: identity",)])
async def test_compressed_answers_pass_as_they_are(depth: int, asked: tuple[str, ...]) -> None:
    engine = FakeEngine("a")
    async with tiers(engine, depth=depth, health={"eject_after": 1000}, queue={"max_requests": 0}) as world:
        for status in (200, 400, 404, 422, 500, 429, 503):
            engine.choose = lambda s, status=status: whole_gzip(status)  # type: ignore[misc]
            response = await ask(world.url, PATH, chat(MODEL), *asked)
            assert response.status == status
            assert response.header("content-encoding") == "gzip"
            assert response.header("content-length") == str(len(response.body))
            assert json.loads(gzip.decompress(response.body))["error"]["code"] == status
            assert engine.seen[-1].header("accept-encoding") == (asked[0].split(": ")[1] if asked else None)
            world.candidate(engine).busy_until = 0.0
            for tier in world.chain:
                for balancer in tier.balancing.balancers.values():
                    for candidate in balancer.candidates.values():
                        candidate.busy_until = 0.0


async def test_a_compressed_stream_passes_event_by_event(depth: int) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    words = Script.stream("one ", "two ", "three ").chunks
    pieces = [packer.compress(word) + packer.flush(zlib.Z_SYNC_FLUSH) for word in words]
    pieces[-1] += packer.flush()
    script = Script(
        content_type="text/event-stream",
        framing="chunked",
        headers=(("content-encoding", "gzip"),),
        chunks=tuple(pieces),
        gap_s=0.15,
    )
    async with tiers(FakeEngine("a", script), depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(post(PATH, chat(MODEL, stream=True), "accept-encoding: gzip", "connection: close"))
        opened = zlib.decompressobj(16 + zlib.MAX_WBITS)
        text, read = b"", 0
        for count in range(1, 4):
            while text.count(b"data:") < count:
                assert await raw._more()
                payload = body_of(raw.received)
                text += opened.decompress(payload[read:])
                read = len(payload)
            assert text.count(b"data:") == count  # each as soon as it is there
        received = await raw.to_end()
        assert body_of(received) == b"".join(pieces)


async def test_a_compressed_stream_that_breaks_is_cut_and_nothing_is_written_into_it(depth: int) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    piece = packer.compress(Script.stream("one ").chunks[0]) + packer.flush(zlib.Z_SYNC_FLUSH)
    script = Script(
        content_type="text/event-stream",
        framing="chunked",
        headers=(("content-encoding", "gzip"),),
        chunks=(piece,),
        cut="rst",
    )
    async with tiers(FakeEngine("a", script), depth=depth) as world, await Raw.connect(world.url) as raw:
        raw.send(post(PATH, chat(MODEL, stream=True)))
        received = await raw.to_end()
        assert not received.endswith(b"0\r\n\r\n")
        assert body_of(received) == piece


async def test_an_error_too_large_to_be_handed_on_is_told_in_our_words(depth: int) -> None:
    """A compressed one that was cut could not be read, and a longer one is kept in part only."""
    large = Script.error(503, "x" * 100_000, headers=(("retry-after", "3"),))
    async with tiers(FakeEngine("a", large), depth=depth) as world:
        response: Response = await world.chat()
        assert response.status == 503
        assert openai(response.json(), 503)
        assert len(response.body) < 1000
        assert response.header("retry-after") == "3"
        assert response.header("content-length") == str(len(response.body))


async def test_an_expect_and_a_refusal_by_its_coding_leave_the_connection_in_order(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        received = await exchange(
            world.url, post(PATH, b"x", "content-encoding: br") + post(PATH, chat(MODEL), "connection: close")
        )
        assert statuses(received) == [415, 200]
