"""One balancer process of a world: what `common.balancing` and `common.serving` do, in virtual time.

It holds the production `Balancer` of every pool it knows, runs `descend` over them, sends the request to the chosen
peer or instance, tries elsewhere while no token has come, and gives every pick back once. The policy is told what a
service would tell it and nothing else; a request's true length is never among it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Protocol

from common.policy.admission import RetryBudget
from common.policy.balancer import Balancer, Policy
from common.policy.candidate import Limits
from common.policy.prefix import Prompts
from common.policy.server import Told
from common.policy.stages import Route, descend
from common.sim.instance import Caller, End, Instance
from common.sim.lengths import Lengths
from common.sim.loop import Loop
from common.sim.records import Ending, Record
from common.sim.traces import TraceRow
from common.types import Endpoint, InferenceRequest, LoadReport, Outcome, Path, Peer, Pool, Shed, Slo

if TYPE_CHECKING:
    from common.sim.checkers import Checker

ATTEMPTS = 2  # servers one request may be sent to: the default of `retry.attempts`
BUDGET_RATIO = 0.2  # the default of `retry.budget_ratio`
MAX_TRIES = 8  # as in `common.serving`

_OUTCOMES = {
    End.COMPLETE: Outcome.SUCCESS,
    End.OVERLOADED: Outcome.OVERLOADED,
    End.TOO_LONG: Outcome.IGNORED,
    End.UNREACHABLE: Outcome.FAILED,
    End.LOST: Outcome.FAILED,
    End.REJECTED: Outcome.OVERLOADED,
}
"""What an instance's answer says of it; a peer is never judged by what happened behind it."""


class Directory(Protocol):
    """Where things are, and how far: what DNS and the network are to a service."""

    def instance(self, path: Path) -> Instance:
        """The instance at a path."""

    def node(self, id_: str) -> Node:
        """The balancer of that id."""

    def one_way_s(self, start: Path, end: Path) -> float:
        """Seconds a message takes from a balancer of the node `start` to `end`."""


class StopWatch:
    """Host time spent in the policy, choice by choice; `clock` is handed in, since virtual time has none."""

    __slots__ = ("_spent_s", "clock", "decision_s", "learning_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.decision_s: list[float] = []
        self.learning_s: list[float] = []
        self._spent_s = 0.0

    def understood(self, began: float) -> None:
        """The length of a request was guessed; counted with the choice that follows."""
        self._spent_s += self.clock() - began

    def decided(self, began: float) -> None:
        """A route was chosen."""
        self.decision_s.append(self._spent_s + self.clock() - began)
        self._spent_s = 0.0

    def learned(self, began: float) -> None:
        """A first token or an end was taken in."""
        self.learning_s.append(self.clock() - began)


class Call:
    """One request on its way, whatever tiers it passes: its row, its record, and what policy sees of it."""

    __slots__ = ("attempts", "record", "request", "row", "slo")

    def __init__(self, row: TraceRow, record: Record, slo: Slo) -> None:
        self.row = row
        self.record = record
        self.slo = slo
        self.request: InferenceRequest | None = None  # made by the first balancer that gets it
        self.attempts = 0  # instances that were sent it, over all tiers


class Node:
    """One balancer process of the node `path` of the tree."""

    def __init__(
        self,
        id_: str,
        path: Path,
        loop: Loop,
        directory: Directory,
        policy: Callable[[Path], Policy],
        lengths: Lengths,
        rng: Random,
        limits: Limits | None = None,
        attempts: int = ATTEMPTS,
        *,
        prefixes: bool = False,
    ) -> None:
        """`prefixes`: servers cache prompts, so requests say which blocks theirs begin with."""
        self.id = id_
        self.path = path
        self.loop = loop
        self.directory = directory
        self.balancers: dict[Path, Balancer] = {}
        self.lengths = lengths
        self.attempts = attempts
        self.prefixes = prefixes
        self.budget = RetryBudget(BUDGET_RATIO)
        self.checker: Checker | None = None
        self.watch: StopWatch | None = None
        self._policy = policy
        self._limits = limits or Limits()
        self._rng = rng
        self._peer_in_flight: dict[str, int] = {}

    # -- what it is told ---------------------------------------------------------------------------------------------

    def update(self, pool: Pool) -> None:
        """Membership's present word on one pool."""
        balancer = self.balancers.get(pool.parent)
        if balancer is None:
            balancer = Balancer(pool.parent, self._policy(pool.parent), self._limits)
            self.balancers[pool.parent] = balancer
        balancer.update(pool, self.loop.now)

    def report(self, parent: Path, report: LoadReport) -> None:
        """A load report on an endpoint of the pool `parent`."""
        balancer = self.balancers.get(parent)
        if balancer is not None:
            balancer.report(report, self.loop.now)

    def hear(self, parent: Path, replica: str, told: Mapping[str, Told]) -> None:
        """What another balancer of the pool `parent` has under way."""
        balancer = self.balancers.get(parent)
        if balancer is not None:
            balancer.hear(replica, told, self.loop.now)

    def hear_prompts(self, parent: Path, replica: str, told: Prompts) -> None:
        """Where another balancer of the pool `parent` sent prompts of late."""
        balancer = self.balancers.get(parent)
        if balancer is not None:
            balancer.hear_prompts(replica, told)

    def round_trip(self, path: Path, seconds: float) -> None:
        """A measured round trip to an endpoint."""
        balancer = self.balancers.get(path[:-1])
        if balancer is not None:
            balancer.round_trip(path[-1], seconds, self.loop.now)

    def quote(self, endpoint: str) -> LoadReport:
        """What it reports of its own node to the tier above."""
        return LoadReport(endpoint, servers=self.balancers[self.path].quote(self.loop.now))

    # -- one request -------------------------------------------------------------------------------------------------

    def serve(self, call: Call, caller: Caller, start: Path) -> None:
        """Carry a request from the node `start` down; `caller` hears of its first token and of its end."""
        if call.request is None:
            call.request = self._understand(call)
        self.budget.request(self.loop.now)
        _Carried(self, call, caller, start).go()

    def _understand(self, call: Call) -> InferenceRequest:
        row, record = call.row, call.record
        began = self.watch.clock() if self.watch is not None else 0.0
        expected = record.expected_tokens = self.lengths.expect(row)
        if self.watch is not None:
            self.watch.understood(began)
        return InferenceRequest(
            id=str(record.index),
            model=row.model,
            stream=True,
            input_tokens=row.input_tokens,
            output_tokens=expected,
            prefix_hashes=row.prefix_hashes if self.prefixes else (),
            tenant=row.client,
            priority=row.priority,
            slo=call.slo,
        )

    def route(self, request: InferenceRequest, start: Path, exclude: frozenset[Path]) -> Route | Shed:
        """Run stages from `start` down; every pick of the route holds a reservation."""
        watch, now = self.watch, self.loop.now
        began = watch.clock() if watch is not None else 0.0
        route = descend(request, start, self.balancers, self._peer_of, self._serves, now, self._rng, exclude)
        if watch is not None:
            watch.decided(began)
        if self.checker is not None:
            self.checker.routed(self, route)
        return route

    def _serves(self, path: Path) -> bool:
        return path == self.path

    def _peer_of(self, path: Path, endpoint: Endpoint) -> Peer | None:
        """The balancer of that endpoint with least in flight from here; None: run its stage here."""
        if path == self.path or not endpoint.balancers:
            return None
        return min(endpoint.balancers, key=lambda p: (self._peer_in_flight.get(p.id, 0), p.id))

    def sent_to_peer(self, id_: str, requests: int) -> None:
        """So many more requests (or, negative, fewer) are under way at a peer."""
        self._peer_in_flight[id_] = self._peer_in_flight.get(id_, 0) + requests

    def first_token(self, route: Route) -> None:
        """The first token of a route's answer came."""
        began = self.watch.clock() if self.watch is not None else 0.0
        for hop in route.hops:
            self.balancers[hop.path].first_token(hop.pick.reservation, self.loop.now)
        if self.watch is not None:
            self.watch.learned(began)

    def release(self, route: Route, end: End, row: TraceRow, cached_tokens: int | None = None) -> None:
        """Give a route's picks back; only the last one is judged, those above it only chose it."""
        began = self.watch.clock() if self.watch is not None else 0.0
        outcome = _OUTCOMES[end]
        if route.peer is not None and outcome is Outcome.FAILED:
            outcome = Outcome.IGNORED
        tokens = float(row.output_tokens) if end is End.COMPLETE else None
        *above, last = route.hops
        for hop in above:
            said = outcome if outcome is Outcome.SUCCESS else Outcome.IGNORED
            self.balancers[hop.path].release(hop.pick.reservation, said, self.loop.now, output_tokens=tokens)
        self.balancers[last.path].release(
            last.pick.reservation,
            outcome,
            self.loop.now,
            output_tokens=tokens,
            cached_tokens=None if cached_tokens is None else float(cached_tokens),
            unreachable=end is End.UNREACHABLE and route.peer is None,
        )
        if end is End.COMPLETE:
            self.lengths.learn(row)
        if self.watch is not None:
            self.watch.learned(began)
        if self.checker is not None:
            self.checker.released(self, route)


class _Carried:
    """A request inside one balancer process: tries routes until one answers or the budget says stop."""

    __slots__ = ("_call", "_caller", "_exclude", "_node", "_start", "_started", "_tries")

    def __init__(self, node: Node, call: Call, caller: Caller, start: Path) -> None:
        self._node = node
        self._call = call
        self._caller = caller
        self._start = start
        self._exclude: frozenset[Path] = frozenset()
        self._tries = 0
        self._started = False  # its caller has seen a token

    def go(self) -> None:
        """Choose a route and send the request along it."""
        node, call = self._node, self._call
        assert call.request is not None
        self._tries += 1
        route = node.route(call.request, self._start, self._exclude)
        if isinstance(route, Shed):
            call.record.reason = route.reason
            self._caller.ended(End.REJECTED)
            return
        _Leg(self, route).send()

    def first(self) -> None:
        """A token came."""
        self._started = True
        self._caller.first()

    def ended(self, route: Route, end: End, cached_tokens: int | None) -> None:
        """One route's answer is over; what has not begun may be tried elsewhere, as in `common.serving`."""
        if end is not End.COMPLETE and not self._started and self._again_after(route, end):
            self._exclude |= {route.target}
            self.go()
            return
        if end is not End.COMPLETE and not self._call.record.reason:
            self._call.record.reason = end.value
        self._caller.ended(end, cached_tokens)

    def _again_after(self, route: Route, end: End) -> bool:
        if self._tries >= MAX_TRIES or end is End.TOO_LONG:
            return False
        if end is End.REJECTED:
            return True
        granted = end is End.UNREACHABLE or self._call.attempts < self._node.attempts
        return granted and self._node.budget.take(self._node.loop.now)

    @property
    def node(self) -> Node:
        """The process it is in."""
        return self._node

    @property
    def call(self) -> Call:
        """The request."""
        return self._call


class _Leg:
    """One try: a route on its way, whose picks are released here, once. It is what the answerer calls."""

    __slots__ = ("_carried", "_node", "_one_way_s", "_route")

    def __init__(self, carried: _Carried, route: Route) -> None:
        self._carried = carried
        self._route = route
        self._node = carried.node
        self._one_way_s = self._node.directory.one_way_s(self._node.path, route.target)

    def send(self) -> None:
        """On its way, which takes as long as the network does."""
        peer, node, call = self._route.peer, self._node, self._carried.call
        if peer is not None:
            node.sent_to_peer(peer.id, 1)
        else:
            pick = self._route.hops[-1].pick
            record = call.record
            record.instance = pick.endpoint.id
            record.predicted_ttft_s, record.predicted_e2e_s = pick.predicted_ttft_s, pick.predicted_total_s
            call.attempts += 1
            record.attempts = call.attempts
        node.loop.after(self._one_way_s, self._arrive)

    def _arrive(self) -> None:
        route, call = self._route, self._carried.call
        if route.peer is not None:
            self._node.directory.node(route.peer.id).serve(call, self, route.target)
            return
        row = call.row
        instance = self._node.directory.instance(route.target)
        instance.submit(call.record.index, row.input_tokens, row.output_tokens, row.prefix_hashes, self)

    def first(self) -> None:
        """Its first token leaves the answerer."""
        self._node.loop.after(self._one_way_s, self._first)

    def _first(self) -> None:
        self._node.first_token(self._route)
        self._carried.first()

    def ended(self, end: End, cached_tokens: int | None = None) -> None:
        """Its end leaves the answerer."""
        self._node.loop.after(self._one_way_s, self._ended, end, cached_tokens)

    def _ended(self, end: End, cached_tokens: int | None) -> None:
        if self._route.peer is not None:
            self._node.sent_to_peer(self._route.peer.id, -1)
        if end is End.UNREACHABLE and self._route.peer is None:
            self._carried.call.attempts -= 1  # it never saw the request
        self._node.release(self._route, end, self._carried.call.row, cached_tokens)
        self._carried.ended(self._route, end, cached_tokens)


class Client:
    """Who asked in the first place: writes down what became of it."""

    __slots__ = ("_done", "_loop", "_one_way_s", "_record")

    def __init__(self, record: Record, loop: Loop, done: Callable[[Record], None], one_way_s: float = 0.0) -> None:
        self._record = record
        self._loop = loop
        self._done = done
        self._one_way_s = one_way_s

    def first(self) -> None:
        """The first token came."""
        assert self._record.ttft_s is None
        self._record.ttft_s = self._loop.now + self._one_way_s - self._record.at_s

    def ended(self, end: End, cached_tokens: int | None = None) -> None:
        """The answer ended."""
        record = self._record
        record.e2e_s = self._loop.now + self._one_way_s - record.at_s
        if end is End.COMPLETE:
            record.ending, record.reason = Ending.COMPLETE, ""
        else:
            refused = end in {End.REJECTED, End.OVERLOADED, End.TOO_LONG}
            record.ending = Ending.REJECTED if refused else Ending.BROKEN
        self._done(record)
