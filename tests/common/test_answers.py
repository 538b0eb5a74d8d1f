"""What each engine's answers mean, in the words they were seen to use; and how long they ask to be left alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.answers import MAX_READ_BYTES, MAX_RETRY_AFTER_S, Headers, Meaning, Reading, classify, retry_after
from services.agent.engines import ADAPTERS
from tests.services.agent.pages import errors

ENGINES = ("vllm", "sglang", "tgi", "llamacpp", "ollama", "triton", "torchserve", "trtllm", "openai", "sim", "", "new")


def headers(told: dict[str, str]) -> Headers:
    return [(k.encode(), v.encode()) for k, v in told.items()]


def name(error: dict[str, Any]) -> str:
    return f"{error['engine'] or 'any'}-{error['status']}-{error['body'][:40]}"


@pytest.mark.parametrize("error", errors(), ids=name)
def test_what_servers_say(error: dict[str, Any]) -> None:
    meaning = Meaning(error["meaning"])
    expected = Reading(meaning, Meaning(error.get("cause", error["meaning"])), error.get("retry_after_s"))
    read = classify(error["engine"], error["status"], headers(error.get("headers", {})), error["body"].encode())
    assert read == expected


@pytest.mark.parametrize("error", [e for e in errors() if e["engine"]], ids=name)
def test_an_engine_that_is_not_known_is_read_nearly_as_well(error: dict[str, Any]) -> None:
    """What only its own engine's rows tell: a status used in its own way, or words that mean nothing elsewhere."""
    own = (
        error["status"] in {400, 424}
        or "running timeout" in error["body"]
        or any(
            w in error["body"] for w in ("Stub process", "Context size has been", "failed to parse the request JSON")
        )
        or error["meaning"] == "fine"
    )
    if own or error["meaning"] == "ok_error":
        return
    read = classify("new", error["status"], (), error["body"].encode()).meaning.value
    assert read == error["meaning"] or (read, error["meaning"]) == ("failed", "overload")


def test_every_adapter_s_engine_is_read() -> None:
    for adapter in ADAPTERS:
        assert classify(adapter.engine, 429, (), b"").meaning is Meaning.OVERLOAD


def test_every_meaning_occurs() -> None:
    assert {e["meaning"] for e in errors()} == {m.value for m in Meaning}


@pytest.mark.parametrize("engine", ENGINES)
def test_by_status_alone(engine: str) -> None:
    """Without a word: what is safe to think."""
    meanings = {status: classify(engine, status, (), b"").meaning for status in range(100, 700)}
    assert {s for s, m in meanings.items() if m is Meaning.FINE} == set(range(100, 400))
    assert {s for s, m in meanings.items() if m is Meaning.OVERLOAD} == {429, 529}
    assert {s for s, m in meanings.items() if m is Meaning.OOM} == {507}
    client = set(range(400, 500)) - {429} - ({424} if engine == "tgi" else set()) | {501}
    assert {s for s, m in meanings.items() if m is Meaning.CLIENT} == client
    assert Meaning.DEAD not in meanings.values()


def test_a_mistake_of_the_client_is_never_read_further() -> None:
    words = b"CUDA out of memory; EngineCore encountered an issue; queue is full; Loading model"
    for status in (400, 401, 403, 405, 409, 413, 414, 415, 422, 431, 499):
        for engine in ENGINES:
            assert classify(engine, status, (), words).meaning is Meaning.CLIENT, (engine, status)


def test_words_far_into_a_body_are_not_read() -> None:
    assert classify("", 500, (), b" " * (MAX_READ_BYTES - 13) + b"out of memory").meaning is Meaning.OOM
    assert classify("", 500, (), b" " * MAX_READ_BYTES + b"out of memory").meaning is Meaning.FAILED


def test_case_and_line_ends_make_no_difference() -> None:
    assert classify("", 500, (), b"cuda\nOUT OF MEMORY\r\n").meaning is Meaning.OOM


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n',
        b'event: error\ndata: {"error": {"message": "x"}}\n\n',
        b'\n\n{"error":"x"}',
        b'  {"object":"error","message":"x"}',
        b'{ "error" : { "code": 500 } }',
    ],
)
def test_errors_under_success(body: bytes) -> None:
    assert classify("vllm", 200, (), body) == Reading(Meaning.OK_ERROR, Meaning.FAILED)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'data: {"choices":[{"delta":{"content":"error"}}]}\n\n',
        b'{"error":""}',
        b'{"error":null,"choices":[]}',
        b'{"data":[{"error":"of one of many"}]}',
        b'"error"',
        b'["error"]',
        b'{"x":"error"}',
        b'{"x":' + b"[" * 5000 + b'"error"',
        b'{"id":1,"error":"' + b"x" * MAX_READ_BYTES,  # too long to be told
        b"\xff\xfe",
    ],
)
def test_what_is_no_error_under_success(body: bytes) -> None:
    assert classify("vllm", 200, (), body).meaning is Meaning.FINE


# -- how long to stay away -------------------------------------------------------------------------------------------

DATE = b"Sun, 29 Nov 2026 21:00:00 GMT"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"2"], 2.0),
        ([b" 7 "], 7.0),
        ([b"0"], 0.0),
        ([b"1.5"], 1.5),
        ([b"99999999"], MAX_RETRY_AFTER_S),
        ([b"9" * 400], None),
        ([b"-5"], None),
        ([b"abc"], None),
        ([b""], None),
        ([b"1e9"], None),
        ([b"inf"], None),
        ([b"\xb2"], None),  # ² is a digit to some
        ([b"2", b"7"], 7.0),
        ([b"2, 7"], 7.0),
        ([b"abc", b"3"], 3.0),
        ([b"Sun, 29 Nov 2026 21:00:03 GMT"], 3.0),
        ([b"Sun, 29 Nov 2026 20:59:00 GMT"], None),
        ([b"Mon, 30 Nov 2026 21:00:00 GMT"], MAX_RETRY_AFTER_S),
        ([b"Sunday, 29-Nov-26 21:00:03 GMT"], 3.0),
        ([b"Sun Nov 29 21:00:03 2026"], 3.0),
        ([b"Sun, 99 Nov 2026 21:00:03 GMT"], None),
        ([b"::::"], None),
        ([b"Sun, 29 Nov 99999999999 21:00:03 +99999999"], None),
        ([DATE + b" " * 100], None),
    ],
)
def test_retry_after(values: list[bytes], expected: float | None) -> None:
    told = [(b"date", DATE), *((b"retry-after", v) for v in values)]
    assert retry_after(told) == expected
    assert classify("", 429, told, b"") == Reading(Meaning.OVERLOAD, Meaning.OVERLOAD, expected)


def test_a_date_without_the_server_s_own_says_nothing() -> None:
    assert retry_after([(b"retry-after", b"Sun, 29 Nov 2026 21:00:03 GMT")]) is None
    assert retry_after([(b"date", b"x"), (b"retry-after", b"Sun, 29 Nov 2026 21:00:03 GMT")]) is None
    assert retry_after([]) is None


# -- whatever comes --------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(ENGINES),
    st.integers(0, 999),
    st.lists(
        st.tuples(st.sampled_from([b"retry-after", b"date", b"content-type"]), st.binary(max_size=80)), max_size=4
    ),
    st.binary(max_size=200),
)
def test_nothing_breaks_it(engine: str, status: int, told: list[tuple[bytes, bytes]], body: bytes) -> None:
    read = classify(engine, status, told, b'{"error":' + body)
    assert read.retry_after_s is None or 0.0 <= read.retry_after_s <= MAX_RETRY_AFTER_S


def test_it_is_quick() -> None:
    dull = b"the quick brown fox is not loading a queue of input for the engine " * 200
    began = time.perf_counter()
    for _ in range(20):
        for engine in ENGINES:
            classify(engine, 503, (), dull)
    assert (time.perf_counter() - began) / (20 * len(ENGINES)) < 0.01
    fine = b'{"id":"x","choices":[{"message":{"content":"' + b"word " * 1600 + b'"}}]}'
    began = time.perf_counter()
    for _ in range(1000):
        classify("vllm", 200, (), fine)
    assert (time.perf_counter() - began) / 1000 < 0.0005
