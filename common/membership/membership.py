"""Joins this process and its pools to the store: registers under a lease, watches, and tells whoever asked.

With the store away everything goes on with what was known, marked stale (fail static); see `outage` for its return.
Nothing here fails or delays a request: pools are values that are swapped between two requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog

from common import clock
from common.errors import ConfigError, StoreUnavailable
from common.membership.drains import Drain, decode_drain, drain_path, encode_drain, key_of_drain
from common.membership.orphans import Orphans
from common.membership.outage import OutageGuard
from common.membership.pools import Member, Tree, grow
from common.membership.records import Place, decode, encode, key_of, place_of
from common.store.base import Lease, MembershipStore, Snapshot
from common.types import Endpoint, Path, Peer, Phase, Pool

log = structlog.get_logger()

TTL_S: Final = 5.0
ROOT: Final = "/headwater"
CONFIRM_INTERVAL_S: Final = 0.2  # how soon an unconfirmed member that stops answering is let go of
REST: Final = 4.0  # after a change so many times what working it out took: requests have four fifths of the time,
MOST_REST_S: Final = 0.25  # however many members come and go; what comes meanwhile is one change

OnChange = Callable[[Mapping[Path, Pool]], None]
"""Told all pools whenever anything changed: () regions, (region,) clusters, (region, cluster) instances.

A parent that is missing has nothing below it any more. Called on the event loop; it must be quick and not raise.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A store and what it is asked for. A region with an etcd of its own is a second source, with its prefix."""

    store: MembershipStore
    prefix: str = ROOT + "/"


class Membership:
    """Presence of this process, and the pools of all.

    `stores`: one store for everything below `root`, or several sources, whose keys are united; a registration is
    written to each source whose prefix covers it. `ttl_s`: how long this process is presented after it has died.
    `answers(member)`: whether a balancer or instance is known to be alive by other means; asked only about those that
    vanished in a burst after an outage (see OutageGuard), and taken for yes when not given. `adopts`: whether instances
    whose agent died are kept while they answer; somebody has to look then (`orphans`). `now`: monotonic seconds.
    """

    def __init__(
        self,
        stores: MembershipStore | Sequence[Source],
        *,
        on_change: OnChange = lambda pools: None,
        ttl_s: float = TTL_S,
        root: str = ROOT,
        answers: Callable[[Member], bool] = lambda member: True,
        adopts: bool = False,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._root = root.rstrip("/")
        sources = stores if isinstance(stores, Sequence) else [Source(stores, self._root + "/")]
        self._sources = [_Watched(source, OutageGuard(ttl_s)) for source in sources]
        self._heard = asyncio.Event()
        self._orphans = Orphans() if adopts else None
        self._on_change = on_change
        self._ttl_s = ttl_s
        self._answers = answers
        self._now = now
        self._tree = Tree()
        self._records: dict[str, _Record] = {}
        self._own: dict[str, tuple[Place, Member]] = {}  # what this process has registered, by key
        self._told = False

    # -- presence ----------------------------------------------------------------------------------------------------

    async def register_balancer(self, path: Path, peer: Peer) -> None:
        """Present a balancer of the node at `path`, or replace what is presented of it. Returns within the store's
        time-out, registered or not: without the store it is registered when that is back. Raises ConfigError.
        """
        await self._register(Place(path, peer.id), peer)

    async def register_instance(self, path: Path, endpoint: Endpoint) -> None:
        """Present an instance of the cluster at `path` (region, cluster); as `register_balancer`."""
        await self._register(Place(path, endpoint.id, instance=True), endpoint)

    async def set_phase(self, phase: Phase, id_: str = "") -> None:
        """Present another phase: of all that this process has registered, or of those with this id."""
        due = [(place, replace(member, phase=phase)) for place, member in self._own.values() if id_ in ("", member.id)]
        await asyncio.gather(*(self._register(place, member) for place, member in due))

    async def deregister(self, path: Path, id_: str) -> None:
        """Stop presenting what this process registered under this path and id, at once; nothing if there is none."""
        for key, (place, member) in list(self._own.items()):
            if (place.path, place.id) == (path, id_):
                await self._leaving(place, member)
                self._own.pop(key, None)
                leases = [source.lease for source in self._covering(key) if source.lease is not None]
                await asyncio.gather(*(lease.delete(key) for lease in leases))

    async def close(self) -> None:
        """Stop presenting everything, at once; `run` is ended by whoever started it."""
        await asyncio.gather(*(self._leaving(place, member) for place, member in list(self._own.values())))
        self._own.clear()
        leases = [source.lease for source in self._sources if source.lease is not None]
        await asyncio.gather(*(lease.close() for lease in leases))

    async def _leaving(self, place: Place, member: Member) -> None:
        """An instance that leaves in order says so before its key goes, see `orphans`."""
        if place.instance and member.phase is not Phase.DRAINING:
            await self._register(place, replace(member, phase=Phase.DRAINING))

    async def _register(self, place: Place, member: Member) -> None:
        key, value = key_of(self._root, place), encode(member)
        sources = self._covering(key)
        if not sources:
            raise ConfigError(f"no store takes {key}")
        self._own[key] = (place, member)
        await asyncio.gather(*(source.put(key, value, self._ttl_s) for source in sources))

    def _covering(self, key: str) -> list[_Watched]:
        return [source for source in self._sources if key.startswith(source.prefix)]

    # -- what operators want -----------------------------------------------------------------------------------------

    @property
    def drains(self) -> tuple[Drain, ...]:
        """What takes no new work by an operator's word, in order of paths."""
        marks = (record.drain for record in self._records.values() if record.drain is not None)
        return tuple(sorted(marks, key=lambda drain: drain.path))

    async def drain(self, drain: Drain) -> None:
        """Have no new work sent to a region, cluster or instance until `undrain`.

        Raises StoreUnavailable, and ConfigError for what is no path of one.
        """
        key = key_of_drain(self._root, drain.path)
        await asyncio.gather(*(source.store.put(key, encode_drain(drain)) for source in self._covering(key)))

    async def undrain(self, path: Path) -> None:
        """Take such a mark away; nothing if there is none. Raises StoreUnavailable, ConfigError."""
        key = key_of_drain(self._root, path)
        await asyncio.gather(*(source.store.delete(key) for source in self._covering(key)))

    async def _put_back(self, source: _Watched, lost: Mapping[str, Drain]) -> None:
        """A store that lost its data has forgotten what operators wanted, which nobody registers again."""
        for key, drain in lost.items():
            try:
                await source.store.put_if_absent(key, encode_drain(drain))
            except StoreUnavailable as error:
                log.warning("drain lost by the store and not put back", key=key, reason=str(error))

    # -- everybody's -------------------------------------------------------------------------------------------------

    @property
    def pools(self) -> Mapping[Path, Pool]:
        """All pools as known now; () is always there."""
        return self._tree.pools

    def pool(self, path: Path) -> Pool:
        """The pool under one parent; empty if nothing is there."""
        return self._tree.pools.get(path) or Pool(path, stale=self._stale(path))

    def balancers(self, path: Path) -> tuple[Peer, ...]:
        """The balancers of the node at `path`, in id order."""
        return self._tree.balancers.get(path, ())

    @property
    def orphans(self) -> dict[str, Endpoint]:
        """Instances that are kept though their registration ran out, by key."""
        kept = self._orphans.kept if self._orphans is not None else frozenset()
        records = ((key, self._records.get(key)) for key in kept)
        return {key: r.member for key, r in records if r is not None and isinstance(r.member, Endpoint)}

    def silent(self, key: str) -> None:
        """One of them does not answer: it is let go of."""
        if self._orphans is not None:
            self._orphans.silent(key)
            self._refresh()

    @property
    def tree(self) -> dict[str, Any]:
        """All of it for people to look at: plain dicts and lists, in id order."""
        regions: dict[str, Any] = {}
        for region in self.pool(()).endpoints:
            clusters = {}
            for cluster in self.pool((region.id,)).endpoints:
                path = (region.id, cluster.id)
                instances = {e.id: _shown(e) for e in self.pool(path).endpoints}
                clusters[cluster.id] = {"balancers": self._shown_balancers(path), "instances": instances}
            regions[region.id] = {"balancers": self._shown_balancers((region.id,)), "clusters": clusters}
        return {
            "revision": self.pool(()).revision,
            "stale": any(source.snapshot.stale for source in self._sources),
            "unconfirmed": sorted(key for source in self._sources for key in source.guard.unconfirmed),
            "orphans": sorted(self._orphans.kept) if self._orphans is not None else [],
            "drains": ["/".join(drain.path) for drain in self.drains],
            "balancers": self._shown_balancers(()),
            "regions": regions,
        }

    async def run(self) -> None:
        """Watch until cancelled, or until the stores are closed."""
        watches = [asyncio.create_task(self._watch(source), name="membership-watch") for source in self._sources]
        confirm = asyncio.create_task(self._confirm(), name="membership-confirm")
        try:
            await asyncio.gather(*watches)
        finally:
            for task in (*watches, confirm):
                task.cancel()
            await asyncio.gather(*watches, confirm, return_exceptions=True)

    async def until_heard(self, timeout_s: float) -> bool:
        """Wait until every store has said something, be it what a snapshot holds; whether it has within the time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()
        return self._heard.is_set()

    async def _watch(self, source: _Watched) -> None:
        async with aclosing(source.store.watch(source.prefix)) as snapshots:
            async for snapshot in snapshots:
                before, source.snapshot, source.heard = source.snapshot, snapshot, True
                emptied = not snapshot.stale and snapshot.revision < before.revision
                lost = self._drains_lost(source) if emptied else {}
                began = self._now()
                self._refresh()
                if all(one.heard for one in self._sources):
                    self._heard.set()
                took_s = self._now() - began
                await self._put_back(source, lost)
                await asyncio.sleep(min(REST * took_s, MOST_REST_S))

    def _drains_lost(self, source: _Watched) -> dict[str, Drain]:
        here = ((key, r.drain) for key, r in self._records.items() if key.startswith(source.prefix))
        return {key: drain for key, drain in here if drain is not None and key not in source.snapshot.values}

    async def _confirm(self) -> None:
        """Look after what is unconfirmed: no snapshot comes when its time is over or it stops answering."""
        while True:
            await asyncio.sleep(CONFIRM_INTERVAL_S)
            if any(source.guard.unconfirmed for source in self._sources):
                self._refresh()

    def _refresh(self) -> None:
        """Work out the tree, and tell of it if it changed. Takes 4 ms for 1,000 instances."""
        values: dict[str, bytes] = {}
        for source in self._sources:
            doubted = source.guard.unconfirmed
            values |= source.guard.believe(source.snapshot.values, source.snapshot.stale, self._now(), self._alive)
            if source.guard.unconfirmed - doubted:
                log.warning(
                    "members vanished after an outage of the store, keeping them until they are confirmed or not",
                    count=len(source.guard.unconfirmed),
                )
        if self._orphans is not None:
            kept = self._orphans.kept
            removed = {key: value for source in self._sources for key, value in source.snapshot.removed.items()}
            values = dict(self._orphans.adopt(values, removed, self._now(), self._left))
            if self._orphans.kept - kept:
                log.warning(
                    "instances are registered no more without having left, keeping them while they answer",
                    count=len(self._orphans.kept),
                )
        self._records = {key: self._record(key, value) for key, value in values.items()}
        members = ((r.place, r.member) for r in self._records.values() if r.place is not None and r.member is not None)
        revision = sum(source.snapshot.revision for source in self._sources)
        drained = {r.drain.path for r in self._records.values() if r.drain is not None}
        before, self._tree = self._tree, grow(members, revision, self._stale, self._tree, drained)
        if self._tree is not before or not self._told:
            self._told = True
            self._on_change(self._tree.pools)

    def _record(self, key: str, value: bytes) -> _Record:
        """The record of a key, decoded when it is new. One that cannot be used is logged then, and skipped."""
        known = self._records.get(key)
        if known is not None and known.value == value:
            return known
        place = known.place if known is not None else None
        try:
            place = place or place_of(self._root, key)
            if place is not None:
                return _Record(value, place, decode(place, value))
            path = drain_path(self._root, key)
            return _Record(value, None, None, decode_drain(path, value) if path is not None else None)
        except ValueError as error:
            log.warning("membership record not understood, skipped", key=key, reason=str(error))
            return _Record(value, place, None)

    def _left(self, key: str, value: bytes) -> bool:
        """Whether what a key held last was no instance that takes work."""
        record = self._record(key, value)
        return not isinstance(record.member, Endpoint) or record.member.phase is Phase.DRAINING

    def _alive(self, key: str) -> bool:
        record = self._records.get(key)
        if record is not None and record.drain is not None:
            return True  # it waits to be put back, and nobody would answer for it
        return record is not None and record.member is not None and self._answers(record.member)

    def _stale(self, path: Path) -> bool:
        """Whether any store that may hold what is below `path` is out of reach, or has not been heard yet."""
        prefix = key_of(self._root, Place(path, "x")).removesuffix("global/balancers/x").removesuffix("balancers/x")
        return any(
            source.snapshot.stale or not source.heard
            for source in self._sources
            if source.prefix.startswith(prefix) or prefix.startswith(source.prefix)
        )

    def _shown_balancers(self, path: Path) -> dict[str, Any]:
        return {
            p.id: {"url": p.url, "load": p.load, "admin": p.admin, "phase": p.phase.value} for p in self.balancers(path)
        }


@dataclass(slots=True)
class _Watched:
    """One source and what was last heard from it."""

    source: Source
    guard: OutageGuard
    snapshot: Snapshot = field(default_factory=lambda: Snapshot({}, 0))
    heard: bool = False
    lease: Lease | None = None
    granting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Present a key under this process's one lease there."""
        async with self.granting:
            if self.lease is None:
                self.lease = await self.store.lease(ttl_s)
        await self.lease.put(key, value)

    @property
    def store(self) -> MembershipStore:
        return self.source.store

    @property
    def prefix(self) -> str:
        return self.source.prefix


@dataclass(frozen=True, slots=True)
class _Record:
    """One key's value as stored, and as understood."""

    value: bytes
    place: Place | None
    member: Member | None
    drain: Drain | None = None


def _shown(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "url": endpoint.url,
        "agent": endpoint.agent,
        "models": sorted(endpoint.models),
        "engine": endpoint.engine,
        "gpu": endpoint.gpu,
        "weight": endpoint.weight,
        "price_usd_per_hour": endpoint.price_usd_per_hour,
        "phase": endpoint.phase.value,
        "boot": endpoint.boot,
        "memory_gb": endpoint.memory_gb,
        "labels": sorted(endpoint.labels),
        "loadable": sorted(endpoint.loadable),
    }
