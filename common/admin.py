"""The admin listener: health, metrics, the tree of what is known, recent requests and traces.

Bound to loopback by default and apart from the data listener, so that nothing here is ever in reach of clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import generate_latest

from common import clock
from common.balancing import Balancing
from common.policy.balancer import Balancer
from common.policy.candidate import Candidate
from common.spans import Span, spans_of
from common.telemetry import Telemetry, access_line
from common.types import Path, Tier

PEER_TIMEOUT_S = 2.0  # for another tier's spans; one that is gone must not keep a trace from being shown


def admin_app(
    process_id: str,
    node: Path,
    balancing: Balancing,
    telemetry: Telemetry,
    ready: Callable[[], bool],
    admins: Callable[[], frozenset[str]],
) -> FastAPI:
    """The application. `admins` gives the admin URLs of all balancers that membership knows.

    All but /metrics are coroutines: FastAPI runs plain functions on a thread, where what they read changes under them.
    """
    app = FastAPI(title="Headwater admin", description=f"{Tier.of(node).value} tier, process {process_id}")

    @app.get("/livez", tags=["health"])
    async def livez() -> Response:
        """200 while the process runs."""
        return PlainTextResponse("ok")

    @app.get("/readyz", tags=["health"])
    async def readyz() -> Response:
        """200 while it takes new requests, 503 when it is draining."""
        return PlainTextResponse("ok" if ready() else "draining", 200 if ready() else 503)

    @app.get("/metrics", tags=["metrics"])
    def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(telemetry.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/admin/v1/pools", tags=["state"])
    async def pools() -> dict[str, Any]:
        """Every pool this process knows, with what it knows of each endpoint."""
        return {
            "process": process_id,
            "tier": Tier.of(node).value,
            "node": "/".join(node),
            "pools": {"/".join(p): _pool(b) for p, b in sorted(balancing.balancers.items())},
        }

    @app.get("/admin/v1/requests", tags=["requests"])
    async def requests(limit: int = 100) -> list[dict[str, Any]]:
        """The latest finished requests, newest first; `limit` at most 1,000."""
        return [access_line(record) for record in telemetry.recent(max(1, min(limit, 1000)))]

    @app.get("/admin/v1/traces/{trace_id}", tags=["requests"])
    async def trace(trace_id: str, everywhere: bool = False) -> Response:
        """The spans of one trace kept here; with `everywhere`, those of all other tiers too."""
        spans = [span for record in telemetry.find(trace_id) for span in spans_of(record)]
        if everywhere:
            spans += await _spans_elsewhere(trace_id, admins())
        return Response(msgspec.json.encode(spans), media_type="application/json")

    @app.exception_handler(Exception)
    async def crashed(request: Any, error: Exception) -> Response:
        return JSONResponse({"detail": f"{type(error).__name__}"}, 500)

    return app


async def _spans_elsewhere(trace_id: str, urls: frozenset[str]) -> list[Span]:
    async with httpx.AsyncClient(timeout=PEER_TIMEOUT_S, trust_env=False) as client:

        async def ask(url: str) -> list[Span]:
            try:
                reply = await client.get(f"{url}/admin/v1/traces/{trace_id}")
                return msgspec.json.decode(reply.content, type=list[Span]) if reply.status_code == 200 else []
            except (httpx.HTTPError, msgspec.DecodeError):
                return []

        found = await asyncio.gather(*(ask(url) for url in sorted(urls)))
    return [span for spans in found for span in spans]


def _pool(balancer: Balancer) -> dict[str, Any]:
    now = clock.now()
    return {
        "policy": balancer.policy.name,
        "stale": balancer.stale,
        "in_flight": balancer.in_flight,
        "endpoints": {c.endpoint.id: _candidate(c, now) for c in balancer.candidates.values()},
    }


def _candidate(c: Candidate, now: float) -> dict[str, Any]:
    report = c.report
    return {
        "url": c.endpoint.url or None,
        "balancers": [asdict(p) | {"phase": p.phase.value} for p in c.endpoint.balancers],
        "models": sorted(c.endpoint.models),
        "loadable": sorted(c.endpoint.loadable),
        "labels": sorted(c.endpoint.labels),
        "memory_gb": c.endpoint.memory_gb,
        "engine": c.endpoint.engine or None,
        "gpu": c.endpoint.gpu or None,
        "fleet": dict(c.endpoint.fleet) or None,
        "phase": c.phase.value,
        "breaker": c.breaker.state.value,
        "in_flight": c.in_flight,
        "round_trip_s": c.round_trip.value,
        "servers": [asdict(s.load(now)) | {"models": sorted(s.models)} for s in (c.quoted or c.own)],
        "report": None
        if report is None
        else {
            "age_s": round(now - c.report_at, 3),
            "running": report.running,
            "waiting": report.waiting,
            "kv_utilization": report.kv_utilization,
            "gpu_utilization": report.gpu_utilization,
        },
    }
