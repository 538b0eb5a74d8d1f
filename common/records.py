"""What happened to one request in this process: the one account that spans, metrics, logs and explanations come from.

Filled in as the request goes, in monotonic seconds; the wall clock is read once, at its start. Nothing in it is a
prompt, an answer or a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.types import InferenceRequest, Path, Pick, Score, Shed


class Ending(Enum):
    """How an answer ended; every request has exactly one."""

    COMPLETE = "complete"
    CLIENT_LEFT = "client_left"
    BROKE_BEFORE = "broke_before_first_byte"
    BROKE_AFTER = "broke_after_first_byte"
    REFUSED = "refused_here"


@dataclass(slots=True)
class StageRecord:
    """One stage's decision. What is not asked for is not computed: it holds the pick, whose columns are read later."""

    path: Path  # the node whose children it chose among
    pick: Pick
    takeover: bool
    at: float
    span_id: str
    attempt: int = 0  # which of the request's attempts it led to
    pool_size: int = 0  # endpoints there were, whether they qualified or not
    scorers: tuple[tuple[str, float, Any], ...] = ()  # of the policy: (term, weight, how it is computed)
    unheard: tuple[str, ...] = ()  # whose last load report was too old to be believed
    pool_stale: bool = False  # membership was what was known last: its store was out of reach

    @property
    def weights(self) -> dict[str, float]:
        """What each term counts for in the total: seconds for one of its unit."""
        return {term: weight for term, weight, _ in self.scorers}

    @property
    def chosen(self) -> str:
        """The id of the child that was taken."""
        return self.pick.endpoint.id

    @property
    def policy(self) -> str:
        """Name of the policy that chose."""
        return self.pick.policy

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of what the costs are made of."""
        return self.pick.terms

    @property
    def scores(self) -> tuple[Score, ...]:
        """What each candidate cost, in the order of their ids. Built anew at each call: O(candidates)."""
        return self.pick.scores

    @property
    def predicted_ttft_s(self) -> float | None:
        """Seconds from the decision to the first token, as foreseen."""
        return self.pick.predicted_ttft_s

    @property
    def predicted_total_s(self) -> float | None:
        """Seconds from the decision to the last token, as foreseen."""
        return self.pick.predicted_total_s


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
    continues: bool = False  # the stream of the attempt before it, which broke


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
    alias: str = ""  # the name it was asked by, where that is not its model's
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
    version: str = ""  # of the model that was asked for, as in `InferenceRequest`
    shadow_of: str = ""  # the request that this is a copy of, as in `InferenceRequest`
    struck: int = 0  # servers that it took down, or whose memory it exhausted, as this tier and those below saw
    served_by: str = ""  # region/cluster/instance
    first_byte_at: float | None = None
    ended_at: float = 0.0
    status: int = 0
    ending: Ending = Ending.REFUSED
    error: str = ""
    counted: bool = False  # in the gauge of requests under way
    request: InferenceRequest | None = None  # as the stages saw it; None when it was refused before any
    shed: Shed | None = None  # the last stage's word, when nobody could take it

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first byte of the answer's body left for the client."""
        return None if self.first_byte_at is None else self.first_byte_at - self.started_at

    @property
    def last_began_at(self) -> float | None:
        """When the server that answered in the end sent its first byte: not the first one's, if it carries that on."""
        carries_on = bool(self.attempts) and self.attempts[-1].continues
        return self.attempts[-1].first_byte_at if carries_on else self.first_byte_at

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

    @property
    def went_well(self) -> bool:
        """Whether it was answered whole, and with no error."""
        return self.ending is Ending.COMPLETE and self.status < 400

    @property
    def answered_stages(self) -> list[StageRecord]:
        """The decisions that led to the last attempt, which is the one that was answered if any was."""
        last = len(self.attempts) - 1
        return [stage for stage in self.stages if stage.attempt == last]

    def footprint(self) -> int:
        """Bytes of memory it holds, rounded up; what it shares with others (names, pools) is left out. O(stages)."""
        size = RECORD_BYTES + len(self.model) + len(self.path) + ATTEMPT_BYTES * len(self.attempts)
        if self.request is not None:
            size += REQUEST_BYTES + HASH_BYTES * len(self.request.prefix_hashes)
        for stage in self.stages:
            pick = stage.pick
            size += STAGE_BYTES + len(pick.candidates) * (NUMBER_BYTES * (len(pick.columns) + 1) + 8)
            size += REMOVED_BYTES * len(pick.removed)
        return size


# Bytes of the objects in CPython 3.11 to 3.13, measured and rounded up; a test holds them to what tracemalloc says.
RECORD_BYTES = 1800
REQUEST_BYTES = 600
ATTEMPT_BYTES = 450
STAGE_BYTES = 1100
REMOVED_BYTES = 300  # of one filter, which names sixteen at most
NUMBER_BYTES = 32  # a float and the list's pointer to it
HASH_BYTES = 44  # an integer of 64 bits and the tuple's pointer to it
