"""A cluster whose size changes while it serves: the production decision, or one to compare it with, in virtual time.

Every interval the scaler is shown what a tier would tell it (arrivals, what is under way, who serves), and
what it desires is carried out: a new server registers at once, loads for its cold start and then serves; one that is
given up takes no more requests, ends those it has, and goes. GPU time is counted from when a server is asked for until
it is gone, loading included, since that is what is paid for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from common.policy.prediction import class_speed
from common.policy.scaling.demand import Counts, group_seen
from common.policy.scaling.desired import Decision, DesiredReplicas, Group, Rules, Seen
from common.sim.fleet import Machine
from common.sim.world import CLUSTER, World
from common.types import Endpoint, Path, Speed


@dataclass(frozen=True, slots=True)
class Scalable:
    """A group of like servers in the world. `kind.count` is ignored; `start` of them are there from the beginning."""

    name: str
    kind: Machine
    cold_start_s: float = 20.0
    least: int = 1
    most: int = 100
    start: int = 1

    def has(self, endpoint: Endpoint) -> bool:
        """Whether a server is one of these."""
        return endpoint.gpu == self.kind.gpu


class Scaler(Protocol):
    """Says how many servers of each group there should be."""

    def desired(self, seen: Seen, now: float) -> Mapping[str, int]:
        """Called once an interval, from the beginning of the run."""


class Predicted:
    """The production decision."""

    def __init__(self, groups: Sequence[Scalable], rules: Rules) -> None:
        self.policy = DesiredReplicas(
            [Group(g.name, g.kind.price_usd_per_hour, g.least, g.most, g.cold_start_s) for g in groups], rules
        )
        self.decisions: list[tuple[float, Decision]] = []

    def desired(self, seen: Seen, now: float) -> Mapping[str, int]:
        """See Scaler."""
        decision = self.policy.decide(seen, now)
        self.decisions.append((now, decision))
        return decision.desired


class Threshold:
    """Kubernetes' HPA on requests under way for each replica: ceil(current · metric ÷ target), synced now and then.

    The defaults are those of kube-controller-manager: 15 s between two decisions, a tolerance of a tenth, and the
    largest answer of the last `stabilization_s` counts when it would shrink. All of it in one group.
    """

    def __init__(self, group: Scalable, target: float, *, sync_s: float = 15.0, stabilization_s: float = 300.0) -> None:
        self._group = group
        self._target = target
        self._sync_s = sync_s
        self._stabilization_s = stabilization_s
        self._due = 0.0
        self._desired = group.start
        self._answers: deque[tuple[float, int]] = deque()

    def desired(self, seen: Seen, now: float) -> Mapping[str, int]:
        """See Scaler."""
        group = seen.groups[self._group.name]
        if now >= self._due and group.serving:
            self._due = now + self._sync_s
            metric = group.requests / group.serving  # replicas that are not ready count for nothing
            ratio = metric / self._target
            answer = self._desired if abs(ratio - 1.0) <= 0.1 else ceil(group.serving * ratio)
            self._answers.append((now, min(max(answer, self._group.least), self._group.most)))
            while self._answers[0][0] < now - self._stabilization_s:
                self._answers.popleft()
            newest = self._answers[-1][1]
            self._desired = max(newest, min(self._desired, max(n for _, n in self._answers)))
        return {self._group.name: self._desired}


class Fixed:
    """A fleet that stays as it is."""

    def __init__(self, groups: Sequence[Scalable]) -> None:
        self._there = {g.name: g.start for g in groups}

    def desired(self, seen: Seen, now: float) -> Mapping[str, int]:
        """See Scaler."""
        return self._there


@dataclass(slots=True)
class Replica:
    """One server's life, in virtual seconds."""

    path: Path
    asked_s: float
    gone_s: float | None = None
    leaving: bool = False


@dataclass(slots=True)
class Ledger:
    """What was there, and what it costs."""

    replicas: dict[str, list[Replica]] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)
    counts: list[tuple[float, int, int]] = field(default_factory=list)  # (when, asked for, serving), once an interval

    def gpu_s(self, start_s: float, end_s: float) -> dict[str, float]:
        """Seconds by group that servers were there between two moments."""
        return {
            name: sum(
                max(0.0, min(r.gone_s if r.gone_s is not None else end_s, end_s) - max(r.asked_s, start_s)) for r in rs
            )
            for name, rs in self.replicas.items()
        }

    def cost_usd(self, start_s: float, end_s: float) -> float:
        """What they cost."""
        return sum(s / 3600.0 * self.prices[name] for name, s in self.gpu_s(start_s, end_s).items())


class Scaling:
    """Runs a scaler in a world that has balancers and no servers yet."""

    def __init__(
        self,
        world: World,
        groups: Sequence[Scalable],
        scaler: Scaler,
        interval_s: float = 1.0,
        *,
        parent: Path = CLUSTER,
        clock_s: float = 0.0,
    ) -> None:
        """`clock_s`: what the scaler's clock says when the world's says 0; a season's phases are counted by it."""
        self.world = world
        self.groups = {g.name: g for g in groups}
        self.scaler = scaler
        self.ledger = Ledger(prices={g.name: g.kind.price_usd_per_hour for g in groups})
        self._parent = parent
        self._clock_s = clock_s
        self._number = 0
        self._counted = 0
        for group in groups:
            self.ledger.replicas[group.name] = []
            for _ in range(group.start):
                self._launch(group, 0.0)
        world.loop.every(interval_s, self._decide, first_s=interval_s)

    def _launch(self, group: Scalable, loading_s: float) -> None:
        path = (*self._parent, f"{group.kind.gpu or 'gpu'}-{self._number}")
        self._number += 1
        self.world.launch(path, group.kind, loading_s)
        self.ledger.replicas[group.name].append(Replica(path, self.world.loop.now))

    def _decide(self) -> None:
        now = self.world.loop.now
        desired = self.scaler.desired(self._seen(), now + self._clock_s)
        asked = serving = 0
        for name, group in self.groups.items():
            there = [r for r in self.ledger.replicas[name] if r.gone_s is None and not r.leaving]
            for _ in range(desired.get(name, 0) - len(there)):
                self._launch(group, group.cold_start_s)
            for replica in self._least_busy(there)[: max(0, len(there) - desired.get(name, 0))]:
                self._retire(replica)
            asked += desired.get(name, 0)
            serving += sum(self.world.instances[r.path].serving for r in there)
        self.ledger.counts.append((now, asked, serving))

    def _least_busy(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Those that are easiest to give up first: still loading, then with least on them."""
        instances = self.world.instances
        return sorted(replicas, key=lambda r: (instances[r.path].serving, instances[r.path].in_flight, r.path))

    def _retire(self, replica: Replica) -> None:
        replica.leaving = True

        def gone() -> None:
            replica.gone_s = self.world.loop.now

        self.world.retire(replica.path, gone)

    def _seen(self) -> Seen:
        """What a balancer of the cluster knows; with several, what they tell each other must have reached it."""
        counts = Counts()
        for record in self.world.records[self._counted :]:
            counts.add(record.input_tokens, record.expected_tokens)
        self._counted = len(self.world.records)
        balancer = next(iter(self.world.nodes.values())).balancers[self._parent]
        groups = {name: group_seen(balancer, group.has, _prior(group.kind)) for name, group in self.groups.items()}
        return Seen(groups, counts.requests, counts.input_tokens, counts.output_tokens)


def _prior(kind: Machine) -> Speed:
    return kind.known or class_speed(kind.gpu)
