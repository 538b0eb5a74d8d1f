"""Who may call, and what each of them may: tenants and the hashes of their keys, as one immutable value.

A key is 256 random bits, so its SHA-256 says nothing of it and cannot be found by trying; a slow hash would only slow
requests down. Only hashes are kept, here and wherever a directory comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from math import inf
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from common.config import NAME, Name, Section, Whole
from common.types import Priority

MAX_TENANTS: Final = 10_000
MAX_KEYS: Final = 100_000
MAX_MODELS: Final = 1000  # that one tenant names
MAX_REGIONS: Final = 32  # likewise; they travel in the route header

PriorityName = Literal["critical", "standard", "batch"]
Limit = Annotated[int, Field(ge=1, le=10**12), Whole]


def _midnight(value: Any) -> Any:
    digits = isinstance(value, str) and value.strip().lstrip("+-").replace(".", "", 1).isdigit()
    if digits or isinstance(value, bool | int | float):  # which would be seconds since 1970
        raise ValueError("must be a time, as in 2027-06-30 or 2027-06-30T12:00:00Z")
    return datetime(value.year, value.month, value.day, tzinfo=UTC) if type(value) is date else value


def _utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _digest(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("must be a SHA-256, 64 hexadecimal digits; a key itself is never kept")
    return value


def _models(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(values) > MAX_MODELS or not all(0 < len(value) <= 512 for value in values):
        raise ValueError(f"must be at most {MAX_MODELS} names")
    return values


Time = Annotated[datetime, BeforeValidator(_midnight), AfterValidator(_utc)]
Digest = Annotated[str, AfterValidator(_digest)]
Models = Annotated[
    tuple[Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 512})], ...],
    AfterValidator(_models),
    Field(strict=False, json_schema_extra={"maxItems": MAX_MODELS}),
]
Regions = Annotated[
    tuple[Annotated[Name, Field(json_schema_extra={"pattern": f"^{NAME.pattern}$"})], ...],
    Field(strict=False, max_length=MAX_REGIONS),
]


class TenantSpec(Section):
    """What one tenant may; what is not given is not limited."""

    model_config = ConfigDict(strict=True)

    disabled: bool = False
    """Refuse all its requests, without deleting it."""
    priority: PriorityName = "standard"
    """The class of its requests: critical, standard or batch."""
    ceiling: PriorityName | None = None
    """The highest class that its requests may ask for with the header x-priority; default: `priority`."""
    requests_per_minute: Limit | None = None
    """Requests in any 60 seconds, over all balancers."""
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and answers in any 60 seconds, over all balancers."""
    concurrent_requests: Limit | None = None
    """Requests under way at once, streams included, over all balancers."""
    monthly_tokens: Limit | None = None
    """Tokens of prompts and answers in one calendar month, UTC."""
    monthly_usd: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """US dollars in one calendar month, UTC, by the prices in `tenants.prices`."""
    models: Models = ()
    """Models that it may use; a `*` at the end stands for anything; none: all of them."""
    regions: Regions = ()
    """Regions that may serve it; none: all of them."""

    @model_validator(mode="after")
    def _ceiling(self) -> TenantSpec:
        if self.ceiling and Priority[self.ceiling.upper()] > Priority[self.priority.upper()]:
            raise ValueError(f"ceiling: {self.ceiling} is below the tenant's own priority, {self.priority}")
        return self


class KeySpec(Section):
    """One key, by its hash."""

    id: Name
    """Names the key in listings, logs and usage records."""
    sha256: Digest
    """Of the key as the client sends it, in hexadecimal."""
    created: Time | None = None
    """When it was made."""
    expires: Time | None = None
    """From when on it is refused, UTC unless it says otherwise; default: never."""
    note: Annotated[str, Field(max_length=200)] = ""
    """Whose it is, in words."""


class TenantEntry(TenantSpec):
    """A tenant in a file: with its keys."""

    model_config = ConfigDict(strict=False)

    keys: tuple[KeySpec, ...] = ()
    """Its keys."""


class TenantsFile(Section):
    """A file of tenants."""

    tenants: Mapping[Name, TenantEntry]
    """Tenants by name."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, as it is looked up. Times are seconds since the epoch."""

    tenant: str
    spec: KeySpec
    expires_at: float = inf


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, as it is asked about for each request."""

    name: str
    spec: TenantSpec = field(default_factory=TenantSpec)
    priority: Priority = Priority.STANDARD
    ceiling: Priority = Priority.STANDARD
    _models: frozenset[str] = frozenset()
    _prefixes: tuple[str, ...] = ()

    @staticmethod
    def of(name: str, spec: TenantSpec) -> Tenant:
        """From what is stored."""
        priority = Priority[spec.priority.upper()]
        return Tenant(
            name,
            spec,
            priority,
            Priority[spec.ceiling.upper()] if spec.ceiling else priority,
            frozenset(model for model in spec.models if not model.endswith("*")),
            tuple(model[:-1] for model in spec.models if model.endswith("*")),
        )

    def may_use(self, model: str) -> bool:
        """Whether a model is allowed; a request that names none only to whoever may use all."""
        return not self.spec.models or model in self._models or (bool(model) and model.startswith(self._prefixes))

    def priority_for(self, asked: Priority | None) -> Priority:
        """The class of a request that asks for one: never above the ceiling."""
        return self.priority if asked is None else max(asked, self.ceiling)


@dataclass(frozen=True, slots=True)
class Directory:
    """All tenants and keys at one moment."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[str, ApiKey] = field(default_factory=dict)  # by SHA-256, in hexadecimal

    @staticmethod
    def of(tenants: Mapping[str, TenantSpec], keys: Mapping[str, tuple[KeySpec, ...]]) -> Directory:
        """From tenants and the keys of each. Raises ValueError for what cannot be: twice the same key, too many."""
        found: dict[str, ApiKey] = {}
        ids: set[str] = set()
        for tenant, specs in keys.items():
            for spec in specs:
                if spec.sha256 in found or spec.id in ids:
                    raise ValueError(f"tenants: the key '{spec.id}' of '{tenant}' is there twice")
                ids.add(spec.id)
                expires_at = spec.expires.timestamp() if spec.expires else inf
                found[spec.sha256] = ApiKey(tenant, spec, expires_at)
        if len(tenants) > MAX_TENANTS or len(found) > MAX_KEYS:
            raise ValueError(f"at most {MAX_TENANTS} tenants and {MAX_KEYS} keys are kept")
        return Directory({name: Tenant.of(name, spec) for name, spec in tenants.items()}, found)

    def keys_of(self, tenant: str) -> list[KeySpec]:
        """A tenant's keys, in the order of their ids."""
        return sorted((key.spec for key in self.keys.values() if key.tenant == tenant), key=lambda spec: spec.id)
