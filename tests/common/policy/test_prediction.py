from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.prediction import (
    CLASS_SPEED,
    UNKNOWN_CLASS,
    Terms,
    class_speed,
    marginal_cost,
)
from common.policy.server import Server
from common.types import Speed
from tests.common.policy.build import ROUND

# -- what is generated -----------------------------------------------------------------------------------------------

amounts = st.just(0.0) | st.floats(0.01, 1e6)
counts = st.just(0.0) | st.floats(0.01, 500.0)
speeds = st.sampled_from(list(CLASS_SPEED.values())) | st.builds(
    Speed,
    alpha_s=st.floats(1e-4, 1.0),
    beta_s=st.floats(0.0, 0.01),
    gamma_s=st.floats(0.0, 1e-5),
    prefill_tokens_per_s=st.floats(10.0, 1e6),
    attention_tokens=st.floats(1e3, 1e6),
    chunk_tokens=st.floats(1.0, 10_000.0),
    slots=st.integers(1, 1_000).map(float),
    kv_tokens=st.floats(100.0, 1e7),
)
prompts = st.integers(1, 200_000)
outputs = st.just(0.0) | st.floats(1.0, 20_000.0)


@st.composite
def servers(draw: st.DrawFn) -> Server:
    s = Server(draw(speeds), count=draw(st.integers(1, 20)))
    s.n, s.w = draw(counts), draw(counts)
    s.p, s.k, s.r = draw(amounts), draw(amounts), draw(amounts)
    return s


def changed(s: Server, **sums: float) -> Server:
    other = Server(s.speed, s.gpu, s.count)
    for name in ("n", "w", "p", "k", "r"):
        setattr(other, name, sums.get(name, getattr(s, name)))
    return other


def total(terms: Terms) -> float:
    return terms.ttft + terms.decode + terms.others


def no_cheaper(more: Terms, less: Terms) -> bool:
    return total(more) >= total(less) * (1.0 - 1e-9)


def loaded(speed: Speed, requests: int, context: float = 500.0, rest: float = 100.0) -> Server:
    """So many requests decoding, all alike."""
    s = Server(speed)
    s.n, s.k, s.r = float(requests), requests * context, requests * rest
    return s


# -- marginal_cost ---------------------------------------------------------------------------------------------------


def test_on_an_idle_server_it_is_the_formula_by_hand() -> None:
    terms = marginal_cost(Server(ROUND), uncached=2_000, length=3_000, output=100)
    # 2,000 tokens at 10,000 a second with attention over 3,000, and in two chunks two steps and a half of 10 ms
    assert terms.ttft == pytest.approx(0.2 * (1 + 3_000 / 60_000) + 2.5 * 0.01)
    # a hundred steps of 10 ms, a hundred tokens of arithmetic, and the context they read
    assert terms.decode == pytest.approx(100 * 0.01 + 100 * 1e-4 + 100 * 3_050 * 1e-7)
    assert terms.others == 0.0


def test_with_requests_there_it_is_the_formula_by_hand() -> None:
    s = Server(ROUND)
    s.n, s.w, s.p, s.k, s.r = 2.0, 1.0, 1_500.0, 1_200.0, 150.0
    terms = marginal_cost(s, uncached=500, length=500, output=100)
    step = 0.01 + 2 * 1e-4 + 1_200 * 1e-7
    shared = 3 * 50 * (1 - exp(-100 / 50))  # fifty tokens to come for each of the three
    assert terms.ttft == pytest.approx(2_000 / 10_000 * (1 + 500 / 60_000) + (ceil(2_000 / 998) + 0.5) * step)
    assert terms.decode == pytest.approx(100 * 0.01 + 1e-4 * (100 + shared) + 1e-7 * (shared * 400 + 100 * 550))
    assert terms.others == pytest.approx(3 * 500 / 10_000 + shared * (1e-4 + 1e-7 * 550))


def test_what_does_not_generate_costs_its_prompt_and_the_stall_it_causes() -> None:
    terms = marginal_cost(loaded(ROUND, 3), uncached=1_000, length=1_000, output=0.0)
    assert terms.decode == 0.0
    assert terms.others == pytest.approx(3 * 0.1)
    assert marginal_cost(Server(ROUND), 1_000, 1_000, 0.0).others == 0.0


def test_all_slots_taken_costs_the_wait_until_one_is_free() -> None:
    free, full, queue = (marginal_cost(loaded(ROUND, n), 100, 100, 50).ttft for n in (3, 4, 8))
    step = 0.01 + 4 * 1e-4 + 2_000 * 1e-7
    assert full - free > 100 * step / 4  # the next of four to end, each with a hundred tokens to come
    assert full - free < 2 * 100 * step / 4
    assert queue > full * 2


def test_memory_that_is_taken_costs_the_wait_until_enough_of_it_is_free() -> None:
    fits = marginal_cost(loaded(ROUND, 2, context=9_000, rest=100), 1_000, 1_000, 100).ttft
    waits = marginal_cost(loaded(ROUND, 2, context=9_500, rest=100), 1_000, 1_000, 100).ttft
    assert waits - fits > 0.4


@given(servers(), prompts, outputs)
def test_it_is_infinite_exactly_when_the_request_can_never_fit(s: Server, length: int, output: float) -> None:
    terms = marginal_cost(s, length, length, output)
    assert isfinite(total(terms)) == (output == 0.0 or length + output <= s.speed.kv_tokens)
    assert min(terms) >= 0.0


def test_what_fits_exactly_is_taken_and_one_token_more_is_not() -> None:
    assert isfinite(marginal_cost(Server(ROUND), 19_900, 19_900, 100).ttft)
    assert marginal_cost(Server(ROUND), 19_901, 19_901, 100).ttft == inf
    assert marginal_cost(Server(ROUND), 16, 19_901, 100).ttft == inf  # cached or not, it has to be resident


@given(servers(), prompts, outputs, st.sampled_from("pkr"), st.floats(0.0, 1e5))
def test_more_prompts_context_or_output_under_way_never_make_it_cheaper(
    s: Server, length: int, output: float, sum_: str, more: float
) -> None:
    heavier = changed(s, **{sum_: getattr(s, sum_) + more})
    assert no_cheaper(marginal_cost(heavier, length, length, output), marginal_cost(s, length, length, output))


@given(
    speeds,
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(1.0, 20_000.0),
    st.floats(2.0, 5_000.0),
    st.booleans(),
    prompts,
    outputs,
)
def test_one_more_request_like_those_there_never_makes_it_cheaper(
    speed: Speed, n: int, w: int, prompt: float, rest: float, waiting: bool, length: int, output: float
) -> None:
    """n and w: a request waiting or decoding brings its prompt or context, and its output to come, with it."""
    less = Server(speed)
    less.n, less.w, less.p, less.k, less.r = float(n), float(w), w * prompt, n * prompt, (n + w) * rest
    one = {"w": less.w + 1, "p": less.p + prompt} if waiting else {"n": less.n + 1, "k": less.k + prompt}
    more = changed(less, r=less.r + rest, **one)
    assert no_cheaper(marginal_cost(more, length, length, output), marginal_cost(less, length, length, output))


@given(servers(), prompts, st.integers(1, 50_000), outputs)
def test_a_longer_prompt_never_costs_less(s: Server, length: int, more: int, output: float) -> None:
    short, long = (marginal_cost(s, tokens, tokens, output) for tokens in (length, length + more))
    assert no_cheaper(long, short)


@given(servers(), prompts, st.floats(0.0, 20_000.0), st.floats(0.0, 20_000.0))
def test_a_longer_answer_never_costs_less(s: Server, length: int, output: float, more: float) -> None:
    short, long = (marginal_cost(s, length, length, tokens) for tokens in (output, output + more))
    assert no_cheaper(long, short)


@given(servers(), st.integers(1_000, 50_000), st.floats(0.0, 1.0), outputs)
def test_what_is_cached_never_costs_more(s: Server, length: int, share: float, output: float) -> None:
    warm, cold = marginal_cost(s, length * share, length, output), marginal_cost(s, length, length, output)
    assert no_cheaper(cold, warm)


@given(servers(), prompts, outputs, st.sampled_from(["alpha_s", "beta_s", "gamma_s"]), st.floats(1.0, 4.0))
def test_a_slower_server_never_costs_less(s: Server, length: int, output: float, part: str, times: float) -> None:
    slower = changed(s)
    slower.speed = replace(s.speed, **{part: getattr(s.speed, part) * times})
    assert no_cheaper(marginal_cost(slower, length, length, output), marginal_cost(s, length, length, output))


# -- classes of accelerators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0, 4])
@pytest.mark.parametrize(("length", "output"), [(16, 500.0), (200, 100.0), (4_000, 10.0), (8_000, 400.0)])
def test_a_faster_class_costs_less_whatever_is_asked(busy: int, length: int, output: float) -> None:
    order = ["h200", "h100", "a100", "l4", "t4", "cpu"]
    costs = [total(marginal_cost(loaded(CLASS_SPEED[gpu], busy), length, length, output)) for gpu in order]
    pairs = zip(order, costs, order[1:], costs[1:], strict=False)
    # A T4 steps as fast as an L4 and reads prompts slower: short prompts with short contexts cost the same there.
    wrong = [(a, b) for a, cost, b, next_ in pairs if cost > next_ * (1.05 if (a, b) == ("l4", "t4") else 1.0)]
    assert wrong == []


def test_an_unknown_class_is_a_middling_one() -> None:
    assert class_speed("") == class_speed("abacus") == CLASS_SPEED[UNKNOWN_CLASS]
    assert class_speed("h100") == CLASS_SPEED["h100"]
    costs = {gpu: total(marginal_cost(Server(v), 500, 500, 200)) for gpu, v in CLASS_SPEED.items()}
    assert min(costs.values()) < costs[UNKNOWN_CLASS] < max(costs.values())
