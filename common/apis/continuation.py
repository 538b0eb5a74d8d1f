"""Carries a stream of text on at another server, once the one that wrote it is gone: what to ask, and what to change.

The follower is asked for the same, with the text so far as the end of the prompt (completions), or as an answer that
was begun (chat: `continue_final_message` of vLLM and SGLang), and with as many fewer tokens to write. Its events go on
under the id of the first one, and its usage is counted as if one server had written all of it. It samples on from the
text as the client has it, so what follows may differ from what the first server would have written.

Only what is plain text by one sampler can be carried on: a field that is not in `PLAIN` (tools, a response format,
logprobs, penalties) leaves a stream as it is. Tokens are counted as the server counts them, or one an event.
Source: the OpenAI API reference; vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import msgspec

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
CONTINUABLE: Final = (CHAT, COMPLETIONS)
PREFILLS: Final = frozenset(("vllm", "sglang", "sim"))  # engines that go on with an answer that was begun
BODY_BYTES: Final = 1 << 20  # of a request that is kept for this
TEXT_BYTES: Final = 1 << 20  # of an answer that is kept for this
PLAIN: Final = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "priority"),
    )
)
CAPS: Final = ("max_tokens", "max_completion_tokens")
_ASKED = b'"add_generation_prompt":false,"continue_final_message":true,'
_EVENT = re.compile(rb".*?(?:\n\n|\n\r\n|\r\r)|.+", re.DOTALL)
_DATA = re.compile(rb"(?:^|[\r\n])data: ?([^\r\n]+)")
_ID = re.compile(rb'"id"\s*:\s*("[^"\\]{1,256}")')
_STRING = rb'("(?:[^"\\]|\\.)*")'
_KEYS = 16  # places of a key in a body that are looked at; most stand in objects within


class Continuation:
    """One stream, as far as it came. Told all events of it, the follower's too."""

    __slots__ = (
        "_body",
        "_chat",
        "_dead",
        "_fields",
        "_follows",
        "_id",
        "_parts",
        "_size",
        "_told",
        "before",
        "tokens",
    )

    def __init__(self, path: str, body: bytes, fields: dict[str, Any]) -> None:
        """See `of`."""
        self._chat = path == CHAT
        self._body, self._fields = body, fields
        self._parts: list[str] = []
        self._size = 0
        self._id = b""
        self._dead = False  # something came that cannot be carried on, or the end
        self._follows = False  # what comes is of another server than the first one
        self._told = ""  # who that is, which the client is yet to be told
        self.before = 0  # tokens of the servers before the one that writes now
        self.tokens = 0

    @classmethod
    def of(cls, path: str, engine: str, body: bytes) -> Continuation | None:
        """Of a request to a server of this kind; None where it cannot be carried on."""
        if path not in CONTINUABLE or len(body) > BODY_BYTES or (path == CHAT and engine not in PREFILLS):
            return None
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None
        if not isinstance(fields, dict) or not fields.keys() <= PLAIN or fields.get("n") not in (None, 1):
            return None
        if path == COMPLETIONS:
            return cls(path, body, fields) if isinstance(fields.get("prompt"), str) else None
        talk = fields.get("messages")
        last = talk[-1] if isinstance(talk, list) and talk else None
        begun = not isinstance(last, dict) or last.get("role") == "assistant"
        return None if begun else cls(path, body, fields)

    # -- what was written ----------------------------------------------------------------------------------------------

    def saw(self, events: bytes) -> None:
        """Whole events of the stream, on their way to the client."""
        for data in _DATA.findall(events):
            if not self._dead:
                self._read(data)

    def _read(self, data: bytes) -> None:
        chunk = _object(data)
        choices = chunk.get("choices") if chunk is not None else None
        if chunk is None or not isinstance(choices, list) or chunk.get("error"):
            self._dead = True  # [DONE] among them
            return
        if not self._id and (found := _ID.search(data)):
            self._id = found[1]
        for choice in choices:
            said = choice.get("delta") if self._chat else choice
            text = said.get("content" if self._chat else "text") if isinstance(said, dict) else None
            more = self._chat and any(v for k, v in said.items() if k not in ("role", "content")) if said else True
            if choice.get("index") or choice.get("finish_reason") or more or not isinstance(text, str | None):
                self._dead = True
                return
            if text:
                self._parts.append(text)
                self._size += len(text)
                self.tokens += 1
        usage = chunk.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.tokens = self.before + usage["completion_tokens"]

    @property
    def text(self) -> str:
        """All that was written so far."""
        return "".join(self._parts)

    # -- what a follower is asked --------------------------------------------------------------------------------------

    def request(self) -> bytes | None:
        """The body of the request that carries it on; None where that cannot be asked."""
        if self._dead or self._size > TEXT_BYTES:
            return None
        body, fields = self._body, dict(self._fields)
        for cap in CAPS:
            most = fields.get(cap)
            if isinstance(most, int) and self.tokens:
                fields[cap] = most - self.tokens
                if most <= self.tokens:
                    return None  # it has written all, and its end is lost
                body = _replaced(body, cap, rb"(%d)" % most, b"%d" % fields[cap])
        text = self.text
        if text and self._chat:
            begun = {"role": "assistant", "content": text}
            fields["messages"] = [*fields["messages"], begun]
            talk = bytes(msgspec.json.decode(body, type=_Talk).messages)
            body = _replaced(
                body, "messages", b"(%b)" % re.escape(talk), talk[:-1] + b"," + msgspec.json.encode(begun) + b"]"
            )
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
            at = body.index(b"{") + 1
            body = body[:at] + _ASKED + body[at:]
        elif text:
            asked = fields["prompt"] + text
            fields["prompt"] = asked
            body = _replaced(body, "prompt", _STRING, msgspec.json.encode(asked))
        return body if _object(body) == fields else None

    # -- what the follower's events become -----------------------------------------------------------------------------

    def follows(self, server: str) -> None:
        """Another one begins; its name is shown to the client in a comment."""
        self._follows, self.before, self._told = True, self.tokens, server

    def edited(self, events: bytes) -> bytes:
        """A follower's events as the client is to see them; those of the first server pass as they are."""
        if not self._follows:
            self.saw(events)
            return events
        out = []
        if self._told:
            out.append(b": continued by %b\n\n" % self._told.encode())
            self._told = ""
        for event in _EVENT.findall(events):
            began = len(self._parts)
            self.saw(event)
            out.append(self._as_one(event, said=len(self._parts) > began))
        return b"".join(out)

    def _as_one(self, event: bytes, *, said: bool) -> bytes:
        """One event of a follower, as if the first server had gone on."""
        found = _DATA.search(event)
        chunk = _object(found[1]) if found is not None else None
        if found is None or chunk is None:
            return event
        choices, usage = chunk.get("choices"), chunk.get("usage")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        delta = first.get("delta")
        if isinstance(delta, dict) and delta.get("role") and not said and not first.get("finish_reason"):
            return b""  # the answer has begun already
        if isinstance(usage, dict):
            for key, more in (("prompt_tokens", -self.before), ("completion_tokens", self.before)):
                if isinstance(usage.get(key), int):
                    usage[key] = max(0, usage[key] + more)
            event = event[: found.start(1)] + msgspec.json.encode(chunk) + event[found.end(1) :]
        return _ID.sub(lambda _: b'"id":' + self._id, event, count=1) if self._id else event


class _Talk(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _places(body: bytes, key: str, value: bytes) -> Iterator[re.Match[bytes]]:
    return islice(re.compile(rb'"%b"\s*:\s*%b' % (key.encode(), value), re.DOTALL).finditer(body), _KEYS)


def _replaced(body: bytes, key: str, value: bytes, new: bytes) -> bytes:
    """A body with another value at a key of its own, and every other byte as it was; unchanged if it is not found."""
    wanted = msgspec.json.decode(new)
    for found in _places(body, key, value):
        changed = body[: found.start(1)] + new + body[found.end(1) :]
        fields = _object(changed)
        if fields is not None and fields.get(key) == wanted:  # else it is a key of an object within
            return changed
    return body
