"""An average that forgets by time: the weight of a sample halves every `half_life_s`.

Source: time-decayed exponential averaging as in linkerd's `ewma` crate and TCP's smoothed round trip (RFC 6298),
with the gap between samples deciding how much the old value still counts.
"""

from __future__ import annotations

from math import exp


class Ewma:
    """Time-decayed average of samples; unknown (None) until the first one."""

    __slots__ = ("_at", "_value", "half_life_s")

    def __init__(self, half_life_s: float, value: float | None = None, now: float = 0.0) -> None:
        self.half_life_s = half_life_s
        self._value = value
        self._at = now

    def add(self, sample: float, now: float) -> None:
        """Take one sample in, with a tenth of the weight at least: samples in quick succession still move it."""
        if self._value is None:
            self._value = sample
        else:
            keep = min(float(0.5 ** ((now - self._at) / self.half_life_s)), 0.9)
            self._value = keep * self._value + (1.0 - keep) * sample
        self._at = max(self._at, now)

    @property
    def value(self) -> float | None:
        """The average, or None before any sample."""
        return self._value


class DecayingSum:
    """Sum of samples, each fading as exp(-age / time_constant_s); for rates and shares of recent time."""

    __slots__ = ("_at", "_sum", "time_constant_s")

    def __init__(self, time_constant_s: float) -> None:
        self.time_constant_s = time_constant_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add `amount` at `now`."""
        self._sum = self.value_at(now) + amount
        self._at = max(self._at, now)

    def value_at(self, now: float) -> float:
        """The faded sum as of `now`; does not change it."""
        if self._sum == 0.0:
            return 0.0
        return self._sum * exp(-max(0.0, now - self._at) / self.time_constant_s)
