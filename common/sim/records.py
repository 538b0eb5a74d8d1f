"""What a run leaves behind: one record a request, and the load of every instance over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Ending(Enum):
    """How a request ended, as its client sees it."""

    COMPLETE = "complete"
    REJECTED = "rejected"  # refused before any answer: no place, no endpoint, too long
    BROKEN = "broken"  # its server was lost, and it could not be run elsewhere


@dataclass(slots=True)
class Record:
    """One request. Times are virtual seconds; `None` where it has not come, or never will."""

    index: int  # in the traffic offered, from 0
    at_s: float  # when it arrived at the first balancer
    input_tokens: int
    output_tokens: int  # true length
    expected_tokens: float = 0.0  # what the policy was told its length would be
    instance: str = ""  # the last one it was sent to
    node: str = ""  # the balancer it arrived at
    attempts: int = 0  # instances it was sent to
    predicted_ttft_s: float | None = None  # by the policy, when it was sent there
    predicted_e2e_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None  # to the end, be it good or bad
    ending: Ending | None = None
    reason: str = ""  # of a rejection

    @property
    def complete(self) -> bool:
        """Whether its client got all it asked for."""
        return self.ending is Ending.COMPLETE

    @property
    def tpot_s(self) -> float | None:
        """Seconds for one output token after the first; None for what has no second one."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def s_per_token(self) -> float | None:
        """End to end, per output token."""
        return None if self.e2e_s is None else self.e2e_s / max(1, self.output_tokens)


@dataclass(slots=True)
class LoadSeries:
    """What was on every instance at regular times: one row a sample, one column an instance; None: it was gone.

    Columns are in the order of `instances`; a row from before an instance joined is shorter. `work_s` is the GPU time
    that all on it has still to come, counted as least work left counts it, from true lengths.
    """

    instances: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    in_flight: list[list[int | None]] = field(default_factory=list)
    occupancy: list[list[float | None]] = field(default_factory=list)  # in flight ÷ batch slots; above 1 some wait
    work_s: list[list[float | None]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # fraction of the living instances that compute


@dataclass(slots=True)
class RunRecord:
    """All of one run."""

    seed: int
    records: list[Record]
    load: LoadSeries
    decision_s: list[float]  # host time of each choice, where a stop watch was given
    learning_s: list[float]  # host time of each first token and end, likewise
    events: int = 0
    end_s: float = 0.0  # virtual time when the last request ended
    prefix_queries: int = 0  # prompt tokens looked up in prefix caches
    prefix_hits: int = 0  # of those, found
