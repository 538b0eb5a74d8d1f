"""Which requests are relayed, by method and path; everything else is answered by the application beside the relay.

Source: the OpenAI API reference, with vLLM's and Cohere's rerank and score; Anthropic's Messages API; the Open
Inference Protocol (KServe v2) with Triton's generate extension; TorchServe's inference API; Ollama's API.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from urllib.parse import unquote

HEALTH = frozenset(("/health", "/v2/health/live", "/v2/health/ready", "/ping"))  # asked by probes, which have no keys


class Family(Enum):
    """An API family: what its errors look like, and which engines speak it."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    KSERVE = "kserve"
    TORCHSERVE = "torchserve"
    OLLAMA = "ollama"


class Kind(Enum):
    """How the model and the prompt stand in a request."""

    JSON = "json"  # a JSON object with a `model` key
    FORM = "form"  # multipart/form-data with a part named model
    PATH = "path"  # the model is in the path, and the body is the server's own business


@dataclass(frozen=True, slots=True)
class Api:
    """One relayed route."""

    family: Family
    operation: str  # as the GenAI semantic conventions name it, where they do
    generates: bool = False  # token by token, as opposed to in one piece
    kind: Kind = Kind.JSON
    streams: bool = False  # unless the request says otherwise
    model_optional: bool = False  # any server of the family can answer it
    creates: bool = False  # what it answers with has an id, under which that server alone holds it in memory


class Match(NamedTuple):
    """A relayed route, and what its path names: the model, or the id of what one server holds in memory ("": none)."""

    api: Api
    model: str = ""
    held: str = ""


_O, _A, _K, _T, _L = Family.OPENAI, Family.ANTHROPIC, Family.KSERVE, Family.TORCHSERVE, Family.OLLAMA

EXACT: dict[tuple[str, str], Match] = {
    ("POST", path): Match(api)
    for path, api in {
        "/v1/chat/completions": Api(_O, "chat", generates=True),
        "/v1/completions": Api(_O, "text_completion", generates=True),
        "/v1/responses": Api(_O, "responses", generates=True, creates=True),
        "/v1/embeddings": Api(_O, "embeddings"),
        "/v1/rerank": Api(_O, "rerank"),
        "/v2/rerank": Api(_O, "rerank"),
        "/rerank": Api(_O, "rerank"),
        "/v1/score": Api(_O, "score"),
        "/score": Api(_O, "score"),
        "/pooling": Api(_O, "pooling"),
        "/classify": Api(_O, "classify"),
        "/v1/moderations": Api(_O, "moderations"),
        "/v1/audio/speech": Api(_O, "speech"),
        "/v1/audio/transcriptions": Api(_O, "transcription", generates=True, kind=Kind.FORM),
        "/v1/audio/translations": Api(_O, "translation", generates=True, kind=Kind.FORM),
        "/v1/images/generations": Api(_O, "image_generation"),
        "/v1/images/edits": Api(_O, "image_edit", kind=Kind.FORM),
        "/v1/images/variations": Api(_O, "image_variation", kind=Kind.FORM),
        "/tokenize": Api(_O, "tokenize"),
        "/detokenize": Api(_O, "detokenize"),
        "/v1/messages": Api(_A, "chat", generates=True),
        "/v1/messages/count_tokens": Api(_A, "count_tokens"),
        "/api/chat": Api(_L, "chat", generates=True, streams=True),
        "/api/generate": Api(_L, "text_completion", generates=True, streams=True),
        "/api/embed": Api(_L, "embeddings"),
        "/api/embeddings": Api(_L, "embeddings"),
        "/api/show": Api(_L, "show"),
    }.items()
} | {
    ("POST", "/v1/conversations"): Match(
        Api(_O, "conversations", kind=Kind.PATH, model_optional=True, creates=True),
    ),
    ("GET", "/api/ps"): Match(Api(_L, "ps", kind=Kind.PATH, model_optional=True)),
    ("GET", "/api/version"): Match(Api(_L, "version", kind=Kind.PATH, model_optional=True)),
}

_INFER = Api(_K, "infer", kind=Kind.PATH)
_GENERATE = Api(_K, "text_completion", generates=True, kind=Kind.PATH)
_STREAM = Api(_K, "text_completion", generates=True, kind=Kind.PATH, streams=True)
_LOOK = Api(_K, "metadata", kind=Kind.PATH)
PREDICT = Api(_T, "infer", kind=Kind.PATH)
PREDICT_METHODS = ("POST", "PUT", "GET", "OPTIONS")

KSERVE_MODEL = re.compile(
    r"/v2/models/([^/]+)(?:/versions/[^/]+)?(?:/(infer|generate|generate_stream|ready|stats|config))?"
)
KSERVE: dict[tuple[str, str], Api] = {
    ("POST", "infer"): _INFER,
    ("POST", "generate"): _GENERATE,
    ("POST", "generate_stream"): _STREAM,
    ("GET", "ready"): _LOOK,
    ("GET", "stats"): _LOOK,
    ("GET", "config"): _LOOK,
    ("GET", ""): _LOOK,
}
_HELD = Api(_O, "held", kind=Kind.PATH, model_optional=True)
HELD = re.compile(r"/v1/(?:responses/([^/]+)(?:/(?:cancel|input_items))?|conversations/([^/]+)(?:/items(?:/[^/]+)?)?)")
TORCHSERVE_MODEL = re.compile(r"/predictions/([^/]+)(?:/[^/]+)?")


def family_of(path: str) -> Family:
    """Whose clients call a path that is not relayed, for the shape of what they are told."""
    if path.startswith("/v2/") and path != "/v2/rerank":
        return Family.KSERVE
    if path.startswith("/api/"):
        return Family.OLLAMA
    if path.startswith("/predictions/"):
        return Family.TORCHSERVE
    return Family.ANTHROPIC if path.startswith("/v1/messages") else Family.OPENAI


def match(method: str, path: str) -> Match | None:
    """The relayed route of a request, or None when it is not relayed. HEAD is a GET without its body."""
    if method == "HEAD":
        method = "GET"
    found = EXACT.get((method, path))
    if found is not None:
        return found
    if path.startswith(("/v1/responses/", "/v1/conversations/")):
        held = HELD.fullmatch(path) if method in ("GET", "POST", "DELETE") else None
        return Match(_HELD, held=unquote(held[1] or held[2])) if held else None
    if path.startswith("/v2/models/"):
        model = KSERVE_MODEL.fullmatch(path)
        api = KSERVE.get((method, model[2] or "")) if model else None
        return Match(api, unquote(model[1])) if model and api else None
    if path.startswith("/predictions/"):
        model = TORCHSERVE_MODEL.fullmatch(path)
        return Match(PREDICT, unquote(model[1])) if model and method in PREDICT_METHODS else None
    return None
