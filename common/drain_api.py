"""Draining by hand, as part of the admin API: have a region, cluster or instance get no new work, and give it back.

The mark goes into the membership store, so that all tiers see it and no restart forgets it. What is named may be a
path as in `eu/eu-a/i1`, or the name of whatever carries it, if there is only one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from common import clock
from common.admin.peers import Peers
from common.balancing import Balancing
from common.errors import StoreUnavailable
from common.membership import Drain, Membership
from common.membership.drains import BY_CHARS, REASON_CHARS
from common.types import Path

SEEN_S = 2.0  # a mark is waited for, until this tier's own membership has it
LOOKS = 100
NAMED = 5  # of the places that carry an ambiguous name


class DrainRequest(BaseModel):
    """What to drain, and for people why."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: Annotated[str, Field(min_length=1, max_length=200)]
    """A path (`eu`, `eu/eu-a`, `eu/eu-a/i1`), or a name that is carried once."""
    reason: Annotated[str, Field(max_length=REASON_CHARS)] = ""
    by: Annotated[str, Field(max_length=BY_CHARS)] = ""


class DrainReply(BaseModel):
    """One mark. `exists`: whether membership has it at present.

    `in_flight`: requests still under way there, `remaining_s`: predicted seconds until the last of them has ended.
    """

    path: str
    reason: str
    by: str
    since: str
    exists: bool
    in_flight: int
    remaining_s: float = 0.0


def drain_router(membership: Membership, balancing: Balancing, peers: Peers) -> APIRouter:
    """The routes. `peers` asks all other balancers."""
    router = APIRouter(prefix="/admin/v1/drains", tags=["drains"])

    def shown(drain: Drain, elsewhere: tuple[int, float] = (0, 0.0)) -> DrainReply:
        path = "/".join(drain.path)
        return DrainReply(
            path=path,
            reason=drain.reason,
            by=drain.by,
            since=drain.since,
            exists=_exists(membership, drain.path),
            in_flight=balancing.under_way(drain.path) + elsewhere[0],
            remaining_s=round(max(balancing.remaining_s(drain.path), elsewhere[1]), 3),
        )

    @router.get("")
    async def drains(everywhere: bool = False) -> list[DrainReply]:
        """All marks; with `everywhere`, what is under way there as all tiers together see it."""
        counts = await _elsewhere(peers) if everywhere else {}
        return [shown(drain, counts.get("/".join(drain.path), (0, 0.0))) for drain in membership.drains]

    @router.post("", responses={404: {}, 409: {}, 503: {}})
    async def drain(request: DrainRequest) -> DrainReply:
        """Send no new work there; what is under way ends in peace. Once more only replaces the reason."""
        path = _named(membership, request.id, {d.path for d in membership.drains})
        since = datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, UTC).isoformat()
        mark = Drain(path, request.reason, request.by, since)
        try:
            await membership.drain(mark)
            for _ in range(LOOKS):  # so that who asks here next is told of it
                if any(d.path == path for d in membership.drains):
                    break
                await asyncio.sleep(SEEN_S / LOOKS)
        except StoreUnavailable as error:
            raise HTTPException(503, f"the membership store does not answer: {error}") from None
        return shown(mark)

    @router.delete("/{id:path}", responses={404: {}, 409: {}, 503: {}})
    async def undrain(id: str) -> DrainReply:  # noqa: A002 - the name in the path
        """Send work there again, slowly at first."""
        marks = {d.path: d for d in membership.drains}
        path = _named(membership, id, marks.keys())
        if path not in marks:
            raise HTTPException(404, f"{'/'.join(path)} is not drained")
        try:
            await membership.undrain(path)
        except StoreUnavailable as error:
            raise HTTPException(503, f"the membership store does not answer: {error}") from None
        return shown(marks[path])

    return router


def _places(membership: Membership) -> set[Path]:
    return {(*parent, e.id) for parent, pool in membership.pools.items() for e in pool.endpoints}


def _exists(membership: Membership, path: Path) -> bool:
    return any(e.id == path[-1] for e in membership.pool(path[:-1]).endpoints)


def _named(membership: Membership, id_: str, marked: Set[Path]) -> Path:
    """The place that a path or a name means. Raises HTTPException 404, 409, or 400 for what cannot be one."""
    known = _places(membership) | marked
    path = tuple(id_.strip("/").split("/"))
    if path in known:
        return path
    found = sorted(place for place in known if place[-1] == id_)
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join("/".join(place) for place in found[:NAMED])
        raise HTTPException(409, f"{len(found)} places are called {id_}: {places}; give the path")
    raise HTTPException(404, f"there is no region, cluster or instance {id_!r}")


async def _elsewhere(peers: Peers) -> dict[str, tuple[int, float]]:
    """What all other tiers have under way at what is drained, and for how long yet, by path.

    One that does not answer counts as none.
    """
    counts: dict[str, tuple[int, float]] = {}
    for content in await peers.get("/admin/v1/drains"):
        try:
            replies = [DrainReply.model_validate(one) for one in msgspec.json.decode(content)]
        except (msgspec.DecodeError, ValueError, TypeError):
            continue
        for one in replies:
            in_flight, remaining_s = counts.get(one.path, (0, 0.0))
            counts[one.path] = in_flight + one.in_flight, max(remaining_s, one.remaining_s)
    return counts
