"""What a process runs on, as part of the admin API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

import structlog
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from common import logs
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
