"""The engine model: against closed forms, against a brute-force replica, and against itself step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.policy.prediction import CLASS_SPEED
from common.sim.engine import (
    BLOCK_TOKENS,
    STEP_TOKEN_BUCKETS,
    EngineModel,
    Event,
    EventKind,
    PrefixCache,
    Refusal,
    Sequence,
    State,
)
from common.types import Speed

TINY = Speed(0.01, 1e-3, 1e-6, 1000.0, attention_tokens=2000.0, chunk_tokens=64, slots=3, kv_tokens=600)
CLASSES = ["h100", "a100", "l4", "t4"]


def submitted(engine: EngineModel, *args: object, **kwargs: object) -> Sequence:
    sequence = engine.submit(*args, **kwargs)  # type: ignore[arg-type]
    assert isinstance(sequence, Sequence)
    return sequence


def run_all(engine: EngineModel) -> list[Event]:
    return engine.run_until(inf)


# --- closed form ---


@pytest.mark.parametrize("gpu", CLASSES)
@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 2), (2048, 50), (5000, 700), (9001, 1)])
def test_a_lone_request_matches_the_closed_form(gpu: str, prompt: int, output: int) -> None:
    v = CLASS_SPEED[gpu]
    engine = EngineModel(v)
    sequence = submitted(engine, "a", prompt, output, (), 3.0)
    run_all(engine)
    ttft = ceil(prompt / v.chunk_tokens) * v.alpha_s
    ttft += prompt / v.prefill_tokens_per_s * (1 + prompt / (2 * v.attention_tokens))
    contexts = sum(prompt + i for i in range(1, output))
    decode = (output - 1) * (v.alpha_s + v.beta_s) + v.gamma_s * contexts
    assert sequence.first_token_s == pytest.approx(3.0 + ttft, abs=1e-9)
    assert sequence.finished_s == pytest.approx(3.0 + ttft + decode, abs=1e-9)
    assert sequence.generated == output
    assert engine.generated_tokens == output
    assert engine.prompt_tokens == prompt
    assert engine.steps == ceil(prompt / v.chunk_tokens) + output - 1


def test_what_does_not_generate_ends_with_its_prompt() -> None:
    engine = EngineModel(TINY)
    sequence = submitted(engine, "e", 100, 0)
    events = run_all(engine)
    assert [(e.kind, e.sequence) for e in events] == [(EventKind.FINISHED, sequence)]
    assert sequence.first_token_s is None
    assert engine.generated_tokens == 0
    assert engine.steps == 2


def test_decoding_slows_down_with_the_batch_and_prompts_hold_it_up() -> None:
    engine = EngineModel(TINY)
    first = submitted(engine, "a", 10, 20)
    engine.run_until(0.05)
    before = engine.generated(first)
    submitted(engine, "b", 60, 20, (), 0.05)
    alone, other = EngineModel(TINY), EngineModel(TINY)
    lone = submitted(alone, "a", 10, 20)
    run_all(alone)
    run_all(engine)
    assert 0 < before < 20
    assert first.finished_s is not None
    assert lone.finished_s is not None
    assert first.finished_s > lone.finished_s + 60 / 1000
    assert other.step() == []


# --- a brute-force replica: one step at a time, sums and nothing else ---


@dataclass
class Job:
    at: float
    prompt: int
    output: int
    read: int = 0
    got: int = 0
    first: float | None = None
    end: float | None = None


def brute_force(v: Speed, jobs: list[Job]) -> None:
    """First token and end of each job, straight from the definition of a step."""
    now, queue, batch = 0.0, list(jobs), []
    while queue or batch:
        if not batch:
            now = max(now, queue[0].at)
        while queue and queue[0].at <= now:
            used = sum(j.prompt + j.output for j in batch)
            if len(batch) >= v.slots or used + queue[0].prompt + queue[0].output > v.kv_tokens:
                break
            batch.append(queue.pop(0))
        decoding = [j for j in batch if j.got]
        step = v.alpha_s + v.beta_s * len(decoding) + v.gamma_s * sum(j.prompt + j.got for j in decoding)
        budget = int(v.chunk_tokens) - len(decoding)
        for j in batch:
            if j.got == 0 and budget > 0:
                take = min(budget, j.prompt - j.read)
                step += take * (1 + (j.read + take / 2) / v.attention_tokens) / v.prefill_tokens_per_s
                j.read += take
                budget -= take
        now += step
        for j in decoding:
            j.got += 1
        for j in batch:
            if j.got == 0 and j.read == j.prompt:
                j.got, j.first = 1, now
            if j.got >= j.output and j.end is None:
                j.end = now
        batch = [j for j in batch if j.end is None]


arrivals = st.lists(st.tuples(st.floats(1e-4, 0.5), st.integers(1, 300), st.integers(1, 200)), min_size=1, max_size=40)


def timed(gaps: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    now, jobs = 0.0, []
    for gap, prompt, output in gaps:
        now += gap
        jobs.append((now, prompt, output))
    return jobs


@settings(max_examples=100, deadline=None)
@given(arrivals)
def test_times_equal_a_brute_force_replica(gaps: list[tuple[float, int, int]]) -> None:
    jobs = [Job(*job) for job in timed(gaps)]
    brute_force(TINY, jobs)
    engine = EngineModel(TINY, max_queue=len(jobs))
    sequences = [submitted(engine, str(i), j.prompt, j.output, (), j.at) for i, j in enumerate(jobs)]
    run_all(engine)
    for job, sequence in zip(jobs, sequences, strict=True):
        assert sequence.first_token_s == pytest.approx(job.first, abs=1e-9)
        assert sequence.finished_s == pytest.approx(job.end, abs=1e-9)


# --- step by step against the fast path ---


def stepped(v: Speed, work: list[tuple[float, int, int, float]]) -> tuple[EngineModel, list[Sequence]]:
    """Every step by itself, as the live server may do; a request with a cancel time is cancelled then."""
    engine = EngineModel(v, max_queue=10_000)
    sequences: list[Sequence] = []
    marks = sorted([(at, 0, i) for i, (at, *_) in enumerate(work)] + [(w[3], 1, i) for i, w in enumerate(work)])
    for at, what, i in marks:
        if at == inf:
            continue
        while engine.step_end_s <= at:
            engine.step()
        if what == 0:
            sequences.append(submitted(engine, str(i), work[i][1], work[i][2], (), at))
        else:
            engine.cancel(sequences[i], at)
    while engine.step_end_s < inf:
        engine.step()
    return engine, sequences


def skipped(v: Speed, work: list[tuple[float, int, int, float]]) -> tuple[EngineModel, list[Sequence]]:
    """Only what `next_event_s` asks for, as in virtual time."""
    engine = EngineModel(v, max_queue=10_000)
    sequences: list[Sequence] = []
    marks = sorted([(at, 0, i) for i, (at, *_) in enumerate(work)] + [(w[3], 1, i) for i, w in enumerate(work)])
    for at, what, i in marks:
        if at == inf:
            continue
        while engine.next_event_s <= at:
            engine.run_until(engine.next_event_s)
        if what == 0:
            sequences.append(submitted(engine, str(i), work[i][1], work[i][2], (), at))
        else:
            engine.cancel(sequences[i], at)
    while engine.next_event_s < inf:
        engine.run_until(engine.next_event_s)
    return engine, sequences


@settings(max_examples=100, deadline=None)
@given(arrivals, st.lists(st.one_of(st.none(), st.floats(0.0, 3.0)), max_size=40), st.sampled_from(["tiny", *CLASSES]))
def test_stepping_and_skipping_agree(
    gaps: list[tuple[float, int, int]], patience: list[float | None], gpu: str
) -> None:
    v = TINY if gpu == "tiny" else replace(CLASS_SPEED[gpu], slots=4, kv_tokens=900)
    work = []
    for i, (at, prompt, output) in enumerate(timed(gaps)):
        leaves = patience[i] if i < len(patience) else None
        work.append((at, prompt, output, inf if leaves is None else at + leaves))
    (one, a), (other, b) = stepped(v, work), skipped(v, work)
    for x, y in zip(a, b, strict=True):
        assert (x.state, x.generated) == (y.state, y.generated)
        assert x.first_token_s == pytest.approx(y.first_token_s, abs=1e-9)
        assert x.finished_s == pytest.approx(y.finished_s, abs=1e-9)
    assert one.steps == other.steps
    assert one.generated_tokens == other.generated_tokens
    assert one.step_tokens == other.step_tokens


def test_counters_are_exact_in_the_middle_of_a_run() -> None:
    engine, stepping = EngineModel(CLASS_SPEED["a100"]), EngineModel(CLASS_SPEED["a100"])
    submitted(engine, "a", 500, 400)
    submitted(stepping, "a", 500, 400)
    for now in (0.0, 0.1, 0.5, 0.50001, 2.0, 3.7):
        engine.run_until(now)
        while stepping.step_end_s <= now:
            stepping.step()
        assert engine.steps == stepping.steps
        assert engine.generated_tokens == stepping.generated_tokens
        assert engine.kv_tokens == stepping.kv_tokens
        assert engine.step_end_s == stepping.step_end_s


# --- invariants ---


@settings(max_examples=100, deadline=None)
@given(arrivals, st.lists(st.integers(0, 60), max_size=30))
def test_limits_hold_and_nothing_leaks(gaps: list[tuple[float, int, int]], cancels: list[int]) -> None:
    engine = EngineModel(TINY, max_queue=5)
    sequences: list[Sequence] = []
    events: list[Event] = []
    for i, (at, prompt, output) in enumerate(timed(gaps)):
        events += engine.run_until(at)
        answer = engine.submit(str(i), prompt, output, (), at)
        if isinstance(answer, Sequence):
            sequences.append(answer)
        if i in cancels and sequences:
            engine.cancel(sequences[i % len(sequences)], at)
        assert engine.waiting <= 5
        assert engine.running <= engine.slots
        assert engine.reserved_tokens <= engine.kv_capacity
        assert 0 <= engine.kv_tokens <= engine.reserved_tokens
    events += run_all(engine)
    assert (engine.running, engine.waiting, engine.decoding) == (0, 0, 0)
    assert (engine.reserved_tokens, engine.kv_tokens, engine.next_event_s) == (0, 0, inf)
    assert engine.finished + engine.cancelled == len(sequences)
    assert [e.at_s for e in events] == sorted(e.at_s for e in events)
    ends = [e.sequence for e in events if e.kind is EventKind.FINISHED]
    assert len(ends) == len(set(ends)) == engine.finished
    assert sum(engine.step_tokens) == engine.steps
    assert engine.preemptions == 0


# --- admission ---


def test_a_request_waits_for_a_slot() -> None:
    engine = EngineModel(replace(TINY, slots=1))
    first, second = submitted(engine, "a", 10, 5), submitted(engine, "b", 10, 5)
    assert (engine.running, engine.waiting) == (1, 1)
    assert second.state is State.WAITING
    run_all(engine)
    assert first.finished_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s > first.finished_s


def test_a_request_waits_for_memory_and_the_queue_keeps_its_order() -> None:
    engine = EngineModel(TINY)
    big, bigger, small = (
        submitted(engine, "a", 300, 100),
        submitted(engine, "b", 300, 100),
        submitted(engine, "c", 1, 1),
    )
    assert (engine.running, engine.waiting) == (1, 2)
    run_all(engine)
    assert big.finished_s is not None
    assert bigger.first_token_s is not None
    assert small.first_token_s is not None
    assert big.finished_s < bigger.first_token_s <= small.first_token_s


def test_what_can_never_fit_is_refused() -> None:
    assert EngineModel(TINY).submit("a", 500, 101) is Refusal.TOO_LONG


def test_the_queue_is_bounded() -> None:
    engine = EngineModel(TINY, max_queue=2)
    answers = [engine.submit(str(i), 10, 10) for i in range(6)]
    assert [isinstance(a, Sequence) for a in answers] == [True] * 5 + [False]
    assert answers[-1] is Refusal.QUEUE_FULL
    assert isinstance(engine.submit("late", 10, 10, (), 100.0), Sequence)


def test_cancelling_the_head_of_the_queue_lets_the_next_in() -> None:
    engine = EngineModel(TINY)
    submitted(engine, "a", 200, 100)
    blocked, fits = submitted(engine, "b", 400, 100), submitted(engine, "c", 10, 10)
    assert engine.cancel(blocked, 0.0)
    assert fits.state is State.PREFILLING
    assert not engine.cancel(blocked, 0.0)


def test_a_cancelled_sequence_frees_its_place_at_the_end_of_the_step() -> None:
    engine = EngineModel(replace(TINY, slots=1))
    gone, waiting = submitted(engine, "a", 10, 500), submitted(engine, "b", 10, 5)
    engine.run_until(0.1)
    assert engine.cancel(gone, 0.1)
    end = engine.step_end_s
    assert engine.step() == []
    assert waiting.state is State.PREFILLING
    run_all(engine)
    assert gone.state is State.CANCELLED
    assert 0 < gone.generated < 500
    assert waiting.first_token_s is not None
    assert waiting.first_token_s > end


# --- prefix cache ---


def test_cached_blocks_are_not_read_again() -> None:
    engine = EngineModel(CLASS_SPEED["a100"])
    hashes = tuple(range(100, 108))
    cold = submitted(engine, "a", 8 * BLOCK_TOKENS + 40, 1, hashes)
    run_all(engine)
    warm = submitted(engine, "b", 8 * BLOCK_TOKENS + 40, 1, hashes, 100.0)
    other = submitted(engine, "c", 8 * BLOCK_TOKENS + 40, 1, (100, 101, *range(200, 206)), 200.0)
    run_all(engine)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 8 * BLOCK_TOKENS
    assert other.cached_tokens == 2 * BLOCK_TOKENS
    assert cold.first_token_s is not None
    assert warm.first_token_s is not None
    assert warm.first_token_s - 100.0 < 0.1 * cold.first_token_s
    assert engine.prefix_queries == 3 * (8 * BLOCK_TOKENS + 40)
    assert engine.prefix_hits == 10 * BLOCK_TOKENS
    assert engine.prompt_tokens == engine.prefix_queries


def test_some_of_a_fully_cached_prompt_is_computed() -> None:
    engine = EngineModel(CLASS_SPEED["a100"])
    for now in (0.0, 100.0):
        last = submitted(engine, "a", 2 * BLOCK_TOKENS, 1, (1, 2), now)
        run_all(engine)
    assert last.cached_tokens == 2 * BLOCK_TOKENS - 16


def test_the_prefix_cache_evicts_what_was_used_longest_ago_and_tails_first() -> None:
    cache = PrefixCache(4)
    cache.insert((1, 2))
    cache.insert((3, 4))
    assert cache.match((1, 2)) == 2
    cache.insert((5,))
    assert cache.match((3, 4)) == 1
    assert cache.match((1, 2)) == 2
    cache.insert(tuple(range(10, 20)))
    assert len(cache) == 4
    assert cache.match(tuple(range(10, 20))) == 4
    nothing = PrefixCache(0)
    nothing.insert((1,))
    assert nothing.match((1,)) == 0


def test_a_batch_as_large_as_the_chunk_reads_no_prompt_until_someone_leaves() -> None:
    engine = EngineModel(replace(TINY, chunk_tokens=2))
    a, b = submitted(engine, "a", 1, 5), submitted(engine, "b", 1, 9)
    engine.run_until(0.02)
    late = submitted(engine, "c", 1, 1, (), 0.02)
    run_all(engine)
    assert a.finished_s is not None
    assert b.finished_s is not None
    assert late.first_token_s is not None
    assert a.finished_s < late.first_token_s


def test_a_speed_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="must take time"):
        EngineModel(replace(TINY, alpha_s=0.0))


def test_steps_are_counted_by_tokens_processed() -> None:
    engine = EngineModel(CLASS_SPEED["h100"])
    submitted(engine, "a", 2048 + 100, 11)
    run_all(engine)
    assert engine.steps == 12
    assert engine.step_tokens_sum == 2048 + 100 + 10
    assert engine.step_tokens[STEP_TOKEN_BUCKETS.index(1)] == 10
    assert engine.step_tokens[STEP_TOKEN_BUCKETS.index(2048)] == 1
