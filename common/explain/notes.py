"""What is written down at the moment of a decision, because nobody could find it out later.

A pick itself says what each candidate cost and whom the filters removed. What it does not say is whose load report was
too old to be believed; that is looked at twice a second and not a request at a time.
"""

from __future__ import annotations

from common.policy.balancer import Balancer
from common.policy.candidate import FRESH_REPORT_S, QUOTE_STALE_S
from common.policy.stages import Hop
from common.records import StageRecord
from common.types import Path

LOOK_EVERY_S = 0.5  # how often the age of reports is looked at


class Notes:
    """Makes the record of a stage. One for a process; it holds no more than the pools that have decided here."""

    def __init__(self) -> None:
        self._unheard: dict[Path, tuple[float, tuple[str, ...]]] = {}

    def stage(self, hop: Hop, balancer: Balancer, attempt: int, now: float, span_id: str) -> StageRecord:
        """The record of one pick that was made just now. O(1), but for two looks a second at the pool's reports."""
        looked_at, unheard = self._unheard.get(hop.path, (-LOOK_EVERY_S, ()))
        if now - looked_at >= LOOK_EVERY_S:
            unheard = unheard_of(balancer, now)
            self._unheard[hop.path] = (now, unheard)
        return StageRecord(
            hop.path,
            hop.pick,
            hop.takeover,
            now,
            span_id,
            attempt,
            len(balancer.candidates),
            balancer.policy.scorers,
            unheard,
            balancer.stale,
        )

    def keep_only(self, paths: frozenset[Path]) -> None:
        """Let go of pools that are gone."""
        for path in self._unheard.keys() - paths:
            del self._unheard[path]


def unheard_of(balancer: Balancer, now: float) -> tuple[str, ...]:
    """Whose last load report is missing or too old to be believed, in the order of their ids."""
    limit = FRESH_REPORT_S if len(balancer.parent) == 2 else QUOTE_STALE_S
    return tuple(id_ for id_, c in balancer.candidates.items() if c.report is None or now - c.report_at > limit)
