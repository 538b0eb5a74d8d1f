"""Rollouts as part of the admin API of a tier that clients call."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.config import Whole
from common.errors import StoreUnavailable
from common.policy.rollout import Guard, Rollout
from common.rollouts import Rollouts


class RolloutRequest(BaseModel):
    """What to roll out, and how."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=512)]
    to: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,64}$")]
    steps: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=100.0)], ...], Field(min_length=1, max_length=20, strict=False)
    ] = (
        5.0,
        25.0,
        50.0,
        100.0,
    )
    step_s: Annotated[float, Field(ge=0.1, le=86_400.0)] = 60.0
    error_increase: Annotated[float, Field(ge=0.0, le=1.0)] = Guard().error_increase
    ttft_ratio: Annotated[float, Field(ge=1.0, le=100.0)] = Guard().ttft_ratio
    min_requests: Annotated[int, Field(ge=0, le=1_000_000), Whole] = Guard().min_requests

    @field_validator("steps")
    @classmethod
    def _rise(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("steps must rise, as in 5, 25, 50, 100")
        return value


def shown(rollout: Rollout) -> dict[str, Any]:
    """A rollout for people."""
    return {
        "model": rollout.model,
        "to": rollout.to,
        "stage": rollout.stage.value,
        "share": rollout.share,
        "steps": rollout.steps,
        "step_s": rollout.step_s,
        "owner": rollout.owner,
        "reason": rollout.reason,
    }


def rollout_router(rollouts: Rollouts) -> APIRouter:
    """The routes."""
    router = APIRouter(prefix="/admin/v1/rollouts", tags=["rollouts"])

    @router.get("")
    async def status() -> list[dict[str, Any]]:
        """All rollouts, finished ones included."""
        return [shown(rollout) for _, rollout in sorted(rollouts.known.items())]

    @router.post("", responses={503: {}})
    async def start(asked: RolloutRequest) -> dict[str, Any]:
        """Start one; until an instance of the new version takes work, the old one serves everything."""
        guard = Guard(asked.error_increase, asked.ttft_ratio, asked.min_requests)
        rollout = Rollout(asked.model, asked.to, asked.steps, asked.step_s, guard)
        try:
            return shown(await rollouts.start(rollout))
        except StoreUnavailable as error:
            raise HTTPException(503, f"the membership store does not answer: {error}") from None

    @router.delete("/{model:path}", responses={404: {}, 503: {}})
    async def abort(model: str, forget: bool = False) -> dict[str, Any]:
        """Send everything to the old version again; with `forget`, to whichever version there is."""
        if model not in rollouts.known:
            raise HTTPException(404, f"there is no rollout of {model[:200]}")
        try:
            if forget:
                await rollouts.forget(model)
                return {}
            aborted = await rollouts.abort(model)
        except StoreUnavailable as error:
            raise HTTPException(503, f"the membership store does not answer: {error}") from None
        return shown(aborted) if aborted is not None else {}

    return router
