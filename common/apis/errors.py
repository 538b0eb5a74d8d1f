"""How each API tells its clients of an error: as a whole answer, and in the middle of a stream.

Source: the error objects of the OpenAI and Anthropic API references; Triton's, TorchServe's and Ollama's servers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.apis.routes import Family
from common.errors import LBError

OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TORCHSERVE_TYPES = {
    400: "BadRequestException",
    404: "ModelNotFoundException",
    405: "MethodNotAllowedException",
    413: "BadRequestException",
    429: "ServiceUnavailableException",
    503: "ServiceUnavailableException",
}


def error_body(family: Family, error: LBError | tuple[int, str]) -> bytes:
    """An error in the shape of the API that was called; JSON bytes. `error` may be a bare (status, message)."""
    if isinstance(error, tuple):
        return msgspec.json.encode(_shape(family, *error, None, None))
    return msgspec.json.encode(_shape(family, error.status, str(error), error.code, getattr(error, "param", None)))


def _shape(family: Family, status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
    server = "server_error" if status >= 500 else "invalid_request_error"
    if family is Family.OPENAI:
        kind = OPENAI_TYPES.get(status, server)
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}
    if family is Family.ANTHROPIC:
        kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if family is Family.TORCHSERVE:
        kind = TORCHSERVE_TYPES.get(status, "InternalServerException")
        return {"code": status, "type": kind, "message": message}
    return {"error": message}  # KServe, Triton, Ollama


def error_event(family: Family, content_type: str, message: str, code: str = "stream_broken") -> bytes:
    """What tells a streaming client of an error, in the shape of the API: an SSE event, or a line of NDJSON.

    Empty for an answer that has no place for it: that one can only be cut.
    """
    body = msgspec.json.encode(_shape(family, 502, message, code, None))
    if content_type.startswith("text/event-stream"):
        return (b"event: error\ndata: " if family is Family.ANTHROPIC else b"data: ") + body + b"\n\n"
    if content_type.startswith(("application/x-ndjson", "application/jsonl")):
        return body + b"\n"
    return b""
