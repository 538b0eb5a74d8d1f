"""Answers under way: what whole ones (`whole`) and streams (`stream`) have in common, and what is remembered of them.

A reply owns the sequences of one request. The engine calls `started` and `finished` for each, and `pump` at every tick
for those that stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from common.sim.engine import Sequence
from services.engine_sim.bodies import Job, Part
from services.engine_sim.faults import RequestFaults
from services.engine_sim.http import Connection

if TYPE_CHECKING:
    from services.engine_sim.live import LiveEngine

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Record(msgspec.Struct, kw_only=True):
    """What is remembered of a request, for tests that count executions."""

    id: str  # x-request-id as received
    traceparent: str  # as received
    path: str
    sha256: str  # of the raw body
    header_names: list[str]
    model: str = ""  # as the body named it
    status: int = 0  # of the answer; 0: none was begun
    executed: bool = False  # whether the engine took it
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_sent: int = 0
    finished: bool = False  # answered to the end
    aborted: bool = False  # the client left before


class Generation:
    """One sequence of a reply, and how much of it was sent."""

    __slots__ = ("index", "over", "part", "reply", "sent", "sequence", "start", "stop")

    def __init__(self, reply: Reply, index: int, part: Part) -> None:
        self.reply = reply
        self.index = index
        self.part = part
        self.sequence: Sequence | None = None  # set as soon as the engine took it
        self.sent = 0  # tokens
        self.over = False  # its last token was sent
        self.start, self.stop = reply.event_ends(index)


class Reply:
    """An answer under way: what whole ones and streams have in common."""

    __slots__ = (
        "connection",
        "created",
        "engine",
        "faults",
        "generations",
        "id",
        "job",
        "left",
        "orca",
        "received_s",
        "record",
    )

    def __init__(
        self,
        engine: LiveEngine,
        connection: Connection,
        job: Job,
        record: Record,
        faults: RequestFaults,
        orca: bytes,
        now: float,
    ) -> None:
        self.engine = engine
        self.connection = connection
        self.job = job
        self.record = record
        self.faults = faults
        self.received_s = now
        self.orca = orca  # the format in which the client wants load metrics, "": none
        self.id, self.created = engine.identify(job.kind, record.id)
        self.generations = [Generation(self, i, part) for i, part in enumerate(job.parts)]
        self.left = len(self.generations)  # not over yet

    def event_ends(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event of sequence `index`; nothing for whole answers."""
        return b"", b""

    def begin(self) -> None:
        """The engine took the request."""

    def started(self, generation: Generation) -> None:
        """A sequence got its first token."""

    def finished(self, generation: Generation) -> None:
        """A sequence got its last token."""
        raise NotImplementedError

    def failed(self) -> None:
        """The engine died under it."""
        raise NotImplementedError

    def pump(self, generation: Generation) -> None:
        """Write what the engine has made of a sequence and the client has not got."""

    def gone(self) -> None:
        """The client left."""
        self.record.aborted = True
        self.engine.dropped(self)

    def resume(self) -> None:
        """There is room to write again."""

    def closed(self) -> None:
        """The answer was written."""
        self.record.finished = True
        self.engine.closed(self)

    def cached_tokens(self) -> int:
        """Prompt tokens of all its sequences that were found in the prefix cache."""
        return sum(g.sequence.cached_tokens for g in self.generations if g.sequence is not None)

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        """vLLM's usage block."""
        self.record.cached_tokens = self.cached_tokens()
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "total_tokens": self.job.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.record.cached_tokens},
        }
