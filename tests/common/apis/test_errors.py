from __future__ import annotations

import json
from typing import Any

import pytest

from common import errors
from common.apis import Family, error_body, error_event
from common.errors import BadRequest, LBError, ModelNotFound

SSE = "text/event-stream; charset=utf-8"


def shape(body: bytes) -> dict[str, Any]:
    content = json.loads(body)
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    return content["error"]


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (BadRequest("no", param="model"), "invalid_request_error"),
        (ModelNotFound("no", param="model"), "not_found_error"),
        (BadRequest("no", status=413, code="too_large"), "invalid_request_error"),
        (BadRequest("no", status=401), "authentication_error"),
        (BadRequest("no", status=403), "permission_error"),
        (BadRequest("no", status=408), "timeout_error"),
        (BadRequest("no", status=422), "invalid_request_error"),
        (errors.Saturated("no"), "rate_limit_error"),
        (errors.NoEndpoints("no"), "server_error"),
        (errors.StreamBroken("no"), "server_error"),
        (errors.FirstByteTimeout("no"), "server_error"),
        (LBError("no"), "server_error"),
    ],
)
def test_errors_have_the_shape_of_the_api(error: LBError, type_: str) -> None:
    assert shape(error_body(Family.OPENAI, error)) == {
        "message": "no",
        "type": type_,
        "param": getattr(error, "param", None),
        "code": error.code,
    }


def test_an_error_without_a_code_of_ours_has_none() -> None:
    error = shape(error_body(Family.OPENAI, (405, "not like this")))
    assert error == {"message": "not like this", "type": "invalid_request_error", "param": None, "code": None}


def test_a_message_is_escaped_whatever_a_client_put_into_it() -> None:
    message = 'the "model"\n\x00 </script> é'
    assert shape(error_body(Family.OPENAI, BadRequest(message)))["message"] == message


def test_a_stream_is_told_of_its_end_by_one_event() -> None:
    event = error_event(Family.OPENAI, SSE, 'it "broke"\n\n')
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2  # a message cannot end the event early
    assert shape(event.removeprefix(b"data: "))["code"] == "stream_broken"
    assert shape(error_event(Family.OPENAI, SSE, "x", "evicted").removeprefix(b"data: "))["code"] == "evicted"


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        (Family.ANTHROPIC, {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}),
        (Family.KSERVE, {"error": "no"}),
        (Family.OLLAMA, {"error": "no"}),
        (Family.TORCHSERVE, {"code": 503, "type": "ServiceUnavailableException", "message": "no"}),
    ],
)
def test_each_api_has_a_shape_of_its_own(family: Family, wanted: dict[str, Any]) -> None:
    assert json.loads(error_body(family, errors.NoEndpoints("no"))) == wanted


def test_a_stream_is_told_in_its_own_framing_or_not_at_all() -> None:
    anthropic = error_event(Family.ANTHROPIC, SSE, "broke")
    assert anthropic.startswith(b"event: error\ndata: {")
    assert anthropic.endswith(b"}\n\n")
    assert error_event(Family.OLLAMA, "application/x-ndjson", "broke") == b'{"error":"broke"}\n'
    assert error_event(Family.OPENAI, "application/json", "broke") == b""
    assert error_event(Family.OPENAI, "audio/mpeg", "broke") == b""
