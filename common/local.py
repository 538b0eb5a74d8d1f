"""What the data listener answers itself: which models there are, and that it is alive, in each API's own words.

A FastAPI application; everything that is relayed never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from common import apis
from common.apis.openapi import errors, relayed
from common.balancing import Balancing
from common.errors import ModelNotFound
from common.policy.versions import Split

# Handlers are coroutines, although they await nothing: others would run in threads, over maps that the loop changes.


DRAINING: dict[int | str, dict[str, Any]] = {503: {"description": "it is draining", "content": {"text/plain": {}}}}
NOT_READY: dict[int | str, dict[str, Any]] = {400: {"description": "nobody serves", "content": {"text/plain": {}}}}


def local_app(balancing: Balancing, ready: Callable[[], bool], aliases: Mapping[str, Split]) -> FastAPI:
    """The application beside the relay on the data listener. `aliases`: other names, and the models they stand for."""

    def served() -> frozenset[str]:
        models = balancing.models()
        return models | {name for name, split in aliases.items() if any(t.model in models for t in split.targets)}

    def behind(name: str) -> list[str]:
        return [target.model for target in aliases[name].targets] if name in aliases else [name]

    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, openapi_url="/openapi.json")

    def models_for(request: Request) -> list[str]:
        """Those that are served and that the caller's tenant may use, in order."""
        tenant = getattr(request.state, "tenant", None)
        return sorted(m for m in served() if tenant is None or any(tenant.may_use(name) for name in behind(m)))

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """All models that some live instance serves, merged."""
        names = models_for(request)
        if "anthropic-version" in request.headers:
            listed = [{"type": "model", "id": m, "display_name": m, "created_at": EPOCH} for m in names]
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            return {"data": listed, "has_more": False, **ends}
        return {"object": "list", "data": [_model(m) for m in names]}

    @app.get("/v1/models/{model:path}", responses={404: {"description": "nobody serves it"}})
    async def model(model: str, request: Request) -> Response:
        """One of them."""
        if model in models_for(request):
            return JSONResponse(_model(model))
        error = ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")
        return Response(apis.error_body(apis.Family.OPENAI, error), error.status, media_type="application/json")

    @app.get("/api/tags")
    async def tags(request: Request) -> dict[str, Any]:
        """The same as Ollama lists them."""
        return {"models": [{"name": m, "model": m} for m in models_for(request)]}

    @app.get("/health", response_class=PlainTextResponse, responses=DRAINING)
    @app.get("/v2/health/live", response_class=PlainTextResponse, responses=DRAINING)
    async def health() -> Response:
        """200 while requests are taken, 503 once this process is draining."""
        return PlainTextResponse("ok" if ready() else "draining", 200 if ready() else 503)

    @app.get("/v2/health/ready", response_class=PlainTextResponse, responses=NOT_READY)
    async def can_infer() -> Response:
        """200 while requests are taken and some instance serves, in the words of the Open Inference Protocol."""
        serving = ready() and balancing.serving
        return PlainTextResponse("" if serving else "no instance is ready", 200 if serving else 400)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """What this is, in the same protocol."""
        return {"name": "headwater", "version": "", "extensions": []}

    @app.get("/ping")
    async def ping() -> dict[str, str]:
        """In TorchServe's words."""
        return {"status": "Healthy" if ready() and balancing.serving else "Unhealthy"}

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path[:200]} is not served here"
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        body = apis.error_body(apis.family_of(request.url.path), (status, message))
        return Response(body, status, media_type="application/json", headers=headers)

    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Have its OpenAPI document name what is relayed as well; it is made when it is first asked for."""

    own = app.openapi

    @cache
    def document() -> dict[str, Any]:
        made = own()
        for path, operations in relayed().items():
            made["paths"].setdefault(path, {}).update(operations)
        made.setdefault("components", {}).setdefault("schemas", {}).update(errors())
        return made

    app.openapi = document  # type: ignore[method-assign]


EPOCH = "1970-01-01T00:00:00Z"  # nobody knows when a served model was made


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headwater"}
