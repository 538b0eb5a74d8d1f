"""Writes each chart's values.schema.json out of its values.yaml: `make charts`. A test fails while the two differ.

With it Helm refuses a value that the chart does not have, which it would ignore otherwise. A map that is empty by
default may have any keys; so may `config`, which the process itself is strict about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHARTS = ("headwater-global", "headwater-region", "headwater-instance", "headwater-agent")
FREE = ("config",)


def schema(chart: str) -> str:
    """The text of one chart's schema."""
    values = yaml.safe_load((HERE / chart / "values.yaml").read_text(encoding="utf-8"))
    shape = _of(values)
    shape["properties"] |= {"global": {"type": "object"}, "headwater-common": {"type": "object"}}  # Helm's own
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **shape}, indent=1) + "\n"


def _of(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        if not value or key in FREE:
            return {"type": "object"}
        properties = {name: _of(default, name) for name, default in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if isinstance(value, list):
        return {"type": "array"}
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "number", "minimum": 0}
    return {"type": ["string", "number"]}


if __name__ == "__main__":
    for name in CHARTS:
        (HERE / name / "values.schema.json").write_text(schema(name), encoding="utf-8")
