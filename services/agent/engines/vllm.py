"""vLLM, and what speaks like it (`headwater engine`).

Source: vLLM's `v1/metrics/loggers.py` and `entrypoints/openai/api_server.py`; names seen live on 0.32. A metric that is
deprecated in one release is hidden in the next and gone in the one after, hence the aliases. Gauges have one series per
data-parallel engine; KV use is averaged over them, everything else summed.
"""

from __future__ import annotations

import asyncio
from typing import Final

from common.types import Phase
from services.agent.engines.base import Answer, Ask, EngineState, Unreachable, counted, fraction
from services.agent.engines.openai import longest, models_of, names, reason, unreachable
from services.agent.engines.prometheus import Page

RUNNING: Final = ("vllm:num_requests_running",)
WAITING: Final = ("vllm:num_requests_waiting",)
KV_USE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # both 0…1, in spite of their name
GENERATED: Final = ("vllm:generation_tokens_total", "vllm:generation_tokens")
STEPS: Final = ("vllm:iteration_tokens_total_count",)  # a histogram that is written once a step
SLEEP: Final = "vllm:engine_sleep_state"
CACHE: Final = "vllm:cache_config_info"
STARTED: Final = ("process_start_time_seconds",)


class Vllm:
    """Adapter of vLLM."""

    engine = "vllm"

    async def recognise(self, ask: Ask) -> bool:
        """Its models are owned by "vllm", or its metrics begin so (`--disable-log-stats` takes those away)."""
        listing, metrics = await asyncio.gather(ask("/v1/models"), ask("/metrics"))
        if any(m.owner == "vllm" for m in models_of(listing) or ()):
            return True
        return metrics.ok and Page(metrics.body).has("vllm:")

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """`/health` says whether its engine lives, `/metrics` what it is doing, `/v1/models` what it serves."""
        health, metrics, listing = await asyncio.gather(ask("/health"), ask("/metrics"), ask("/v1/models"))
        if not health.status and not metrics.status and not listing.status:
            return unreachable(health, metrics, listing)
        page = Page(metrics.body)
        models = models_of(listing)
        return EngineState(
            phase=_phase(health, page),
            models=names(models),
            max_model_len=longest(models),
            running=counted(page.total(RUNNING)),
            waiting=counted(page.total(WAITING)),
            kv_utilization=fraction(page.mean(KV_USE)),
            kv_tokens=_kv_tokens(page),
            generated_tokens=counted(page.total(GENERATED)),
            steps=counted(page.total(STEPS)),
            started_s=counted(page.total(STARTED)),
            problems=_problems(metrics, page, listing, models is not None),
        )


def _phase(health: Answer, page: Page) -> Phase:
    """Not serving: an engine that its health path calls dead or not up (5xx), or one that was put to sleep.

    A health path that does not answer says nothing: a server at its limit is slow to answer and serves nevertheless.
    """
    awake = [s.value for s in page.samples(SLEEP) if s.labels.get("sleep_state") == "awake"]
    if health.status >= 500 or (awake and max(awake) == 0.0):
        return Phase.LOADING
    return Phase.SERVING


def _kv_tokens(page: Page) -> float | None:
    """Tokens that the KV caches of all its engines hold; None while vLLM has not said (`num_gpu_blocks="None"`).

    Newer versions give the figure. In older ones it is blocks times tokens a block, which would be far too little for
    models in which only some layers keep keys and values.
    """
    total = 0.0
    for sample in page.samples(CACHE):
        labels = sample.labels
        try:
            if labels.get("kv_cache_size_tokens", "None") != "None":
                total += int(labels["kv_cache_size_tokens"])
            else:
                total += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        except (KeyError, ValueError):
            return None
    return counted(total) or None


def _problems(metrics: Answer, page: Page, listing: Answer, listed: bool) -> frozenset[str]:
    problems = set()
    if not metrics.ok:
        problems.add(f"metrics: {reason(metrics)}")
    elif not page.has("vllm:"):
        problems.add("metrics: none of vLLM's")
    elif counted(page.total(RUNNING)) is None:
        problems.add("metrics: no number of running requests")
    if not listed:
        problems.add(f"models: {reason(listing)}")
    return frozenset(problems)
