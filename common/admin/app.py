"""Puts the admin listener together: health, metrics, the tree of what is known, recent requests and traces.

Bound to loopback by default and apart from the data listener, so that nothing here is ever in reach of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from re import Pattern
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import generate_latest
from starlette.routing import compile_path

from common import clock
from common.admin.console import ConsoleRoutes
from common.admin.decisions import KINDS, DecisionRoutes
from common.admin.peers import Peers
from common.admin.picture import Picture, Pictures
from common.admin.shapes import Everywhere, TraceId, answers, describe, json
from common.balancing import Balancing
from common.history import Step
from common.policy.balancer import Balancer
from common.policy.candidate import Candidate
from common.spans import Span, spans_of
from common.telemetry import Telemetry
from common.types import Path, Tier


def admin_app(
    process_id: str,
    node: Path,
    balancing: Balancing,
    telemetry: Telemetry,
    ready: Callable[[], bool],
    peers: Peers,
) -> FastAPI:
    """The application. `peers` asks all other balancers that membership knows.

    All but /metrics are coroutines: FastAPI runs plain functions on a thread, where what they read changes under them.
    """
    app = FastAPI(title="Headwater admin", description=f"{Tier.of(node).value} tier, process {process_id}")
    describe(app, (Span, Picture, Step, *KINDS))

    @app.get("/livez", tags=["health"], response_class=PlainTextResponse)
    async def livez() -> Response:
        """200 while the process runs."""
        return PlainTextResponse("ok")

    @app.get(
        "/readyz",
        tags=["health"],
        response_class=PlainTextResponse,
        responses={503: {"description": "it is draining", "content": {"text/plain": {}}}},
    )
    async def readyz() -> Response:
        """200 while it takes new requests, 503 when it is draining."""
        return PlainTextResponse("ok" if ready() else "draining", 200 if ready() else 503)

    @app.get("/metrics", tags=["metrics"], response_class=PlainTextResponse)
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

    @app.get("/admin/v1/traces/{trace_id}", tags=["requests"], responses=answers(list[Span]))
    async def trace(trace_id: TraceId, everywhere: Everywhere = False) -> Response:
        """The spans of one trace kept here; with `everywhere`, those of all other tiers too."""
        spans = [span for record in telemetry.recent.find(trace_id) for span in spans_of(record)]
        if everywhere:
            for content in await peers.get(f"/admin/v1/traces/{trace_id}"):
                try:
                    spans += msgspec.json.decode(content, type=list[Span])
                except msgspec.DecodeError:
                    continue  # a tier of another version
        return json(spans)

    decisions = DecisionRoutes(balancing, telemetry, peers)
    pictures = Pictures(process_id, node, balancing, telemetry, ready, peers)
    console = ConsoleRoutes(telemetry, pictures, peers, ready, decisions.of)
    for router in (decisions.router(), console.router(), console.pages()):
        app.include_router(router)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        # Without what was sent, which need not be JSON (infinity), nor fit to be repeated.
        return json({"detail": [{k: e[k] for k in ("loc", "msg", "type")} for e in error.errors()]}, 422)

    @app.exception_handler(405)
    async def not_so(request: Request, error: Exception) -> Response:
        # FastAPI names the methods of one route, and each method has a route of its own.
        allowed = sorted({m.upper() for at, methods in _paths(app) if at.match(request.url.path) for m in methods})
        headers = {"allow": ", ".join(allowed)} if allowed else None
        return JSONResponse({"detail": "Method Not Allowed"}, 405, headers=headers)

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": f"{type(error).__name__}"}, 500)

    return app


def _paths(app: FastAPI) -> list[tuple[Pattern[str], Iterable[str]]]:
    """What matches each path of the API, and its methods."""
    return [(compile_path(path)[0], methods) for path, methods in app.openapi()["paths"].items()]


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
        "learned_from": [e.samples for e in c.estimates],
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
