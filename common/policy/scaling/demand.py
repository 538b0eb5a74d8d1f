"""What is asked of a model and what is under way on its servers, as a cluster's balancer knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.policy.balancer import Balancer
from common.policy.candidate import Candidate
from common.policy.health import State
from common.policy.server import Server, Sums
from common.types import Endpoint, Phase, ServerLoad, Speed

NO_SUMS: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class Counts:
    """Requests for one model so far, and their tokens; those of the answers as predicted when they came."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0

    def add(self, input_tokens: float, output_tokens: float) -> None:
        """One more came."""
        self.requests += 1.0
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """What is there of a group of like replicas now."""

    speed: Speed  # as learned of late, or the prior of its class
    serving: int = 0
    loading: int = 0
    sums: Sums = NO_SUMS  # what is under way on all of it: n, w, P, K, R as in `policy.server`

    @property
    def requests(self) -> float:
        """Under way on all of it."""
        return self.sums[0] + self.sums[1]


def group_seen(balancer: Balancer, belongs: Callable[[Endpoint], bool], prior: Speed) -> GroupSeen:
    """The instances of a cluster's pool that belong to a group, what other balancers sent there included. O(instances).

    One whose breaker is open bears nothing, so it counts as neither serving nor loading.
    """
    found = [c for c in balancer.candidates.values() if belongs(c.endpoint)]
    well = [c for c in found if c.breaker.state is not State.OPEN]
    return GroupSeen(
        _best_known(found, prior),
        sum(c.phase is Phase.SERVING for c in well),
        sum(c.phase is Phase.LOADING for c in well),
        _summed(c.server for c in found),
    )


def _best_known(candidates: list[Candidate], prior: Speed) -> Speed:
    """The speed of the one that has taught most."""
    best = max(candidates, key=lambda c: c.estimates[0].samples, default=None)
    return best.server.speed if best is not None else prior


def _summed(servers: Iterable[Server]) -> Sums:
    n = w = p = k = r = 0.0
    for server in servers:
        copies = server.copies
        n, w, p = n + copies * server.n, w + copies * server.w, p + copies * server.p
        k, r = k + copies * server.k, r + copies * server.r
    return n, w, p, k, r


def backlog_s(speed: Speed, servers: int, sums: Sums) -> float:
    """GPU seconds of all that is under way on so many like servers, as `server.Costs` counts them."""
    count = max(1, servers)
    n, w, p, k, r = (x / count for x in sums)
    load = ServerLoad(speed, decoding=n, waiting=w, prompt_tokens=p, context_tokens=k, remaining_tokens=r)
    return Server.of(load, 0.0).costs().backlog_s * count
