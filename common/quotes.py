"""Which load reports this process follows, and what it quotes to the tier above.

Every node whose stage may be run here needs its children's load: from a child's balancer where one lives, else from one
level further down. The plan is made anew from membership whenever that changes, so a takeover follows the agents of a
dead balancer's instances and a hand-back lets go of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random

import structlog

from common import clock
from common.balancing import Balancing
from common.reporting import ReportClient, ReportServer, Tls
from common.types import Endpoint, LoadReport, Path, Pool

log = structlog.get_logger()

REPLAN_S = 1.0  # how soon a peer whose cool-down is over is followed again, which is how it is found to be back

Following = dict[str, dict[str, Path]]
"""Address -> endpoint id -> the pool it is in."""


class Quotes:
    """Follows reports for a `Balancing`, rolls quotes up, and offers this node's own."""

    def __init__(
        self,
        node: Path,
        balancing: Balancing,
        rng: Random,
        interval_s: float,
        *,
        tls: Tls | None = None,
        on_peer: Callable[[str, bool], None] = lambda peer, heard: None,
    ) -> None:
        """`on_peer(id, heard)`: told when the reports of a balancer stop, and when they come again."""
        self._node = node
        self._balancing = balancing
        self._interval_s = interval_s
        self._pools: Mapping[Path, Pool] = {}
        self._following: Following = {}
        self._rolled: list[Path] = []  # nodes whose quote is made here, the deepest first
        self._peers: dict[str, str] = {}  # address -> id of the balancer that reports there
        self._lost: set[str] = set()  # balancers that membership names and that do not report
        self._client = ReportClient(
            balancing.process_id, rng, on_report=self._took, on_state=self._state, interval_s=interval_s, tls=tls
        )
        self._on_peer = on_peer

    def update(self, pools: Mapping[Path, Pool]) -> None:
        """Membership changed: follow what is needed now and nothing else."""
        self._pools = pools
        self._lost &= {peer.id for pool in pools.values() for e in pool.endpoints for peer in e.balancers}
        plan: Following = {}
        rolled: list[Path] = []
        self._peers = {}
        for start in {(), self._node}:
            self._plan(start, plan, rolled)
        for address, wanted in plan.items():
            self._client.follow(address, wanted)
        for address in self._following.keys() - plan.keys():
            self._client.unfollow(address)
        self._following = plan
        self._rolled = sorted(set(rolled), key=len, reverse=True)

    def _plan(self, node: Path, plan: Following, rolled: list[Path]) -> None:
        pool = self._pools.get(node)
        if pool is None:
            return
        for endpoint in pool.endpoints:
            child = (*node, endpoint.id)
            address = self._reporter(child, endpoint)
            if address:
                plan.setdefault(address, {})[endpoint.id] = node
            elif len(child) < 3:
                rolled.append(child)
                self._plan(child, plan, rolled)

    def _reporter(self, path: Path, endpoint: Endpoint) -> str:
        """Where reports of an endpoint come from; "" when its quote has to be made here."""
        if len(path) == 3:
            return endpoint.agent
        peer = self._balancing.peer_of(path, endpoint)
        if peer is None or not peer.load:
            return ""
        # The one that is followed already stays while it lives, so that streams do not hop between balancers of a node.
        followed = (p for p in self._balancing.peers_of(path, endpoint) if p.load in self._following)
        peer = next(followed, peer)
        self._peers[peer.load] = peer.id
        return peer.load

    def _took(self, address: str, report: LoadReport) -> None:
        parent = self._following.get(address, {}).get(report.endpoint)
        if parent is not None:
            self._balancing.report(parent, report)

    def _state(self, address: str, connected: bool) -> None:
        peer = self._peers.get(address)
        if peer is None:
            return
        if connected:
            if peer in self._lost:
                self._lost.discard(peer)
                log.info("balancer_back", balancer=peer)
            self._balancing.peer_back(peer)
            self._on_peer(peer, True)
        else:
            if peer not in self._lost:
                self._lost.add(peer)
                log.warning("balancer_lost", balancer=peer, meanwhile="another of its node, or its stage is run here")
            self._balancing.peer_lost(peer)
            self._on_peer(peer, False)
            # Another balancer of the node, or the level below it, is followed instead.
            asyncio.get_running_loop().call_soon(self.update, self._pools)

    def own(self, now: float) -> LoadReport:
        """The quote of this process's own node."""
        balancer = self._balancing.balancers.get(self._node)
        servers = balancer.quote(now) if balancer is not None else ()
        return LoadReport(self._node[-1] if self._node else "", servers=servers)

    def offer(self, server: ReportServer) -> None:
        """Offer the quote to whoever follows this node; the global tier has nobody above it."""
        if self._node:
            server.offer(self._node[-1], self.own)

    async def run(self) -> None:
        """Roll quotes up through the nodes whose stages are run here, until cancelled."""
        planned_at = clock.now()
        while True:
            await asyncio.sleep(self._interval_s)
            now = clock.now()
            if now - planned_at >= REPLAN_S:
                planned_at = now
                self.update(self._pools)
            for path in self._rolled:
                balancer = self._balancing.balancers.get(path)
                if balancer is not None:
                    report = LoadReport(path[-1], servers=balancer.quote(now))
                    self._balancing.report(path[:-1], report)

    async def close(self) -> None:
        """Let go of everything followed."""
        await self._client.close()
