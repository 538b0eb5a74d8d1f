"""The console in the browser, and what it asks for: live pictures as server-sent events, history, clients' requests.

The page and all it needs are files beside this one; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import islice
from pathlib import Path as FilePath
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, StreamingResponse
from msgspec.structs import asdict

from common import clock
from common.admin.peers import Peers, decoded
from common.admin.picture import Picture, Pictures
from common.admin.shapes import Everywhere, Limit, TraceId, answers, json
from common.explain.decisions import Decision
from common.explain.words import explain
from common.history import Step, together
from common.records import RequestRecord
from common.telemetry import Telemetry, access_line

FILES = FilePath(__file__).with_name("page")
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
EVERY_S = 1.0  # between two pictures
MOST_WATCHERS = 32  # that may follow at a time
Steps = list[tuple[int, Step]]


class ConsoleRoutes:
    """The routes. `ready`: the process is not draining; those who follow are let go when it does."""

    def __init__(
        self,
        telemetry: Telemetry,
        pictures: Pictures,
        peers: Peers,
        ready: Callable[[], bool],
        decisions_of: Callable[[str], list[Decision]],
    ) -> None:
        self._decisions_of = decisions_of
        self._telemetry = telemetry
        self._pictures = pictures
        self._peers = peers
        self._ready = ready
        self._watchers = 0

    def pages(self) -> APIRouter:
        """The page itself; not part of the API."""
        router = APIRouter(include_in_schema=False)

        @router.get("/")
        async def root() -> Response:
            return RedirectResponse("/console")

        @router.get("/console")
        async def console() -> Response:
            return _file("index.html")

        @router.get("/console/{name:path}")
        async def asset(name: str) -> Response:
            return _file(name)

        return router

    def router(self) -> APIRouter:
        """What the page asks for, and others may."""
        router = APIRouter(prefix="/admin/v1")

        @router.get("/picture", tags=["state"], responses=answers(Picture))
        async def picture(everywhere: Everywhere = False) -> Response:
            """Regions, clusters, instances, their load and health, takeovers, and the latest counts, at this moment."""
            return json(await self._pictures.all() if everywhere else self._pictures.own())

        @router.get(
            "/events",
            tags=["state"],
            responses={
                200: {"content": {"text/event-stream": {}}},
                503: {"description": "too many follow, or draining"},
            },
        )
        async def events() -> Response:
            """A picture of everything each second, as server-sent events."""
            if self._watchers >= MOST_WATCHERS or not self._ready():
                raise HTTPException(503, "too many follow already" if self._ready() else "draining")
            return StreamingResponse(
                self._follow(), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )

        @router.get("/history", tags=["state"], responses=answers(Steps))
        async def history(everywhere: Everywhere = False) -> Response:
            """The last quarter of an hour of clients' requests: (age in steps of 5 s, counts), oldest first."""
            found: list[Steps] = [self._telemetry.history.steps(clock.now())]
            if everywhere:
                found += [decoded(content, Steps) or [] for content in await self._peers.get("/admin/v1/history")]
            return json(together(found))

        @router.get("/requests", tags=["requests"], responses=answers(list[dict[str, Any]]))
        async def requests(
            limit: Limit = 100,
            everywhere: Everywhere = False,
            clients: Annotated[bool, Query(description="only clients' own, not what another tier sent on")] = False,
            slow: Annotated[bool, Query(description="only what missed its service level")] = False,
            failed: Annotated[bool, Query(description="only what did not end well")] = False,
            text: Annotated[str, Query(max_length=200, description="part of id, model, path or served_by")] = "",
        ) -> Response:
            """The latest finished requests, as the access log has them, newest first."""

            lines = self._lines(limit, text, clients=clients, slow=slow, failed=failed)
            if everywhere:
                asked = {"limit": limit, "clients": clients, "slow": slow, "failed": failed, "text": text}
                for content in await self._peers.get("/admin/v1/requests", asked):
                    lines += decoded(content, list[dict[str, Any]]) or []
                lines.sort(key=lambda line: -float(line["time"]))
            return json(lines[:limit])

        @router.get(
            "/decisions/{trace_id}/words",
            tags=["decisions"],
            response_class=PlainTextResponse,
            responses={404: {"description": "no tier that was asked remembers it"}},
        )
        async def words(trace_id: TraceId) -> Response:
            """What `headwater explain` prints: the decisions of all tiers in sentences."""
            found = self._decisions_of(trace_id)
            for content in await self._peers.get(f"/admin/v1/decisions/{trace_id}"):
                found += decoded(content, list[Decision]) or []
            if not found:
                raise HTTPException(404, "no tier that was asked remembers this request")
            return PlainTextResponse("\n".join(explain(found)) + "\n")

        return router

    def _lines(self, limit: int, text: str, *, clients: bool, slow: bool, failed: bool) -> list[dict[str, Any]]:
        def wanted(r: RequestRecord) -> bool:
            if (clients and r.from_peer) or (failed and r.went_well) or (slow and not self._telemetry.slow(r)):
                return False
            return not text or any(text in field for field in (r.id, r.model, r.path, r.served_by))

        records = self._telemetry.recent.latest(len(self._telemetry.recent))
        kept = islice(filter(wanted, records), limit)
        return [{**asdict(access_line(r)), "slow": self._telemetry.slow(r)} for r in kept]

    async def _follow(self) -> AsyncIterator[bytes]:
        self._watchers += 1
        try:
            yield b"retry: 1000\n\n"
            while self._ready():
                yield b"data: %b\n\n" % msgspec.json.encode(await self._pictures.all())
                await asyncio.sleep(EVERY_S)
        finally:
            self._watchers -= 1


def _file(name: str) -> Response:
    file = (FILES / name).resolve()
    if not file.is_relative_to(FILES.resolve()) or file.suffix not in KINDS or not file.is_file():
        raise HTTPException(404, "no such page")
    return FileResponse(file, media_type=KINDS[file.suffix], headers=HEADERS)
