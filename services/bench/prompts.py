"""Turns a row of a trace into the HTTP request that stands for it: same row, same seed, same bytes.

The trace has lengths and block ids but no text, so text is made: words of three letters and a space, each one token
to the usual tokenizers, 4 bytes a token. Each block of text depends on its id alone, so rows with the same leading ids
share leading text, byte for byte; beyond its ids a row's text is its session's, and without a session its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import shake_128
from urllib.parse import quote

from common.sim.workload import BLOCK_TOKENS, TraceRow

BYTES_PER_TOKEN = 4

# 64 words, so six bits a word: 16 words, the block a prefix cache goes by, tell 2^96 texts apart.
_WORDS = (
    "the and for are but not you all any can had her was one our out "
    "day get has him his how man new now old see two way who boy did "
    "its let put say she too use dad mom car run big end far few got "
    "ask air buy cut due eat eye job key law lot low map own pay red"
)
_LETTERS = tuple(bytes(ord(_WORDS[byte % 64 * BYTES_PER_TOKEN + at]) for byte in range(256)) for at in range(3))

_ANY_LENGTH = 1024  # max_tokens where the length is the simulated server's secret; longer answers raise it


def block_text(key: str) -> bytes:
    """The 2048 bytes of text of the block called `key`; about 5 us."""
    digest = shake_128(key.encode()).digest(BLOCK_TOKENS)
    text = bytearray(b" " * (BLOCK_TOKENS * BYTES_PER_TOKEN))
    for at, letters in enumerate(_LETTERS):
        text[at::BYTES_PER_TOKEN] = digest.translate(letters)
    return bytes(text)


def prompt(row: TraceRow, index: int, seed: int = 0) -> bytes:
    """The text of `row`, which is number `index` of its replay: ASCII, 4 bytes for each of its input tokens."""
    tokens = max(row.input_tokens, 1)
    tail = f"session {row.session}" if row.session else f"row {index}"
    blocks = [
        block_text(f"{seed} block {row.prefix_hashes[at]}" if at < len(row.prefix_hashes) else f"{seed} {tail} {at}")
        for at in range(-(-tokens // BLOCK_TOKENS))
    ]
    return b"".join(blocks)[: tokens * BYTES_PER_TOKEN]


@dataclass(frozen=True, slots=True)
class Template:
    """What all requests of a replay have in common.

    `sim` tells a simulated server how long to answer (`sim_output_tokens`) and leaves `max_tokens` as loose as clients
    do; without it `max_tokens` is the length of the trace, which `ignore_eos` makes real servers reach. `max_tokens`
    overrides both. `api_key` is one key, or a key for each client (tenant) of the trace; "" sends none.
    """

    model: str = ""
    sim: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    api_key: str | Mapping[str, str] = ""
    seed: int = 0
    path: str = "/v1/chat/completions"

    def body(self, row: TraceRow, index: int, stream: bool) -> bytes:
        """The JSON body. Text is plain ASCII words, so it is set in without escaping."""
        output_tokens = max(row.output_tokens, 1)
        limit = max(output_tokens, _ANY_LENGTH) if self.sim else output_tokens
        fields: dict[str, object] = {"model": self.model, "max_tokens": self.max_tokens or limit}
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.sim:
            fields["sim_output_tokens"] = output_tokens
        if self.ignore_eos:
            fields["ignore_eos"] = True
        text = prompt(row, index, self.seed)
        said = b'"prompt":"%b"' % text
        if not self.path.endswith("/v1/completions"):
            said = b'"messages":[{"role":"user","content":"%b"}]' % text
        return b"%b,%b}" % (json.dumps(fields, separators=(",", ":"))[:-1].encode(), said)

    def request(self, row: TraceRow, index: int, stream: bool, host: str, prefix: str = "") -> bytes:
        """The whole HTTP/1.1 request, head and body, to `host` (host:port) under path `prefix`."""
        body = self.body(row, index, stream)
        key = self.api_key if isinstance(self.api_key, str) else self.api_key.get(row.client, "")
        head = [
            f"POST {prefix}{self.path} HTTP/1.1",
            f"host: {host}",
            "user-agent: headwater-bench",
            f"accept: {'text/event-stream' if stream else 'application/json'}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        if key:
            head.append(f"authorization: Bearer {key}")
        if row.session:
            session = quote(row.session, safe="+:/=@")  # a trace may hold anything, a header line may not
            head.append(f"x-session-id: {self.seed}-{session}" if self.seed else f"x-session-id: {session}")
        return "\r\n".join([*head, "\r\n"]).encode() + body
