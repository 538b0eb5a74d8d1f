"""SGLang (default port 30000).

Source: `python/sglang/srt/entrypoints/http_server.py` and `v1_loads.py`, `srt/observability/metrics_collector.py` and
`docs/references/production_metrics.md` of sgl-project/sglang, 0.4 to mid 2026. Metrics exist only with
`--enable-metrics`; `/v1/loads` needs no option, and alone says how many requests run at most. Neither is on all
versions, so both are asked for and each figure is taken from where it is.

Gauges come once a data-parallel rank, to be summed; with metrics of all schedulers also once a tensor-parallel rank,
which are copies; with priority scheduling also once a priority, which are parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import isfinite
from typing import Any, Final

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
from services.agent.engines.openai import adapters, longest, models_of, names, owned_by
from services.agent.engines.prometheus import Page

RUNNING: Final = ("sglang:num_running_reqs", "sglang:num_running_req", "sglang:num_requests_running")
WAITING: Final = ("sglang:num_queue_reqs", "sglang:queue_req", "sglang:num_requests_waiting")
KV_USE: Final = ("sglang:token_usage",)
KV_TOKENS: Final = ("sglang:max_total_num_tokens",)
RATE: Final = ("sglang:gen_throughput",)
GENERATED: Final = ("sglang:generation_tokens_total",)  # moves when a request ends
STEPS: Final = (  # all move while tokens come; in tokens where it counts no steps
    "sglang:realtime_tokens_total",
    "sglang:inter_token_latency_seconds_count",
    "sglang:time_per_output_token_seconds_count",
)
MAX_RANKS: Final = 1024  # data-parallel ranks of one server


class Sglang:
    """Adapter of SGLang."""

    engine = "sglang"

    async def recognise(self, ask: Ask) -> bool:
        """Its models are owned by "sglang", or its metrics begin so."""
        if owned_by(await ask("/v1/models"), "sglang"):
            return True
        metrics = await ask("/metrics")
        return metrics.ok and Page(metrics.body).has("sglang:")

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """`/health` is 503 until it is warm; it has an idle server generate one token, and waits for no busy one."""
        health, listing, metrics, loads, info = await asyncio.gather(
            ask("/health"), ask("/v1/models"), ask("/metrics", Listener.METRICS), ask("/v1/loads"), ask("/model_info")
        )
        answers = (health, listing, metrics, loads)
        if not any(a.status for a in answers):
            return trouble.unreachable(*answers)
        models = models_of(listing)
        page, ranks = Page(metrics.body), _ranks(loads)
        running = _sum(ranks, "num_running_reqs", page, RUNNING)
        return EngineState(
            phase=Phase.LOADING if health.status >= 500 else Phase.SERVING,
            models=names(models),
            adapters=adapters(models),
            versions=_versions(info, names(models)),
            max_model_len=longest(models),
            max_running=positive(_sum(ranks, "max_running_requests", page, ())),
            running=running,
            waiting=_sum(ranks, "num_waiting_reqs", page, WAITING),
            kv_utilization=_kv_utilization(ranks, page),
            kv_tokens=positive(_sum(ranks, "max_total_num_tokens", page, KV_TOKENS)),
            generated_tokens=counted(page.total(GENERATED)),
            steps=counted(page.total(STEPS)),
            tokens_per_s=_sum(ranks, "gen_throughput", page, RATE),
            problems=trouble.listing(listing, known=models is not None) | _load_trouble(metrics, loads, page, running),
        )


def _ranks(answer: Answer) -> list[dict[str, Any]]:
    """The loads of `/v1/loads`, one a data-parallel rank; none if it is no such answer."""
    page = answer.json()
    loads = page.get("loads") if isinstance(page, dict) else None
    return [r for r in loads[:MAX_RANKS] if isinstance(r, dict)] if isinstance(loads, list) else []


def _sum(ranks: list[dict[str, Any]], key: str, page: Page, metric: Iterable[str]) -> float | None:
    """A figure over all ranks, from the loads if all of them have it, else from the metrics."""
    values = [counted(number(rank.get(key))) for rank in ranks]
    known = [v for v in values if v is not None]
    if known and len(known) == len(values):
        return sum(known)
    by_rank = _by_rank(page, metric)
    return counted(sum(by_rank)) if by_rank else None


def _by_rank(page: Page, metric: Iterable[str]) -> list[float]:
    """One value a data-parallel rank, of the first of these names that is there."""
    for name in metric:
        ranks: dict[str, float] = {}
        for sample in page.samples(name):
            if not sample.labels.get("priority") and isfinite(sample.value):
                rank = sample.labels.get("dp_rank", "")
                ranks[rank] = max(sample.value, ranks.get(rank, sample.value))
        if ranks:
            return list(ranks.values())
    return []


def _kv_utilization(ranks: list[dict[str, Any]], page: Page) -> float | None:
    told = [number(rank.get("token_usage")) for rank in ranks]
    values = [v for v in told if v is not None] or _by_rank(page, KV_USE)
    return fraction(sum(values) / len(values)) if values else None


def _versions(info: Answer, models: frozenset[str] | None) -> frozenset[tuple[str, str]]:
    """The version that whoever updates its weights gave them; "default" is none."""
    page = info.json()
    version = page.get("weight_version") if isinstance(page, dict) else None
    if not isinstance(version, str) or version in {"", "default"}:
        return frozenset()
    return frozenset((model, version[:64]) for model in models or ())


def _load_trouble(metrics: Answer, loads: Answer, page: Page, running: float | None) -> frozenset[str]:
    """Its load can be read from either of two places; without both, the metrics are what an operator can switch on."""
    if running is not None:
        return frozenset()
    found = trouble.metrics(metrics, page, "sglang:", "SGLang", running)
    hint = " (start it with --enable-metrics)" if metrics.status == 404 and loads.status == 404 else ""
    return frozenset(f"{problem}{hint}" for problem in found)
