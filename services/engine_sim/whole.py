"""Answers in one piece, in vLLM's JSON.

Source: the full generators of vllm/entrypoints/openai, from which the fields, their order and the nulls are.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from typing import Any

import msgspec

from services.engine_sim.bodies import ApiError
from services.engine_sim.replies import DEAD, Generation, Reply
from services.engine_sim.text import answer, embedding


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
        self.closed()

    def failed(self) -> None:
        """500, as vLLM answers when its engine core is dead."""
        self.record.status = 500
        error = ApiError(500, DEAD, "InternalServerError")
        self.connection.respond(500, error.body(), more=self.engine.headers)
        self.closed()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.job.model}

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
