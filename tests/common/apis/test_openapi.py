"""The document of the data listener names what is relayed, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

from common.apis import Family, error_body, match
from common.apis.openapi import errors, relayed, routes
from common.apis.routes import EXACT, KSERVE
from common.errors import Saturated


def test_all_that_is_named_is_relayed_and_all_that_is_relayed_is_named() -> None:
    named = {(method, path): api for method, path, api in routes()}
    for (method, path), api in named.items():
        found = match(method, re.sub(r"\{\w+\}", "x", path))
        assert found is not None, path
        assert found.api == api
    assert EXACT.keys() <= named.keys()
    assert {(m, f"/v2/models/{{model}}{f'/{a}' if a else ''}") for m, a in KSERVE} <= named.keys()


def test_each_operation_has_a_name_of_its_own_and_its_parameters() -> None:
    operations = [(path, o) for path, methods in relayed().items() for o in methods.values()]
    assert len({o["operationId"] for _, o in operations}) == len(operations)
    for path, operation in operations:
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)\}", path))


def test_errors_are_as_the_document_says() -> None:
    schemas: dict[str, Any] = errors()
    for family in Family:
        body = json.loads(error_body(family, Saturated("full")))
        schema = schemas[f"{family.value}_error"]
        assert body.keys() == set(schema["required"])
        for name, part in schema["properties"].items():
            if part.get("type") == "object":
                assert set(part["required"]) <= body[name].keys() <= part["properties"].keys()
