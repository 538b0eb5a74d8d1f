"""The live picture: what one process knows of the tree, and what all of them know together.

Each process knows best what it serves itself: of a cluster's instances its own balancer, of a region's clusters that
region's. Where that one is gone, whoever stands in for it does. Counts of picks and takeovers are those of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from common import clock
from common.admin.peers import Peers, decoded
from common.balancing import Balancing
from common.history import Step, together
from common.policy.candidate import Candidate
from common.telemetry import Telemetry
from common.types import Path, Tier

LATEST_STEPS = 3  # of the history that go with every picture
OLD_S = 0.8  # a picture this young is shown again instead of asking everybody
PEER_S = 0.8  # for another tier's part: a host that is gone must not keep a takeover off the map for longer
TAKEOVER_S = 5.0  # one is shown for so long after its last request


class BalancerView(msgspec.Struct):
    """A live balancer of a region or cluster."""

    id: str
    phase: str


class EndpointView(msgspec.Struct, omit_defaults=True):
    """A region, a cluster or an instance, as whoever serves its parent sees it."""

    phase: str
    breaker: str
    in_flight: int  # sent by that process
    picks: float = 0.0  # ever, by all processes
    weight: float = 1.0
    failing: float = 0.0  # share of late requests that failed
    round_trip_s: float | None = None
    balancers: list[BalancerView] = []
    models: list[str] = []
    gpu: str = ""
    engine: str = ""
    price_usd_per_hour: float = 0.0
    under_way: float = 0.0  # on an instance: by all we know, others' requests included
    slots: float = 0.0  # requests it takes at a time
    seconds_per_token: float | None = None  # at rest, as learned
    learned_from: int = 0  # answers
    report_age_s: float | None = None
    waiting: float | None = None  # in its own queue, by its report
    kv_utilization: float | None = None
    gpu_utilization: float | None = None


class PoolView(msgspec.Struct):
    """The endpoints under one node."""

    by: str  # the process that says so
    policy: str
    stale: bool
    endpoints: dict[str, EndpointView]


class TakeoverView(msgspec.Struct):
    """A stage that another tier runs: `node`'s own balancers are gone."""

    node: str
    by: str
    count: float
    ago_s: float


class ProcessView(msgspec.Struct):
    """A tier process."""

    id: str
    tier: str
    node: str
    in_flight: float
    queued: float
    draining: bool


class Picture(msgspec.Struct):
    """All of it. `unheard`: balancers that membership knows and that gave no answer."""

    processes: list[ProcessView]
    pools: dict[str, PoolView]
    takeovers: list[TakeoverView]
    steps: list[tuple[int, Step]]  # (age in steps of five seconds, counts)
    unheard: int = 0


class Pictures:
    """Makes them. Several that look at the same time share one."""

    def __init__(
        self,
        process_id: str,
        node: Path,
        balancing: Balancing,
        telemetry: Telemetry,
        ready: Callable[[], bool],
        peers: Peers,
    ) -> None:
        self._id = process_id
        self._node = node
        self._balancing = balancing
        self._telemetry = telemetry
        self._ready = ready
        self._peers = peers
        self._lock = asyncio.Lock()
        self._made_at = -OLD_S
        self._last: Picture | None = None

    def own(self) -> Picture:
        """What this process knows."""
        now, telemetry = clock.now(), self._telemetry
        process = ProcessView(
            self._id,
            Tier.of(self._node).value,
            "/".join(self._node),
            telemetry.in_flight.value,
            telemetry.queued.value,
            not self._ready(),
        )
        pools = {
            "/".join(path): PoolView(
                self._id,
                b.policy.name,
                b.stale,
                {id_: self._endpoint(path, c, now) for id_, c in b.candidates.items()},
            )
            for path, b in sorted(self._balancing.balancers.items())
        }
        takeovers = [
            TakeoverView("/".join(path), self._id, count, round(now - at, 3))
            for path, (count, at) in telemetry.taken_over.items()
            if now - at <= TAKEOVER_S
        ]
        return Picture([process], pools, takeovers, telemetry.history.steps(now, LATEST_STEPS))

    def _endpoint(self, path: Path, c: Candidate, now: float) -> EndpointView:
        e, report = c.endpoint, c.report
        view = EndpointView(
            c.phase.value,
            c.breaker.state.value,
            c.in_flight,
            self._telemetry.picks.get((path, e.id), 0.0),
            round(c.share, 4),
            round(c.failing, 4),
            c.round_trip.value,
            [BalancerView(p.id, p.phase.value) for p in e.balancers],
            sorted(e.models)[:8],
            e.gpu,
            e.engine,
            e.price_usd_per_hour,
        )
        if report is not None:
            view.report_age_s = round(now - c.report_at, 3)
            view.waiting = report.waiting
            view.kv_utilization = report.kv_utilization
            view.gpu_utilization = report.gpu_utilization
        if len(path) == 2:
            estimate, server = c.estimates[0], c.server
            view.under_way = round(server.n + server.w, 2)
            view.slots = server.speed.slots
            view.learned_from = estimate.samples
            if estimate.samples:
                view.seconds_per_token = round(estimate.speed.alpha_s + estimate.speed.beta_s, 6)
        return view

    async def all(self) -> Picture:
        """What all processes know together, at most OLD_S old."""
        async with self._lock:
            if self._last is None or clock.now() - self._made_at >= OLD_S:
                asked = len(self._peers.urls())
                found = [self.own()]
                for content in await self._peers.get("/admin/v1/picture", timeout_s=PEER_S):
                    picture = decoded(content, Picture)
                    if picture is not None:
                        found.append(picture)
                self._last, self._made_at = merged(found), clock.now()
                self._last.unheard = asked + 1 - len(found)
            return self._last


def merged(pictures: Sequence[Picture]) -> Picture:
    """One picture of several; the first is the asking process's."""
    processes = [process for picture in pictures for process in picture.processes]
    nodes = {process.id: process.node for process in processes}
    pools: dict[str, PoolView] = {}
    picks: dict[tuple[str, str], float] = {}
    for picture in pictures:
        for path, pool in picture.pools.items():
            for id_, endpoint in pool.endpoints.items():
                picks[path, id_] = picks.get((path, id_), 0.0) + endpoint.picks
            if path not in pools or _knows_better(path, pool, pools[path], nodes):
                pools[path] = pool
    for path, pool in pools.items():
        for id_, endpoint in pool.endpoints.items():
            endpoint.picks = picks[path, id_]
    return Picture(
        sorted(processes, key=lambda p: (p.node.count("/") + bool(p.node), p.node, p.id)),
        dict(sorted(pools.items())),
        sorted((t for p in pictures for t in p.takeovers), key=lambda t: (t.node, t.by)),
        together([picture.steps for picture in pictures]),
    )


def _knows_better(path: str, new: PoolView, old: PoolView, nodes: dict[str, str]) -> bool:
    def rank(pool: PoolView) -> tuple[bool, int]:
        return nodes.get(pool.by) == path, sum(e.in_flight for e in pool.endpoints.values())

    return rank(new) > rank(old)
