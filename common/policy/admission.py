"""How much may be asked of a system in trouble: the budget of retries.

Source: Finagle's RetryBudget: retries are a share of recent requests plus a small constant, so that an outage of
everything is not multiplied while a blip of one endpoint is hidden.
"""

from __future__ import annotations

from common.policy.ewma import DecayingSum

WINDOW_S = 10.0  # how far back requests count
RESERVE = 100.0  # retries in a window whatever the traffic: what one dying server may have in flight


class RetryBudget:
    """Grants retries: at most `ratio` of the requests of the last ten seconds, and RESERVE more."""

    __slots__ = ("_requests", "_retries", "ratio")

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._requests = DecayingSum(WINDOW_S)
        self._retries = DecayingSum(WINDOW_S)

    def request(self, now: float) -> None:
        """A request came in."""
        self._requests.add(1.0, now)

    def take(self, now: float) -> bool:
        """Whether one more retry is granted; if so it is counted."""
        if self._retries.value_at(now) + 1.0 > self.ratio * self._requests.value_at(now) + RESERVE:
            return False
        self._retries.add(1.0, now)
        return True
