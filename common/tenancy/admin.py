"""The admin API of tenants and keys: a router for the admin listener, which is guarded.

Where tenants come from a file it shows them and changes nothing: the file is the truth. A key is in one answer, the one
to the request that made it, and nowhere else.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, HTTPException, Path, Response
from pydantic import Field

from common import clock
from common.config import NAME, Section
from common.errors import StoreUnavailable
from common.tenancy.directory import MAX_KEYS, MAX_TENANTS, Directory, KeySpec, TenantSpec, Time
from common.tenancy.gate import Gate
from common.tenancy.keys import make
from common.tenancy.sources import StoredTenants

log = structlog.get_logger()

SEEN_S: Final = 2.0  # a change is waited for until this balancer itself goes by it
OVERLAP_S: Final = 86_400.0  # a rotated key goes on for a day, so that its clients can be changed one by one
Seconds = Annotated[float, Field(ge=0.0, le=366 * 86_400.0)]
ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    404: {"description": "there is no such tenant or key"},
    409: {"description": "there are as many as are kept, or they are kept in a file"},
    503: {"description": "the tenants are not known yet, or their store does not answer"},
}
NameInPath = Annotated[str, Path(pattern=f"^{NAME.pattern}$")]


class NewKey(Section):
    """What is wanted of a new key."""

    expires: Time | None = None
    """From when on it is refused; default: never."""
    note: Annotated[str, Field(max_length=200)] = ""
    """Whose it is, in words."""


class Rotation(NewKey):
    """What is wanted of the key that takes another's place."""

    overlap_s: Seconds = OVERLAP_S
    """For so long the old one is good as well."""


def tenants_router(gate: Gate, stored: StoredTenants | None, where: str) -> APIRouter:  # noqa: C901, PLR0915 - one route each
    """The routes. `stored`: where changes go, None if they go nowhere from here; `where` tells people so."""
    router = APIRouter(prefix="/admin/v1", tags=["tenants"], responses=ANSWERS)

    def directory() -> Directory:
        if gate.directory is None:
            raise HTTPException(503, "the tenants are not known yet")
        return gate.directory

    def writable() -> StoredTenants:
        if stored is None:
            raise HTTPException(409, f"the tenants are kept in {where}: change them there")
        return stored

    def known(name: str) -> TenantSpec:
        tenant = directory().tenants.get(name)
        if tenant is None:
            raise HTTPException(404, f"there is no tenant '{name}'")
        return tenant.spec

    def key_of(id_: str) -> tuple[str, KeySpec]:
        for key in directory().keys.values():
            if key.spec.id == id_:
                return key.tenant, key.spec
        raise HTTPException(404, f"there is no key '{id_}'")

    async def changed(action: str, works: Any, seen: Any, **what: str) -> None:
        try:
            await works
        except StoreUnavailable as error:
            raise HTTPException(503, f"not changed, or not all of it: {error}") from None
        log.info("admin_change", action=action, **what)
        await gate.until(seen, SEEN_S)

    async def new_key(tenant: str, wanted: NewKey, response: Response) -> dict[str, Any]:
        if len(directory().keys) >= MAX_KEYS:
            raise HTTPException(409, f"at most {MAX_KEYS} keys are kept")
        key, spec = make(_now(), wanted.expires, wanted.note)
        source = writable()
        await changed(
            "key_made", source.put_key(tenant, spec), lambda d: spec.sha256 in d.keys, tenant=tenant, key=spec.id
        )
        response.headers["cache-control"] = "no-store"
        return {"key": key, "tenant": tenant, **_shown(spec)}

    @router.get("/tenants")
    async def tenants() -> list[dict[str, Any]]:
        """All tenants, what each may, and how much of it is under way here."""
        known_now = directory()
        return [_tenant(gate, name, known_now) for name in sorted(known_now.tenants)]

    @router.get("/tenants/{name}")
    async def tenant(name: NameInPath) -> dict[str, Any]:
        """One of them, with its keys, and what it has used this month over all balancers."""
        known(name)
        tokens, usd = await gate.look_up_month(directory().tenants[name])
        keys = [_shown(key) for key in directory().keys_of(name)]
        return _tenant(gate, name, directory()) | {"month": {"tokens": tokens, "usd": usd}, "keys": keys}

    @router.put("/tenants/{name}")
    async def put_tenant(name: NameInPath, spec: TenantSpec) -> dict[str, Any]:
        """Create a tenant, or replace what it may."""
        source = writable()
        if name not in directory().tenants and len(directory().tenants) >= MAX_TENANTS:
            raise HTTPException(409, f"at most {MAX_TENANTS} tenants are kept")

        def seen(now: Directory) -> bool:
            return name in now.tenants and now.tenants[name].spec == spec

        await changed("tenant_put", source.put_tenant(name, spec), seen, tenant=name)
        return {"name": name, **spec.model_dump(mode="json")}

    @router.delete("/tenants/{name}", status_code=204)
    async def delete_tenant(name: NameInPath) -> None:
        """Delete a tenant and all its keys."""
        source = writable()
        known(name)
        works = source.delete_tenant(name, directory().keys_of(name))
        await changed("tenant_deleted", works, lambda d: name not in d.tenants, tenant=name)

    @router.get("/tenants/{name}/keys")
    async def keys(name: NameInPath) -> list[dict[str, Any]]:
        """A tenant's keys, without the keys themselves, which nobody has."""
        known(name)
        return [_shown(key) for key in directory().keys_of(name)]

    @router.post("/tenants/{name}/keys", status_code=201)
    async def create_key(name: NameInPath, wanted: NewKey, response: Response) -> dict[str, Any]:
        """Make a key. It is in this answer and nowhere else."""
        writable()
        known(name)
        return await new_key(name, wanted, response)

    @router.post("/keys/{id_}/rotate", status_code=201)
    async def rotate_key(id_: NameInPath, wanted: Rotation, response: Response) -> dict[str, Any]:
        """Make a key in another's place, which goes on for as long as `overlap_s`."""
        source = writable()
        tenant, old = key_of(id_)
        made = await new_key(tenant, NewKey(expires=wanted.expires, note=wanted.note or old.note), response)
        ends = _now() + timedelta(seconds=wanted.overlap_s)
        if old.expires is None or old.expires > ends:
            ending = old.model_copy(update={"expires": ends})

            def seen(now: Directory) -> bool:
                return old.sha256 in now.keys and now.keys[old.sha256].spec.expires == ends

            await changed("key_expires", source.put_key(tenant, ending), seen, tenant=tenant, key=id_)
        return made

    @router.delete("/keys/{id_}", status_code=204)
    async def revoke_key(id_: NameInPath) -> None:
        """Revoke a key: all balancers refuse it within moments."""
        source = writable()
        tenant, key = key_of(id_)
        works = source.delete_key(id_)
        await changed("key_revoked", works, lambda d: key.sha256 not in d.keys, tenant=tenant, key=id_)

    return router


def _tenant(gate: Gate, name: str, directory: Directory) -> dict[str, Any]:
    spec = directory.tenants[name].spec.model_dump(mode="json")
    return {"name": name, **spec, "under_way_here": gate.under_way(name)}


def _shown(key: KeySpec) -> dict[str, Any]:
    return key.model_dump(mode="json", include={"id", "created", "expires", "note"})


def _now() -> datetime:
    return datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, UTC)
