"""Which removals to doubt after an outage of the store. Pure.

A store that was away lets leases expire in a burst when it returns, though their holders are well and only need a
moment to register again (CASES C26; `patroni/patroni: docs/dcs_failsafe_mode.rst` for the idea). A removal at any other
time takes effect at once, and so does one of a single member among several: that much is lost in any minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

BURST: Final = 1 / 3  # more than this share of a group gone since the outage is a burst, if it is more than one member


class OutageGuard:
    """Believes what a store says, except a burst of removals within `hold_s` after it was stale.

    Members (keys) are counted by group: the part of the key before its last slash. What goes in a burst stays, as
    unconfirmed, for `hold_s`, unless it is registered again before, or is known not to answer.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._believed: dict[str, bytes] = {}
        self._before: dict[str, dict[str, bytes]] = {}  # group -> what was believed when the outage began
        self._stale = False
        self._until = 0.0  # end of the time after an outage in which removals are doubted
        self._kept: dict[str, float] = {}  # unconfirmed key -> when to let go of it
        self._let_go: set[str] = set()  # keys doubted once already, for this outage

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Keys that are believed in though the store has them no more."""
        return frozenset(self._kept)

    def believe(
        self, values: Mapping[str, bytes], stale: bool, now: float, answers: Callable[[str], bool] = lambda key: True
    ) -> Mapping[str, bytes]:
        """What to believe now that the store has said `values`; to be asked again while there is anything unconfirmed.

        `now`: monotonic seconds. `answers(key)` is only asked about what is unconfirmed.
        """
        if stale:
            if not self._stale:
                self._outage_begins()
        else:
            if self._stale:
                self._until = now + self._hold_s
                self._kept = dict.fromkeys(self._kept, self._until)
            self._doubt(values, now)
            self._let_go_of(values, now, answers)
        self._stale = stale
        self._believed = {**values, **{key: self._believed[key] for key in self._kept}}
        return self._believed

    def _outage_begins(self) -> None:
        self._before = {}
        self._let_go.clear()
        for key, value in self._believed.items():
            self._before.setdefault(_group(key), {})[key] = value

    def _doubt(self, values: Mapping[str, bytes], now: float) -> None:
        if now >= self._until:
            self._before = {}
        for members in self._before.values():
            missing = [key for key in members if key not in values]
            if len(missing) > BURST * len(members) and (len(missing) > 1 or len(members) == 1):
                for key in missing:
                    if key not in self._kept and key not in self._let_go:
                        self._kept[key] = now + self._hold_s
                        self._believed[key] = members[key]

    def _let_go_of(self, values: Mapping[str, bytes], now: float, answers: Callable[[str], bool]) -> None:
        for key, until in list(self._kept.items()):
            if key in values:
                del self._kept[key]
            elif now >= until or not answers(key):
                del self._kept[key]
                self._let_go.add(key)


def _group(key: str) -> str:
    return key.rpartition("/")[0]
