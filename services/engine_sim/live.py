"""The engine model in real time: one timer, and at each tick the tokens that the model has made since the last.

The model's clock runs `speed` times faster than ours; a stall stops it, a slow-down divides it. The model is the
authority on time, so a timer that comes late delays what is written and nothing else. Steps shorter than `tick_s` are
taken several at a tick, which keeps the rate right with fewer writes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import ceil, inf
from secrets import token_hex

import msgspec

from common import clock
from common.sim.engine import EngineModel, Event, EventKind, Refusal
from services.engine_sim.bodies import ApiError, Job
from services.engine_sim.config import EngineConfig
from services.engine_sim.faults import NONE, Faults, RequestFaults
from services.engine_sim.http import Connection
from services.engine_sim.metrics import Metrics
from services.engine_sim.replies import DEAD, Generation, Record, Reply
from services.engine_sim.stream import StreamReply
from services.engine_sim.whole import WholeReply

FLUSH_S = 0.01  # what is left to bytes already written before a connection or the process is broken on purpose
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-"}


class ModelClock:
    """Maps our clock to the model's; `rate` is model seconds per second, 0 while it stands still."""

    __slots__ = ("_model_s", "_real_s", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._real_s = now
        self._model_s = 0.0

    def model(self, now: float) -> float:
        """The model's time at our `now`."""
        return self._model_s + (now - self._real_s) * self.rate

    def real(self, model_s: float) -> float:
        """Our time at the model's `model_s`; inf while it stands still."""
        return self._real_s + (model_s - self._model_s) / self.rate if self.rate else inf

    def set_rate(self, rate: float, now: float) -> None:
        """From `now` on the model's clock runs at `rate`."""
        self._model_s = self.model(now)
        self._real_s = now
        self.rate = rate


class LiveEngine:
    """One simulated server behind its HTTP routes. `die` is how its death looks from outside: see server.py."""

    def __init__(self, config: EngineConfig, die: Callable[[], None]) -> None:
        now = clock.now()
        self.config = config
        self.model = self._new_model()
        self.metrics = Metrics()
        self.faults: Faults = NONE
        self.dead = False  # its engine core is, as after out of memory
        self.ready_s = now + config.load_time_s
        self.started_wall_s = clock.wall_ns() / 1e9
        self.records: deque[Record] = deque(maxlen=config.record_requests)
        self.received = 0  # requests, remembered or not
        self.in_flight: set[Reply] = set()
        self.streaming: dict[Generation, None] = {}  # past their first token and not all sent; in order of arrival
        self.chunks_to_live: int | None = None  # of fault "die": "after_chunks:N"
        self.headers = b""  # of every answer
        self._die = die
        self._loop = asyncio.get_running_loop()
        self._clock = ModelClock(config.speed, now)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = inf
        self._stall_end: asyncio.TimerHandle | None = None
        self._last_tick_s = now
        self._counted = (0, 0)  # steps and decoded tokens already in the inter-token histogram
        self.rename(config)

    def _new_model(self) -> EngineModel:
        config = self.config
        return EngineModel(config.engine_speed(), max_queue=config.max_queue, prefix_fraction=config.prefix_fraction)

    def rename(self, config: EngineConfig) -> None:
        """Take the name and port that binding has settled."""
        self.config = config
        self.headers = b"x-engine-id: %b\r\n" % config.name.encode()

    # --- requests ---

    def identify(self, kind: str, request_id: str) -> tuple[str, int]:
        """The id and creation time of an answer; as vLLM, out of the client's x-request-id if it sent one."""
        return _ID_PREFIX[kind] + (request_id or token_hex(16)), clock.wall_ns() // 1_000_000_000

    def accept(self, job: Job, connection: Connection, record: Record, faults: RequestFaults, orca: bytes) -> None:
        """Take a job into the engine. Raises ApiError if it is dead or full."""
        if self.dead:
            raise ApiError(500, DEAD, "InternalServerError")
        out_of_memory = any(faults.out_of_memory(part.input_tokens) for part in job.parts)
        kind = StreamReply if job.stream else WholeReply
        now = self.advance()
        reply = kind(self, connection, job, record, faults, orca, now)
        for generation in reply.generations:
            part = generation.part
            taken = self.model.submit(
                reply.id, part.input_tokens, part.output_tokens, part.prefix_hashes, self._clock.model(now), generation
            )
            if isinstance(taken, Refusal):
                self._cancel(reply, now)
                self._arm(now)
                busy = self.config.queue_full_status
                kind_name = "TooManyRequestsError" if busy == 429 else "ServiceUnavailableError"
                message = f"The request queue is full ({self.config.max_queue} requests are waiting)."
                raise ApiError(busy, message, kind_name, retry_after_s=self.config.retry_after_s)
            generation.sequence = taken
        record.executed = True
        self.in_flight.add(reply)
        connection.reply = reply
        reply.begin()
        if out_of_memory:
            self._run_out_of_memory(reply, fatal=faults.oom_fatal)
        else:
            self._arm(now)

    def closed(self, reply: Reply) -> None:
        """A reply was answered to its end."""
        self.in_flight.discard(reply)

    def dropped(self, reply: Reply) -> None:
        """A reply will not be answered any further: stop its sequences at once. May be called in a tick."""
        now = clock.now()
        self.in_flight.discard(reply)
        if self._cancel(reply, now):
            self.metrics.finished["abort"] += 1
            self._arm(now)

    def _cancel(self, reply: Reply, now: float) -> bool:
        stopped = False
        for generation in reply.generations:
            self.streaming.pop(generation, None)
            if generation.sequence is not None:
                stopped |= self.model.cancel(generation.sequence, self._clock.model(now))
        return stopped

    # --- time ---

    def advance(self) -> float:
        """Bring the model up to now and send what it has made. Returns now. Not to be called in a tick."""
        now = clock.now()
        if self.model.pending or self.model.step_end_s <= self._clock.model(now):
            self._tick(now)
        return now

    def _on_timer(self) -> None:
        self._timer = None
        now = clock.now()
        self._tick(now)
        self._arm(now)

    def _tick(self, now: float) -> None:
        events = self.model.run_until(self._clock.model(now))
        self._observe_steps(now)
        for event in events:
            self._happened(event)
        for generation in list(self.streaming):
            generation.reply.pump(generation)

    def _happened(self, event: Event) -> None:
        generation = event.sequence.owner
        assert isinstance(generation, Generation)
        # A reply may have been dropped between the event and now.
        listening = generation.reply in self.in_flight
        at_s = self._clock.real(event.at_s)
        took_s = (at_s if at_s < inf else clock.now()) - generation.reply.received_s
        if event.kind is EventKind.FIRST:
            self.metrics.ttft.observe(took_s)
            if listening:
                generation.reply.started(generation)
        else:
            self.metrics.e2e.observe(took_s)
            self.metrics.finished[generation.part.finish_reason] += 1
            if listening:
                generation.reply.finished(generation)

    def _observe_steps(self, now: float) -> None:
        """Book the gaps between tokens since the last tick, all alike: in one batch every gap is one step."""
        model = self.model
        steps, decoded = self._counted
        if model.steps > steps:
            gaps = model.generated_tokens - model.first_tokens - decoded
            if gaps:
                self.metrics.inter_token.observe((now - self._last_tick_s) / (model.steps - steps), gaps)
            self._counted = (model.steps, decoded + gaps)
        self._last_tick_s = now

    def _arm(self, now: float) -> None:
        """Set the timer for the next step's end, or for the next event where nobody streams."""
        model_due = self.model.step_end_s if self.streaming else self.model.next_event_s
        due = max(self._clock.real(model_due), self._last_tick_s + self.config.tick_s)
        if self.model.pending:  # a cancel has run the model on to now
            due = now
        if self._timer is not None:
            if self._timer_due_s <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due < inf:
            # The loop's timers have whole milliseconds and must not come early, or they would come twice.
            self._timer = self._loop.call_later(ceil((due - now) * 1000.0) / 1000.0, self._on_timer)
            self._timer_due_s = due

    # --- faults ---

    def set_faults(self, faults: Faults) -> None:
        """Let go wrong what is asked for, from now on."""
        now = self.advance()
        if faults.die != self.faults.die:
            self.chunks_to_live = faults.die_after
        self.faults = faults
        if self._stall_end is not None:
            self._stall_end.cancel()
            self._stall_end = None
        if faults.stall and not isinstance(faults.stall, bool):
            self._stall_end = self._loop.call_later(faults.stall, self._end_stall)
        self._set_rate(now)
        if faults.die == "now":
            self._loop.call_later(FLUSH_S, self._die)

    def clear_faults(self) -> None:
        """All is well again, and a dead engine core has been started anew."""
        self.dead = False
        self.set_faults(NONE)

    def drop_once(self) -> None:
        """One of the counted `drop_before_byte` was used up."""
        left = self.faults.drop_before_byte
        if left and not isinstance(left, bool):
            self.faults = msgspec.structs.replace(self.faults, drop_before_byte=left - 1)

    def spend_chunks(self, count: int) -> int:
        """How many of `count` chunks may still be written before the engine dies; the last one kills it."""
        if self.chunks_to_live is None:
            return count
        allowed = min(count, self.chunks_to_live)
        if self.chunks_to_live > 0 and allowed == self.chunks_to_live:
            self._loop.call_later(FLUSH_S, self._die)
        self.chunks_to_live -= allowed
        return allowed

    def reset_soon(self, connection: Connection) -> None:
        """Reset a connection as soon as what was written to it is out."""
        self._loop.call_later(FLUSH_S, connection.reset)

    def stop(self) -> None:
        """The process of this engine is gone: no timer, no sequences."""
        now = clock.now()
        for reply in list(self.in_flight):
            self._cancel(reply, now)
        self.in_flight.clear()
        self._clock.set_rate(0.0, now)
        for timer in (self._timer, self._stall_end):
            if timer is not None:
                timer.cancel()
        self._timer = self._stall_end = None

    def _end_stall(self) -> None:
        self._stall_end = None
        self.faults = msgspec.structs.replace(self.faults, stall=False)
        self._set_rate(clock.now())

    def _set_rate(self, now: float) -> None:
        still = bool(self.faults.stall) or self.dead
        self._clock.set_rate(0.0 if still else self.config.speed / self.faults.slow, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._arm(now)

    def _run_out_of_memory(self, reply: Reply, *, fatal: bool) -> None:
        """CUDA out of memory: one request fails, or the engine core dies under all of them."""
        failing = list(self.in_flight) if fatal else [reply]
        self.dead = self.dead or fatal
        now = clock.now()
        for each in failing:
            self.in_flight.discard(each)
            self._cancel(each, now)
            self.metrics.finished["error"] += 1
            each.failed()
        if fatal:
            self.model = self._new_model()  # nothing is in memory any more, and its counters begin again
            self._counted = (0, 0)
            self._set_rate(now)
        else:
            self._arm(now)

    # --- what it says of itself ---

    @property
    def loading(self) -> bool:
        """Whether its model is not in memory yet."""
        return clock.now() < self.ready_s

    def load_header(self, form: bytes) -> bytes:
        """vLLM's ORCA header line in the format the client asked for; empty for none or an unknown one."""
        kv, waiting = self.model.kv_utilization, float(self.model.waiting)
        if form.upper() == b"TEXT":
            return (
                f"endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc={kv}, "
                f"named_metrics.num_requests_waiting={waiting}\r\n"
            ).encode()
        if form.upper() == b"JSON":
            named = f'{{"named_metrics": {{"kv_cache_usage_perc": {kv}, "num_requests_waiting": {waiting}}}}}'
            return f"endpoint-load-metrics: JSON {named}\r\n".encode()
        return b""
