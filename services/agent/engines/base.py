"""What an adapter is: the one place that knows how a kind of inference server shows its state.

An adapter is a file with a class of two methods and a line in `engines.ADAPTERS`; everything else (intervals, failure
counting, restarts, registration, reports) is the monitor's and the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import Any, Protocol

from common.types import Phase


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back from one GET. Nothing is raised: `problem` says in a word or two what went wrong.

    `status` is the HTTP status, 0 if no answer came at all. The body is whole, or empty where there is a problem.
    """

    status: int
    body: bytes = b""
    problem: str = ""
    refused: bool = False  # nobody listens there: the process is gone, or not up yet

    @property
    def ok(self) -> bool:
        """A whole 200 answer."""
        return self.status == 200 and not self.problem

    def json(self) -> Any:
        """The body as JSON, None if it is none (an HTML page, say) or was not a 200."""
        if not self.ok:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Listener(Enum):
    """Some servers answer on several ports: requests on one, metrics or management on others."""

    MAIN = "main"
    METRICS = "metrics"
    MANAGEMENT = "management"


class Ask(Protocol):
    """GETs a path of one server, bounded in time and size; `http.Scraper.of` makes them."""

    def __call__(self, path: str, listener: Listener = Listener.MAIN, ports_up: int = 0) -> Awaitable[Answer]:
        """The answer to `GET path`, from a listener as configured, else `ports_up` ports above the server's own."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What one look at a server showed. None (for models: None too) is what it does not say, or said nonsense of."""

    phase: Phase = Phase.SERVING
    models: frozenset[str] | None = None  # what requests may name, aliases and LoRA adapters included
    adapters: frozenset[str] | None = None  # those of the models that are LoRA adapters
    versions: frozenset[tuple[str, str]] = field(default=frozenset())  # (model, version), where it tells versions
    warm_models: frozenset[str] | None = None  # in memory now, the others must be loaded first; None: all, or untold
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_running: float | None = None  # requests it computes at once; further ones wait in it
    running: float | None = None  # requests being computed
    waiting: float | None = None  # requests the server holds back
    kv_utilization: float | None = None  # fraction, 0…1
    kv_tokens: float | None = None  # how many tokens its KV cache holds
    generated_tokens: float | None = None  # counter since it began
    steps: float | None = None  # counter of engine steps or executions since it began: moves while work gets done
    tokens_per_s: float | None = None  # generated just now, by its own reckoning
    prompt_tokens_per_s: float | None = None  # prompts read just now, by its own reckoning
    started_s: float | None = None  # when its process began, by its own clock: compared with its earlier word only
    problems: frozenset[str] = field(default=frozenset())  # what could not be read, in words for a log


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The look found nobody. `refused`: no connection could be made; else the server took it and said nothing."""

    refused: bool
    why: str


class Adapter(Protocol):
    """One kind of inference server. Adapters keep no state: one object serves all servers of its kind."""

    @property
    def engine(self) -> str:
        """Its name, as in `Endpoint.engine`."""

    async def recognise(self, ask: Ask) -> bool:
        """Whether the server is of this kind. Paths asked for by several adapters are fetched once."""

    async def look(self, ask: Ask) -> EngineState | Unreachable:
        """The server's present state."""


def positive(value: float | None) -> float | None:
    """A capacity if it can be one: finite and above 0."""
    return value if value is not None and isfinite(value) and value > 0.0 else None


def number(value: object) -> float | None:
    """A number out of JSON; None for anything else, true and false included."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def counted(value: float | None) -> float | None:
    """A count or counter if it can be one: finite and not negative."""
    return value if value is not None and isfinite(value) and value >= 0.0 else None


def fraction(value: float | None) -> float | None:
    """A fraction if it can be one; a rounding error above 1 is 1, a percentage is nonsense."""
    if value is None or not 0.0 <= value <= 1.01:
        return None
    return min(value, 1.0)
