"""Streams that are carried on: what a follower is asked for, and what its events become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.apis.continuation import CHAT, COMPLETIONS, Continuation
from tests.fake_engine import event, token

TALK: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "max_tokens": 10,
    "messages": [{"role": "user", "content": 'say "max_tokens": 10, {"messages": []}'}],
}
PROMPT: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 10, "prompt": 'The "prompt": "x" \\ 漢'}
ROLE = token("", delta={"role": "assistant", "content": ""})


def text(words: str, **more: Any) -> bytes:
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": words, "finish_reason": None}], **more})


def of(path: str, fields: dict[str, Any], engine: str = "vllm") -> Continuation:
    found = Continuation.of(path, engine, json.dumps(fields).encode())
    assert found is not None
    return found


def asked(continuation: Continuation) -> dict[str, Any]:
    body = continuation.request()
    assert body is not None
    return dict(json.loads(body))


@pytest.mark.parametrize(
    ("path", "engine", "changes"),
    [
        ("/v1/responses", "vllm", {}),
        (CHAT, "triton", {}),
        (CHAT, "vllm", {"tools": []}),
        (CHAT, "vllm", {"response_format": {"type": "json_object"}}),
        (CHAT, "vllm", {"n": 2}),
        (CHAT, "vllm", {"logprobs": True}),
        (CHAT, "vllm", {"messages": []}),
        (CHAT, "vllm", {"messages": [{"role": "assistant", "content": "begun"}]}),
        (CHAT, "vllm", {"continue_final_message": True}),
        (COMPLETIONS, "vllm", {"prompt": ["a", "b"]}),
        (COMPLETIONS, "vllm", {"echo": True}),
    ],
)
def test_what_cannot_be_carried_on_is_left_as_it_is(path: str, engine: str, changes: dict[str, Any]) -> None:
    assert Continuation.of(path, engine, json.dumps({**TALK, **changes}).encode()) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\x1f\x8b\x08", b'{"a":' * 3000])
def test_what_is_no_json_object_is_left_as_it_is(body: bytes) -> None:
    assert Continuation.of(CHAT, "vllm", body) is None


def test_a_chat_is_asked_to_go_on_with_the_answer_that_was_begun() -> None:
    continuation = of(CHAT, TALK)
    assert continuation.edited(ROLE + token('one "')) == ROLE + token('one "')
    continuation.edited(b": ping\n\n" + token("🌊\n"))
    body = asked(continuation)
    assert body.pop("add_generation_prompt") is False
    assert body.pop("continue_final_message") is True
    assert body == {
        **TALK,
        "max_tokens": 8,
        "messages": [*TALK["messages"], {"role": "assistant", "content": 'one "🌊\n'}],
    }


def test_a_completion_is_asked_with_its_text_behind_the_prompt() -> None:
    continuation = of(COMPLETIONS, PROMPT, engine="openai")
    continuation.edited(text(" one") + text(' "two'))
    assert asked(continuation) == {**PROMPT, "max_tokens": 8, "prompt": PROMPT["prompt"] + ' one "two'}


def test_every_other_byte_of_a_body_stays_as_it_was() -> None:
    body = b'{ "seed": 9007199254740993,"temperature":1.0,\n"prompt" : "a\\/b" , "model":"m","stream":true}'
    continuation = Continuation.of(COMPLETIONS, "vllm", body)
    assert continuation is not None
    continuation.edited(text("c"))
    assert continuation.request() == body.replace(b'"a\\/b"', b'"a/bc"')


def test_without_a_word_so_far_the_same_is_asked_again() -> None:
    continuation = of(CHAT, TALK)
    continuation.edited(ROLE)
    assert asked(continuation) == TALK


@pytest.mark.parametrize(
    "events",
    [
        token("", delta={}, finish_reason="stop"),
        event("[DONE]"),
        token("", delta={"tool_calls": [{"index": 0}]}),
        token("", delta={"reasoning_content": "hm"}),
        token("b", index=1),
        event({"error": {"message": "no"}}),
        event("{"),
        *([token("word") * 10]),
    ],
)
def test_what_was_ended_or_is_no_plain_text_is_not_carried_on(events: bytes) -> None:
    continuation = of(CHAT, TALK)
    assert continuation.edited(token("a") + events) == token("a") + events
    assert continuation.request() is None


def test_a_follower_of_one_that_has_written_nothing_goes_on_under_its_id_as_well() -> None:
    continuation = of(CHAT, TALK)
    continuation.edited(ROLE)
    continuation.follows("eu/eu-a/i2")
    events = [e.replace(b"chatcmpl-1", b"chatcmpl-2") for e in (ROLE, token("one "), token("two"))]
    seen = b"".join(continuation.edited(e) for e in events)
    assert seen == b": continued by eu/eu-a/i2\n\n" + b"".join(
        e.replace(b'"id": "chatcmpl-2"', b'"id":"chatcmpl-1"') for e in events[1:]
    )


def test_a_followers_events_look_as_if_the_first_server_had_gone_on() -> None:
    continuation = of(CHAT, TALK)
    continuation.edited(ROLE + token("one ") + token("two "))
    continuation.follows("eu/eu-a/i2")
    other = [e.replace(b"chatcmpl-1", b"chatcmpl-2") for e in (ROLE, token("three"), token("", finish_reason="stop"))]
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    seen = b"".join(continuation.edited(e) for e in other)
    seen += continuation.edited(event({"id": "chatcmpl-2", "choices": [], "usage": usage}) + event("[DONE]"))
    comment, *events = seen.split(b"\n\n")
    assert comment == b": continued by eu/eu-a/i2"
    data = [e.removeprefix(b"data: ") for e in events if e]
    assert data[-1] == b"[DONE]"
    said = [json.loads(d) for d in data[:-1]]
    assert {d["id"] for d in said} == {"chatcmpl-1"}
    assert [d["choices"][0]["delta"]["content"] for d in said[:2]] == ["three", ""]
    assert said[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}


def test_the_servers_own_count_of_tokens_goes_before_that_of_events() -> None:
    continuation = of(COMPLETIONS, PROMPT)
    continuation.edited(text("a b c d", usage={"prompt_tokens": 3, "completion_tokens": 4}))
    assert asked(continuation)["max_tokens"] == 6
    continuation.follows("eu/eu-a/i2")
    continuation.edited(text("e f", usage={"prompt_tokens": 7, "completion_tokens": 2}))
    assert asked(continuation)["max_tokens"] == 4
    assert asked(continuation)["prompt"] == PROMPT["prompt"] + "a b c de f"
