"""Shadow traffic: copies of clients' requests that another version, or another model, answers as well, for nobody.

A copy is made once its request has been admitted, goes in the lowest class, waits in no room, is tried once and has its
answer dropped as it comes. Whatever becomes of it, its client's answer, session, usage and prompt are left alone.
Bounded by how many are under way and by the bytes of their bodies; what would be above that is not copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from random import Random
from typing import TYPE_CHECKING

from common.policy.versions import Shadow
from common.relay.exchange import ClientLimits, Exchange
from common.types import InferenceRequest, Priority

if TYPE_CHECKING:
    from common.relay.heads import Headers


@dataclass(slots=True)
class Nobody:
    """Takes an answer in a client's stead and drops it."""

    limits: ClientLimits
    peername: str
    verified: bool = False
    write_paused: bool = False

    @property
    def transport(self) -> Nobody:
        """What would be closed."""
        return self

    def abort(self) -> None:
        """There is nothing to close."""

    def write(self, data: bytes) -> None:
        """A piece of the answer."""

    def finished(self) -> None:
        """The answer is complete."""

    def cut(self, last_words: bytes = b"") -> None:
        """The answer broke."""

    def respond(self, status: int, headers: Headers, body: bytes, added: bytes = b"") -> None:
        """An answer of our own."""


class Shadows:
    """The copies of one process."""

    def __init__(self, rules: Mapping[str, Shadow], max_requests: int, max_bytes: int) -> None:
        self.rules = rules
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._running: set[asyncio.Task[None]] = set()

    def wanted(self, names: tuple[str, str], exchange: Exchange, rng: Random) -> Shadow | None:
        """The rule for a request by the name it was asked by, or else by that of its model; None: it is not copied."""
        rule = self.rules.get(names[0]) or self.rules.get(names[1])
        if rule is None or exchange.carrier is not None or exchange.method != b"POST":
            return None
        if rule.paths and not any(fnmatchcase(exchange.path, glob) for glob in rule.paths):
            return None
        return None if rule.ratio < 1.0 and rng.random() >= rule.ratio else rule

    def takes(self, size: int) -> bool:
        """Whether there is room for one more with a body of this size."""
        return len(self._running) < self._max_requests and self._bytes + size <= self._max_bytes

    def run(self, work: Coroutine[None, None, None], size: int) -> None:
        """Have a copy with a body of this size sent."""
        task = asyncio.get_running_loop().create_task(work, name="shadow")
        self._running.add(task)
        self._bytes += size

        def done(ended: asyncio.Task[None]) -> None:
            self._running.discard(ended)
            self._bytes -= size
            if not ended.cancelled():
                ended.result()  # an error here is a bug: the loop's handler says so

        task.add_done_callback(done)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._running:
            task.cancel()


def asked_of(request: InferenceRequest, id_: str, model: str, version: str) -> InferenceRequest:
    """What policy sees of a copy: the same prompt for others, in the lowest class and of no session."""
    return replace(
        request,
        id=id_,
        model=model,
        version=version,
        priority=Priority.BATCH,
        session="",
        warm=(),
        warm_tokens=0,
        sticky=False,
        deadline_s=None,
        fingerprint=0,  # what it does to servers is not held against its client's
        shadow_of=request.id,
    )


def copied(exchange: Exchange) -> Exchange:
    """The same request, answered to nobody."""
    client = exchange.client
    copy = Exchange(Nobody(client.limits, client.peername))
    copy.method, copy.target, copy.headers, copy.fields = (
        exchange.method,
        exchange.target,
        list(exchange.headers),
        dict(exchange.fields),
    )
    copy.body, copy.head_complete = exchange.body, True
    copy.started_at, copy.started_wall_ns = exchange.started_at, exchange.started_wall_ns
    return copy
