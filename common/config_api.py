"""What a process runs on, as part of the admin API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
import structlog
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from common import logs
from common.admin.decisions import PolicyName
from common.admin.peers import Peers, ask
from common.admin.shapes import Everywhere
from common.config import PolicySection
from common.policy.stages import POLICIES
from common.reload import Reloader

log = structlog.get_logger()

C = TypeVar("C", bound=BaseModel)


class ConfigState(BaseModel):
    """What a process runs on. `error`: why what its file holds now is not in use; "" when it is."""

    file: str
    valid: bool
    error: str
    loaded_at: str


def config_router(reloader: Reloader[C]) -> APIRouter:
    """Admin routes: what the process runs on, and have it read again."""
    router = APIRouter(prefix="/admin/v1/config", tags=["configuration"])

    def state() -> ConfigState:
        at = datetime.fromtimestamp(reloader.loaded_at_ns // 1_000_000_000, UTC).isoformat()
        return ConfigState(file=str(reloader.file or ""), valid=not reloader.error, error=reloader.error, loaded_at=at)

    @router.get("")
    async def config() -> ConfigState:
        """Whether the file is good, and since when it is in use."""
        return state()

    @router.post("/reload")
    async def reload() -> ConfigState:
        """Read the file now, as SIGHUP does."""
        await reloader.reload()
        return state()

    return router


class LogLevel(BaseModel):
    """The least severe that a process writes to its log."""

    model_config = ConfigDict(extra="forbid")

    level: logs.LevelName


def log_router() -> APIRouter:
    """Admin routes: how much the process logs, until its `log.level` changes or it starts anew."""
    router = APIRouter(prefix="/admin/v1/log-level", tags=["configuration"])

    @router.get("")
    async def log_level() -> LogLevel:
        """What is written now."""
        return LogLevel(level=logs.level())

    @router.put("")
    async def set_log_level(wanted: LogLevel) -> LogLevel:
        """Write more, or less, from now on. The access log has a switch of its own, `log.access`."""
        before = logs.level()
        logs.set_level("info")
        log.info("log_level_changed", before=before, to=wanted.level)
        logs.set_level(wanted.level)
        return wanted

    return router


class PolicyChange(BaseModel):
    """How to choose from now on. `price_weight_s_per_usd`: default: as before; `process`: only the one of this id."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: PolicyName
    price_weight_s_per_usd: Annotated[float, Field(ge=0.0, le=1e12)] | None = None
    process: Annotated[str, Field(max_length=200)] = ""
    everywhere: bool = False


class PolicyState(BaseModel):
    """How one process chooses."""

    process: str
    name: str
    price_weight_s_per_usd: float


class Policies(BaseModel):
    """How processes choose, and what there is to choose from. `unheard`: balancers that gave no answer."""

    processes: list[PolicyState]
    unheard: int = 0
    known: list[str]


def policy_router(
    process: str, current: Callable[[], PolicySection], change: Callable[[PolicySection], None], peers: Peers
) -> APIRouter:
    """Admin routes: how the stages of this process, and of all others, choose; until it starts anew or its file says
    otherwise.
    """
    router = APIRouter(prefix="/admin/v1/policy", tags=["configuration"])
    path = "/admin/v1/policy"

    def own() -> PolicyState:
        policy = current()
        return PolicyState(process=process, name=policy.name, price_weight_s_per_usd=policy.price_weight_s_per_usd)

    async def all_of(method: str, body: dict[str, object] | None = None) -> Policies:
        urls = sorted(peers.urls())
        async with peers.client() as client:
            contents = await asyncio.gather(*(ask(client, method, url + path, json=body) for url in urls))
        found = [Policies.model_validate(msgspec.json.decode(c)) for c in contents if c is not None]
        others = sorted((state for one in found for state in one.processes), key=lambda state: state.process)
        return Policies(processes=[own(), *others], unheard=len(urls) - len(found), known=list(POLICIES))

    @router.get("")
    async def policy(everywhere: Everywhere = False) -> Policies:
        """By which policy this process chooses; with `everywhere`, all of them."""
        return await all_of("GET") if everywhere else Policies(processes=[own()], known=list(POLICIES))

    @router.put("", responses={404: {"description": "no process of this id answers"}})
    async def set_policy(wanted: PolicyChange) -> Policies:
        """Choose by another policy from the next request on."""
        if wanted.process in ("", process):
            before, weight = current(), wanted.price_weight_s_per_usd
            weight = before.price_weight_s_per_usd if weight is None else weight
            change(before.model_copy(update={"name": wanted.name, "price_weight_s_per_usd": weight}))
            log.info("policy_changed", before=before.name, to=wanted.name, price_weight_s_per_usd=weight)
        if wanted.everywhere:
            found = await all_of("PUT", wanted.model_dump() | {"everywhere": False})
            if wanted.process and all(state.process != wanted.process for state in found.processes):
                raise HTTPException(404, f"no process {wanted.process!r} answers")
            return found
        return Policies(processes=[own()], known=list(POLICIES))

    return router
