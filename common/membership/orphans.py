"""Instances whose registration ran out though they were not taken away: their agent died, and they may be well. Pure.

Who leaves in order is presented as draining before its key goes. A key that goes without that has run out of time, and
says more of the agent that renewed it than of the server: the server stays while it answers, and no longer than MOST_S,
for by then somebody should have looked, and addresses are given to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

MOST_S: Final = 3600.0


@dataclass(slots=True)
class _Orphan:
    value: bytes
    since: float


class Orphans:
    """Adds to what is registered whatever is only kept for answering."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._before: Mapping[str, bytes] = {}
        self._kept: dict[str, _Orphan] = {}
        self._silent: set[str] = set()  # looked at, and did not answer

    @property
    def kept(self) -> frozenset[str]:
        """Keys that nobody presents any more, of servers to be looked at."""
        return frozenset(self._kept)

    def silent(self, key: str) -> None:
        """A server that is kept did not answer."""
        if key in self._kept:
            self._silent.add(key)

    def adopt(
        self,
        values: Mapping[str, bytes],
        removed: Mapping[str, bytes],
        now: float,
        left: Callable[[str, bytes], bool],
    ) -> Mapping[str, bytes]:
        """What to believe now that `values` are presented.

        `removed`: last values of keys that are gone, where they are known better than from the last call. `left(key,
        value)`: whether what was presented last is a reason not to keep it. `now`: monotonic seconds.
        """
        for key in self._before.keys() - values.keys() - self._kept.keys():
            value = removed.get(key, self._before[key])
            if not left(key, value):
                self._kept[key] = _Orphan(value, now)
        for key, orphan in list(self._kept.items()):
            if key in values or key in self._silent or now - orphan.since > self._most_s:
                del self._kept[key]
        self._silent.clear()
        self._before = values
        return {**values, **{key: orphan.value for key, orphan in self._kept.items()}} if self._kept else values
