"""Deadlines of all connections, looked at a few times a second by one timer instead of one timer each.

A deadline is met to within `TICK_S`; arming one costs an attribute. The scan is linear: 5,000 connections cost well
under a millisecond a tick.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Protocol

from common import clock

TICK_S = 0.1


class Timed(Protocol):
    """Something with a deadline (monotonic seconds, `inf`: none) and what to do when it has passed."""

    deadline: float

    def expired(self, now: float) -> None:
        """The deadline has passed; called once for each time it is set."""


class Sweeper:
    """Calls `expired` on whatever is past its deadline."""

    def __init__(self) -> None:
        self._watched: set[Timed] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, timed: Timed) -> None:
        """Watch it until `discard`."""
        self._watched.add(timed)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def discard(self, timed: Timed) -> None:
        """Stop watching it."""
        self._watched.discard(timed)

    def _tick(self) -> None:
        now = clock.now()
        due = [timed for timed in self._watched if timed.deadline <= now]
        for timed in due:
            timed.deadline = inf
            timed.expired(now)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick) if self._watched else None
