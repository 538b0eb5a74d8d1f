"""What must hold in every world, whatever goes wrong in it: checked after each choice and end, and when all is over.

No reservation leaks; a request ends once; no balancer holds more than its bounds and no engine more than its slots and
memory; nothing is sent to what membership or its breaker has ruled out; every cost is a number, none below zero. What
fails raises `CheckFailed`, which names seed and time: the same seed shows it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from common.policy.health import State
from common.sim.instance import Instance
from common.sim.loop import Loop
from common.sim.records import Record
from common.types import Path, Phase, Shed

if TYPE_CHECKING:
    from common.policy.balancer import Balancer
    from common.policy.stages import Hop, Route
    from common.sim.node import Node

ROUNDING = 1e-6  # what sums of thousands of additions and subtractions may be off by


class CheckFailed(AssertionError):  # noqa: N818 - it says what happened
    """Something that must never happen did; the message has the seed and the virtual time."""


class Checker:
    """Watches one world."""

    def __init__(self, loop: Loop, seed: int) -> None:
        self._loop = loop
        self._seed = seed
        self._held: Counter[tuple[str, Path]] = Counter()  # (balancer process, pool) -> picks not given back
        self._ended: set[int] = set()
        self.checks = 0

    def _fail(self, what: str) -> None:
        raise CheckFailed(f"{what} (seed {self._seed}, at {self._loop.now:.6f} s)")

    def expect(self, holds: bool, what: str) -> None:
        """Fail with `what` unless it holds."""
        self.checks += 1
        if not holds:
            self._fail(what)

    # -- while it runs -----------------------------------------------------------------------------------------------

    def routed(self, node: Node, route: Route | Shed) -> None:
        """A balancer process chose."""
        if isinstance(route, Shed):
            self.expect(bool(route.reason), f"{node.id} shed without a reason")
            return
        for hop in route.hops:
            self._picked(node, hop)

    def _picked(self, node: Node, hop: Hop) -> None:
        balancer = node.balancers[hop.path]
        id_ = hop.pick.endpoint.id
        self._held[node.id, hop.path] += 1
        self._balanced(node, hop.path, balancer)
        candidate = balancer.candidates.get(id_)
        if candidate is None:
            self._fail(f"{node.id} sent a request to {id_}, which has left the pool {'/'.join(hop.path)}")
            return
        self.expect(candidate.phase is Phase.SERVING, f"{node.id} sent a request to {id_}, which is {candidate.phase}")
        self.expect(candidate.breaker.state is not State.OPEN, f"{node.id} sent a request to {id_}, which is ejected")
        self.expect(candidate.in_flight <= candidate.max_in_flight, f"{id_} holds more than it may: {node.id}")
        self.expect(min(hop.pick.totals) < inf, f"{node.id} picked {id_} although nothing could take the request")
        self.expect(all(cost >= 0.0 for cost in hop.pick.totals), f"{node.id} saw a cost below zero or none at all")

    def released(self, node: Node, route: Route) -> None:
        """A balancer process gave a route back."""
        for hop in route.hops:
            self._held[node.id, hop.path] -= 1
            self._balanced(node, hop.path, node.balancers[hop.path])

    def _balanced(self, node: Node, path: Path, balancer: Balancer) -> None:
        held = self._held[node.id, path]
        self.expect(
            balancer.in_flight == held, f"{node.id} holds {balancer.in_flight} reservations for {held} requests"
        )

    def ended(self, record: Record) -> None:
        """A request's client heard of its end."""
        self.expect(record.index not in self._ended, f"request {record.index} ended twice")
        self._ended.add(record.index)
        if record.complete:
            whole = record.ttft_s is not None or record.output_tokens == 0
            self.expect(whole, f"request {record.index} ended well without a first token")

    def engines(self, instances: Iterable[Instance]) -> None:
        """Engines keep to their slots, memory and queues."""
        for instance in instances:
            engine, id_ = instance.engine, instance.endpoint.id
            self.expect(engine.running <= engine.slots, f"{id_} runs more sequences than it has slots")
            self.expect(engine.reserved_tokens <= engine.kv_capacity, f"{id_} promised more memory than it has")
            self.expect(engine.waiting <= engine.max_queue, f"{id_} queues more than it may")
            self.expect(engine.running + engine.waiting == instance.in_flight, f"{id_} lost count of its requests")

    # -- when all is over --------------------------------------------------------------------------------------------

    def over(self, nodes: Iterable[Node], instances: Iterable[Instance], records: Iterable[Record]) -> None:
        """Every request has ended, and nothing of them is left anywhere."""
        for record in records:
            self.expect(record.index in self._ended, f"request {record.index} never ended")
        for instance in instances:
            self.expect(not instance.on_it, f"{instance.endpoint.id} still has {len(instance.on_it)} requests")
        for node in nodes:
            for path, balancer in node.balancers.items():
                self._balanced(node, path, balancer)
                self.expect(not balancer.in_flight, f"{node.id} leaked {balancer.in_flight} reservations")
                self._empty(node, balancer)

    def _empty(self, node: Node, balancer: Balancer) -> None:
        for id_, candidate in balancer.candidates.items():
            self.expect(not candidate.in_flight, f"{node.id} leaked {candidate.in_flight} of {id_}")
            if candidate.foreign_seen or candidate.heard:
                continue  # what others were last seen to have there is allowed to stay
            for server in candidate.own:
                left = max(abs(server.n), abs(server.w), abs(server.p), abs(server.k), abs(server.r))
                self.expect(left < ROUNDING, f"{node.id} still counts {left} on {id_}, which is empty")
