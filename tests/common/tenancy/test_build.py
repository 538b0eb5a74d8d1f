"""What a configuration of tenants makes, and what it cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import TierConfig, load
from common.errors import ConfigError
from common.store.memory import MemoryMembershipStore
from common.tenancy.build import Tenants, tenants_of
from common.tenancy.sources import FileTenants

OIDC = {"issuer": "https://login.example/", "audience": ["headwater"]}


async def made(**values: Any) -> Tenants | None:
    return await tenants_of(load(TierConfig, None, values, environ={}), MemoryMembershipStore(), lambda: 1)


async def test_nobody_is_asked_unless_it_is_configured() -> None:
    assert await made() is None


async def test_a_file_with_all_there_is_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {requests_per_minute: 1}}")
    usage = {"usage_file": str(tmp_path / "usage"), "prices": {"*": {"input_usd": 1.0}}}
    tenants = await made(tenants={"file": str(file), "oidc": [OIDC], "anonymous": "acme", **usage})
    assert tenants is not None
    assert isinstance(tenants.source, FileTenants)
    assert {route.path for route in tenants.router.routes} >= {"/admin/v1/tenants", "/admin/v1/keys/{id_}/rotate"}
    await tenants.close()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tenants": {"stored": True}}, "tenants.stored: needs etcd.urls"),
        ({"tenants": {"file": "/nowhere.yaml"}}, "/nowhere.yaml: cannot be read"),
        ({"tenants": {"file": "a", "stored": True}}, "exclude each other"),
        ({"tenants": {"anonymous": "acme"}}, "needs file or stored"),
        ({"tenants": {"oidc": [OIDC]}}, "needs file or stored"),
        ({"tenants": {"file": "a", "usage_stream": "u"}}, "tenants.usage_stream: needs redis.url"),
        ({"tenants": {"file": "a", "usage_file": "u"}, "workers": 2}, "tenants.usage_file: workers"),
        ({"tenants": {"file": "a", "oidc": [OIDC | {"algorithms": ["none"]}]}}, "algorithms"),
        ({"tenants": {"file": "a", "oidc": [OIDC | {"algorithms": ["HS256"]}]}}, "algorithms"),
        ({"tenants": {"file": "a", "oidc": [{"issuer": "https://login.example"}]}}, "audience"),
    ],
)
async def test_what_cannot_be_ends_the_start(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await made(**values)


async def test_keys_of_a_provider_come_over_https(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {}")
    with pytest.raises(ConfigError, match="https"):
        await made(tenants={"file": str(file), "oidc": [OIDC | {"issuer": "http://login.example"}]})
