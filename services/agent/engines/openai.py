"""Any server that lists its models at `/v1/models`: alive, ready and which models, and nothing of its load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import Answer, Ask, EngineState, Unreachable

MAX_MODELS: Final = 1024  # served by one server, adapters included; the rest is not listed
MAX_NAME: Final = 256  # characters of a model's name

_ALIVE: Final = frozenset({200, 401, 403, 404, 405})  # answers that say the server is up, if not what it serves


@dataclass(frozen=True, slots=True)
class Model:
    """One entry of the list."""

    name: str
    owner: str
    max_len: int | None = None
    adapter: bool = False  # a LoRA adapter: it names the model it belongs to


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
            return trouble.unreachable(listing, health)
        models = models_of(listing)
        ready = health.status < 500 and (listing.status in _ALIVE or not listing.status)
        return EngineState(
            phase=Phase.SERVING if ready else Phase.LOADING,
            models=names(models),
            adapters=adapters(models),
            max_model_len=longest(models),
            problems=trouble.listing(listing, known=models is not None),
        )


def models_of(answer: Answer) -> list[Model] | None:
    """The models of an answer to `/v1/models`; None if it is no such list. Entries that make no sense are left out."""
    entries = entries_of(answer)
    return None if entries is None else [m for m in map(_model, entries) if m is not None]


def entries_of(answer: Answer) -> list[Any] | None:
    """The first MAX_MODELS entries of such a list as they are."""
    page = answer.json()
    entries = page.get("data") if isinstance(page, dict) else None
    return entries[:MAX_MODELS] if isinstance(entries, list) else None


def _model(entry: Any) -> Model | None:
    name = name_of(entry.get("id")) if isinstance(entry, dict) else None
    if name is None:
        return None
    length = entry.get("max_model_len")
    return Model(
        name,
        str(entry.get("owned_by", "")),
        length if type(length) is int and length > 0 else None,
        adapter=isinstance(entry.get("parent"), str),
    )


def name_of(value: Any) -> str | None:
    """A model's name, None for what cannot be one."""
    return value if isinstance(value, str) and 0 < len(value) <= MAX_NAME else None


def owned_by(answer: Answer, owner: str) -> bool:
    """Whether any model of the list is said to be this owner's: servers put their own name there."""
    return any(m.owner == owner for m in models_of(answer) or ())


def names(models: list[Model] | None) -> frozenset[str] | None:
    """What the models are called; None if they are not known."""
    return None if models is None else frozenset(m.name for m in models)


def adapters(models: list[Model] | None) -> frozenset[str] | None:
    """Which of them are LoRA adapters; None if the models are not known."""
    return None if models is None else frozenset(m.name for m in models if m.adapter)


def longest(models: list[Model] | None) -> int | None:
    """The longest context any of them takes, tokens."""
    return max((m.max_len for m in models or () if m.max_len is not None), default=None)
