"""One request inside a simulated engine, and what can happen to it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class EventKind(Enum):
    """What can happen to a sequence that its sender would notice."""

    FIRST = "first"  # token
    FINISHED = "finished"


class Refusal(Enum):
    """Why a request was not taken."""

    QUEUE_FULL = "queue_full"
    TOO_LONG = "too_long"  # input and output together exceed KV memory: it could never be admitted


class Sequence:
    """One request inside the engine. Read-only for others; times are on the clock that `now` was on.

    `owner` is for whoever submitted it; the model never reads it.
    """

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "finished_s",
        "first_step",
        "first_token_s",
        "generated",
        "id",
        "input_tokens",
        "looked_up",
        "output_tokens",
        "owner",
        "prefilled",
        "prefix_hashes",
        "state",
    )

    def __init__(
        self,
        request_id: str,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[int, ...],
        arrived_s: float,
        owner: object,
    ) -> None:
        self.id = request_id
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens  # true length; 0: prefill only, as an embedding
        self.prefix_hashes = prefix_hashes
        self.arrived_s = arrived_s
        self.owner = owner
        self.state = State.WAITING
        self.cached_tokens = 0  # of the prompt, found in the prefix cache
        self.prefilled = 0  # prompt tokens read, cached ones included
        self.looked_up = False  # whether the prefix cache has been asked
        self.first_step = -1  # number of the engine step that gave the first token
        self.generated = 0  # final count; while it decodes, ask EngineModel.generated
        self.first_token_s: float | None = None
        self.finished_s: float | None = None


class Event(NamedTuple):
    """Something that happened at `at_s`."""

    at_s: float
    kind: EventKind
    sequence: Sequence
