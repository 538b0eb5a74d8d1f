"""NVIDIA's Triton Inference Server (HTTP on 8000, metrics two ports above unless `metrics_url` says otherwise).

Source: `docs/protocol` and `docs/user_guide/metrics.md` of triton-inference-server/server, mid 2026, and a live 2.51.

Which models it serves is read from `GET /v2/models/stats`, which lists the versions that are ready and how often each
was executed. The index of the repository would say it too, and why a model is not ready, but it is a POST, and a look
is to be made of requests that cannot change anything. Where statistics were left out of the build, the labels of the
metrics name the models. A server with one model that is not ready calls itself not ready (400), as strict readiness
has it, and is taken at its word.

How many requests run it says only for the TensorRT-LLM backend; `nv_inference_exec_count` is a counter, and no count
of what runs, whatever some dashboards make of it. What waits is the pending count. A model that is loaded anew begins
to count from 0, which the monitor takes for another process: what was learned of the old model is not the new one's.
"""

from __future__ import annotations

import asyncio
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
from services.agent.engines.openai import MAX_MODELS, name_of
from services.agent.engines.prometheus import Page

METRICS_PORTS_UP: Final = 2
PENDING: Final = ("nv_inference_pending_request_count",)
EXECUTIONS: Final = ("nv_inference_exec_count",)
GENERATED: Final = ("vllm:generation_tokens_total",)  # its vLLM backend passes vLLM's counters on
LLM_REQUESTS: Final = ("nv_trt_llm_request_metrics",)  # these two of its TensorRT-LLM backend, one series a type
LLM_BLOCKS: Final = ("nv_trt_llm_kv_cache_block_metrics",)
EXTENSIONS: Final = frozenset({"model_repository", "statistics"})  # together with no other server of this protocol


class Triton:
    """Adapter of Triton."""

    engine = "triton"

    async def recognise(self, ask: Ask) -> bool:
        """`GET /v2` names it, or (`--server-id` may change the name) the extensions that it alone has."""
        told = (await ask("/v2")).json()
        extensions = told.get("extensions") if isinstance(told, dict) else None
        if not isinstance(extensions, list):
            return False
        return told.get("name") == "triton" or frozenset(e for e in extensions if isinstance(e, str)) >= EXTENSIONS

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """Readiness, the models that are ready with their executions, and the metrics of the third port."""
        ready, stats, metrics = await asyncio.gather(
            ask("/v2/health/ready"), ask("/v2/models/stats"), ask("/metrics", Listener.METRICS, METRICS_PORTS_UP)
        )
        if not ready.status and not stats.status:
            return trouble.unreachable(ready, stats)
        page = Page(metrics.body)
        entries = _entries(stats)
        versions = _versions(entries) if entries is not None else _labelled(page)
        tokens = page.total_where(LLM_BLOCKS, "kv_cache_block_type", "tokens_per")
        blocks = page.total_where(LLM_BLOCKS, "kv_cache_block_type", "max")
        return EngineState(
            phase=Phase.SERVING if ready.status in {0, 200} else Phase.LOADING,
            models=frozenset(name for name, _ in versions) if entries is not None or versions else None,
            versions=versions,
            max_running=positive(page.total_where(LLM_REQUESTS, "request_type", "max")),
            running=counted(page.total_where(LLM_REQUESTS, "request_type", "scheduled")),
            waiting=_waiting(page),
            kv_utilization=fraction(page.total_where(LLM_BLOCKS, "kv_cache_block_type", "fraction")),
            kv_tokens=positive(tokens * blocks) if tokens is not None and blocks is not None else None,
            generated_tokens=counted(page.total(GENERATED)),
            steps=_executions(entries, page),
            problems=trouble.listing(stats, known=entries is not None or bool(versions))
            | trouble.metrics(metrics, page, "nv_", "Triton", 0.0),
        )


def _entries(answer: Answer) -> list[dict[str, Any]] | None:
    page = answer.json()
    stats = page.get("model_stats") if isinstance(page, dict) else None
    return [e for e in stats[:MAX_MODELS] if isinstance(e, dict)] if isinstance(stats, list) else None


def _versions(entries: list[dict[str, Any]]) -> frozenset[tuple[str, str]]:
    found = ((name_of(e.get("name")), str(e.get("version", ""))[:64]) for e in entries)
    return frozenset((name, version) for name, version in found if name is not None)


def _labelled(page: Page) -> frozenset[tuple[str, str]]:
    """The models of the metrics' labels. One that was unloaded stays among them."""
    found = ((name_of(s.labels.get("model")), s.labels.get("version", "")) for s in page.samples(EXECUTIONS[0]))
    return frozenset((name, version[:64]) for name, version in found if name is not None)


def _waiting(page: Page) -> float | None:
    """What waits before the scheduler, and in the queue of a batcher of its own where there is one."""
    queues = (counted(page.total(PENDING)), counted(page.total_where(LLM_REQUESTS, "request_type", "waiting")))
    known = [q for q in queues if q is not None]
    return sum(known) if known else None


def _executions(entries: list[dict[str, Any]] | None, page: Page) -> float | None:
    counts = [counted(number(e.get("execution_count"))) for e in entries or ()]
    known = [c for c in counts if c is not None]
    return sum(known) if known else counted(page.total(EXECUTIONS))
