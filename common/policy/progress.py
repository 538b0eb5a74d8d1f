"""Whether an instance that has work is at work: told by what comes from it, never by its probes.

An instance hangs when a request there is overdue and nothing at all has come from it for a while: no byte of any
answer's body, and no move of its own counters, where it has some. It hangs as well when all streams that are older than
that while stand still and none has ended since, though new ones get their first words: an engine that dies young.
One that produces anything is busy, however late its answers and its probes are.

How long "a while" is, is learned: an instance that was silent for long and went on is given twice that the next time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from common.types import LoadReport

PATIENCE = 3.0  # what is predicted may take so many times as long before it is overdue
FRESH_S = 3.0  # counters that were read longer ago say nothing of now
LEAST_STREAMS = 2  # that stand still, where others get their first words
LONGEST_S = 120.0  # a silence that ended is not learned beyond this,
FORGET_S = 300.0  # and half forgotten after this


@dataclass(frozen=True, slots=True)
class Signs:
    """What came from an instance here, monotonic seconds; -inf: nothing yet."""

    moved_at: float = -inf  # the last byte of an answer's body
    completed_at: float = -inf  # the last answer that was complete
    streams: tuple[tuple[float, float], ...] = ()  # under way and begun: (first byte at, last byte at)


NO_SIGNS = Signs()


class Progress:
    """Of one instance."""

    __slots__ = ("_counter", "_longest_s", "_looked_at", "_peak_s", "counted_at", "read_at")

    def __init__(self) -> None:
        self._counter: float | None = None
        self.counted_at = -inf  # when its counters were last seen to move
        self.read_at = -inf  # when they were last read
        self._peak_s = 0.0  # of the silence at present
        self._longest_s = 0.0  # that ended well
        self._looked_at = 0.0

    def told(self, report: LoadReport, at: float) -> None:
        """Its counters at `at`."""
        if report.progress is None:
            return
        if self._counter is None or report.progress != self._counter:
            self._counter = report.progress
            self.counted_at = max(self.counted_at, at)
        self.read_at = max(self.read_at, at)

    def counts(self, now: float) -> bool:
        """Whether its counters are known and of now."""
        return now - self.read_at < FRESH_S

    def idle(self) -> None:
        """It has no work of ours, so its silence says nothing."""
        self._peak_s = 0.0

    def hangs(self, signs: Signs, due: Iterable[tuple[float, float]], now: float, stall_s: float) -> bool:
        """Whether it does, by all that is known. `due`: (sent at, seconds it is predicted to be silent) of each
        request under way there.
        """
        last = max(signs.moved_at, self.counted_at)
        due = tuple(due)
        self._longest_s *= 0.5 ** (max(0.0, now - self._looked_at) / FORGET_S)
        self._looked_at = now
        silent_s = now - max(last, min((at for at, _ in due), default=now))
        allowed_s = max(stall_s, 2.0 * self._longest_s)
        if silent_s < self._peak_s:  # it went on
            self._longest_s = min(max(self._longest_s, self._peak_s), LONGEST_S)
        self._peak_s = silent_s
        if silent_s > allowed_s:
            return any(now - max(at, last) > allowed_s + PATIENCE * min(silence_s, LONGEST_S) for at, silence_s in due)
        return self._all_stall(signs, now, allowed_s)

    @staticmethod
    def _all_stall(signs: Signs, now: float, allowed_s: float) -> bool:
        old = [(began, moved) for began, moved in signs.streams if now - began > allowed_s]
        if len(old) < LEAST_STREAMS or signs.completed_at > min(moved for _, moved in old):
            return False
        return all(now - moved > allowed_s for _, moved in old)
