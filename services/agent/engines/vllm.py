"""vLLM, and what speaks like it (`headwater engine`).

Source: vLLM's `v1/metrics/loggers.py` and `entrypoints/openai/api_server.py`; names seen live on 0.32. A metric that is
deprecated in one release is hidden in the next and gone in the one after, hence the aliases. Gauges have one series per
data-parallel engine; KV use is averaged over them, everything else summed. How many requests it computes at once
(`--max-num-seqs`) it does not say.
"""

from __future__ import annotations

import asyncio
from typing import Final

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import Answer, Ask, EngineState, Listener, Unreachable, counted, fraction
from services.agent.engines.openai import adapters, longest, models_of, names, owned_by
from services.agent.engines.prometheus import Page

RUNNING: Final = ("vllm:num_requests_running",)
WAITING: Final = ("vllm:num_requests_waiting",)
KV_USE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # both 0…1, in spite of their name
GENERATED: Final = ("vllm:generation_tokens_total", "vllm:generation_tokens")
STEPS: Final = ("vllm:iteration_tokens_total_count",)  # a histogram that is written once a step
RATE: Final = ("vllm:avg_generation_throughput_toks_per_s",)  # until 0.8
PROMPT_RATE: Final = ("vllm:avg_prompt_throughput_toks_per_s",)
SLEEP: Final = "vllm:engine_sleep_state"
CACHE: Final = "vllm:cache_config_info"
STARTED: Final = ("process_start_time_seconds",)


class Vllm:
    """Adapter of vLLM."""

    engine = "vllm"

    async def recognise(self, ask: Ask) -> bool:
        """Its models are owned by "vllm", or its metrics begin so (`--disable-log-stats` takes those away)."""
        if owned_by(await ask("/v1/models"), "vllm"):
            return True
        metrics = await ask("/metrics")
        return metrics.ok and Page(metrics.body).has("vllm:")

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """`/health` says whether its engine lives, `/metrics` what it is doing, `/v1/models` what it serves."""
        health, metrics, listing = await asyncio.gather(
            ask("/health"), ask("/metrics", Listener.METRICS), ask("/v1/models")
        )
        if not health.status and not metrics.status and not listing.status:
            return trouble.unreachable(health, metrics, listing)
        page = Page(metrics.body)
        models = models_of(listing)
        running = counted(page.total(RUNNING))
        return EngineState(
            phase=_phase(health, page),
            models=names(models),
            adapters=adapters(models),
            max_model_len=longest(models),
            running=running,
            waiting=counted(page.total(WAITING)),
            kv_utilization=fraction(page.mean(KV_USE)),
            kv_tokens=_kv_tokens(page),
            generated_tokens=counted(page.total(GENERATED)),
            steps=counted(page.total(STEPS)),
            tokens_per_s=counted(page.total(RATE)),
            prompt_tokens_per_s=counted(page.total(PROMPT_RATE)),
            started_s=counted(page.total(STARTED)),
            problems=trouble.metrics(metrics, page, "vllm:", "vLLM", running)
            | trouble.listing(listing, known=models is not None),
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
