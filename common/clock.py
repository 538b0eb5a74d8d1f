"""The only place that reads a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

now: Callable[[], float] = time.monotonic
"""Monotonic seconds of this process; never compared with another host's."""


def wall_ns() -> int:
    """Nanoseconds since the epoch, for time stamps that people and collectors read."""
    return time.time_ns()
