"""Answers under way: how the tokens of the engine become vLLM's JSON and its server-sent events.

A reply owns the sequences of one request. The engine calls `started` and `finished` for each, and `pump` at every tick
for those that stream; a reply whose client does not read writes nothing and keeps nothing but its place.
Source: the stream generators of vllm/entrypoints/openai, from which the fields, their order and the nulls are.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import msgspec

from common.sim.engine import Sequence, State
from services.engine_sim.bodies import ApiError, Job, Part
from services.engine_sim.faults import RequestFaults
from services.engine_sim.http import Connection
from services.engine_sim.text import BURST_TOKENS, answer, embedding, words

if TYPE_CHECKING:
    from services.engine_sim.live import LiveEngine

DONE = b"data: [DONE]\n\n"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Record(msgspec.Struct, kw_only=True):
    """What is remembered of a request, for tests that count executions."""

    id: str  # x-request-id as received
    traceparent: str  # as received
    path: str
    sha256: str  # of the raw body
    header_names: list[str]
    status: int = 0  # of the answer; 0: none was begun
    executed: bool = False  # whether the engine took it
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_sent: int = 0
    finished: bool = False  # answered to the end
    aborted: bool = False  # the client left before


class Generation:
    """One sequence of a reply, and how much of it was sent."""

    __slots__ = ("index", "over", "part", "reply", "sent", "sequence", "start", "stop")

    def __init__(self, reply: Reply, index: int, part: Part) -> None:
        self.reply = reply
        self.index = index
        self.part = part
        self.sequence: Sequence | None = None  # set as soon as the engine took it
        self.sent = 0  # tokens
        self.over = False  # its last token was sent
        self.start, self.stop = reply.event_ends(index)


class Reply:
    """An answer under way: what whole ones and streams have in common."""

    __slots__ = ("connection", "created", "engine", "faults", "generations", "id", "job", "left", "orca", "record")

    def __init__(
        self, engine: LiveEngine, connection: Connection, job: Job, record: Record, faults: RequestFaults, orca: bytes
    ) -> None:
        self.engine = engine
        self.connection = connection
        self.job = job
        self.record = record
        self.faults = faults
        self.orca = orca  # the format in which the client wants load metrics, "": none
        self.id, self.created = engine.identify(job.kind, record.id)
        self.generations = [Generation(self, i, part) for i, part in enumerate(job.parts)]
        self.left = len(self.generations)  # not over yet

    def event_ends(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of sequence `index`; nothing for whole answers."""
        return b"", b""

    def begin(self) -> None:
        """The engine took the request."""

    def started(self, generation: Generation) -> None:
        """A sequence got its first token."""

    def finished(self, generation: Generation) -> None:
        """A sequence got its last token."""
        raise NotImplementedError

    def failed(self) -> None:
        """The engine died under it."""
        raise NotImplementedError

    def pump(self, generation: Generation) -> None:
        """Write what the engine has made of a sequence and the client has not got."""

    def gone(self) -> None:
        """The client left."""
        self.record.aborted = True
        self.engine.dropped(self)

    def resume(self) -> None:
        """There is room to write again."""

    def _closed(self) -> None:
        """The answer was written."""
        self.record.finished = True
        self.engine.closed(self)

    def _cached_tokens(self) -> int:
        return sum(g.sequence.cached_tokens for g in self.generations if g.sequence is not None)

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """vLLM's usage block."""
        self.record.cached_tokens = self._cached_tokens()
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "total_tokens": self.job.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.record.cached_tokens},
        }


class WholeReply(Reply):
    """An answer in one piece, sent when its last sequence ends."""

    __slots__ = ()

    def finished(self, generation: Generation) -> None:
        """Answer, if this was the last one."""
        generation.over = True
        generation.sent = generation.part.output_tokens
        self.left -= 1
        if self.left:
            return
        tokens = sum(g.sent for g in self.generations)
        self.record.tokens_sent = tokens
        body = {"chat": self._chat, "completion": self._completion, "embedding": self._embedding}[self.job.kind]
        self.record.status = 200
        more = self.engine.headers + self.engine.load_header(self.orca)
        self.connection.respond(200, msgspec.json.encode(body(tokens)), more=more)
        self._closed()

    def failed(self) -> None:
        """500, as vLLM answers when its engine core is dead."""
        self.record.status = 500
        error = ApiError(500, DEAD, "InternalServerError")
        self.connection.respond(500, error.body(), more=self.engine.headers)
        self._closed()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.engine.config.model}

    def _chat(self, tokens: int) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": g.index,
                "message": {
                    "role": "assistant",
                    "content": answer(g.part.offset, g.sent),
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": g.part.finish_reason,
                "stop_reason": None,
                "token_ids": None,
            }
            for g in self.generations
        ]
        nulls = {"prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
        about = {"service_tier": None, "system_fingerprint": None}
        return {**self._head("chat.completion"), "choices": choices, **about, "usage": self.usage(tokens), **nulls}

    def _completion(self, tokens: int) -> dict[str, Any]:
        choices = [
            {
                "index": g.index,
                "text": answer(g.part.offset, g.sent),
                "logprobs": None,
                "finish_reason": g.part.finish_reason,
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for g in self.generations
        ]
        about = {"service_tier": None, "system_fingerprint": None}
        usage = {"usage": self.usage(tokens), "kv_transfer_params": None}
        return {**self._head("text_completion"), "choices": choices, **about, **usage}

    def _embedding(self, tokens: int) -> dict[str, Any]:
        rows = []
        for g in self.generations:
            vector: Any = embedding(g.part.vector, self.job.dimensions)
            if self.job.base64:
                vector = b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
            rows.append({"index": g.index, "object": "embedding", "embedding": vector})
        return {**self._head("list"), "data": rows, "usage": self.usage(tokens)}


class StreamReply(Reply):
    """Server-sent events, one for each token."""

    __slots__ = ("_fault_after",)

    def begin(self) -> None:
        """vLLM sends the head as soon as the request is valid, long before the first token."""
        self._fault_after = self.faults.chunks
        self.record.status = 200
        self.connection.begin(b"text/event-stream; charset=utf-8", self.engine.headers)

    def event_ends(self, index: int) -> tuple[bytes, bytes]:
        """Before and after the text of an event that is not the last."""
        kind = "chat.completion.chunk" if self.job.kind == "chat" else "text_completion"
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.engine.config.model}
        head = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":[{"index":%d,' % index
        if self.job.kind == "chat":
            return head + b'"delta":{"content":"', b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        tail = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        return head + b'"text":"', tail + b',"usage":null}\n\n'

    def started(self, generation: Generation) -> None:
        """From now on it is pumped at every tick."""
        self.engine.streaming[generation] = None

    def finished(self, generation: Generation) -> None:
        """Send what is left of it, or as much as the client takes."""
        self.pump(generation)

    def resume(self) -> None:
        """Go on where the client stopped reading."""
        for generation in self.generations:
            self.pump(generation)

    def failed(self) -> None:
        """An error event under status 200, then the end, as vLLM does."""
        error = ApiError(500, DEAD, "InternalServerError")
        self.connection.write(b"data: " + error.body() + b"\n\n" + DONE, last=True)
        self._closed()

    def pump(self, generation: Generation) -> None:
        """One write for all the tokens there are, BURST_TOKENS at most."""
        engine, sequence = self.engine, generation.sequence
        if generation.over or sequence is None or sequence.state is State.CANCELLED:
            return
        available = engine.model.generated(sequence)
        while generation.sent < available and not self.connection.paused:
            count = min(available - generation.sent, BURST_TOKENS)
            if self._fault_after is not None or engine.chunks_to_live is not None:
                count = self._allowed(count)
                if count <= 0:
                    return
            events = self._events(generation, count)
            generation.sent += count
            self.record.tokens_sent += count
            if generation.sent == generation.part.output_tokens:
                self._over(generation, events)
            else:
                self.connection.write(events)

    def _events(self, generation: Generation, count: int) -> bytes:
        start, stop, first = generation.start, generation.stop, generation.sent
        texts = words(generation.part.offset, first, count)
        opening = self._opening(generation) if first == 0 and self.job.kind == "chat" else b""
        last = first + count == generation.part.output_tokens
        if count == 1 and not last and not opening and not self.job.continuous_usage:
            return start + texts[0] + stop
        pieces = [opening]
        for i, text in enumerate(texts, first + 1):
            tail = self._last_stop(generation) if last and i == first + count else stop
            if self.job.continuous_usage:
                tail = tail[: tail.rindex(b"]") + 1] + b',"usage":%b}\n\n' % msgspec.json.encode(self._plain_usage(i))
            pieces += (start, text, tail)
        return b"".join(pieces)

    def _last_stop(self, generation: Generation) -> bytes:
        reason = b'"finish_reason":"%b"' % generation.part.finish_reason.encode()
        if self.job.kind == "chat":
            reason += b',"stop_reason":null'
        return generation.stop.replace(b'"finish_reason":null', reason)

    def _opening(self, generation: Generation) -> bytes:
        """The event with the role that comes before the first token of a chat."""
        head = generation.start.removesuffix(b'"delta":{"content":"')
        usage = b',"usage":' + msgspec.json.encode(self._plain_usage(0)) if self.job.continuous_usage else b""
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return head + delta + usage + b"}\n\n"

    def _plain_usage(self, tokens: int) -> dict[str, int]:
        prompt = self.job.prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}

    def _over(self, generation: Generation, events: bytes) -> None:
        generation.over = True
        self.engine.streaming.pop(generation, None)
        self.left -= 1
        if self.left:
            self.connection.write(events)
            return
        if self.job.include_usage:
            tokens = sum(g.sent for g in self.generations)
            head = self.generations[0].start.partition(b',"choices":')[0]
            events += head + b',"choices":[],"usage":%b}\n\n' % msgspec.json.encode(self.usage(tokens))
        self.record.cached_tokens = self._cached_tokens()
        self.connection.write(events + DONE, last=True)
        self._closed()

    def _allowed(self, count: int) -> int:
        """How many of `count` tokens may still be sent before a fault strikes; strikes when it is time."""
        if self._fault_after is not None:
            left = self._fault_after - self.record.tokens_sent
            if left <= 0:
                self._strike()
                return 0
            count = min(count, left)
        return self.engine.spend_chunks(count)

    def _strike(self) -> None:
        faults, after = self.faults, self._fault_after
        if after == faults.stall_after_chunks:
            return  # the sequence runs on, its client waits
        self.engine.dropped(self)
        if after == faults.error_after_chunks:
            self.failed()
        elif after == faults.truncate_after_chunks:
            self.connection.finish()
        else:
            self.connection.reply = None
            self.engine.reset_soon(self.connection)
