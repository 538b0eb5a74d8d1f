"""What is learned of the replicas of a group: how long they take to come, whether they come, how fast they are."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from common.types import Speed

STARTS_KEPT = 5  # the slowest of the last starts is what the next one is expected to take
STARTS_PENDING = 1000
COLD_START_S = (0.5, 7200.0)  # bounds of what is learned
PATIENCE = 5.0  # times a cold start,
LEAST_PATIENCE_S = 120.0  # and at least so long: after that a replica that was asked for is not counted on any more
SPEED_S = 60.0  # a speed is the median of so long
SPEED_EVERY_S = 1.0


class Starts:
    """How long replicas of one group take to come, and whether they come at all."""

    def __init__(self, first_guess_s: float) -> None:
        self._asked_at: deque[float] = deque(maxlen=STARTS_PENDING)
        self._took: deque[float] = deque((first_guess_s,), maxlen=STARTS_KEPT)
        self._serving: int | None = None

    @property
    def cold_start_s(self) -> float:
        """From asking for one to its serving."""
        return max(self._took)

    def asked(self, more: int, now: float) -> None:
        """So many more than before (or, negative, fewer) are asked for."""
        for _ in range(more):
            self._asked_at.append(now)
        for _ in range(min(-more, len(self._asked_at))):
            self._asked_at.pop()

    def seen(self, serving: int, now: float) -> None:
        """So many serve."""
        for _ in range(serving - (serving if self._serving is None else self._serving)):
            if self._asked_at:
                took = now - self._asked_at.popleft()
                self._took.append(min(max(took, COLD_START_S[0]), COLD_START_S[1]))
        self._serving = serving

    def served_s(self, ahead_s: float, now: float) -> float:
        """Seconds that those on the way will have served, all together, `ahead_s` from now."""
        cold = self.cold_start_s
        return sum(max(0.0, ahead_s - max(0.0, at + cold - now)) for at in self._asked_at)

    def overdue(self, now: float) -> int:
        """Replicas that were asked for so long ago that they are not counted on."""
        patience = max(PATIENCE * self.cold_start_s, LEAST_PATIENCE_S)
        return sum(now - at > patience for at in self._asked_at)


class Pace:
    """How fast servers of one group have been of late: the median of each constant over SPEED_S.

    What is learned of a server that is flooded within seconds is off for as long as that lasts.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Speed]] = deque()

    def add(self, speed: Speed, now: float) -> None:
        """So fast they are now."""
        if self._seen and now - self._seen[-1][0] < SPEED_EVERY_S:
            return
        self._seen.append((now, speed))
        while self._seen[0][0] < now - SPEED_S:
            self._seen.popleft()

    @property
    def speed(self) -> Speed:
        """So fast they have been."""
        return replace(
            self._seen[-1][1],
            alpha_s=median(s.alpha_s for _, s in self._seen),
            beta_s=median(s.beta_s for _, s in self._seen),
            gamma_s=median(s.gamma_s for _, s in self._seen),
            prefill_tokens_per_s=median(s.prefill_tokens_per_s for _, s in self._seen),
        )
