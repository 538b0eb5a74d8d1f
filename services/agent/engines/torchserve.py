"""TorchServe (inference on 8080, management one port above, metrics two, unless the instance's URLs say otherwise).

Source: `docs/inference_api.md`, `management_api.md` and `metrics_api.md` of pytorch/serve, and a live 0.12 (the last).

Its health path says healthy from the start, before any worker has loaded its model, so it is the management API that
says what is served: the models that have a worker READY. A model whose workers are still starting takes requests into
its queue, and is not told of before. With token authorization, which 0.11 and later have switched on unless told
otherwise, that API answers nobody without a key: then name the models in the configuration. Metrics are there only with
`metrics_mode=prometheus`; nothing of the load depends on them, they only count requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from common.types import Phase
from services.agent.engines import trouble
from services.agent.engines.base import Answer, Ask, EngineState, Listener, Unreachable, counted, number, positive
from services.agent.engines.openai import name_of
from services.agent.engines.prometheus import Page

MANAGEMENT_PORTS_UP: Final = 1
METRICS_PORTS_UP: Final = 2
REQUESTS: Final = ("ts_inference_requests_total",)
MAX_DESCRIBED: Final = 32  # models; each costs one request a look
TITLE: Final = "TorchServe APIs"  # of its API description


class TorchServe:
    """Adapter of TorchServe."""

    engine = "torchserve"

    async def recognise(self, ask: Ask) -> bool:
        """Its API description has its name."""
        told = (await ask("/api-description")).json()
        info = told.get("info") if isinstance(told, dict) else None
        return isinstance(info, dict) and info.get("title") == TITLE

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """Health from the inference port; models, workers and queues from the management port."""
        ping, listing, metrics = await asyncio.gather(
            ask("/ping"),
            ask(f"/models?limit={MAX_DESCRIBED}", Listener.MANAGEMENT, MANAGEMENT_PORTS_UP),
            ask("/metrics", Listener.METRICS, METRICS_PORTS_UP),
        )
        if not ping.status:
            return trouble.unreachable(ping)
        descriptions = await asyncio.gather(
            *(
                ask(f"/models/{quote(name, safe='')}/all", Listener.MANAGEMENT, MANAGEMENT_PORTS_UP)
                for name in _listed(listing) or ()
            )
        )
        versions = _versions(descriptions) if _listed(listing) is not None else None
        served = frozenset((name, str(v.get("modelVersion", ""))[:64]) for name, v in versions or () if _ready(v))
        idle = versions is not None and not served
        return EngineState(
            phase=Phase.LOADING if ping.status >= 500 or idle else Phase.SERVING,
            models=None if versions is None else frozenset(name for name, _ in served),
            versions=served,
            max_running=positive(sum(_ready(v) * _batch(v) for _, v in versions or ())),
            waiting=None if versions is None else _pending(versions),
            steps=counted(Page(metrics.body).total(REQUESTS)),
            problems=_problems(listing, descriptions, known=versions is not None),
        )


def _listed(answer: Answer) -> list[str] | None:
    """The models of a list; None if it is none, or goes on beyond what is asked for."""
    page = answer.json()
    models = page.get("models") if isinstance(page, dict) and not page.get("nextPageToken") else None
    if not isinstance(models, list):
        return None
    names = (name_of(m.get("modelName")) for m in models[:MAX_DESCRIBED] if isinstance(m, dict))
    return [name for name in names if name is not None]


def _versions(descriptions: Sequence[Answer]) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, description) of each version of each model; None if one is not described: it may be served or not."""
    pages = [d.json() for d in descriptions]
    if not all(isinstance(page, list) for page in pages):
        return None
    found = [v for page in pages for v in page[:MAX_DESCRIBED] if isinstance(v, dict)]
    return [(name, v) for v in found if (name := name_of(v.get("modelName"))) is not None]


def _problems(listing: Answer, descriptions: Sequence[Answer], *, known: bool) -> frozenset[str]:
    page = listing.json()
    if isinstance(page, dict) and page.get("nextPageToken"):
        return frozenset({f"models: more than {MAX_DESCRIBED}; name them in the configuration"})
    return trouble.listing(next((d for d in descriptions if d.json() is None), listing), known=known)


def _batch(version: dict[str, Any]) -> float:
    return positive(number(version.get("batchSize"))) or 1.0


def _ready(version: dict[str, Any]) -> int:
    """How many of its workers have loaded the model."""
    workers = version.get("workers")
    if not isinstance(workers, list):
        return 0
    return sum(1 for w in workers if isinstance(w, dict) and w.get("status") == "READY")


def _pending(versions: list[tuple[str, dict[str, Any]]]) -> float | None:
    """Requests in its queues; None if one of them is not told, 0 without any model."""
    queues = [v.get("jobQueueStatus") for _, v in versions]
    counts = [counted(number(q.get("pendingRequests"))) if isinstance(q, dict) else None for q in queues]
    known = [c for c in counts if c is not None]
    return sum(known) if len(known) == len(counts) else None
