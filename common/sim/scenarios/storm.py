"""Everything at once, drawn from a seed: what the checkers must hold through. The same seed is the same storm.

Source: simulation testing with seeded faults, as TigerBeetle's VOPR does.
"""

from __future__ import annotations

from random import Random

from common.policy.candidate import Limits
from common.sim.faults import Burst, Fault, compressed
from common.sim.fleet import Machine, machine, singles
from common.sim.lengths import lengths_named
from common.sim.records import RunRecord
from common.sim.scenarios.recovery import PolicyOf
from common.sim.scenarios.traffic import at_load
from common.sim.world import Network, Setup, simulate
from common.types import Slo

GPUS = ("h100", "a100", "l4", "t4")
LASTS_S = 90.0


def storm(policy: PolicyOf, seed: int) -> RunRecord:
    """A random fleet, network and load, and servers that die, return, slow down, join and drain. Raises CheckFailed."""
    rng = Random(f"{seed}/storm")
    fleet: tuple[Machine, ...] = tuple(machine(gpu, rng.randint(1, 3)) for gpu in rng.sample(GPUS, rng.randint(1, 4)))
    strong, traffic = at_load(fleet, rng.uniform(0.2, 1.4), LASTS_S, seed)
    setup = Setup(
        strong,
        policy,
        lengths_named(rng.choice(["learned", "oracle", "noise:1"])),
        Slo(2.0, 0.1) if rng.random() < 0.5 else Slo(),
        rng.randint(1, 3),
        _network(rng),
        Limits(max_in_flight=rng.choice([4, 64, 1024])),
        rng.randint(1, 3),
        rng.choice([0.0, 0.9]),
        _faults(rng, [id_ for id_, _ in singles(fleet)]),
    )
    bursts = [Burst(rng.uniform(5.0, 60.0), rng.uniform(2.0, 10.0), rng.uniform(1.0, 5.0))] * rng.randint(0, 1)
    return simulate(setup, compressed(traffic, bursts), seed)


def _network(rng: Random) -> Network:
    return Network(
        one_way_s=rng.choice([0.0, 0.001, 0.05]),
        look_s=rng.choice([None, 0.2, 1.0, 5.0]),
        report_s=rng.choice([0.05, 0.2, 1.0]),
        report_delay_s=rng.choice([0.0, 0.005, 0.5]),
        gone_s=rng.choice([0.1, 5.0, 30.0]),
        exchange_s=rng.choice([None, 0.05, 1.0]),
    )


def _faults(rng: Random, ids: list[str]) -> tuple[Fault, ...]:
    faults = []
    for _ in range(rng.randint(0, 6)):
        at_s, target = rng.uniform(1.0, LASTS_S - 1.0), rng.choice(ids)
        kind = rng.choice(["die", "blink", "slow", "join", "drain"])
        if kind == "slow":
            faults.append(Fault("slow", at_s, target, rng.uniform(0.1, 2.0)))
        elif kind == "join":
            faults.append(Fault("join", at_s, rng.choice(GPUS), rng.choice([0.0, 10.0])))
        elif kind == "drain":
            faults.append(Fault("drain", at_s, target))
        else:
            faults.append(Fault("die", at_s, target))
            if kind == "blink":
                faults.append(Fault("return", at_s + rng.uniform(0.01, 20.0), target, rng.choice([0.0, 5.0])))
    return tuple(faults)
