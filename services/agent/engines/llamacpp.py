"""llama.cpp's server (default port 8080), with one model or as a router of several.

Source: `tools/server/README.md` of ggml-org/llama.cpp, mid 2026, and the server itself, run out of the wheel xllamacpp
2026.10. Metrics exist only with `--metrics`. `/slots` is never asked for, though it would show what runs: it counts as
a task, and would keep a server from going to sleep (`--sleep-idle-seconds`). A server asleep takes requests and loads
its model first, as does a router for a model that is not loaded: such models are served, and not warm.

Its KV cache is the slots' contexts together; with `--kv-unified` they share one, which it does not say, so that the
capacity is an upper bound there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import fsum
from typing import Any, Final
from urllib.parse import quote

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import (
    Answer,
    Ask,
    EngineState,
    Listener,
    Unreachable,
    counted,
    fraction,
    number,
    positive,
)
from services.agent.engines.openai import entries_of, name_of, owned_by
from services.agent.engines.prometheus import Page

RUNNING: Final = ("llamacpp:requests_processing",)
WAITING: Final = ("llamacpp:requests_deferred",)
KV_USE: Final = ("llamacpp:kv_cache_usage_ratio",)  # until spring 2025
GENERATED: Final = ("llamacpp:tokens_predicted_total",)  # moves when a request ends
STEPS: Final = ("llamacpp:n_decode_total",)
RATE: Final = ("llamacpp:predicted_tokens_seconds",)  # of what ended since the last look, and 0 if nothing did
PROMPT_RATE: Final = ("llamacpp:prompt_tokens_seconds",)
MAX_LOADED: Final = 16  # models of a router whose metrics are asked for; it keeps 4 by default


class LlamaCpp:
    """Adapter of llama.cpp's server."""

    engine = "llamacpp"

    async def recognise(self, ask: Ask) -> bool:
        """Its models are owned by "llamacpp", or its health path says in its own words that it is loading."""
        if owned_by(await ask("/v1/models"), "llamacpp"):
            return True
        health = await ask("/health")
        return health.status == 503 and b'"unavailable_error"' in health.body[:1024]

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """A router is told by its list of models, in which each has a status."""
        health, listing, props, metrics = await asyncio.gather(
            ask("/health"), ask("/v1/models"), ask("/props"), ask("/metrics", Listener.METRICS)
        )
        answers = (health, listing, props, metrics)
        if not any(a.status for a in answers):
            return trouble.unreachable(*answers)
        phase = Phase.LOADING if health.status >= 500 else Phase.SERVING
        entries = [e for e in entries_of(listing) or () if isinstance(e, dict)]
        if any("status" in e for e in entries):
            return await _router(ask, phase, entries)
        return _single(phase, listing, props, metrics)


def _single(phase: Phase, listing: Answer, props: Answer, metrics: Answer) -> EngineState:
    entries = entries_of(listing)
    models = None if entries is None else _names(entries)
    told = props.json()
    told = told if isinstance(told, dict) else {}
    settings = told.get("default_generation_settings")
    context = positive(number(settings.get("n_ctx"))) if isinstance(settings, dict) else None  # tokens of one slot
    slots = positive(number(told.get("total_slots")))
    page = Page(metrics.body)
    running = counted(page.total(RUNNING))
    return EngineState(
        phase=phase,
        models=models,
        warm_models=frozenset() if told.get("is_sleeping") is True else models,
        max_model_len=int(context) if context else None,
        max_running=slots,
        running=running,
        waiting=counted(page.total(WAITING)),
        kv_utilization=fraction(page.total(KV_USE)),
        kv_tokens=context * slots if context and slots else None,
        generated_tokens=counted(page.total(GENERATED)),
        steps=counted(page.total(STEPS)),
        tokens_per_s=positive(page.total(RATE)),
        prompt_tokens_per_s=positive(page.total(PROMPT_RATE)),
        problems=trouble.listing(listing, known=models is not None) | _metrics_trouble(metrics, page, running),
    )


async def _router(ask: Ask, phase: Phase, entries: list[dict[str, Any]]) -> EngineState:
    """A router's load is that of its loaded models together. `autoload=false`: no look may load a model."""
    loaded = [e for e in entries if _status(e) == "loaded"][:MAX_LOADED]
    paths = [f"/metrics?model={quote(str(e.get('id')), safe='')}&autoload=false" for e in loaded]
    answers = await asyncio.gather(*(ask(path) for path in paths))
    pages = [Page(a.body) for a in answers]
    running = _over(pages, RUNNING)
    return EngineState(
        phase=phase,
        models=_names(entries),
        warm_models=_names(loaded),
        running=running,
        waiting=_over(pages, WAITING),
        generated_tokens=_over(pages, GENERATED),
        steps=_over(pages, STEPS),
        tokens_per_s=positive(_over(pages, RATE)),
        problems=frozenset().union(*(_metrics_trouble(a, p, running) for a, p in zip(answers, pages, strict=True))),
    )


def _status(entry: dict[str, Any]) -> str:
    status = entry.get("status")
    return str(status.get("value")) if isinstance(status, dict) else ""


def _names(entries: list[Any]) -> frozenset[str]:
    """What the models are called, aliases included."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            aliases = entry.get("aliases")
            found += [entry.get("id"), *(aliases[:64] if isinstance(aliases, list) else ())]
    return frozenset(name for name in map(name_of, found) if name is not None)


def _over(pages: list[Page], metric: Iterable[str]) -> float | None:
    """A figure summed over all pages; None if one of them lacks it, 0 if there are none: nothing is loaded."""
    values = [counted(page.total(metric)) for page in pages]
    known = [v for v in values if v is not None]
    return fsum(known) if len(known) == len(values) else None


def _metrics_trouble(metrics: Answer, page: Page, running: float | None) -> frozenset[str]:
    if metrics.status == 501:
        return frozenset({"metrics: switched off (start it with --metrics)"})
    return trouble.metrics(metrics, page, "llamacpp:", "llama.cpp", running)
