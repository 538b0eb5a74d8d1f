"""A rollout: how a new version's share grows step by step, and when it is taken back. Pure; time comes in.

The old version serves everything until the new one is there. Each step lasts `step_s` and until enough was seen of
the new version, which is compared with the old one all the while: so much more of its requests may fail, and so much
later its slow first tokens may come; else all requests go back to the old version, at once and for good.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from common.policy.versions import NOT, Split, Target

SAMPLES = 2000  # first-token times kept of each side and step
GROSS_ERRORS = 5  # with so many, and at least every second one failed, nobody waits for more
COMPARED_FROM = 30  # answers of each side from which first-token times are compared
TTFT_SLACK_S = 0.1  # a difference below this is nobody's
TAIL = 0.99


class Stage(Enum):
    """Of a rollout."""

    WAITING = "waiting"  # for an instance of the new version
    STEPPING = "stepping"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Guard:
    """What the new version may cost."""

    error_increase: float = 0.02  # share of requests that may fail beyond the old version's
    ttft_ratio: float = 1.3  # its 99th percentile against the old one's
    min_requests: int = 20  # of the new version in each step, before the next


@dataclass(frozen=True, slots=True)
class Rollout:
    """One model's rollout, as it stands in the store."""

    model: str
    to: str  # the new version
    steps: tuple[float, ...] = (5.0, 25.0, 50.0, 100.0)  # per cent
    step_s: float = 60.0
    guard: Guard = Guard()
    stage: Stage = Stage.WAITING
    step: int = 0  # of `steps`, while stepping
    owner: str = ""  # the balancer that moves it on
    reason: str = ""

    @property
    def live(self) -> bool:
        """Whether it still moves."""
        return self.stage in (Stage.WAITING, Stage.STEPPING)

    @property
    def share(self) -> float:
        """Of the new version, per cent."""
        if self.stage is Stage.STEPPING:
            return self.steps[self.step]
        return 100.0 if self.stage is Stage.DONE else 0.0

    def split(self) -> Split:
        """Where requests go by it."""
        return Split(
            self.model,
            (Target(self.model, self.to, self.share), Target(self.model, NOT + self.to, 100.0 - self.share)),
        )


class Seen:
    """What was seen of one version in one step."""

    __slots__ = ("failed", "requests", "ttfts")

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.ttfts: list[float] = []

    def saw(self, *, failed: bool, ttft_s: float | None) -> None:
        """One request ended."""
        self.requests += 1
        self.failed += failed
        if ttft_s is not None and not failed and len(self.ttfts) < SAMPLES:
            self.ttfts.append(ttft_s)

    @property
    def error_rate(self) -> float:
        """Share that failed."""
        return self.failed / self.requests if self.requests else 0.0

    def tail_s(self) -> float:
        """99th percentile of the first-token times, seconds."""
        ordered = sorted(self.ttfts)
        return ordered[min(len(ordered) - 1, int(TAIL * len(ordered)))]


def moved_on(rollout: Rollout, new: Seen, old: Seen, elapsed_s: float, *, there: bool) -> Rollout:
    """The rollout as it is to be now. `elapsed_s`: since its step began; `there`: the new version has instances."""
    if rollout.stage is Stage.WAITING:
        return replace(rollout, stage=Stage.STEPPING, step=0) if there else rollout
    if rollout.stage is not Stage.STEPPING:
        return rollout
    worse = _worse(rollout.guard, new, old)
    if worse:
        return replace(rollout, stage=Stage.ROLLED_BACK, reason=worse)
    if elapsed_s < rollout.step_s or new.requests < rollout.guard.min_requests:
        return rollout
    if rollout.step + 1 < len(rollout.steps):
        return replace(rollout, step=rollout.step + 1)
    return replace(rollout, stage=Stage.DONE)


def _worse(guard: Guard, new: Seen, old: Seen) -> str:
    """In what the new version is worse than it may be; "" if in nothing."""
    gross = new.failed >= GROSS_ERRORS and new.error_rate >= 0.5 and old.error_rate < 0.5
    enough = new.requests >= guard.min_requests
    if gross or (enough and new.error_rate > old.error_rate + guard.error_increase):
        return f"{new.failed} of {new.requests} requests failed, against {old.failed} of {old.requests}"
    if len(new.ttfts) >= COMPARED_FROM and len(old.ttfts) >= COMPARED_FROM:
        mine, theirs = new.tail_s(), old.tail_s()
        if mine > guard.ttft_ratio * theirs + TTFT_SLACK_S:
            return f"first tokens took {mine:.2f} s (p99), against {theirs:.2f} s"
    return ""
