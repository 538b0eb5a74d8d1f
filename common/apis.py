"""Which API a request speaks, what routing needs out of it, and how its errors look.

The body is read once, at the first tier that gets it, for the few fields that routing needs; unknown fields, their
order and their numbers are nobody's business here and pass on untouched. A key that routing depends on may stand in
the body once only: two readers could disagree on which one counts.
Source: the OpenAI API reference; vLLM's and SGLang's error bodies for the shapes.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from common.errors import BadRequest, LBError

BYTES_PER_TOKEN = 4.0  # of English text and JSON under common tokenizers
PREFIX_BLOCK_BYTES = 2048  # about 512 tokens
PREFIX_BLOCKS = 64  # hashed of one prompt at most: about 32,000 tokens
EMBEDDING_OUTPUT = 0.0  # what does not generate has no output tokens
MODEL_CHARS = 512  # in a model's name; the route header has to hold it however it is escaped
UTF8_CHUNK = 1 << 20  # bytes checked at once, so that no second copy of a large body is made


@dataclass(frozen=True, slots=True)
class Api:
    """One relayed route of an API family."""

    family: str  # whose error shape is used: openai
    operation: str  # GenAI semantic-convention name of the operation
    generates: bool  # token by token, as opposed to in one piece


ROUTES: dict[tuple[str, str], Api] = {
    ("POST", "/v1/chat/completions"): Api("openai", "chat", generates=True),
    ("POST", "/v1/completions"): Api("openai", "text_completion", generates=True),
    ("POST", "/v1/embeddings"): Api("openai", "embeddings", generates=False),
}
"""(method, path) -> what is relayed; anything else is answered by the application beside the relay."""


def route(method: str, path: str) -> Api | None:
    """The relayed API of a request, or None when it is not relayed."""
    return ROUTES.get((method, path))


class Body(msgspec.Struct):
    """The fields of a request body that routing reads; all others are skipped without being decoded."""

    model: Any = None
    stream: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    conversation: Any = None

    @property
    def text(self) -> bytes:
        """The prompt as it stands in the body."""
        return bytes(self.messages) or bytes(self.prompt) or bytes(self.input)


_decoder = msgspec.json.Decoder(Body)
ROUTED_KEYS = (b"model", b"stream")
# A key can hide from a plain search behind \u escapes of its letters.
_ESCAPED = re.compile(rb"\\u00[46-7]")


def read_body(body: bytes) -> Body:
    """Decode what routing needs. Raises BadRequest (400) for what is no JSON object or names a routed key twice."""
    if not body:
        raise BadRequest("the request body is empty; a JSON object is expected")
    try:
        fields = _decoder.decode(body)
        if not body.isascii():
            _check_utf8(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not a valid JSON object: {error}") from None
    if any(body.count(b'"%b"' % key) > 1 for key in ROUTED_KEYS) or _ESCAPED.search(body):
        _refuse_duplicates(body)
    return fields


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError for what is no UTF-8: the decoder does not look into what it skips."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(body), UTF8_CHUNK):
        decoder.decode(body[at : at + UTF8_CHUNK])


def _refuse_duplicates(body: bytes) -> None:
    """The slow, exact check, made only when a routed key may stand there twice (it may also be in a nested object)."""

    class Pairs(list[tuple[str, Any]]):
        pass

    try:
        top = json.loads(body, object_pairs_hook=Pairs)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not a valid JSON object: {error}") from None
    names = [key for key, _ in top]
    for key in ROUTED_KEYS:
        if names.count(key.decode()) > 1:
            raise BadRequest(f"the key '{key.decode()}' is given more than once", param=key.decode())


def model_of(fields: Body) -> str:
    """The model asked for. Raises BadRequest when there is none, or it is not a name."""
    if not isinstance(fields.model, str) or not fields.model:
        raise BadRequest("you must provide a model parameter (a string)", param="model", code="missing_model")
    if len(fields.model) > MODEL_CHARS:
        raise BadRequest(f"the model's name is longer than {MODEL_CHARS} characters", param="model")
    return fields.model


def wants_stream(fields: Body) -> bool:
    """Whether the answer is to be streamed; null means no, and servers take 1 and "true" for yes."""
    return fields.stream is True or fields.stream == 1 or fields.stream in ("true", "True")


def token_cap(fields: Body) -> int | None:
    """The request's own bound on output tokens, if it has one that makes sense."""
    for value in (fields.max_completion_tokens, fields.max_tokens):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10_000_000:
            return value
    return None


def session_key(fields: Body, header: str | None, cookie: str | None) -> str:
    """What names the session, hashed and of bounded length; "" without one.

    Looked for in order: the `x-session-id` header, `prompt_cache_key`, `previous_response_id`, `conversation`, `user`,
    a cookie `headwater-session`.
    """
    conversation = fields.conversation.get("id") if isinstance(fields.conversation, dict) else fields.conversation
    candidates = (header, fields.prompt_cache_key, fields.previous_response_id, conversation, fields.user, cookie)
    for value in candidates:
        if isinstance(value, str) and value:
            return str(xxhash.xxh3_128_hexdigest(value.encode("utf-8", "surrogatepass")))
    return ""


def prefix_hashes(text: bytes) -> tuple[int, ...]:
    """Chained hashes of the prompt's leading blocks: equal up to where two prompts are equal. At most PREFIX_BLOCKS."""
    hashes: list[int] = []
    seed = 0
    for at in range(0, min(len(text) - PREFIX_BLOCK_BYTES + 1, PREFIX_BLOCKS * PREFIX_BLOCK_BYTES), PREFIX_BLOCK_BYTES):
        seed = xxhash.xxh3_64_intdigest(text[at : at + PREFIX_BLOCK_BYTES], seed)
        hashes.append(seed)
    return tuple(hashes)


ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(family: str, error: LBError | tuple[int, str]) -> bytes:
    """An error in the shape of the API that was called; JSON bytes."""
    status, message = error if isinstance(error, tuple) else (error.status, str(error))
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = None if isinstance(error, tuple) else error.code
    param = getattr(error, "param", None)
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(family: str, message: str, code: str = "stream_broken") -> bytes:
    """An SSE event that tells a streaming client of an error, in the shape of the API."""
    body = msgspec.json.encode({"error": {"message": message, "type": "server_error", "param": None, "code": code}})
    return b"data: " + body + b"\n\n"
