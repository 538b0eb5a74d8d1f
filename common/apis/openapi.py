"""The relayed routes as paths of an OpenAPI document: how each is called, what routing reads, what is refused how.

What a server makes of a request is its own business, so bodies and answers say only what Headwater reads or writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from common.apis.hints import HINTS
from common.apis.routes import EXACT, KSERVE, PREDICT, PREDICT_METHODS, Api, Family, Kind, match

TITLES = {
    Family.OPENAI: "OpenAI",
    Family.ANTHROPIC: "Anthropic",
    Family.KSERVE: "Open Inference Protocol",
    Family.TORCHSERVE: "TorchServe",
    Family.OLLAMA: "Ollama",
}
REFUSALS = {
    "400": "the request makes no sense: framing, JSON, a header, or no model in it",
    "401": "no key that is known, where tenants are told apart",
    "403": "the tenant may not use this model or region",
    "404": "nobody serves this model, or what the id named is gone",
    "408": "the request did not come in time",
    "413": "larger than is taken, than any server can hold, or a prompt that took servers down",
    "429": "over a limit, or all servers are full; `retry-after` says when to come again",
    "502": "the server broke off before the first byte, and nobody else could be tried",
    "503": "no server is there for it at present",
    "504": "no first byte in time, or the deadline cannot be kept",
}
_TEXT = {"type": "string"}
_ERRORS: dict[Family, dict[str, Any]] = {
    Family.OPENAI: {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
    Family.ANTHROPIC: {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
    },
    Family.TORCHSERVE: {"code": {"type": "integer"}, "type": _TEXT, "message": _TEXT},
    Family.KSERVE: {"error": _TEXT},
    Family.OLLAMA: {"error": _TEXT},
}
_NUMBERS = {"type": "number", "exclusiveMinimum": 0}
_HINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "x-session-id": ("requests of one session go to where its context is cached", _TEXT),
    "x-slo-ttft-ms": ("the first token is wanted within so many milliseconds", _NUMBERS),
    "x-slo-tpot-ms": ("each further one within so many", _NUMBERS),
    "x-deadline-ms": ("all of it within so many, or a refusal at once", _NUMBERS),
    "x-expected-output-tokens": ("how many tokens the client expects back", _NUMBERS),
    "x-priority": ("how urgent it is", {"enum": ["critical", "standard", "batch"]}),
}
assert {name.encode() for name in _HINTS} >= HINTS
_ANSWERED = {
    "x-headwater-decision": "the trace id, for `headwater explain` and `headwater trace`",
    "x-headwater-served-by": "region/cluster/instance",
}
SENDING = ("POST", "PUT")
_PARAMETER = re.compile(r"\{(\w+)\}")


def routes() -> Iterator[tuple[str, str, Api]]:
    """(method, path with its parameters in braces, API) of all that is relayed."""
    for (method, path), found in EXACT.items():
        yield method, path, found.api
    for (method, action), api in KSERVE.items():
        for version in ("", "/versions/{version}"):
            yield method, f"/v2/models/{{model}}{version}{f'/{action}' if action else ''}", api
    for path in ("/predictions/{model}", "/predictions/{model}/{version}"):
        yield from ((method, path, PREDICT) for method in PREDICT_METHODS)
    held = (
        ("GET", "/v1/responses/{id}"),
        ("DELETE", "/v1/responses/{id}"),
        ("POST", "/v1/responses/{id}/cancel"),
        ("GET", "/v1/responses/{id}/input_items"),
        ("GET", "/v1/conversations/{id}"),
        ("POST", "/v1/conversations/{id}"),
        ("DELETE", "/v1/conversations/{id}"),
        ("GET", "/v1/conversations/{id}/items"),
        ("POST", "/v1/conversations/{id}/items"),
        ("GET", "/v1/conversations/{id}/items/{item}"),
        ("DELETE", "/v1/conversations/{id}/items/{item}"),
    )
    for method, path in held:
        kept = match(method, _PARAMETER.sub("x", path))
        assert kept is not None
        yield method, path, kept.api


def relayed() -> dict[str, dict[str, Any]]:
    """Paths of the document, each with its operations."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, api in routes():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, api)
    return paths


def errors() -> dict[str, Any]:
    """The schemas that those refer to: one error for each API."""
    return {
        f"{family.value}_error": {"type": "object", "required": list(fields), "properties": fields}
        for family, fields in _ERRORS.items()
    }


def _operation(method: str, path: str, api: Api) -> dict[str, Any]:
    parts = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in _PARAMETER.findall(path)]
    hints = [
        {"name": name, "in": "header", "required": False, "description": what, "schema": schema}
        for name, (what, schema) in _HINTS.items()
    ]
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{api.family.value}_error"}}}
    answer: dict[str, Any] = {"*/*": {}} if api.kind is Kind.PATH else {"application/json": {}}
    if api.generates:
        answer["application/x-ndjson" if api.family is Family.OLLAMA else "text/event-stream"] = {}
    headers = {name: {"description": what, "schema": _TEXT} for name, what in _ANSWERED.items()}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "summary": api.operation.replace("_", " "),
        "tags": [TITLES[api.family]],
        "parameters": [*parts, *(hints if method in SENDING else ())],
        "responses": {
            "200": {"description": "the server's answer", "headers": headers, "content": answer},
            **{status: {"description": what, "content": error} for status, what in REFUSALS.items()},
        },
    }
    if method in SENDING:
        operation["requestBody"] = {"required": api.kind is not Kind.PATH, "content": _body(api)}
    return operation


def _body(api: Api) -> dict[str, Any]:
    if api.kind is Kind.PATH:
        return {"*/*": {}}
    read: dict[str, Any] = {"model": {"type": "string", "description": "which one; aliases are resolved"}}
    if api.generates:
        read["stream"] = {"type": "boolean", "default": api.streams}
    schema = {"type": "object", "required": ["model"], "properties": read, "additionalProperties": True}
    return {"multipart/form-data" if api.kind is Kind.FORM else "application/json": {"schema": schema}}
