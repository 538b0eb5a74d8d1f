"""What can be made to go wrong on command: with the whole server, or with single requests.

POST /sim/faults sets some of them, DELETE clears all; the header `x-sim-fault` (the same JSON, `RequestFaults` only)
concerns one request.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec


class RequestFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of single requests. Counts of chunks are counts of token events of one answer."""

    refuse: int = 0  # answer with this status at once; 0: do not
    drop_before_byte: bool | int = False  # close the connection instead of answering; a number: that many times
    drop_after_chunks: int | None = None  # reset the connection
    stall_after_chunks: int | None = None  # send nothing more
    error_after_chunks: int | None = None  # an error event under status 200, as vLLM does
    truncate_after_chunks: int | None = None  # end the body in order, without finish_reason or [DONE]
    oom: bool | int = False  # true: any request, a number: prompts of more tokens than that kill the engine
    oom_fatal: bool = True  # false: out of memory fails the request alone

    def __post_init__(self) -> None:
        if self.refuse and not 400 <= self.refuse <= 599:
            raise ValueError("refuse must be a status from 400 to 599")

    def out_of_memory(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length is one too many."""
        return self.oom if isinstance(self.oom, bool) else prompt_tokens > self.oom

    @property
    def chunks(self) -> int | None:
        """After how many token events the first of the stream faults comes; None: none of them."""
        limits = (
            self.drop_after_chunks,
            self.stall_after_chunks,
            self.error_after_chunks,
            self.truncate_after_chunks,
        )
        return min((n for n in limits if n is not None), default=None)


class Faults(RequestFaults, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of the server; those of requests then concern all requests."""

    stall: bool | float = False  # no engine step is made: for good, or for that many seconds
    slow: float = 1.0  # steps take this many times longer
    die: str = ""  # "now" or "after_chunks:N", counted over all answers
    revive_after_s: float | None = None  # after death, if the process lives on: the listener opens again, empty
    hang_health: bool = False  # /health and /ping never answer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.slow <= 1e6:
            raise ValueError("slow must be above 0 and at most 1000000")
        if self.die and self.die != "now" and self.die_after is None:
            raise ValueError("die must be now or after_chunks:N")

    @property
    def die_after(self) -> int | None:
        """Chunks until death, at least 1; None: none is set."""
        what, _, number = self.die.partition(":")
        return max(1, int(number)) if what == "after_chunks" and number.isdigit() else None


NONE = Faults()
T = TypeVar("T", bound=RequestFaults)


def changed(faults: Faults, body: bytes) -> Faults:
    """`faults` with what the JSON `body` names set anew. Raises msgspec.ValidationError or DecodeError."""
    return _merged(faults, body, Faults)


def of_request(faults: Faults, header: bytes) -> RequestFaults:
    """The faults that concern one request: the server's, with what its `x-sim-fault` header names set anew."""
    kept = {name: getattr(faults, name) for name in RequestFaults.__struct_fields__}
    base = RequestFaults(**kept)
    return _merged(base, header, RequestFaults) if header else base


def _merged(base: T, body: bytes, kind: type[T]) -> T:
    given = msgspec.json.decode(body, type=dict[str, Any])
    return msgspec.convert({**msgspec.structs.asdict(base), **given}, kind)
