"""Prompts that take servers down: known by fingerprint, refused for a while once two servers have failed over them.

A strike is an answer that says out of memory, or the end of a server's process while it had the request and had begun
no answer. Whoever was there when a server died may be innocent, so a prompt that was answered of late is no suspect,
and one answer takes all strikes away. Balancers of one node tell each other theirs, so that a prompt is refused by all
of them once it has had its two. Bounded: the oldest are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from itertools import islice
from math import inf
from typing import NamedTuple

STRIKES = 2  # servers that one prompt may take down
REMEMBERED = 8192  # fingerprints of each kind
SUSPECTED_S = 600.0  # a strike counts for so long
TOLD = 256  # fingerprints that others are told of, the latest
PEERS = 64  # balancers whose strikes are kept


class Strike(NamedTuple):
    """What one balancer tells another of a prompt: how many strikes, the last of them how long ago, seconds."""

    fingerprint: int
    strikes: int
    age_s: float


class Quarantine:
    """Of one process. `for_s`: how long a prompt is refused, seconds; 0: none ever is."""

    __slots__ = ("_answered", "_heard", "_strikes", "for_s")

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self._answered: OrderedDict[int, float] = OrderedDict()
        self._strikes: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._heard: dict[str, dict[int, tuple[int, float]]] = {}  # by balancer: what its strikes are

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
        if not self._strikes and not self._heard:
            return 0.0
        count, at = self._strikes.get(fingerprint, (0, 0.0))
        for theirs in self._heard.values():
            more, last_at = theirs.get(fingerprint, (0, 0.0))
            if more and now - last_at < SUSPECTED_S and last_at > self._answered.get(fingerprint, -inf):
                count, at = count + more, max(at, last_at)
        return max(0.0, at + self.for_s - now) if count >= STRIKES else 0.0

    # -- other balancers of the node ---------------------------------------------------------------------------------

    def tell(self, now: float) -> list[Strike]:
        """Our own strikes that still count, the latest TOLD of them."""
        latest = islice(reversed(self._strikes.items()), TOLD)
        return [Strike(f, n, now - at) for f, (n, at) in latest if now - at < SUSPECTED_S]

    def hear(self, balancer: str, strikes: Iterable[Strike], now: float) -> None:
        """What another one tells now, in place of what it told before."""
        if not self.for_s:
            return
        theirs = {s.fingerprint: (s.strikes, now - max(0.0, s.age_s)) for s in islice(strikes, TOLD)}
        if not theirs:
            self._heard.pop(balancer, None)
        elif balancer in self._heard or len(self._heard) < PEERS:
            self._heard[balancer] = theirs

    def forget(self, now: float, alive: Set[str]) -> None:
        """Let go of what balancers told that are gone, once it counts no more."""
        for balancer in self._heard.keys() - alive:
            kept = {f: (n, at) for f, (n, at) in self._heard[balancer].items() if now - at < SUSPECTED_S}
            if kept:
                self._heard[balancer] = kept
            else:
                del self._heard[balancer]

    def __len__(self) -> int:
        """Fingerprints that are refused, or one strike from it."""
        return len(self._strikes)
