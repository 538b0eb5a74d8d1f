"""Reads request bodies the way vLLM does: what is asked for, or the error it would answer.

A `Job` is all the rest of the server sees of a body. Output lengths are settled here: `max_tokens` with `ignore_eos`,
the length the request itself names (`sim_output_tokens` in the body or `x-sim-output-tokens`, for traces that are
replayed with their true lengths), else a draw; always at most `max_tokens` and what the context leaves.
Source: vllm/entrypoints/openai (chat_completion, completion, embedding) and its exception handlers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from services.engine_sim.config import MODEL, EngineConfig
from services.engine_sim.text import bytes_of_tokens, count_tokens, drawn_output_tokens, prefix_hashes

MAX_SEQUENCES = 64  # of one request: prompts times n
MAX_DIMENSIONS = 1024
DIMENSIONS = 16
Text = str | list[str | int | list[int]]
Body = TypeVar("Body")


class ApiError(Exception):
    """An answer in vLLM's error shape."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Generation(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    n: int | None = 1
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    sim_output_tokens: int | None = None


class _Chat(_Generation, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


class _Completion(_Generation, kw_only=True):
    prompt: Text


class _Embedding(msgspec.Struct, kw_only=True):
    input: Text
    model: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None


class _Tokenize(msgspec.Struct, kw_only=True):
    prompt: str = ""
    messages: list[_Message] | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a job."""

    input_tokens: int
    output_tokens: int  # 0: none are generated
    prefix_hashes: tuple[int, ...] = ()
    finish_reason: str = "stop"
    offset: int = 0  # where in the prose its answer begins
    vector: bytes = b""  # what an embedding is made from


@dataclass(frozen=True, slots=True)
class Job:
    """What one request asks for."""

    kind: str  # chat, completion or embedding
    parts: tuple[Part, ...]
    prompt_tokens: int  # as the usage block counts them: each prompt once, whatever n is
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    base64: bool = False
    dimensions: int = DIMENSIONS
    model: str = ""  # as the request named it


def read_chat(body: bytes, header: bytes, config: EngineConfig) -> Job:
    """A body of /v1/chat/completions. `header`: the value of x-sim-output-tokens. Raises ApiError."""
    chat = _decoded(body, _Chat)
    _check_model(chat.model, config)
    if not chat.messages:
        raise ApiError(400, "messages must have at least one element", param="messages")
    cap = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    return _generation("chat", [_chat_text(chat.messages)], chat, cap, body, header, config)


def read_completion(body: bytes, header: bytes, config: EngineConfig) -> Job:
    """A body of /v1/completions. Raises ApiError."""
    completion = _decoded(body, _Completion)
    _check_model(completion.model, config)
    # The OpenAI API gives completions 16 tokens when nothing is said, and vLLM follows it.
    cap = completion.max_tokens
    if cap is None and _own_length(completion, header) is None:
        cap = 16
    return _generation("completion", _texts(completion.prompt), completion, cap, body, header, config)


def read_embedding(body: bytes, header: bytes, config: EngineConfig) -> Job:
    """A body of /v1/embeddings. Raises ApiError."""
    asked = _decoded(body, _Embedding)
    _check_model(asked.model, config)
    dimensions = DIMENSIONS if asked.dimensions is None else asked.dimensions
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ApiError(400, f"dimensions must be 1 to {MAX_DIMENSIONS}, got {dimensions}.", param="dimensions")
    parts = []
    for text in _texts(asked.input):
        tokens = count_tokens(text)
        _check_context(tokens, 0, config)
        parts.append(Part(tokens, 0, prefix_hashes(text), vector=text))
    return Job(
        "embedding",
        tuple(parts),
        sum(part.input_tokens for part in parts),
        base64=asked.encoding_format == "base64",
        dimensions=dimensions,
        model=asked.model or config.model,
    )


class _Adapter(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str = ""


def read_adapter(body: bytes) -> str:
    """The name in a body of /v1/load_lora_adapter or /v1/unload_lora_adapter. Raises ApiError."""
    asked = _decoded(body, _Adapter)
    if not MODEL.fullmatch(asked.lora_name):
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    return asked.lora_name


def read_tokenize(body: bytes, config: EngineConfig) -> int:
    """A body of /tokenize: the number of its tokens. Raises ApiError."""
    asked = _decoded(body, _Tokenize)
    _check_model(asked.model, config)
    return count_tokens(_chat_text(asked.messages) if asked.messages else asked.prompt.encode())


READERS: dict[str, Callable[[bytes, bytes, EngineConfig], Job]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/embeddings": read_embedding,
}


def _decoded(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        where = where.rstrip("`").lstrip(".")
        raise ApiError(
            400, f"1 validation error:\n  {what}", "Bad Request", f"body.{where}" if where else "body"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        detail = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error", "ctx": {"error": str(error)}}
        raise ApiError(400, f"1 validation error:\n  {detail}", "Bad Request", "body.0") from None


def _check_model(model: str | None, config: EngineConfig) -> None:
    if model and model not in config.names and model not in config.loadable:
        raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")


def _check_context(prompt: int, output: int, config: EngineConfig) -> None:
    limit = config.context_tokens
    if prompt + output > limit or prompt >= limit:
        message = (
            f"This model's maximum context length is {limit} tokens. However, you requested {output} output tokens and "
            f"your prompt contains at least {prompt} input tokens, for a total of at least {prompt + output} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens. "
            f"(parameter=input_tokens, value={prompt})"
        )
        raise ApiError(400, message, param="input_tokens")


def _chat_text(messages: list[_Message]) -> bytes:
    pieces: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            pieces.append(message.content)
        elif message.content is not None:
            pieces += [part.text for part in message.content]
    return "".join(pieces).encode("utf-8", "surrogatepass")


def _texts(given: Text) -> list[bytes]:
    if isinstance(given, str):
        return [given.encode("utf-8", "surrogatepass")]
    if not given:
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [_of_tokens(ids)]
    texts = []
    for item in given:
        if isinstance(item, int):
            raise ApiError(400, "prompt mixes token ids and texts", param="prompt")
        texts.append(item.encode("utf-8", "surrogatepass") if isinstance(item, str) else _of_tokens(item))
    return texts


def _of_tokens(ids: list[int]) -> bytes:
    try:
        return bytes_of_tokens(ids)
    except OverflowError:
        raise ApiError(400, "Token id is out of vocabulary", param="prompt") from None


def _own_length(asked: _Generation, header: bytes) -> int | None:
    """The output length the request itself names, for replayed traces."""
    if asked.sim_output_tokens is not None:
        length = asked.sim_output_tokens
    elif header:
        length = int(header) if header.isdigit() else 0
    else:
        return None
    if length < 1:
        raise ApiError(400, "sim_output_tokens must be at least 1", param="sim_output_tokens")
    return length


def _generation(
    kind: str, texts: list[bytes], asked: _Generation, cap: int | None, body: bytes, header: bytes, config: EngineConfig
) -> Job:
    if cap is not None and cap < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {cap}.", param="max_tokens")
    n = 1 if asked.n is None else asked.n
    if n < 1 or n * len(texts) > MAX_SEQUENCES:
        raise ApiError(400, f"n must be at least 1, and at most {MAX_SEQUENCES} sequences in all, got {n}.", param="n")
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    own = _own_length(asked, header)
    parts: list[Part] = []
    prompt_tokens = 0
    for text in texts:
        tokens = count_tokens(text)
        _check_context(tokens, cap or 0, config)
        prompt_tokens += tokens
        most = config.context_tokens - tokens if cap is None else cap
        hashes = prefix_hashes(text)
        for _ in range(n):
            length = own if own is not None else _length(asked, most, body, len(parts), config)
            reason = "length" if length >= most else "stop"
            offset = len(body) + 7 * len(parts)
            parts.append(Part(tokens, min(length, most), hashes, reason, offset))
    return Job(
        kind,
        tuple(parts),
        prompt_tokens,
        stream=bool(asked.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage) and bool(options.continuous_usage_stats),
        model=asked.model or config.model,
    )


def _length(asked: _Generation, most: int, body: bytes, index: int, config: EngineConfig) -> int:
    if asked.ignore_eos:
        return most
    drawn = drawn_output_tokens(body, index, config.mean_output_tokens, config.seed)
    return max(drawn, asked.min_tokens or 0)
