"""Prompts that take servers down: known by fingerprint, refused for a while once two servers have failed over them.

A strike is an answer that says out of memory, or the end of a server's process while it had the request and had begun
no answer. Whoever was there when a server died may be innocent, so a prompt that was answered of late is no suspect,
and one answer takes all strikes away. Bounded: the oldest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

STRIKES = 2  # servers that one prompt may take down
REMEMBERED = 8192  # fingerprints of each kind
SUSPECTED_S = 600.0  # a strike counts for so long


class Quarantine:
    """Of one process. `for_s`: how long a prompt is refused, seconds; 0: none ever is."""

    __slots__ = ("_answered", "_strikes", "for_s")

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self._answered: OrderedDict[int, float] = OrderedDict()
        self._strikes: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def struck(self, fingerprint: int, now: float, *, certain: bool) -> None:
        """A server failed over it. `certain`: its answer said so, which no earlier success excuses."""
        answered_at = self._answered.get(fingerprint)
        if not self.for_s or not fingerprint:
            return
        if not certain and answered_at is not None and now - answered_at < SUSPECTED_S:
            return
        count, at = self._strikes.pop(fingerprint, (0, now))
        self._strikes[fingerprint] = (count + 1 if now - at < SUSPECTED_S else 1, now)
        if len(self._strikes) > REMEMBERED:
            self._strikes.popitem(last=False)

    def answered(self, fingerprint: int, now: float) -> None:
        """A server answered it, whole."""
        if not self.for_s or not fingerprint:
            return
        self._strikes.pop(fingerprint, None)
        self._answered[fingerprint] = now
        self._answered.move_to_end(fingerprint)
        if len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)

    def refused_for_s(self, fingerprint: int, now: float) -> float:
        """Seconds for which it is still refused; 0: it is not."""
        if not self._strikes:
            return 0.0
        count, at = self._strikes.get(fingerprint, (0, 0.0))
        return max(0.0, at + self.for_s - now) if count >= STRIKES else 0.0

    def __len__(self) -> int:
        """Fingerprints that are refused, or one strike from it."""
        return len(self._strikes)
