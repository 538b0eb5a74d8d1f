"""What the OpenAPI document says of answers that msgspec writes, and the types of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Path, Query, Response
from fastapi.openapi.utils import get_openapi

REF = "#/components/schemas/{name}"
TraceId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="32 hex digits: x-headwater-decision")]
Everywhere = Annotated[bool, Query(description="ask all other tiers too")]
Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many, the newest first")]


def json(value: Any, status: int = 200) -> Response:
    """A value as JSON; what is infinite or not a number is null."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def answers(kind: Any, *, missing: str = "") -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with `kind`, a msgspec type; `missing`: when there is a 404."""
    schema = _without_prefixes(msgspec.json.schema_components([kind], ref_template=REF)[0][0])
    found: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": schema}}}}
    if missing:
        found[404] = {"description": missing, "content": {"application/json": {"schema": DETAIL}}}
    return found


DETAIL = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}


def _without_prefixes(schema: Any) -> Any:
    """A schema whose tuples are lists of any of their kinds: many tools that read OpenAPI know no `prefixItems`."""
    if isinstance(schema, list):
        return [_without_prefixes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _without_prefixes(value) for key, value in schema.items() if key != "prefixItems"}
    if "prefixItems" in schema:
        found["items"] = {"anyOf": [_without_prefixes(item) for item in schema["prefixItems"]]}
    return found


def describe(app: FastAPI, kinds: Sequence[Any]) -> None:
    """Add the schemas of `kinds` to the application's OpenAPI document, which is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            _, components = msgspec.json.schema_components(kinds, ref_template=REF)
            made.setdefault("components", {}).setdefault("schemas", {}).update(_without_prefixes(components))
            for operation in (o for path in made["paths"].values() for o in path.values() if "requestBody" in o):
                operation["responses"].setdefault("400", {"description": "the body is no text"})
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
