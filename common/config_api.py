"""What a process runs on, as part of the admin API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

from fastapi import APIRouter
from pydantic import BaseModel

from common.reload import Reloader

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
