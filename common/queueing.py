"""The waiting room at work: requests that nobody can take wait here and not in a server's unbounded queue.

Only the tier that a request entered by holds it; the ones below refuse, so that a sibling may be tried. Whenever
something changes (an answer ended, a server came up, a report came in) those in front try again, in one synchronous
step each, so that nobody is overtaken and a place that is free is taken once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from math import inf

from common import clock
from common.errors import DeadlineExceeded, LBError, Loading, NoEndpoints, Saturated
from common.policy.stages import Route
from common.policy.waiting import Bounds, Waiter, WaitingRoom, cost_tokens
from common.types import InferenceRequest, Shed

RETRY_S = 0.05  # what changes with time alone (a server's pause is over) is noticed this soon
WAITABLE = ("saturated", "loading")  # what time may mend

Attempt = Callable[[], Route | Shed]


class Queue:
    """The waiting room of one process. `give_back` releases a route whose request left before it could take it."""

    def __init__(self, bounds: Bounds, give_back: Callable[[Route], None]) -> None:
        self.bounds = bounds
        self.room = WaitingRoom(bounds)
        self._give_back = give_back
        self._waiting: dict[Waiter, tuple[Attempt, asyncio.Future[Route]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def reconfigure(self, bounds: Bounds) -> None:
        """Other bounds from now on. Nobody who waits is sent away for want of room; time is up by the new ones."""
        self.bounds = self.room.bounds = bounds

    def takes(self, shed: Shed) -> bool:
        """Whether waiting may help: the reason passes, and does so before the time in the room is over."""
        return (
            shed.reason in WAITABLE
            and self.bounds.max_requests > 0
            and (shed.retry_after_s or 0.0) <= self.bounds.timeout_s
        )

    def waiting(self, model: str) -> int:
        """Requests for a model that wait here. O(all that wait)."""
        return self.models()[model]

    def models(self) -> Counter[str]:
        """How many wait here, by model. O(all that wait)."""
        return Counter(waiter.model for waiter in self._waiting)

    async def route(self, request: InferenceRequest, attempt: Attempt, shed: Shed, since: float) -> Route:
        """Wait until `attempt` gives a route; `since` is when the request first came to wait (monotonic seconds).

        Raises Saturated, Loading, NoEndpoints or DeadlineExceeded when it will not; `shed` says why it waits.
        """
        now = clock.now()
        waiter = Waiter(
            request.model,
            request.tenant,
            request.priority,
            cost_tokens(request.input_tokens, request.output_tokens),
            since,
            inf if request.deadline_s is None else since + request.deadline_s,
            shed.reason,
        )
        refused = self.room.enter(waiter, now)
        if isinstance(refused, Shed):
            raise error_of(refused)
        if refused is not None:
            self._refuse(refused, Shed("saturated", self.room.expected_wait_s(now)))
        future: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = (attempt, future)
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())  # it was its turn in the very moment in which it left
            raise
        finally:
            self.room.leave(waiter)
            self._waiting.pop(waiter, None)

    def wake(self) -> None:
        """Something changed: whoever is in front tries again."""
        if not self._waiting:
            return
        now = clock.now()
        stuck: set[str] = set()
        while True:
            first = next((w for w in self.room.in_order(now) if w.model not in stuck), None)
            if first is None:
                return
            attempt, future = self._waiting[first]
            if future.done():
                self.room.leave(first)
                continue
            route = attempt()
            if isinstance(route, Route):
                self.room.took(first, now)
                future.set_result(route)
            elif route.reason in WAITABLE:
                stuck.add(first.model)  # others of this model would find nothing either
            else:
                self._refuse(first, route)  # what it waited for has gone
                self.room.leave(first)

    def _expire(self) -> None:
        now = clock.now()
        for waiter in self.room.expired(now):
            reason = "deadline_exceeded" if waiter.deadline <= now else waiter.reason
            self._refuse(waiter, Shed(reason, max(1.0, self.room.expected_wait_s(now))))

    def _refuse(self, waiter: Waiter, shed: Shed) -> None:
        entry = self._waiting.pop(waiter, None)
        if entry is not None and not entry[1].done():
            entry[1].set_exception(error_of(shed))

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._expire()
        self.wake()
        if self._waiting:
            self._arm()


def error_of(shed: Shed) -> LBError:
    """What a client is told of a request that was shed while it waited."""
    if shed.reason == "deadline_exceeded":
        return DeadlineExceeded("it cannot be answered before its deadline", retry_after_s=shed.retry_after_s)
    if shed.reason == "saturated":
        return Saturated(
            "no server has room for this, and too many wait already, or for too long", retry_after_s=shed.retry_after_s
        )
    if shed.reason == "loading":
        return Loading("the model is being loaded", retry_after_s=shed.retry_after_s)
    return NoEndpoints(retry_after_s=shed.retry_after_s)
