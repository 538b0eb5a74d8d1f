"""What the data listener answers itself: which models there are, and that it is alive.

A FastAPI application; everything that is relayed never comes here.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from common import apis
from common.balancing import Balancing
from common.errors import ModelNotFound


def local_app(balancing: Balancing, ready: Callable[[], bool]) -> FastAPI:
    """The application beside the relay on the data listener.

    Coroutines all: FastAPI runs plain functions on a thread, where what they read changes under them.
    """
    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        """All models that some live instance serves, merged."""
        return {"object": "list", "data": [_model(m) for m in sorted(balancing.models())]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of them."""
        if model in balancing.models():
            return JSONResponse(_model(model))
        error = ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")
        return Response(apis.error_body("openai", error), error.status, media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 once this process is draining."""
        return PlainTextResponse("ok" if ready() else "draining", 200 if ready() else 503)

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path[:200]} is not served here"
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        body = apis.error_body("openai", (status, message))
        return Response(body, status, media_type="application/json", headers=headers)

    return app


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headwater"}
