"""What a replay hands out: a sample for each request that ended, and counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request was and what became of it. Times are seconds; `None` where there is nothing to measure."""

    index: int  # which row of the replay
    due_s: float  # when it ought to be sent, from the start of the replay
    late_s: float  # how much later it was; up to a millisecond less than 0, for timers are that coarse
    target: str
    client: str
    session: str
    stream: bool
    input_tokens: int  # of the row
    output_tokens: int  # of the answer, as counted by the server, else by its events
    status: int  # 0: no answer
    error: str  # "" if all is well; `Exchange` lists the kinds
    ttft_s: float | None  # to the first token; streams only
    tpot_s: float | None  # per output token after the first; streams of two or more
    max_gap_s: float  # longest silence between tokens
    e2e_s: float  # to the end, be it good or bad
    body_bytes: int
    done: bool  # the answer was whole: [DONE] seen, or a completion in one piece
    served_by: str  # region/cluster/instance, as the balancer says
    decision: str  # id of the balancer's decision record

    @property
    def ok(self) -> bool:
        """Whether the client got all it asked for."""
        return not self.error

    @property
    def rejected(self) -> bool:
        """Whether it was refused for load, which is not a failure: 429, 503, or a deadline that could not be met."""
        return bool(self.error) and (self.status in {429, 503} or self.error.endswith("deadline_exceeded"))

    @property
    def failed(self) -> bool:
        """Whether it ended badly otherwise."""
        return bool(self.error) and not self.rejected


@dataclass(slots=True)
class Progress:
    """Counts of a replay so far; `last` is the request that ended just now."""

    sent: int = 0
    ok: int = 0
    rejected: int = 0
    failed: int = 0
    elapsed_s: float = 0.0
    last: Sample | None = None

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return self.ok + self.rejected + self.failed

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return self.sent - self.ended
