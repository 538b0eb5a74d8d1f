"""What happened to one request in this process: the one account that spans, metrics, logs and explanations come from.

Filled in as the request goes, in monotonic seconds; the wall clock is read once, at its start. Nothing in it is a
prompt, an answer or a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.types import Path, Pick


class Ending(Enum):
    """How an answer ended; every request has exactly one."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client_left"
    BROKE_BEFORE = "broke_before_first_byte"
    BROKE_AFTER = "broke_after_first_byte"
    REFUSED = "refused_here"


@dataclass(slots=True)
class StageRecord:
    """One stage's decision."""

    path: Path  # the node whose children it chose among
    pick: Pick  # its scores are looked at when somebody asks
    takeover: bool
    at: float
    span_id: str


@dataclass(slots=True)
class AttemptRecord:
    """One try at the next hop: a peer, or the instance itself."""

    target: Path
    peer: str  # id of the balancer it went to; "" for an instance
    url: str
    at: float
    span_id: str
    reused: bool = False  # its connection
    first_byte_at: float | None = None
    ended_at: float | None = None
    status: int = 0
    error: str = ""


@dataclass(slots=True)
class RequestRecord:
    """One request, from its last byte received to its answer's last byte sent."""

    id: str  # trace id, 32 hex digits
    span_id: str  # of this process's server span, 16 hex digits
    parent_id: str  # of the caller's span, or ""
    sampled: bool
    process: str
    node: Path
    method: str
    path: str
    started_at: float
    started_wall_ns: int
    from_peer: bool = False
    operation: str = ""
    model: str = ""
    stream: bool = False
    tenant: str = ""
    has_session: bool = False
    input_tokens: int = 0
    input_bytes: int = 0  # of the prompt's text, where this process read it
    input_items: int = 0  # images, clips and the like beside it
    output_tokens: float | None = None
    used_input_tokens: int | None = None  # by the server's own count; of these it had cached:
    used_cached_tokens: int | None = None
    predicted_output_tokens: float | None = None
    stages: list[StageRecord] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    queued_at: float | None = None  # when it first came to wait here for a server with room
    queued_s: float = 0.0  # how long it waited, all times together
    executions: int = 0  # servers that were sent it so far, by this tier and all others
    served_by: str = ""  # region/cluster/instance
    first_byte_at: float | None = None
    ended_at: float = 0.0
    status: int = 0
    ending: Ending = Ending.REFUSED
    error: str = ""
    counted: bool = False  # in the gauge of requests under way

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first byte of the answer's body left for the client."""
        return None if self.first_byte_at is None else self.first_byte_at - self.started_at

    @property
    def total_s(self) -> float:
        """Seconds until its end."""
        return self.ended_at - self.started_at

    @property
    def tpot_s(self) -> float | None:
        """Seconds for one output token after the first; None when it was not streamed or too short to tell."""
        if self.first_byte_at is None or not self.stream or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_byte_at) / (self.output_tokens - 1)
