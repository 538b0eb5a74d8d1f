"""A Kubernetes API server with EndpointSlices and nothing else, as a process: list, watch, bookmarks, 410 and tokens.

    python -m tests.services.agent.sources.kubernetes_stub PORT TOKEN_FILE

A test changes what there is with PUT and DELETE on /control/NAME, cuts all watches with POST /control/cut, forgets the
past with POST /control/compact, and reads how often it was asked from GET /control/asked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


class Store:
    def __init__(self) -> None:
        self.version = 100
        self.slices: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 100  # watches from before this are refused
        self.changed = asyncio.Condition()
        self.cuts = 0
        self.asked = {"list": 0, "watch": 0}

    async def put(self, name: str, body: dict[str, Any]) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.slices else "ADDED"
        meta = {
            "name": name,
            "resourceVersion": str(self.version),
            "namespace": body.pop("namespace", "ai"),
            "labels": {"kubernetes.io/service-name": body.pop("service", "vllm")},
        }
        self.slices[name] = {"kind": "EndpointSlice", "metadata": meta, **body}
        await self._tell(kind, self.slices[name])

    async def delete(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._tell("DELETED", gone)

    async def _tell(self, kind: str, slice_: dict[str, Any]) -> None:
        async with self.changed:
            self.events.append((self.version, kind, slice_))
            self.changed.notify_all()

    async def watch(self, at: int, timeout_s: float, mine: Callable[[dict[str, Any]], bool]) -> AsyncIterator[bytes]:
        if at < self.oldest:
            yield _line("ERROR", {"kind": "Status", "code": 410, "message": f"too old resource version: {at}"})
            return
        cuts = self.cuts
        ends = asyncio.get_running_loop().time() + timeout_s
        while self.cuts == cuts:
            for version, kind, slice_ in list(self.events):
                if version > at and mine(slice_):
                    yield _line(kind, slice_)
            at = self.version
            left = ends - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(min(left, 0.2)), self.changed:
                    await self.changed.wait()
            except TimeoutError:
                if left <= 0.2:
                    yield _line("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(at)}})
                    return


def _line(kind: str, what: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "object": what}) + b"\n"


def app(token_file: Path) -> FastAPI:
    app = FastAPI()
    store = Store()

    def mine(slice_: dict[str, Any], namespace: str, selector: str) -> bool:
        label, _, value = selector.partition("=")
        meta = slice_["metadata"]
        return meta["namespace"] == namespace and meta["labels"].get(label) == value

    @app.get(PATH)
    async def slices(request: Request, namespace: str) -> Response:
        if request.headers.get("authorization") != f"Bearer {token_file.read_text().strip()}":
            raise HTTPException(401, "Unauthorized")
        query = request.query_params
        selector = query.get("labelSelector", "")
        if query.get("watch") != "1":
            store.asked["list"] += 1
            items = [s for s in store.slices.values() if mine(s, namespace, selector)]
            body = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(store.version)}, "items": items}
            return Response(msgspec.json.encode(body), media_type="application/json")
        store.asked["watch"] += 1
        lines = store.watch(
            int(query["resourceVersion"]), float(query["timeoutSeconds"]), lambda s: mine(s, namespace, selector)
        )

        return StreamingResponse(lines, media_type="application/json")

    @app.put("/control/{name}")
    async def put(name: str, request: Request) -> None:
        await store.put(name, msgspec.json.decode(await request.body()))

    @app.delete("/control/{name}")
    async def delete(name: str) -> None:
        await store.delete(name)

    @app.post("/control/cut")
    async def cut() -> None:
        store.cuts += 1

    @app.post("/control/compact")
    async def compact() -> None:
        store.version += 10
        store.oldest, store.events = store.version, []

    @app.get("/control/asked")
    async def asked() -> dict[str, int]:
        return store.asked

    return app


if __name__ == "__main__":
    uvicorn.run(app(Path(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
