"""Watches that instances with work are at work, by what comes from them and by their counters; see `policy.progress`.

One that hangs is left alone at once, and what waits for it unanswered is tried elsewhere. Answers that it has begun are
left to the stall time-out: should it go on, they go on, and it is taken back.
"""

from __future__ import annotations

import asyncio

import structlog

from common import clock
from common.balancing import Balancing
from common.errors import FirstByteTimeout
from common.hook import Hook
from common.relay.relay import Relay

log = structlog.get_logger()

TICK_S = 0.25
LATE_S = 0.5  # a tick that is this much overdue shows that this process itself stood still


class Watchdog:
    """Looks at all instances that this process sends to."""

    def __init__(self, relay: Relay, balancing: Balancing, stall_s: float, hook: Hook) -> None:
        self._relay = relay
        self._balancing = balancing
        self._stall_s = stall_s
        self._hook = hook

    async def run(self) -> None:
        """Until cancelled; with a stall time of 0 nobody is suspected."""
        if not self._stall_s:
            return
        blind_until = 0.0
        due = clock.now() + TICK_S
        while True:
            await asyncio.sleep(TICK_S)
            now = clock.now()
            if now - due > LATE_S:
                blind_until = now + self._stall_s  # what has come meanwhile is yet to be read
            due = now + TICK_S
            if now >= blind_until:
                self._look(now)

    def _look(self, now: float) -> None:
        for path, balancer in list(self._balancing.balancers.items()):
            if len(path) != 2:
                continue
            watched = {i: c for i, c in balancer.candidates.items() if c.in_flight or c.breaker.hung}
            if not watched:
                continue
            signs = {id_: self._relay.signs(c.endpoint.url) for id_, c in watched.items()}
            for id_, sure in balancer.hung(signs, now, self._stall_s):
                url = watched[id_].endpoint.url
                error = FirstByteTimeout("the server hangs: it has work and nothing comes from it")
                given_up = self._relay.give_up_hung(url, error, sure=sure)
                facts = {"instance": "/".join((*path, id_)), "url": url, "tried_elsewhere": given_up}
                log.warning("instance_hangs", **facts)
                self._hook.tell("instance_hangs", **facts)
