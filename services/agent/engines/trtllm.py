"""NVIDIA's `trtllm-serve` (default port 8000): TensorRT-LLM behind an OpenAI API, without Triton.

Source: `tensorrt_llm/serve/openai_server.py` and `metrics/collector.py` of NVIDIA/TensorRT-LLM, and the names that
llm-d/llm-d-router reads, mid 2026. Its `/metrics` is a list of iterations that is emptied by reading it, so that only
`/prometheus/metrics` is asked for, which is empty unless it runs with `return_perf_metrics`.
"""

from __future__ import annotations

import asyncio
from typing import Final

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import Ask, EngineState, Listener, Unreachable, counted, fraction, positive
from services.agent.engines.openai import adapters, longest, models_of, names, owned_by
from services.agent.engines.prometheus import Page

RUNNING: Final = ("trtllm_num_requests_running",)
WAITING: Final = ("trtllm_num_requests_waiting",)
KV_USE: Final = ("trtllm_kv_cache_utilization",)
KV_BLOCKS: Final = ("trtllm_kv_cache_max_blocks",)
KV_BLOCK_TOKENS: Final = ("trtllm_kv_cache_tokens_per_block",)
STEPS: Final = ("trtllm_iteration_latency_seconds_count", "trtllm_e2e_request_latency_seconds_count")
MAX_RUNNING: Final = ("trtllm_max_num_active_requests",)


class TrtLlm:
    """Adapter of trtllm-serve."""

    engine = "trtllm"

    async def recognise(self, ask: Ask) -> bool:
        """Its models are owned by "tensorrt_llm"."""
        return owned_by(await ask("/v1/models"), "tensorrt_llm")

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """As with any OpenAI API, and its metrics where it has them."""
        health, listing, metrics = await asyncio.gather(
            ask("/health"), ask("/v1/models"), ask("/prometheus/metrics", Listener.METRICS)
        )
        if not health.status and not listing.status:
            return trouble.unreachable(health, listing)
        page = Page(metrics.body)
        models = models_of(listing)
        blocks, tokens = page.total(KV_BLOCKS), page.total(KV_BLOCK_TOKENS)
        running = counted(page.total(RUNNING))
        return EngineState(
            phase=Phase.LOADING if health.status >= 500 else Phase.SERVING,
            models=names(models),
            adapters=adapters(models),
            max_model_len=longest(models),
            max_running=positive(page.total(MAX_RUNNING)),
            running=running,
            waiting=counted(page.total(WAITING)),
            kv_utilization=fraction(page.mean(KV_USE)),
            kv_tokens=positive(blocks * tokens) if blocks is not None and tokens is not None else None,
            steps=counted(page.total(STEPS)),
            problems=trouble.metrics(metrics, page, "trtllm_", "TensorRT-LLM", running)
            | trouble.listing(listing, known=models is not None),
        )
