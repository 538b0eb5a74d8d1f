"""Ollama (default port 11434).

Source: `server/routes.go`, `api/types.go` and `docs/api.md` of ollama/ollama, mid 2026. It has no metrics and shows
neither what runs nor what waits: only which models it has (`/api/tags`) and which of them are in memory (`/api/ps`).
The first request for another one waits until that is loaded, which may first have to push one out; so `warm_models` is
the figure that matters. A model without a tag is its `latest`, hence both names. Models of its cloud need no loading.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from services.agent.engines import trouble
from services.agent.engines.base import Answer, Ask, EngineState, Unreachable, number, positive
from services.agent.engines.openai import MAX_MODELS, name_of

GREETING: Final = b"Ollama is running"
LATEST: Final = ":latest"


class Ollama:
    """Adapter of Ollama."""

    engine = "ollama"

    async def recognise(self, ask: Ask) -> bool:
        """It greets, and has its version path: servers that imitate its API mostly leave one of them out."""
        greeting = await ask("/")
        if not greeting.ok or greeting.body.strip() != GREETING:
            return False
        told = (await ask("/api/version")).json()
        return isinstance(told, dict) and "version" in told

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """Which models it has, and which are in memory."""
        tags, hot = await asyncio.gather(ask("/api/tags"), ask("/api/ps"))
        if not tags.status and not hot.status:
            return trouble.unreachable(tags, hot)
        entries, loaded = _entries(tags), _entries(hot)
        remote = [e for e in entries or () if e.get("remote_host")]
        lengths = [positive(number(e.get("context_length"))) for e in loaded or ()]
        return EngineState(
            models=None if entries is None else _names(entries),
            versions=frozenset(v for v in map(_version, entries or ()) if v is not None),
            warm_models=None if loaded is None else _names(loaded + remote),
            max_model_len=max((int(n) for n in lengths if n), default=None),
            problems=trouble.listing(tags, known=entries is not None)
            | (frozenset() if loaded is not None else frozenset({f"loaded models: {trouble.reason(hot)}"})),
        )


def _entries(answer: Answer) -> list[dict[str, Any]] | None:
    page = answer.json()
    models = page.get("models") if isinstance(page, dict) else None
    # Without a model its list is null in some versions.
    if models is None and isinstance(page, dict) and "models" in page:
        return []
    return [e for e in models[:MAX_MODELS] if isinstance(e, dict)] if isinstance(models, list) else None


def _names(entries: list[dict[str, Any]]) -> frozenset[str]:
    full = {name for e in entries if (name := name_of(e.get("model") or e.get("name"))) is not None}
    return frozenset(full | {name.removesuffix(LATEST) for name in full if name != LATEST})


def _version(entry: dict[str, Any]) -> tuple[str, str] | None:
    """A model's digest, shortened as `ollama list` does."""
    name, digest = name_of(entry.get("model") or entry.get("name")), entry.get("digest")
    return (name, digest.removeprefix("sha256:")[:12]) if name and isinstance(digest, str) and digest else None
