"""A model of one inference server: continuous batching with chunked prefill, in virtual or in real time.

Decides when each sequence gets its first token and its last one. One engine step takes

    α + β·B + γ·K + Σ q·(1 + position/A)/r   seconds

for B sequences decoding with K tokens of context between them, and q prompt tokens read in the step (at most
`chunk_tokens` minus B, first come first served; `position` is the mean position of those q tokens in their prompt, so
that how a prompt is cut does not change what it costs). Every decoding sequence gets one token at the step's end, a
prompt that was read to its end gets its first. Admission is first come first served: a slot must be free and input plus
true output must fit into KV memory, so nothing is ever preempted.

Between two events all steps have the same form and K grows by B a step, so m of them take m·(α + β·B + γ·K) +
γ·B·m(m-1)/2: `run_until` skips over them, `step` does them one by one, and both give the very same times, since both
evaluate that sum. Cost: O(log B) per event, O(1) per skip; nothing per token.

Left to others: the text, the clock, the network (`services/engine_sim` in real time, `common/sim` in virtual time).
Source: Orca (OSDI '22), Sarathi-Serve (arXiv 2403.02310), vLLM's scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from math import inf, sqrt

from common.policy.prefix import CACHED_SHARE as PREFIX_FRACTION
from common.policy.prefix import PREFIX_BLOCK_TOKENS as BLOCK_TOKENS
from common.policy.prefix import PrefixCache
from common.sim.sequence import Event, EventKind, Refusal, Sequence, State
from common.types import Speed

__all__ = [
    "BLOCK_TOKENS",
    "LEAST_PREFILL",
    "PREFIX_FRACTION",
    "STEP_TOKEN_BUCKETS",
    "EngineModel",
    "Event",
    "EventKind",
    "PrefixCache",
    "Refusal",
    "Sequence",
    "State",
]

LEAST_PREFILL = 16  # tokens computed even of a fully cached prompt: vLLM computes the last block of 16 again
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's, tokens a step


class EngineModel:
    """One server. Time only goes forward: each `now` or `until` is at least as large as the one before.

    `max_queue` bounds the requests that wait for a slot or for KV memory. Counters (`steps`, `prompt_tokens`,
    `generated_tokens`, `step_tokens`, …) only grow, and are exact as of the last call.
    """

    preemptions = 0  # admission knows the true output, so none is ever needed

    def __init__(self, speed: Speed, *, max_queue: int = 1024, prefix_fraction: float = PREFIX_FRACTION) -> None:
        if speed.alpha_s <= 0.0 or speed.prefill_tokens_per_s <= 0.0 or speed.chunk_tokens < 1.0:
            raise ValueError("a step must take time, read prompts at some rate, and at least one token of them")
        self.speed = speed
        self.max_queue = max_queue
        self.slots = int(speed.slots)
        self.kv_capacity = int(speed.kv_tokens)
        self.prefix_cache = PrefixCache(int(self.kv_capacity * prefix_fraction) // BLOCK_TOKENS)

        self.running = 0  # admitted: prefilling or decoding
        self.reserved_tokens = 0  # KV promised to them: input plus true output
        self.steps = 0
        self.prompt_tokens = 0  # of prompts read to their end, cached part included
        self.generated_tokens = 0
        self.first_tokens = 0  # how many of `generated_tokens` were a sequence's first
        self.finished = 0
        self.cancelled = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0  # tokens
        self.step_tokens = [0] * (len(STEP_TOKEN_BUCKETS) + 1)  # steps by tokens processed, last: beyond the buckets
        self.step_tokens_sum = 0

        self._waiting: OrderedDict[Sequence, None] = OrderedDict()  # bounded by max_queue
        self._prefilling: deque[Sequence] = deque()  # bounded by slots; in order of arrival
        self._finishing: list[tuple[int, int, Sequence]] = []  # heap of (step, order, sequence): those decoding
        self._leaving: list[Sequence] = []  # cancelled, still in the step under way
        self._events: list[Event] = []  # happened and not yet returned; at most two a sequence
        self._order = 0
        self._context_tokens = 0  # K: of those decoding
        self._prefilled_tokens = 0  # of those prefilling

        # The run under way: like steps, starting at _anchor; _done of _limit are counted.
        self.next_event_s = inf  # when it ends: nothing can happen before; inf when idle
        self._anchor = 0.0
        self._done = 0
        self._limit = 0
        self._base_s = 0.0  # length of its first step, without prompts
        self._growth_s = 0.0  # half of what each step takes longer than the one before
        self._prompt_s = 0.0  # time spent on prompts; only a run of one step has any
        self._tokens = 0  # processed per step
        self._batch = 0  # B

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for KV memory."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Sequences past their first token."""
        return len(self._finishing)

    @property
    def kv_tokens(self) -> int:
        """KV memory in use, tokens: what running sequences have read and written."""
        return self._context_tokens + self._prefilled_tokens

    @property
    def kv_utilization(self) -> float:
        """Fraction of KV memory in use, 0…1."""
        return self.kv_tokens / self.kv_capacity

    @property
    def pending(self) -> bool:
        """Whether something happened that `run_until` or `step` has still to return."""
        return bool(self._events)

    @property
    def step_end_s(self) -> float:
        """When the step under way ends; inf when idle. Exact after `run_until`."""
        return self._end_of(self._done + 1) if self._limit else inf

    def generated(self, sequence: Sequence) -> int:
        """Tokens a sequence has got so far."""
        if sequence.state is State.DECODING:
            return 1 + self.steps - sequence.first_step
        return sequence.generated

    def submit(
        self,
        request_id: str,
        input_tokens: int,
        output_tokens: int,
        prefix_hashes: tuple[int, ...] = (),
        now: float = 0.0,
        owner: object = None,
    ) -> Sequence | Refusal:
        """Take a request, or say why not. It joins the batch at the end of the step under way.

        `input_tokens` is at least 1; `output_tokens` is the true length, 0 for what does not generate. `prefix_hashes`
        are chained, one for each full block of `BLOCK_TOKENS` prompt tokens.
        """
        if now >= self.next_event_s:
            self._run_to(now)
        if input_tokens + output_tokens > self.kv_capacity:
            return Refusal.TOO_LONG
        sequence = Sequence(request_id, input_tokens, output_tokens, prefix_hashes, now, owner)
        if not self._waiting and self._fits(sequence):
            # Resources only grow until the next step, so whoever fits now and is first in line fits then.
            self._admit(sequence)
            self._interrupt(now)
        elif len(self._waiting) >= self.max_queue:
            return Refusal.QUEUE_FULL
        else:
            self._waiting[sequence] = None
        return sequence

    def cancel(self, sequence: Sequence, now: float) -> bool:
        """Stop a sequence; it leaves at the end of the step under way. False if it had ended already."""
        if now >= self.next_event_s:
            self._run_to(now)
        if sequence.state is State.WAITING:
            del self._waiting[sequence]
            sequence.state = State.CANCELLED
            self.cancelled += 1
            if self._admit_waiting():  # it may have been what blocked the head of the queue
                self._interrupt(now)
            return True
        if sequence.state is not State.PREFILLING and sequence.state is not State.DECODING:
            return False
        self._interrupt(now)
        sequence.generated = self.generated(sequence)
        sequence.state = State.CANCELLED
        self._leaving.append(sequence)
        self.cancelled += 1
        return True

    def runs_at(self, speed: Speed, now: float) -> None:
        """From the step after the one under way on, it is as fast as `speed` says, whose limits are not looked at."""
        if now >= self.next_event_s:
            self._run_to(now)
        self.speed = speed
        if self._limit:
            self._interrupt(now)

    def step(self) -> list[Event]:
        """Finish the step under way, at `step_end_s`. Nothing when idle."""
        if self._limit:
            if self._done + 1 >= self._limit:
                self._end_run()
            else:
                self._count(self._done + 1)
        return self._drain()

    def run_until(self, until: float) -> list[Event]:
        """Finish every step that ends at or before `until`; what happened, in order of time."""
        self._run_to(until)
        if self._limit > 1:
            self._count(self._steps_by(until))
        return self._drain()

    # --- admission ---

    def _fits(self, sequence: Sequence) -> bool:
        need = sequence.input_tokens + sequence.output_tokens
        return self.running < self.slots and self.reserved_tokens + need <= self.kv_capacity

    def _admit(self, sequence: Sequence) -> None:
        self.running += 1
        self.reserved_tokens += sequence.input_tokens + sequence.output_tokens
        sequence.state = State.PREFILLING
        self._prefilling.append(sequence)

    def _admit_waiting(self) -> bool:
        admitted = False
        while self._waiting:
            head = next(iter(self._waiting))
            if not self._fits(head):
                break
            del self._waiting[head]
            self._admit(head)
            admitted = True
        return admitted

    def _leave(self, sequence: Sequence) -> None:
        self.running -= 1
        self.reserved_tokens -= sequence.input_tokens + sequence.output_tokens

    # --- the run of like steps ---

    def _end_of(self, steps: int) -> float:
        """When the run's step number `steps` ends; every time the model gives comes from here."""
        return self._anchor + steps * self._base_s + self._growth_s * (steps * (steps - 1)) + self._prompt_s

    def _steps_by(self, now: float) -> int:
        """How many steps of the run have ended by `now`: the root of a quadratic, then made exact."""
        elapsed = now - self._anchor - self._prompt_s
        slope = self._base_s - self._growth_s
        steps = self._done
        if elapsed > 0.0:
            steps = max(steps, int(2.0 * elapsed / (slope + sqrt(slope * slope + 4.0 * self._growth_s * elapsed))))
        while steps > self._done and self._end_of(steps) > now:
            steps -= 1
        while steps < self._limit and self._end_of(steps + 1) <= now:
            steps += 1
        return min(steps, self._limit)

    def _begin_run(self, at: float) -> None:
        """Compose what runs from `at` on: one step if a prompt is read in it, else as many as stay alike."""
        speed, batch = self.speed, len(self._finishing)
        read, self._prompt_s = self._read_prompts(batch) if self._prefilling else (0, 0.0)
        if not batch and not read:
            self._limit, self.next_event_s = 0, inf
            return
        self._anchor = at
        self._done = 0
        self._batch = batch
        self._tokens = batch + read
        self._base_s = speed.alpha_s + speed.beta_s * batch + speed.gamma_s * self._context_tokens
        self._growth_s = 0.5 * speed.gamma_s * batch
        self._limit = 1 if read else self._finishing[0][0] - self.steps
        self.next_event_s = self._end_of(self._limit)

    def _read_prompts(self, batch: int) -> tuple[int, float]:
        """Give the step's token budget to prompts in order of arrival: (tokens read, seconds they take)."""
        budget = int(self.speed.chunk_tokens) - batch
        read, weighted = 0, 0.0
        for sequence in self._prefilling:
            if budget <= 0:
                break
            if not sequence.looked_up:
                self._look_up(sequence)
            done = sequence.prefilled
            take = min(budget, sequence.input_tokens - done)
            weighted += take * (1.0 + (done + 0.5 * take) / self.speed.attention_tokens)
            sequence.prefilled = done + take
            read += take
            budget -= take
        self._prefilled_tokens += read
        return read, weighted / self.speed.prefill_tokens_per_s

    def _look_up(self, sequence: Sequence) -> None:
        sequence.looked_up = True
        self.prefix_queries += sequence.input_tokens
        if sequence.prefix_hashes:
            held = self.prefix_cache.match(sequence.prefix_hashes) * BLOCK_TOKENS
            cached = max(0, min(held, sequence.input_tokens - LEAST_PREFILL))
            sequence.cached_tokens = sequence.prefilled = cached
            self.prefix_hits += cached
            self._prefilled_tokens += cached

    def _interrupt(self, now: float) -> None:
        """The batch changes: end the run with the step under way at `now`, or begin one when idle."""
        if not self._limit:
            self._begin_run(now)
        elif self._limit > 1:
            self._count(self._steps_by(now))
            self._limit = self._done + 1
            self.next_event_s = self._end_of(self._limit)

    def _run_to(self, until: float) -> None:
        while self._limit and self.next_event_s <= until:
            self._end_run()

    def _count(self, done: int) -> None:
        """Book the run's steps up to number `done`: one token each for every decoding sequence."""
        steps = done - self._done
        if steps > 0:
            tokens = steps * self._batch
            self._done = done
            self.steps += steps
            self._context_tokens += tokens
            self.generated_tokens += tokens
            self.step_tokens[bisect_left(STEP_TOKEN_BUCKETS, self._tokens)] += steps
            self.step_tokens_sum += steps * self._tokens

    def _end_run(self) -> None:
        at = self.next_event_s
        self._count(self._limit)
        if self._leaving:
            self._let_leave()
        heap = self._finishing
        while heap and heap[0][0] == self.steps:
            sequence = heappop(heap)[2]
            self._context_tokens -= sequence.input_tokens + sequence.output_tokens
            self._finish(sequence, at)
        prefilling = self._prefilling
        while prefilling and prefilling[0].prefilled == prefilling[0].input_tokens:
            self._end_prefill(prefilling.popleft(), at)
        if self._waiting:
            self._admit_waiting()
        self._begin_run(at)

    def _end_prefill(self, sequence: Sequence, at: float) -> None:
        self._prefilled_tokens -= sequence.input_tokens
        self.prompt_tokens += sequence.input_tokens
        if sequence.prefix_hashes:
            self.prefix_cache.insert(sequence.prefix_hashes)
        if sequence.output_tokens == 0:
            self._finish(sequence, at)
            return
        self.generated_tokens += 1
        self.first_tokens += 1
        sequence.first_token_s = at
        sequence.first_step = self.steps
        self._events.append(Event(at, EventKind.FIRST, sequence))
        if sequence.output_tokens == 1:
            self._finish(sequence, at)
            return
        sequence.state = State.DECODING
        self._context_tokens += sequence.input_tokens + 1
        self._order += 1
        heappush(self._finishing, (self.steps + sequence.output_tokens - 1, self._order, sequence))

    def _finish(self, sequence: Sequence, at: float) -> None:
        self._leave(sequence)
        self.finished += 1
        sequence.state = State.FINISHED
        sequence.generated = sequence.output_tokens
        sequence.finished_s = at
        self._events.append(Event(at, EventKind.FINISHED, sequence))

    def _let_leave(self) -> None:
        """Take the cancelled out of the batch. O(slots) for all of them together."""
        gone = set(self._leaving)
        for sequence in self._leaving:
            self._leave(sequence)
            if sequence.first_step >= 0:
                self._context_tokens -= sequence.input_tokens + 1 + self.steps - sequence.first_step
            else:
                self._prefilled_tokens -= sequence.prefilled
        self._leaving.clear()
        self._prefilling = deque(s for s in self._prefilling if s not in gone)
        self._finishing = [entry for entry in self._finishing if entry[2] not in gone]
        heapify(self._finishing)

    def _drain(self) -> list[Event]:
        events = self._events
        if events:
            self._events = []
        return events
