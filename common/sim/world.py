"""A world in virtual time: servers, balancer processes, the network between them, and traffic through it all.

A world is put together from parts: instances and balancer processes are added at paths of the tree, membership tells
pools to those that know them, agents and balancers report load, and both take as long as they are told to. `cluster`
builds the common one, a cluster behind one or more replicas of its instance tier; worlds of several regions add nodes
of other paths, each with its links, to the same parts.

The objects that decide are those of `common.policy`, wired as a service wires them (`node`); this module gives them
what a network would. Everything random comes from the seed, so a run can be had again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from common.policy.balancer import Policy
from common.policy.candidate import Limits
from common.policy.prefix import TELL_S
from common.sim.checkers import Checker
from common.sim.faults import Fault
from common.sim.fleet import Machine, machine, singles
from common.sim.instance import Instance
from common.sim.lengths import LengthsOf, lengths_named
from common.sim.loop import Loop
from common.sim.node import ATTEMPTS, Call, Client, Node, StopWatch
from common.sim.records import LoadSeries, Record, RunRecord
from common.sim.traces import TraceRow
from common.types import Endpoint, LoadReport, Path, Phase, Pool, Slo

CLUSTER: Path = ("region", "cluster")
CHECK_ENGINES_EVERY = 64  # events; their bounds are checked often enough to be close to what broke them


@dataclass(frozen=True, slots=True)
class Network:
    """How long things take to get from one place to another, seconds; None: that is never sent."""

    one_way_s: float = 0.0  # balancer to instance
    look_s: float | None = 1.0  # an agent reads its server's metrics this often: the default of `scrape_interval_s`
    report_s: float = 0.2  # and reports what it saw this often: the default of `reports.interval_s`
    report_delay_s: float = 0.005  # a report's way
    gone_s: float = 5.0  # membership tells of a death after its lease has run out: the default of `etcd.ttl_s`
    told_s: float = 0.05  # and of everything else after this
    exchange_s: float | None = None  # replicas of one tier tell each other what they have in flight this often
    exchange_delay_s: float = 0.001


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world of one cluster is made of, apart from its traffic and its seed."""

    fleet: tuple[Machine, ...]
    policy: Callable[[Path], Policy]
    lengths: LengthsOf = field(default_factory=lambda: lengths_named("learned"))
    slo: Slo = field(default_factory=Slo)  # asked for by every request
    replicas: int = 1
    network: Network = field(default_factory=Network)
    limits: Limits = field(default_factory=Limits)
    attempts: int = ATTEMPTS
    prefix_fraction: float = 0.0  # of KV memory that engines keep prompts in; 0: no prefix cache
    faults: tuple[Fault, ...] = ()
    sample_s: float = 0.5  # how often the load is written down


class World:
    """Parts, and what goes on between them."""

    def __init__(self, seed: int = 0, network: Network | None = None, *, checked: bool = True) -> None:
        self.seed = seed
        self.network = network or Network()
        self.loop = Loop()
        self.rng = Random(seed)
        self.instances: dict[Path, Instance] = {}
        self.nodes: dict[str, Node] = {}
        self.entries: list[Node] = []  # where clients' requests come in, dealt in turn,
        self.enters: Callable[[int, TraceRow], Node] | None = None  # or as this says; those begin at the top stage
        self.checker = Checker(self.loop, seed) if checked else None
        self.watch: StopWatch | None = None
        self.records: list[Record] = []
        self.load = LoadSeries()
        self._members: dict[Path, dict[str, Endpoint]] = {}
        self._knows: dict[Path, list[Node]] = {}
        self._links: dict[tuple[Path, Path], float] = {}
        self._revision = 0
        self._rows: Sequence[TraceRow] = ()
        self._slo = Slo()
        self._next = 0
        self._open = 0
        self._joined = 0

    # -- parts -------------------------------------------------------------------------------------------------------

    def add_instance(
        self, path: Path, kind: Machine, prefix_fraction: float = 0.0, phase: Phase = Phase.SERVING
    ) -> Instance:
        """A server at `path`, whose agent registers it and reports on it."""
        endpoint = Endpoint(
            path[-1],
            url=f"http://{path[-1]}:8000",
            agent=f"{path[-1]}:7070",
            models=kind.models,
            engine="sim",
            gpu=kind.gpu,
            weight=1.0 if kind.weight is None else kind.weight,
            price_usd_per_hour=kind.price_usd_per_hour,
            phase=phase,
            boot="0",
            capacity=kind.known,
        )
        instance = self.instances[path] = Instance(endpoint, kind.speed, self.loop, prefix_fraction)
        self.load.instances.append(path[-1])
        self.register(path[:-1], endpoint, 0.0)
        self._start_agent(path[:-1], instance)
        return instance

    def launch(self, path: Path, kind: Machine, loading_s: float, prefix_fraction: float = 0.0) -> Instance:
        """A new server while the world runs: registered at once, and it serves when it has loaded."""
        phase = Phase.LOADING if loading_s else Phase.SERVING
        instance = self.add_instance(path, kind, prefix_fraction, phase)
        self._load_then_serve(instance, path[:-1], loading_s)
        return instance

    def retire(self, path: Path, on_gone: Callable[[], None], look_s: float = 0.5) -> None:
        """A server takes no more requests, ends those on it, and goes; `on_gone` is called then."""
        instance = self.instances[path]
        instance.endpoint = replace(instance.endpoint, phase=Phase.DRAINING)
        self.register(path[:-1], instance.endpoint, self.network.told_s)

        def gone() -> None:
            if instance.on_it:
                self.loop.after(look_s, gone)
                return
            instance.alive = False
            self.deregister(path[:-1], path[-1], self.network.told_s)
            on_gone()

        # Balancers hear of it a moment later, and what they sent until then is still under way.
        self.loop.after(look_s, gone)

    def add_node(self, node: Node, pools: Iterable[Path], *, entry: bool = True) -> None:
        """A balancer process that knows these pools."""
        self.nodes[node.id] = node
        node.checker, node.watch = self.checker, self.watch
        for path in pools:
            self._knows.setdefault(path, []).append(node)
            node.update(self._pool(path))
        if entry:
            self.entries.append(node)

    def link(self, start: Path, end: Path, one_way_s: float) -> None:
        """How far it is from balancers of the node `start` to `end` and all below it."""
        self._links[start, end] = one_way_s

    # -- the network (node.Directory) --------------------------------------------------------------------------------

    def instance(self, path: Path) -> Instance:
        """The instance at a path."""
        return self.instances[path]

    def node(self, id_: str) -> Node:
        """The balancer process of that id."""
        return self.nodes[id_]

    def one_way_s(self, start: Path, end: Path) -> float:
        """Seconds from `start` to `end`: of the link that names the longest part of `end`."""
        if self._links:
            for depth in range(len(end), 0, -1):
                found = self._links.get((start, end[:depth]))
                if found is not None:
                    return found
        return self.network.one_way_s

    # -- membership --------------------------------------------------------------------------------------------------

    def register(self, parent: Path, endpoint: Endpoint, delay_s: float) -> None:
        """Membership has a new word on an endpoint, which balancers hear after `delay_s`."""
        self._members.setdefault(parent, {})[endpoint.id] = endpoint
        self._publish(parent, delay_s)

    def deregister(self, parent: Path, id_: str, delay_s: float) -> None:
        """It is gone from membership."""
        self._members.get(parent, {}).pop(id_, None)
        self._publish(parent, delay_s)

    def _pool(self, parent: Path) -> Pool:
        members = self._members.get(parent, {})
        return Pool(parent, tuple(members[id_] for id_ in sorted(members)), self._revision)

    def _publish(self, parent: Path, delay_s: float) -> None:
        self._revision += 1
        pool = self._pool(parent)
        for node in self._knows.get(parent, ()):
            self.loop.after(delay_s, node.update, pool)

    # -- load reports ------------------------------------------------------------------------------------------------

    def _start_agent(self, parent: Path, instance: Instance) -> None:
        look_s, report_s = self.network.look_s, self.network.report_s
        if look_s is None:
            return
        looked = [self.loop.now]

        def look() -> None:
            looked[0] = self.loop.now
            if instance.alive:
                instance.look()

        def report() -> None:
            if instance.alive:
                self._send(parent, instance.report(self.loop.now - looked[0]), self._knows.get(parent, ()))

        now = self.loop.now
        self.loop.every(look_s, look, first_s=now + self.rng.uniform(0.0, look_s))
        self.loop.every(report_s, report, first_s=now + self.rng.uniform(0.0, report_s))

    def start_quotes(self, node: Node, interval_s: float) -> None:
        """A balancer process quotes its node to those that know its parent, with the round trip they see."""
        parent, id_ = node.path[:-1], node.path[-1]

        def quote() -> None:
            for above in self._knows.get(parent, ()):
                way_s = self.one_way_s(above.path, node.path)
                self.loop.after(way_s, above.round_trip, node.path, 2.0 * way_s)
                self.loop.after(way_s, above.report, parent, replace(node.quote(id_), age_s=way_s))

        self.loop.every(interval_s, quote, first_s=self.loop.now + self.rng.uniform(0.0, interval_s))

    def _send(self, parent: Path, report: LoadReport, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.loop.after(self.network.report_delay_s, node.report, parent, report)

    def tell_of_replicas(self, parent: Path) -> None:
        """Each balancer of the pool `parent` knows of the others, as membership tells it."""
        nodes = list(self._knows[parent])
        for node in nodes:
            node.balancers[parent].replicas((other.id for other in nodes if other is not node), self.loop.now)

    def start_exchange(self, parent: Path, interval_s: float) -> None:
        """Replicas that balance the pool `parent` tell each other what each has under way and where prompts went."""
        delay_s, nodes = self.network.exchange_delay_s, self._knows[parent]

        def loads() -> None:
            for teller in nodes:
                sums = teller.balancers[parent].tell(self.loop.now)
                for node in nodes:
                    if node is not teller:
                        self.loop.after(delay_s, node.hear, parent, teller.id, sums)

        def prompts() -> None:
            for teller in nodes:
                told = teller.balancers[parent].tell_prompts(self.loop.now)
                for node in nodes if told[1] else ():
                    if node is not teller:
                        self.loop.after(delay_s, node.hear_prompts, parent, teller.id, told)

        for every_s, tell in ((interval_s, loads), (max(interval_s, TELL_S), prompts)):
            self.loop.every(every_s, tell, first_s=self.loop.now + every_s)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def inflict(self, fault: Fault, parent: Path = CLUSTER, kinds: Mapping[str, Machine] | None = None) -> None:
        """Have a fault happen at its time. `kinds`: what a server that joins is, by GPU class."""
        self.loop.at(fault.at_s, self._inflict, fault, parent, kinds or {})

    def _inflict(self, fault: Fault, parent: Path, kinds: Mapping[str, Machine]) -> None:
        if fault.kind == "join":
            kind = kinds.get(fault.target) or machine(fault.target)
            self.launch((*parent, f"{fault.target}-new{self._joined}"), kind, fault.value)
            self._joined += 1
            return
        instance = self.instances.get((*parent, fault.target))
        if instance is None:
            there = ", ".join(sorted(path[-1] for path in self.instances if path[:-1] == parent)[:8])
            raise ValueError(f"fault {fault.kind}: there is no instance {fault.target}, but {there}, …")
        if fault.kind == "slow":
            instance.runs_at(fault.value)
        elif fault.kind == "drain":
            instance.endpoint = replace(instance.endpoint, phase=Phase.DRAINING)
            self.register(parent, instance.endpoint, self.network.told_s)
        elif fault.kind == "die" and instance.alive:
            instance.die()
            self.loop.after(self.network.gone_s, self._expired, parent, instance, instance.boots)
        elif fault.kind == "return" and not instance.alive:
            instance.endpoint = replace(instance.endpoint, boot=str(instance.boots))
            self._load_then_serve(instance, parent, fault.value)

    def _expired(self, parent: Path, instance: Instance, boots: int) -> None:
        if not instance.alive and instance.boots == boots and instance.endpoint.boot != str(boots):
            self.deregister(parent, instance.endpoint.id, self.network.told_s)

    def back(self, parent: Path, instance: Instance) -> None:
        """A server that died serves again, as another process."""
        instance.endpoint = replace(instance.endpoint, boot=str(instance.boots))
        self._load_then_serve(instance, parent, 0.0)

    def _load_then_serve(self, instance: Instance, parent: Path, loading_s: float) -> None:
        """It registers as loading, takes nothing meanwhile, and then serves."""
        instance.alive = loading_s <= 0.0
        if loading_s > 0.0:
            instance.endpoint = replace(instance.endpoint, phase=Phase.LOADING)
            self.register(parent, instance.endpoint, self.network.told_s)
            self.loop.after(loading_s, self._load_then_serve, instance, parent, 0.0)
            return
        instance.endpoint = replace(instance.endpoint, phase=Phase.SERVING)
        self.register(parent, instance.endpoint, self.network.told_s)

    # -- traffic -----------------------------------------------------------------------------------------------------

    def run(self, rows: Sequence[TraceRow], slo: Slo | None = None, sample_s: float = 0.5) -> RunRecord:
        """Send `rows` at their times, each asking for `slo`, until the last one has ended. Raises CheckFailed."""
        self._rows, self._slo = rows, slo or Slo()
        self.loop.every(sample_s, self._sample, first_s=self.loop.now + sample_s)
        if rows:
            self.loop.at(max(rows[0].arrival_s, self.loop.now), self._arrive)
        checker = self.checker
        while self._open or self._next < len(rows):
            assert self.loop.step(), "nothing is left to happen, and requests wait"
            if checker is not None and self.loop.events % CHECK_ENGINES_EVERY == 0:
                checker.engines(self.instances.values())
        if checker is not None:
            checker.over(self.nodes.values(), self.instances.values(), self.records)
        return self._written()

    def _arrive(self) -> None:
        row = self._rows[self._next]
        node = self.entries[self._next % len(self.entries)] if self.enters is None else self.enters(self._next, row)
        start = node.path if self.enters is None else ()
        record = Record(self._next, self.loop.now, row.input_tokens, row.output_tokens, node=node.id)
        self._next += 1
        self._open += 1
        self.records.append(record)
        if self._next < len(self._rows):
            self.loop.at(max(self._rows[self._next].arrival_s, self.loop.now), self._arrive)
        node.serve(Call(row, record, self._slo), Client(record, self.loop, self._ended), start)

    def _ended(self, record: Record) -> None:
        self._open -= 1
        if self.checker is not None:
            self.checker.ended(record)

    def _sample(self) -> None:
        """Write the load down. What drains after the last arrival is none."""
        if self._next >= len(self._rows):
            return
        load = self.load
        in_flight: list[int | None] = []
        occupancy: list[float | None] = []
        work_s: list[float | None] = []
        busy = alive = 0
        for instance in self.instances.values():
            if not instance.alive:
                in_flight.append(None)
                occupancy.append(None)
                work_s.append(None)
                continue
            instance.catch_up()
            alive += 1
            busy += instance.in_flight > 0
            in_flight.append(instance.in_flight)
            occupancy.append(instance.in_flight / instance.engine.slots)
            work_s.append(instance.work_s)
        load.times_s.append(self.loop.now)
        load.in_flight.append(in_flight)
        load.occupancy.append(occupancy)
        load.work_s.append(work_s)
        load.busy.append(busy / alive if alive else 0.0)

    def _written(self) -> RunRecord:
        watch, engines = self.watch, [instance.engine for instance in self.instances.values()]
        return RunRecord(
            self.seed,
            self.records,
            self.load,
            watch.decision_s if watch is not None else [],
            watch.learning_s if watch is not None else [],
            self.loop.events,
            self.loop.now,
            sum(engine.prefix_queries for engine in engines),
            sum(engine.prefix_hits for engine in engines),
        )


def cluster(setup: Setup, seed: int = 0, clock: Callable[[], float] | None = None, *, checked: bool = True) -> World:
    """A world of one cluster. `clock` (host seconds) times the policy; nothing else does with it."""
    world = World(seed, setup.network, checked=checked)
    world.watch = StopWatch(clock) if clock is not None else None
    for id_, kind in singles(setup.fleet):
        world.add_instance((*CLUSTER, id_), kind, setup.prefix_fraction)
    for number in range(setup.replicas):
        rng = Random(f"{seed}/balancer/{number}")
        node = Node(
            f"balancer-{number}",
            CLUSTER,
            world.loop,
            world,
            setup.policy,
            setup.lengths(Random(f"{seed}/lengths/{number}")),
            rng,
            setup.limits,
            setup.attempts,
            prefixes=setup.prefix_fraction > 0.0,
        )
        world.add_node(node, (CLUSTER,))
    world.tell_of_replicas(CLUSTER)
    if setup.network.exchange_s is not None and setup.replicas > 1:
        world.start_exchange(CLUSTER, setup.network.exchange_s)
    kinds = {kind.gpu: kind for kind in setup.fleet}
    for fault in setup.faults:
        world.inflict(fault, CLUSTER, kinds)
    return world


def simulate(
    setup: Setup,
    rows: Sequence[TraceRow],
    seed: int = 0,
    clock: Callable[[], float] | None = None,
    *,
    checked: bool = True,
) -> RunRecord:
    """One run of a world of one cluster. Raises CheckFailed, with seed and time, where something broke."""
    return cluster(setup, seed, clock, checked=checked).run(rows, setup.slo, setup.sample_s)
