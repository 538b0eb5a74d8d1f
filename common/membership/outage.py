"""Which removals to doubt after an outage of the store. Pure.

A store that was away lets leases expire in a burst when it returns, though their holders are well and only need a
moment to register again (CASES C26; `patroni/patroni: docs/dcs_failsafe_mode.rst` for the idea). At any other time a
removal takes effect at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

BURST: Final = 1 / 3  # more than this share of a group gone since the outage is a burst, if it is more than one member
GATHER_S: Final = 1.0  # a burst is not one event: etcd revokes expired leases one by one, in rounds 0.5 s apart


@dataclass(slots=True)
class _Doubt:
    """A member that the store has no more and that is still believed in."""

    value: bytes
    until: float
    burst: bool  # else it is only waited for, whether it becomes one


class OutageGuard:
    """Believes what a store says, except a burst of removals within `hold_s` after it was stale.

    Members (keys) are counted by group: the part of the key before its last slash. What goes in a burst stays, as
    unconfirmed, for `hold_s`, unless it is registered again before, or is known not to answer. Other removals within
    that time take effect after GATHER_S, when they have not become a burst.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._believed: Mapping[str, bytes] = {}
        self._before: dict[str, dict[str, bytes]] = {}  # group -> what was believed when the outage began
        self._stale = False
        self._until = 0.0  # end of the time after an outage in which removals are doubted
        self._doubts: dict[str, _Doubt] = {}
        self._gone: set[str] = set()  # removals that took effect, and would come back with a burst
        self._dead: set[str] = set()  # those that would not: doubted long enough, or known not to answer

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Keys that are believed in though the store has them no more."""
        return frozenset(self._doubts)

    def believe(
        self, values: Mapping[str, bytes], stale: bool, now: float, answers: Callable[[str], bool] = lambda key: True
    ) -> Mapping[str, bytes]:
        """What to believe now that the store has said `values`; to be asked again while there is anything unconfirmed.

        `now`: monotonic seconds. `answers(key)` is only asked about what is unconfirmed.
        """
        if stale and not self._stale:
            self._outage_begins(self._believed or values)
        elif not stale:
            if self._stale:
                self._until = now + self._hold_s
                for doubt in self._doubts.values():
                    doubt.until = self._until
            self._doubt(values, now)
            self._decide(values, now, answers)
        self._stale = stale
        self._believed = {**values, **{key: doubt.value for key, doubt in self._doubts.items()}}
        return self._believed

    def _outage_begins(self, believed: Mapping[str, bytes]) -> None:
        self._before = {}
        self._gone.clear()
        self._dead.clear()
        for key, value in believed.items():
            self._before.setdefault(key.rpartition("/")[0], {})[key] = value

    def _doubt(self, values: Mapping[str, bytes], now: float) -> None:
        if now >= self._until:
            self._before = {}
        for members in self._before.values():
            missing = [key for key in members if key not in values and key not in self._dead]
            lost = sum(key not in values for key in members)
            burst = lost > BURST * len(members) and (lost > 1 or len(members) == 1)
            for key in missing:
                doubt = self._doubts.get(key)
                if burst and (doubt is None or not doubt.burst):
                    self._doubts[key] = _Doubt(members[key], now + self._hold_s, burst=True)
                    self._gone.discard(key)
                elif doubt is None and key not in self._gone:
                    self._doubts[key] = _Doubt(members[key], now + min(GATHER_S, self._hold_s), burst=False)

    def _decide(self, values: Mapping[str, bytes], now: float, answers: Callable[[str], bool]) -> None:
        for key, doubt in list(self._doubts.items()):
            if key in values:
                del self._doubts[key]
            elif not answers(key):
                del self._doubts[key]
                self._dead.add(key)
            elif now >= doubt.until:
                del self._doubts[key]
                (self._dead if doubt.burst else self._gone).add(key)
