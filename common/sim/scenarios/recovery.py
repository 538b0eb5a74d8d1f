"""How soon a policy is itself again: after servers slow down, after a burst, and when a server is new.

Steady states are not guessed: a second world, with the same requests, has been in the new state from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from common.policy.balancer import Policy
from common.sim.faults import Burst, Fault, compressed
from common.sim.fleet import FLEETS, Machine
from common.sim.records import Record, RunRecord
from common.sim.scenarios.traffic import at_load
from common.sim.traces import TraceRow
from common.sim.world import CLUSTER, Setup, World, cluster, simulate
from common.types import Path, Slo

PolicyOf = Callable[[Path], Policy]

SETTLED_S = 120.0  # by then queues are as long as they get, and every server has been learned


@dataclass(frozen=True, slots=True)
class Recovery:
    """What requests took that arrived so long after a change, against a world that was never different."""

    mean_e2e_s: float
    steady_e2e_s: float

    @property
    def ratio(self) -> float:
        """1.0: nothing is left of the change."""
        return self.mean_e2e_s / self.steady_e2e_s


def slowed(
    policy: PolicyOf,
    seed: int,
    *,
    factor: float = 0.5,
    targets: tuple[str, ...] = ("a100-0", "a100-1"),
    load: float = 0.7,
    after_s: float = 30.0,
    for_s: float = 30.0,
    slo: Slo | None = None,
    rows: Sequence[TraceRow] | None = None,
) -> Recovery:
    """Two servers drop to `factor` of their speed; measured from `after_s` to `after_s + for_s` seconds later."""
    end_s = SETTLED_S + after_s + for_s
    fleet, traffic = at_load(FLEETS["mixed16"], load, end_s + 10.0, seed, rows)
    setup = Setup(fleet, policy, slo=slo or Slo())
    faults = tuple(Fault("slow", SETTLED_S, target, factor) for target in targets)
    changed = simulate(replace(setup, faults=faults), traffic, seed)
    always = _always_slow(setup, seed, targets, factor).run(traffic, setup.slo)
    begin_s = SETTLED_S + after_s
    return Recovery(_mean_e2e(changed, begin_s, end_s), _mean_e2e(always, begin_s, end_s))


def _always_slow(setup: Setup, seed: int, targets: Sequence[str], factor: float) -> World:
    world = cluster(setup, seed)
    for target in targets:
        world.instances[(*CLUSTER, target)].runs_at(factor)
    return world


def _mean_e2e(run: RunRecord, begin_s: float, end_s: float) -> float:
    return fmean(r.e2e_s for r in run.records if r.e2e_s is not None and begin_s <= r.at_s < end_s)


@dataclass(frozen=True, slots=True)
class Spreading:
    """Distance (total variation, 0…1) of the shares of GPU classes from those of a steady state at the new rate."""

    pieces: tuple[float, ...]  # in the first five seconds of the burst, the next five, …
    noise: float  # of five seconds of the steady state itself, in the mean

    @property
    def within_5_s(self) -> float:
        """From five to ten seconds after the burst began."""
        return self.pieces[1]


PIECE_S = 5.0


def burst(
    policy: PolicyOf,
    seed: int,
    *,
    factor: float = 5.0,
    load: float = 0.17,
    slo: Slo | None = None,
    rows: Sequence[TraceRow] | None = None,
) -> Spreading:
    """Arrivals come `factor` times as fast from one moment on, for half a minute; load is that before it."""
    lasts_s, high_s = 6 * PIECE_S, SETTLED_S
    seconds = SETTLED_S + lasts_s * factor
    fleet, traffic = at_load(FLEETS["mixed16"], load, seconds, seed, rows)
    setup = Setup(fleet, policy, slo=slo or Slo())
    bursty = simulate(setup, compressed(traffic, [Burst(SETTLED_S, factor, lasts_s)]), seed)
    calm_fleet, calm_traffic = at_load(FLEETS["mixed16"], load * factor, high_s, seed, rows)
    calm = simulate(replace(setup, fleet=calm_fleet), calm_traffic, seed)
    steady = _shares([r for r in calm.records if r.at_s >= high_s / 2])
    pieces = [_between(bursty.records, SETTLED_S + i * PIECE_S, PIECE_S) for i in range(6)]
    calm_pieces = [_between(calm.records, high_s / 2 + i * PIECE_S, PIECE_S) for i in range(int(high_s / 2 / PIECE_S))]
    return Spreading(
        tuple(distance(_shares(piece), steady) for piece in pieces),
        fmean(distance(_shares(piece), steady) for piece in calm_pieces),
    )


def _between(records: Sequence[Record], begin_s: float, for_s: float) -> list[Record]:
    return [record for record in records if begin_s <= record.at_s < begin_s + for_s]


def _shares(records: Sequence[Record]) -> dict[str, float]:
    counts = Counter(record.instance.partition("-")[0] for record in records)
    return {gpu: count / len(records) for gpu, count in counts.items()}


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Total variation distance of two distributions, 0…1."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a new server was sent in each second of its first minute, in fair shares (1.0: by its capacity)."""

    fair_shares: tuple[float, ...]
    requests: tuple[int, ...]  # the same, counted
    first_minute: float  # the mean over all of it

    @property
    def worst(self) -> float:
        """The most in any one second, beyond the one request by which a whole number of them may be off."""
        return max(
            share * (count - 1) / count if count else 0.0
            for share, count in zip(self.fair_shares, self.requests, strict=True)
        )


def fresh(
    policy: PolicyOf,
    seed: int,
    *,
    load: float = 0.85,
    gpu: str = "a100",
    loading_s: float = 0.0,
    restarted: bool = False,
    slo: Slo | None = None,
    rows: Sequence[TraceRow] | None = None,
) -> Welcome:
    """A server joins a busy pool, or (`restarted`) one of them comes back empty after half a minute; honestly idle."""
    joins_s, seconds = SETTLED_S, SETTLED_S + 61.0
    fleet, traffic = at_load(FLEETS["mixed16"], load, seconds, seed, rows)
    target = f"{gpu}-0" if restarted else f"{gpu}-new0"
    faults: tuple[Fault, ...] = (Fault("join", joins_s, gpu, loading_s),)
    if restarted:
        faults = (Fault("die", joins_s - 30.0, target), Fault("return", joins_s, target, loading_s))
    run = simulate(Setup(fleet, policy, slo=slo or Slo(), faults=faults), traffic, seed)
    share = _fair_share(fleet, gpu, joined=not restarted)
    shares, counts = [], []
    for second in range(60):
        arrived = _between(run.records, joins_s + loading_s + second, 1.0)
        sent = sum(record.instance == target for record in arrived)
        shares.append(sent / (share * len(arrived)) if arrived else 0.0)
        counts.append(sent)
    total = len(_between(run.records, joins_s + loading_s, 60.0))
    return Welcome(tuple(shares), tuple(counts), sum(counts) / (share * total))


def _fair_share(fleet: Sequence[Machine], gpu: str, *, joined: bool) -> float:
    """Of one server of that class, by capacity."""
    weights = {kind.gpu: kind.weight or 0.0 for kind in fleet}
    total = sum(kind.count * weights[kind.gpu] for kind in fleet) + (weights[gpu] if joined else 0.0)
    return weights[gpu] / total
