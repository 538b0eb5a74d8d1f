"""Answers in server-sent events, one for each token, as vLLM writes them.

A client that does not read is written nothing: its stream keeps its place and no bytes. All that a client has not got
goes into one write, BURST_TOKENS at most.
Source: the stream generators of vllm/entrypoints/openai, from which the fields, their order and the nulls are.
"""

from __future__ import annotations

import msgspec

from common.sim.engine import State
from services.engine_sim.bodies import ApiError
from services.engine_sim.replies import DEAD, Generation, Reply
from services.engine_sim.text import BURST_TOKENS, words

DONE = b"data: [DONE]\n\n"


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
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}
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
        self.closed()

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
        self.record.cached_tokens = self.cached_tokens()
        self.connection.write(events + DONE, last=True)
        self.closed()

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
