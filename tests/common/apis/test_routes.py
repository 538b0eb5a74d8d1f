from __future__ import annotations

import pytest

from common.apis import Family, family_of, match


@pytest.mark.parametrize(
    ("method", "path", "family", "operation", "model"),
    [
        ("POST", "/v1/chat/completions", Family.OPENAI, "chat", ""),
        ("POST", "/v1/completions", Family.OPENAI, "text_completion", ""),
        ("POST", "/v1/responses", Family.OPENAI, "responses", ""),
        ("POST", "/v1/embeddings", Family.OPENAI, "embeddings", ""),
        ("POST", "/v1/rerank", Family.OPENAI, "rerank", ""),
        ("POST", "/v2/rerank", Family.OPENAI, "rerank", ""),
        ("POST", "/v1/score", Family.OPENAI, "score", ""),
        ("POST", "/v1/audio/transcriptions", Family.OPENAI, "transcription", ""),
        ("POST", "/v1/audio/speech", Family.OPENAI, "speech", ""),
        ("POST", "/v1/images/generations", Family.OPENAI, "image_generation", ""),
        ("POST", "/v1/messages", Family.ANTHROPIC, "chat", ""),
        ("POST", "/v1/messages/count_tokens", Family.ANTHROPIC, "count_tokens", ""),
        ("POST", "/v2/models/double/infer", Family.KSERVE, "infer", "double"),
        ("POST", "/v2/models/a%2Fb/versions/2/generate_stream", Family.KSERVE, "text_completion", "a/b"),
        ("GET", "/v2/models/double", Family.KSERVE, "metadata", "double"),
        ("HEAD", "/v2/models/double/ready", Family.KSERVE, "metadata", "double"),
        ("POST", "/predictions/echo", Family.TORCHSERVE, "infer", "echo"),
        ("PUT", "/predictions/echo/1.0", Family.TORCHSERVE, "infer", "echo"),
        ("POST", "/api/chat", Family.OLLAMA, "chat", ""),
        ("POST", "/api/generate", Family.OLLAMA, "text_completion", ""),
        ("POST", "/api/embed", Family.OLLAMA, "embeddings", ""),
        ("GET", "/api/version", Family.OLLAMA, "version", ""),
    ],
)
def test_what_is_relayed(method: str, path: str, family: Family, operation: str, model: str) -> None:
    matched = match(method, path)
    assert matched is not None
    assert (matched.api.family, matched.api.operation, matched.model) == (family, operation, model)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("post", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/chat/completions?x=1"),
        ("POST", "//v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/api/tags"),
        ("POST", "/api/pull"),
        ("DELETE", "/api/delete"),
        ("POST", "/v2/models/m/load"),
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/models/m/infer"),
        ("POST", "/v2/models//infer"),
        ("DELETE", "/predictions/m"),
        ("GET", "/v2/health/ready"),
        ("FOO", "/"),
    ],
)
def test_anything_else_is_not_relayed(method: str, path: str) -> None:
    assert match(method, path) is None


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/v1/nothing", Family.OPENAI),
        ("/", Family.OPENAI),
        ("/v2/models/m/load", Family.KSERVE),
        ("/v2/rerank", Family.OPENAI),
        ("/api/pull", Family.OLLAMA),
        ("/predictions/m", Family.TORCHSERVE),
        ("/v1/messages/batches", Family.ANTHROPIC),
    ],
)
def test_whose_clients_call_what_is_not_relayed(path: str, family: Family) -> None:
    assert family_of(path) is family
