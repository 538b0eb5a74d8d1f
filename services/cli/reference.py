"""The configuration reference, out of the code: `make docs` writes docs/configuration.md with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.config import PlacementRule, Price, TierConfig
from common.scaling.config import Scaling
from services.agent.config import AgentConfig
from services.instance_lb.config import InstanceConfig
from services.up.config import UpConfig

HEAD = """# Configuration

One strict YAML file a process, given with `--config`. Every key is also an environment variable, which wins over the
file: `limits.header_timeout_s` is `HEADWATER_LIMITS__HEADER_TIMEOUT_S`; lists and maps are written there as YAML
(`HEADWATER_ETCD__URLS='[http://10.0.0.2:2379]'`). An unknown key or a bad value ends start-up with its file and line.
This page is written by `make docs`.
"""


def page() -> str:
    """The whole page, Markdown."""
    region = (("region", InstanceConfig.model_fields["region"]), ("cluster", InstanceConfig.model_fields["cluster"]))
    picker = type(InstanceConfig.model_fields["picker"].default)
    up_only = [(n, f) for n, f in UpConfig.model_fields.items() if n not in {*TierConfig.model_fields, "scaling"}]
    parts = [
        HEAD,
        "## Every tier (`headwater global`, `region`, `instance`, `up`)\n",
        *_tables(TierConfig),
        "### `tenants.prices`: each model\n",
        _table("tenants.prices.MODEL.", list(Price.model_fields.items())),
        "### `placement.rules`: each rule; [models.md](models.md) has examples\n",
        _table("placement.rules[].", list(PlacementRule.model_fields.items())),
        "## Where a tier stands\n\n`region` is needed by `headwater region` and `instance`, `cluster` by `instance`.\n",
        _table("", region),
        f"### `picker`: {_about(picker)}\n",
        *_tables(picker, "picker."),
        f"## `scaling`: {_about(Scaling)}\n\nOf `headwater instance` and `up`.\n",
        *_tables(Scaling, "scaling."),
        "## `headwater up`\n\nAll of the above, and:\n",
        _table("", up_only),
        "## `headwater agent`\n",
        *_tables(AgentConfig),
    ]
    return "\n".join(parts)


def _tables(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A table of its own keys, then one for each section in it and each list of sections, at any depth."""
    kinds = {name: _section(field) for name, field in model.model_fields.items()}
    flat = [(name, field) for name, field in model.model_fields.items() if kinds[name] is None]
    if flat:
        yield _table(prefix, flat)
    for name, kind in kinds.items():
        if kind is not None:
            section, key = kind[0], f"{prefix}{name}{kind[1]}"
            yield f"### `{key}`: {_about(section)}\n"
            yield from _tables(section, f"{key}.")


def _about(section: type[BaseModel]) -> str:
    """The first paragraph that is said of a section."""
    return " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())


def _section(field: FieldInfo) -> tuple[type[BaseModel], str] | None:
    """The section that a field is, with "", or is a list of, with "[]"."""
    kind, more = field.annotation, ""
    if get_origin(kind) is tuple:
        kind, more = get_args(kind)[0], "[]"
    elif get_origin(kind) is Mapping:
        kind, more = get_args(kind)[1], ".NAME"
    return (kind, more) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(prefix: str, fields: Any) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in fields:
        default = "needed" if field.is_required() else _shown(field)
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{prefix}{name}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def _shown(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if field.default_factory is not None:
        return "the host's name"
    if value in (None, "", (), {}, frozenset()):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")
