"""How long a message was held up on its way, without comparing the clocks of two hosts."""

from __future__ import annotations

from math import isfinite
from typing import Final


class Delay:
    """How much longer a message took than the quickest of its stream: what it spent in buffers on the way.

    Compares durations, never clocks: the time that passed between two messages at the sender with that at the receiver.
    Two clocks may drift apart by some 100 ppm, so the quickest is forgotten a little faster than that.
    """

    FORGET: Final = 2e-4

    def __init__(self) -> None:
        self._least: float | None = None
        self._at = 0.0

    def of(self, sent: float, arrived: float) -> float:
        """Seconds, at least 0: of a message sent and arrived at these times, each of its own side's clock."""
        offset = arrived - sent
        if not isfinite(offset):
            return 0.0
        least = offset if self._least is None else self._least + self.FORGET * (arrived - self._at)
        self._least, self._at = min(least, offset), arrived
        return offset - self._least
