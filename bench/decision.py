"""Measures what one decision costs: pick, first token and release, with learning, prefix match and reservations.

    python bench/decision.py                    16, 64, 256 and 1,000 instances
    python bench/decision.py --requests 20000

The pool is mixed (four GPU classes) and busy, four requests an instance; half of the requests continue a conversation
whose earlier turns are in some instance's prefix cache. Times are CPU time of this process, in microseconds, the
interpreter's garbage collection included, as a tier has it.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from random import Random

from rich.console import Console
from rich.table import Table

from common.policy import balancer
from common.policy.balancer import Balancer
from common.policy.prefix import PREFIX_BLOCK_TOKENS
from common.policy.stages import predicted_completion
from common.tier import spare_the_collector
from common.types import Endpoint, InferenceRequest, Outcome, Pick, Pool, Reservation

GPUS = ("h100", "a100", "l4", "t4")
PARENT = ("region", "cluster")
BUSY = 4  # requests under way an instance
TURN_BLOCKS = 4  # prompt blocks a turn of a conversation adds
MOST_BLOCKS = 32
CONVERSATIONS = 2000


def instances(count: int) -> Pool:
    """A mixed pool."""
    made = (
        Endpoint(id=f"i{k:04d}", url=f"http://127.0.0.1:{k + 1}", gpu=GPUS[k % 4], models=frozenset({"m"}))
        for k in range(count)
    )
    return Pool(PARENT, tuple(made))


class Traffic:
    """Requests of a mean conversation trace, half of them the next turn of one that is going on."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._blocks: deque[tuple[int, ...]] = deque(maxlen=CONVERSATIONS)
        self._made = 0

    def request(self) -> InferenceRequest:
        """The next one."""
        rng = self._rng
        before: tuple[int, ...] = ()
        if self._blocks and rng.random() < 0.5:
            before = self._blocks[rng.randrange(len(self._blocks))]
        blocks = (*before, *(rng.getrandbits(63) for _ in range(rng.randint(1, TURN_BLOCKS))))
        self._blocks.append(blocks if len(blocks) < MOST_BLOCKS else ())
        self._made += 1
        return InferenceRequest(
            f"{self._made:032x}",
            "m",
            "openai",
            True,
            PREFIX_BLOCK_TOKENS * len(blocks),
            None,
            rng.uniform(20.0, 400.0),
            blocks,
        )


def measure(count: int, requests: int, seed: int) -> list[tuple[float, float]]:
    """(seconds of the pick, seconds of the pick and of what follows it) of each of so many requests."""
    rng = Random(seed)
    chooser, traffic = Balancer(PARENT, predicted_completion()), Traffic(rng)
    chooser.update(instances(count), 0.0)
    under_way: deque[Reservation] = deque()
    now, times, clock = 0.0, [], time.process_time_ns
    for _ in range(count * BUSY + requests):
        now += 0.2 / count
        request = traffic.request()
        started = clock()
        decision = chooser.pick(request, now, rng)
        picked = clock()
        assert isinstance(decision, Pick)
        chooser.first_token(decision.reservation, now)
        under_way.append(decision.reservation)
        if len(under_way) > count * BUSY:
            chooser.release(under_way.popleft(), Outcome.SUCCESS, now, output_tokens=100.0)
            times.append(((picked - started) / 1e9, (clock() - started) / 1e9))
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="16,64,256,1000", help="sizes of the pool, with commas")
    parser.add_argument("--requests", type=int, default=5000, help="measured for each size")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    spare_the_collector()
    title = "CPU time of a decision, µs" + ("" if balancer.__file__.endswith(".py") else " (compiled)")
    table = Table(title=title)
    for name in ("instances", "pick p50", "pick p99", "with release p50", "with release p99"):
        table.add_column(name, justify="right")
    for count in (int(n) for n in options.instances.split(",")):
        times = measure(count, options.requests, options.seed)
        row = [str(count)]
        for column in zip(*times, strict=True):
            ordered = sorted(column)
            row += [f"{ordered[len(ordered) // 2] * 1e6:.0f}", f"{ordered[len(ordered) * 99 // 100] * 1e6:.0f}"]
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
