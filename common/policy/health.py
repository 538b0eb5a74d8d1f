"""When an endpoint is left alone because of how it answers, and when it is tried again: a circuit breaker as a table.

CLOSED takes requests. OPEN takes none until its cool-down is over. HALF_OPEN takes one trial at a time: a success
closes it, a failure opens it for twice as long. What says nothing of the endpoint (a client's mistake or cancel, an
overload answer) moves nothing and gives a trial's place back.
Source: the circuit breaker of M. Nygard, *Release It!*; consecutive failures as in Envoy's outlier detection.
"""

from __future__ import annotations

from enum import Enum

from common.types import Outcome

MAX_DOUBLINGS = 32  # of the cool-down: far beyond any maximum, and a float holds it however long an outage lasts


class State(Enum):
    """Of one breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Of one endpoint. `eject_after` failures in a row open it; a refused connection opens it at once."""

    __slots__ = (
        "cooldown_s",
        "eject_after",
        "failures",
        "hung",
        "max_cooldown_s",
        "opened_at",
        "openings",
        "state",
        "trial",
        "unreachable",
    )

    def __init__(self, eject_after: int = 5, cooldown_s: float = 2.0, max_cooldown_s: float = 60.0) -> None:
        self.eject_after = eject_after
        self.cooldown_s = cooldown_s
        self.max_cooldown_s = max_cooldown_s
        self.state = State.CLOSED
        self.failures = 0
        self.openings = 0  # in a row, without a success between
        self.opened_at = 0.0
        self.trial = False
        self.hung = False  # it is open because nothing came from it
        self.unreachable = False  # it is open because nobody listened

    def ready(self, now: float) -> bool:
        """Whether it may be picked; turns OPEN into HALF_OPEN when the cool-down is over."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.OPEN and now >= self.retry_at:
            self.state = State.HALF_OPEN
            self.trial = False
        return self.state is State.HALF_OPEN and not self.trial

    @property
    def retry_at(self) -> float:
        """When an open breaker next lets a trial through (monotonic seconds)."""
        doublings = min(max(0, self.openings - 1), MAX_DOUBLINGS)
        return self.opened_at + min(self.cooldown_s * 2.0**doublings, self.max_cooldown_s)

    def picked(self) -> bool:
        """A request was sent there; in HALF_OPEN it is the trial, which is what is returned."""
        self.trial = self.state is State.HALF_OPEN
        return self.trial

    def ended(self, outcome: Outcome, now: float, *, unreachable: bool = False, trial: bool = True) -> None:
        """A request ended. `unreachable`: no connection could be made, so nobody is there.

        `trial`: it may have been the trial, whose place it then gives back; one sent before the opening does not.
        """
        if outcome is Outcome.SUCCESS:
            self.close()
        elif outcome is Outcome.FAILED:
            self.failures += 1
            if self.state is State.HALF_OPEN or unreachable or self.failures >= self.eject_after:
                self._open(now)
                self.unreachable = unreachable
        if trial:
            self.trial = False

    def hangs(self, now: float) -> None:
        """Nothing comes from it although it has work: open at once."""
        self._open(now)
        self.hung, self.trial = True, False

    def close(self) -> None:
        """It works."""
        self.state, self.failures, self.openings = State.CLOSED, 0, 0
        self.hung = self.unreachable = self.trial = False

    def may_be_back(self, now: float) -> None:
        """Somebody answers where nobody listened: the next request is the trial, before the cool-down is over."""
        if self.state is State.OPEN and self.unreachable:
            self.opened_at = min(self.opened_at, now - self.max_cooldown_s)

    def would_open(self) -> bool:
        """Whether one more failure opens it."""
        return self.state is State.CLOSED and self.failures + 1 >= self.eject_after

    def _open(self, now: float) -> None:
        if self.state is not State.OPEN:
            self.openings += 1
            self.opened_at = now
        self.state, self.failures = State.OPEN, 0
