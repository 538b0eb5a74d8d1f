"""One simulated server of a world: an engine, whoever waits for what it makes, and the ways in which it goes wrong."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from math import inf
from typing import Protocol

from common.sim.engine import EngineModel, Event, EventKind
from common.sim.loop import Loop
from common.sim.sequence import Refusal
from common.types import Endpoint, LoadReport, Phase, Speed

MAX_QUEUE = 100_000  # vLLM's waiting queue has no bound; this one shows a policy that diverges before memory is gone


class End(Enum):
    """How one try at an instance or a peer ended, as the balancer that sent it sees it."""

    COMPLETE = "complete"
    OVERLOADED = "overloaded"  # refused for load: its queue is full
    TOO_LONG = "too_long"  # refused for good: it can never fit
    UNREACHABLE = "unreachable"  # nobody there: it never saw the request
    LOST = "lost"  # it died with the request on it
    REJECTED = "rejected"  # by a peer that dispatched nothing


class Caller(Protocol):
    """Who sent a request and waits for its answer; called at the answerer's time, so the way back is the caller's."""

    def first(self) -> None:
        """Its first token is made."""

    def ended(self, end: End, cached_tokens: int | None = None) -> None:
        """It is over, and nothing comes after this. `cached_tokens`: what the server had of its prompt, if known."""


def as_fast_as(speed: Speed, factor: float) -> Speed:
    """`speed` at `factor` of its pace, its limits unchanged; 0.5 takes twice as long for everything."""
    return replace(
        speed,
        alpha_s=speed.alpha_s / factor,
        beta_s=speed.beta_s / factor,
        gamma_s=speed.gamma_s / factor,
        prefill_tokens_per_s=speed.prefill_tokens_per_s * factor,
    )


class Instance:
    """One server. `endpoint` is what membership says of it; `speed` is how fast it truly is."""

    __slots__ = (
        "_armed_s",
        "_loop",
        "_made_before",
        "_prefix_fraction",
        "_read_before",
        "_seen",
        "alive",
        "boots",
        "endpoint",
        "engine",
        "input_tokens",
        "on_it",
        "output_tokens",
        "speed",
    )

    def __init__(self, endpoint: Endpoint, speed: Speed, loop: Loop, prefix_fraction: float = 0.0) -> None:
        self.endpoint = endpoint
        self.speed = speed
        self.alive = True
        self.boots = 0
        self.on_it: dict[int, Caller] = {}  # those that wait for an answer, in order of arrival
        self._loop = loop
        self._prefix_fraction = prefix_fraction
        self._start()

    def _start(self) -> None:
        self.engine = EngineModel(self.speed, max_queue=MAX_QUEUE, prefix_fraction=self._prefix_fraction)
        self.input_tokens = 0  # sent here since it started
        self.output_tokens = 0  # of true length
        self._armed_s = inf
        self._seen = (0, 0, 0.0, 0)  # running, waiting, KV utilization, generated tokens

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, id_: int, input_tokens: int, output_tokens: int, prefix: tuple[int, ...], caller: Caller) -> None:
        """Take a request; `caller` hears of it, of a refusal before this returns. `id_` is unique on this instance."""
        if not self.alive:
            caller.ended(End.UNREACHABLE)
            return
        now = self._loop.now
        taken = self.engine.submit(str(id_), input_tokens, output_tokens, prefix, now, id_)
        if isinstance(taken, Refusal):
            caller.ended(End.TOO_LONG if taken is Refusal.TOO_LONG else End.OVERLOADED)
        else:
            self.on_it[id_] = caller
            self.input_tokens += input_tokens
            self.output_tokens += output_tokens
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Tell callers what the engine has made by `now`, and come back when it will next have something."""
        engine = self.engine
        if engine.pending or engine.next_event_s <= now:
            self._tell(engine.run_until(now))
        due_s = engine.next_event_s
        if due_s < self._armed_s:
            self._armed_s = due_s
            self._loop.at(due_s, self._due, self.boots)

    def catch_up(self) -> None:
        """Bring the engine's counters to this moment."""
        now = self._loop.now
        self._tell(self.engine.run_until(now))
        self._settle(now)

    def _due(self, boots: int) -> None:
        now = self._loop.now
        if boots != self.boots or now < self._armed_s:
            return  # of an engine that is gone, or overtaken by an earlier one
        self._armed_s = inf
        self._settle(now)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            id_ = event.sequence.owner
            assert isinstance(id_, int)
            if event.kind is EventKind.FIRST:
                self.on_it[id_].first()
            else:
                cached = event.sequence.cached_tokens if self._prefix_fraction else None
                self.on_it.pop(id_).ended(End.COMPLETE, cached)

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Its process ends: all connections are reset, all that was on it is lost."""
        self.alive = False
        self.boots += 1
        self._start()
        lost, self.on_it = list(self.on_it.values()), {}
        for caller in lost:
            caller.ended(End.LOST)

    def revive(self) -> None:
        """A new process answers in its place, empty."""
        assert not self.alive
        self.alive = True
        self.endpoint = replace(self.endpoint, boot=str(self.boots))

    def runs_at(self, factor: float) -> None:
        """From now on it is `factor` times as fast as it was built to be."""
        self.engine.runs_at(as_fast_as(self.speed, factor), self._loop.now)
        self._settle(self._loop.now)

    # -- what it says of itself --------------------------------------------------------------------------------------

    def look(self) -> None:
        """An agent reads its metrics: this is what reports say until the next look."""
        self.catch_up()
        engine = self.engine
        self._seen = (engine.running, engine.waiting, engine.kv_utilization, engine.generated_tokens)

    def report(self, age_s: float) -> LoadReport:
        """What its agent reports of the last look, made `age_s` ago."""
        running, waiting, kv, generated = self._seen
        return LoadReport(
            self.endpoint.id,
            age_s,
            running=float(running),
            waiting=float(waiting),
            kv_utilization=kv,
            generated_tokens=float(generated),
            phase=self.endpoint.phase,
        )

    @property
    def serving(self) -> bool:
        """Whether it is alive and loaded."""
        return self.alive and self.endpoint.phase is Phase.SERVING

    @property
    def in_flight(self) -> int:
        """Requests on it."""
        return len(self.on_it)

    @property
    def work_s(self) -> float:
        """GPU seconds of all that is on it and still to come, as least work left counts them, from true lengths."""
        engine, v = self.engine, self.speed
        prompts = self.input_tokens - engine.prompt_tokens
        rest = self.output_tokens - engine.generated_tokens
        context = engine.kv_tokens / max(1, self.in_flight)
        return prompts / v.prefill_tokens_per_s + rest * (v.beta_s + 2.0 * v.alpha_s / v.slots + v.gamma_s * context)
