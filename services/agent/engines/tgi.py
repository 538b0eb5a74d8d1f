"""Hugging Face's Text Generation Inference (default port 80 in its image, 3000 by itself).

Source: `router/src/server.rs`, `router/src/lib.rs` and `docs/source/reference/metrics.md` of
huggingface/text-generation-inference, 1.x to 3.3 (its last release). Its router listens only once the model is loaded;
a health path that fails afterwards means that the model's processes are lost. It admits requests by the tokens they may
grow to, so that the share of these in `max_batch_total_tokens` is its KV use; version 3 no longer says that limit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import Ask, EngineState, Listener, Unreachable, counted, fraction, number, positive
from services.agent.engines.openai import name_of
from services.agent.engines.prometheus import Page

RUNNING: Final = ("tgi_batch_current_size",)
WAITING: Final = ("tgi_queue_size",)
BATCH_TOKENS: Final = ("tgi_batch_current_max_tokens",)
GENERATED: Final = ("tgi_request_generated_tokens_sum",)  # moves when a request ends
STEPS: Final = ("tgi_batch_forward_duration_count", "tgi_batch_inference_count")
TOKEN_TIME_SUM: Final = ("tgi_request_mean_time_per_token_duration_sum",)  # seconds a token, one entry a request
TOKEN_TIME_COUNT: Final = ("tgi_request_mean_time_per_token_duration_count",)
ROUTER: Final = "text-generation-router"  # what it calls itself


class Tgi:
    """Adapter of TGI."""

    engine = "tgi"

    async def recognise(self, ask: Ask) -> bool:
        """`/info` names its router, or its metrics have its names."""
        page = (await ask("/info")).json()
        router = page.get("router") if isinstance(page, dict) else None
        if isinstance(router, str) and router.startswith(ROUTER):
            return True
        metrics = await ask("/metrics")
        return metrics.ok and Page(metrics.body).has("tgi_")

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """`/info` says what it serves and its limits, `/metrics` its load, `/health` whether its shards live."""
        health, info, metrics = await asyncio.gather(ask("/health"), ask("/info"), ask("/metrics", Listener.METRICS))
        if not health.status and not info.status and not metrics.status:
            return trouble.unreachable(health, info, metrics)
        told = info.json()
        told = told if isinstance(told, dict) else {}
        page = Page(metrics.body)
        model = name_of(told.get("model_id"))
        running = counted(page.total(RUNNING))
        length, budget = (positive(number(told.get(k))) for k in ("max_total_tokens", "max_batch_total_tokens"))
        return EngineState(
            phase=Phase.LOADING if health.status >= 500 else Phase.SERVING,
            models=frozenset({model}) if model else None,
            versions=_versions(model, told.get("model_sha")),
            max_model_len=int(length) if length else None,
            max_running=positive(number(told.get("max_batch_size"))),
            running=running,
            waiting=counted(page.total(WAITING)),
            kv_utilization=_kv_utilization(page, budget),
            kv_tokens=budget,
            generated_tokens=counted(page.total(GENERATED)),
            steps=counted(page.total(STEPS)),
            tokens_per_s=_rate(page, running),
            problems=trouble.metrics(metrics, page, "tgi_", "TGI", running)
            | trouble.listing(info, known=model is not None),
        )


def _versions(model: str | None, sha: object) -> frozenset[tuple[str, str]]:
    return frozenset({(model, sha[:64])}) if model and isinstance(sha, str) and sha else frozenset()


def _kv_utilization(page: Page, budget: float | None) -> float | None:
    promised = page.total(BATCH_TOKENS)
    return fraction(promised / budget) if promised is not None and budget else None


def _rate(page: Page, running: float | None) -> float | None:
    """Tokens a second: those that run, each at the mean pace of all requests so far; None before any has ended."""
    seconds, requests = page.total(TOKEN_TIME_SUM), page.total(TOKEN_TIME_COUNT)
    pace = positive(seconds / requests) if seconds is not None and requests else None
    return running / pace if running is not None and pace else None
