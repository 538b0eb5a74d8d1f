"""Virtual time: a heap of what happens next, by time, and at the same time in the order in which it was asked for.

The same calls in the same order give the same run on every host; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Loop:
    """Runs callbacks at their time. `now` is in seconds and never goes back."""

    __slots__ = ("_asked", "_heap", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # callbacks run so far
        self._asked = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, time_s: float, call: Callable[..., None], *args: object) -> None:
        """Call `call(*args)` at `time_s`, which must not lie in the past. O(log of what is waiting)."""
        assert time_s >= self.now, f"asked at {self.now} for {time_s}"
        self._asked += 1
        heappush(self._heap, (time_s, self._asked, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """Call `call(*args)` after `delay_s`; without a delay at once, before this returns."""
        if delay_s > 0.0:
            self.at(self.now + delay_s, call, *args)
        else:
            call(*args)

    def every(self, interval_s: float, call: Callable[[], None], *, first_s: float = 0.0) -> None:
        """Call `call` at `first_s` and then again every `interval_s`, without end."""

        def again(due_s: float) -> None:
            call()
            self.at(due_s + interval_s, again, due_s + interval_s)

        self.at(first_s, again, first_s)

    def step(self) -> bool:
        """Run what comes next; False when nothing is left."""
        if not self._heap:
            return False
        self.now, _, call, args = heappop(self._heap)
        self.events += 1
        call(*args)
        return True
