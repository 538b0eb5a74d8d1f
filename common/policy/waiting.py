"""Who waits when nobody can take a request, who goes first, and who is refused at once.

Order: priority class, then between tenants whoever has been served fewest tokens for its share, then the earliest
deadline. A class is no wall: a request that has waited AGEING_S counts as one class higher, so nothing starves. What
could not be answered before its deadline by the rate at which the room has emptied of late is refused on arrival.

Source: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96) over token counts, as in VTC (arXiv 2401.00588).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from common.policy.ewma import DecayingSum
from common.types import Priority, Shed

AGEING_S = 10.0
RATE_S = 10.0  # the rate at which the room empties is taken over so long
OUTPUT_WEIGHT = 2.0  # an output token is worth two of input, as most price lists have it


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the room: requests and tokens in it, and seconds in it."""

    max_requests: int = 1000
    max_tokens: int = 4_000_000
    timeout_s: float = 30.0


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits. `tokens` is what it will cost; `deadline` is monotonic seconds, inf: none.

    `reason`: what it waits for to pass, as in `Shed`.
    """

    model: str
    tenant: str
    priority: Priority
    tokens: float
    arrived: float
    deadline: float = inf
    reason: str = "saturated"
    gone: bool = False


Key = tuple[Priority, str, str]


def _key(waiter: Waiter) -> Key:
    return waiter.priority, waiter.tenant, waiter.model


class WaitingRoom:
    """Bounded; O(log n) to enter, O(tenants and models in it) to find who is next."""

    __slots__ = ("_left", "_queues", "_served", "_shares", "bounds", "requests", "tokens")

    def __init__(self, bounds: Bounds, shares: Mapping[str, float] | None = None) -> None:
        self.bounds = bounds
        self._shares = shares or {}
        self._queues: dict[Key, list[tuple[float, float, int, Waiter]]] = {}
        self._served: dict[str, float] = {}  # tenant -> tokens served, over its share; only of those in the room
        self._left = DecayingSum(RATE_S)  # tokens that left for a server of late
        self.requests = 0
        self.tokens = 0.0

    def enter(self, waiter: Waiter, now: float) -> Shed | Waiter | None:
        """Take a request in: None. Or refuse it (Shed), or take it in another's place, who is returned and refused."""
        wait = self.expected_wait_s(now)
        if waiter.deadline < now + wait:
            return Shed("deadline_exceeded", wait)
        evicted = None
        if self.requests >= self.bounds.max_requests or self.tokens + waiter.tokens > self.bounds.max_tokens:
            evicted = self._worst(now)
            if evicted is None or evicted.priority <= waiter.priority or evicted.tokens < waiter.tokens - self._room():
                return Shed("saturated", max(1.0, wait))
            self.leave(evicted)
        self._admit(waiter)
        return evicted

    def _room(self) -> float:
        return self.bounds.max_tokens - self.tokens

    def _admit(self, waiter: Waiter) -> None:
        tenant = waiter.tenant
        if tenant not in self._served:
            # One that comes back has not saved up while it was away.
            self._served[tenant] = min(self._served.values(), default=0.0)
        queue = self._queues.setdefault(_key(waiter), [])
        heappush(queue, (waiter.deadline, waiter.arrived, id(waiter), waiter))
        self.requests += 1
        self.tokens += waiter.tokens

    def leave(self, waiter: Waiter) -> None:
        """Its client is gone, or it was refused; once is enough."""
        if waiter.gone:
            return
        waiter.gone = True
        self.requests -= 1
        self.tokens -= waiter.tokens
        self._sweep(_key(waiter))

    def took(self, waiter: Waiter, now: float) -> None:
        """It was sent to a server."""
        self._left.add(waiter.tokens, now)
        self._served[waiter.tenant] += waiter.tokens / self._shares.get(waiter.tenant, 1.0)
        self.leave(waiter)

    def in_order(self, now: float) -> list[Waiter]:
        """The first of each class, tenant and model, the one to go first in front.

        Where that one has to stay because nobody can take its model, the first of another model may go.
        """
        heads = [queue[0][3] for key in list(self._queues) if (queue := self._sweep(key))]
        return sorted(heads, key=lambda w: self._rank(w, now))

    def _rank(self, w: Waiter, now: float) -> tuple[float, float, float, float]:
        aged = w.priority - int((now - w.arrived) / AGEING_S)
        return max(aged, 0), self._served[w.tenant], w.deadline, w.arrived

    def expired(self, now: float) -> list[Waiter]:
        """Those whose deadline or time in the room is over; they have left it."""
        over = [
            w
            for queue in self._queues.values()
            for _, _, _, w in queue
            if not w.gone and (w.deadline <= now or now - w.arrived >= self.bounds.timeout_s)
        ]
        for waiter in over:
            self.leave(waiter)
        return over

    def expected_wait_s(self, now: float) -> float:
        """Seconds until what is in the room has left it, at the rate of late; 0 while none has left yet."""
        rate = self._left.value_at(now) / RATE_S
        return self.tokens / rate if rate > 0.0 else 0.0

    def _worst(self, now: float) -> Waiter | None:
        waiting = [w for queue in self._queues.values() for _, _, _, w in queue if not w.gone]
        return max(waiting, key=lambda w: self._rank(w, now), default=None)

    def _sweep(self, key: Key) -> list[tuple[float, float, int, Waiter]]:
        """A queue without those at its head who have left; forgotten when it is empty."""
        queue = self._queues.get(key, [])
        while queue and queue[0][3].gone:
            heappop(queue)
        if len(queue) > 2 * self.requests + 16:  # the gone behind the head must not pile up
            queue[:] = [entry for entry in queue if not entry[3].gone]
            heapify(queue)
        if not queue:
            self._queues.pop(key, None)
            if not any(tenant == key[1] for _, tenant, _ in self._queues):
                self._served.pop(key[1], None)
        return queue


def cost_tokens(input_tokens: float, output_tokens: float) -> float:
    """What a request weighs in the room, in input tokens."""
    return input_tokens + OUTPUT_WEIGHT * output_tokens
