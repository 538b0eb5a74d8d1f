"""Any server that lists its models at `/v1/models`: alive, ready and which models, and nothing of its load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from common.types import Phase
from services.agent.engines.base import Answer, Ask, EngineState, Unreachable

MAX_MODELS: Final = 1024  # served by one server, adapters included; the rest is not listed
MAX_NAME: Final = 256  # characters of a model's name

_ALIVE: Final = frozenset({200, 401, 403, 404, 405})  # answers that say the server is up, if not what it serves


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of the list."""

    name: str
    owner: str
    max_len: int | None


class OpenAI:
    """The generic adapter: what recognises nothing better."""

    engine = "openai"

    async def recognise(self, ask: Ask) -> bool:
        """It answers `/v1/models` with a list."""
        return models_of(await ask("/v1/models")) is not None

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """Ready unless its health path or the list itself says otherwise with a 5xx."""
        listing, health = await asyncio.gather(ask("/v1/models"), ask("/health"))
        if not listing.status and not health.status:
            return unreachable(listing, health)
        models = models_of(listing)
        ready = health.status < 500 and (listing.status in _ALIVE or not listing.status)
        return EngineState(
            phase=Phase.SERVING if ready else Phase.LOADING,
            models=names(models),
            max_model_len=longest(models),
            problems=frozenset() if models is not None else frozenset({f"models: {reason(listing)}"}),
        )


def models_of(answer: Answer) -> list[Model] | None:
    """The models of an answer to `/v1/models`; None if it is no such list. Entries that make no sense are left out."""
    page = answer.json()
    entries = page.get("data") if isinstance(page, dict) else None
    if not isinstance(entries, list):
        return None
    return [m for m in map(_model, entries[:MAX_MODELS]) if m is not None]


def _model(entry: Any) -> Model | None:
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return None
    length = entry.get("max_model_len")
    return Model(name, str(entry.get("owned_by", "")), length if type(length) is int and length > 0 else None)


def names(models: list[Model] | None) -> frozenset[str] | None:
    """What the models are called; None if they are not known."""
    return None if models is None else frozenset(m.name for m in models)


def longest(models: list[Model] | None) -> int | None:
    """The longest context any of them takes, tokens."""
    return max((m.max_len for m in models or () if m.max_len is not None), default=None)


def unreachable(*answers: Answer) -> Unreachable:
    """What it means that none of these came: gone only if nobody listens, else hung or cut off."""
    refused = all(a.refused for a in answers)
    return Unreachable(refused, ", ".join(sorted({a.problem for a in answers})))


def reason(answer: Answer) -> str:
    """Why an answer is of no use, in words."""
    if answer.problem:
        return answer.problem
    return f"status {answer.status}" if answer.status != 200 else "not understood"
