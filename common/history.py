"""The last quarter of an hour of clients' requests, in steps of five seconds: what the console draws.

Counted when a request ends, by the tier that the client called; distributions are kept as counts by upper bound, so
that those of several tiers can be added. Bounded: 180 steps of some 80 numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

from common.records import Ending, RequestRecord

STEP_S = 5.0
STEPS = 180
TTFT_BOUNDS_S = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
TPOT_BOUNDS_S = (
    *(0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025),
    *(0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
)


class Step(msgspec.Struct):
    """What ended within one step; each distribution has one count a bound and one for what is above them all."""

    ok: int = 0
    failed: int = 0  # by a server, or broken off
    refused: int = 0  # by us: no place, no such model, a bad request
    left: int = 0  # given up by the client
    output_tokens: float = 0.0
    ttft: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))
    ttft_predicted: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))
    tpot: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TPOT_BOUNDS_S) + 1))
    tpot_predicted: list[int] = msgspec.field(default_factory=lambda: [0] * (len(TPOT_BOUNDS_S) + 1))

    def add(self, other: Step) -> None:
        """Another tier's step of the same time."""
        for name in ("ok", "failed", "refused", "left", "output_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ttft", "ttft_predicted", "tpot", "tpot_predicted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])


class History:
    """Steps by age. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Step]] = deque(maxlen=STEPS)  # (number of the step, its counts), oldest first

    def see(self, record: RequestRecord) -> None:
        """A client's request ended. O(1)."""
        number = int(record.ended_at // STEP_S)
        if not self._steps or self._steps[-1][0] != number:
            self._steps.append((number, Step()))
        step = self._steps[-1][1]
        if record.went_well:
            step.ok += 1
        elif record.ending is Ending.CLIENT_LEFT:
            step.left += 1
        elif record.ending is Ending.REFUSED or (record.ending is Ending.COMPLETE and record.status < 500):
            step.refused += 1
        else:
            step.failed += 1
        step.output_tokens += record.output_tokens or 0.0
        if record.went_well and record.stream:
            self._times(step, record)

    def _times(self, step: Step, record: RequestRecord) -> None:
        ttft, tpot = record.ttft_s, record.tpot_s
        if ttft is not None:
            step.ttft[bisect_left(TTFT_BOUNDS_S, ttft)] += 1
        if tpot is not None:
            step.tpot[bisect_left(TPOT_BOUNDS_S, tpot)] += 1
        foreseen = [s for s in record.answered_stages if s.predicted_ttft_s is not None]
        if not foreseen:
            return
        first, total = foreseen[-1].predicted_ttft_s, foreseen[-1].predicted_total_s
        assert first is not None
        if ttft is not None:
            step.ttft_predicted[bisect_left(TTFT_BOUNDS_S, first)] += 1
        tokens = record.predicted_output_tokens
        if tpot is not None and total is not None and tokens is not None and tokens > 1.0:
            step.tpot_predicted[bisect_left(TPOT_BOUNDS_S, (total - first) / (tokens - 1.0))] += 1

    def steps(self, now: float, count: int = STEPS) -> list[tuple[int, Step]]:
        """(age, counts) of the last `count` steps in which something ended, oldest first; age 0 is the present step."""
        present = int(now // STEP_S)
        return [(present - number, step) for number, step in self._steps if present - number < count]


def together(histories: list[list[tuple[int, Step]]]) -> list[tuple[int, Step]]:
    """Those of several tiers as one."""
    by_age: dict[int, Step] = {}
    for history in histories:
        for age, step in history:
            by_age.setdefault(age, Step()).add(step)
    return sorted(by_age.items(), reverse=True)


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """The `share` (0…1) quantile of counts by upper bound, linear within its bucket; None when nothing was counted."""
    left = share * sum(counts)
    if not sum(counts):
        return None
    for i, count in enumerate(counts):
        if count and left <= count:
            low, high = bounds[i - 1] if i else 0.0, bounds[min(i, len(bounds) - 1)]
            return low + (high - low) * left / count
        left -= count
    return bounds[-1]
