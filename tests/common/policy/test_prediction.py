from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, exp, inf, isfinite, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.prediction import (
    CLASS_SPEED,
    SHARE_S,
    UNKNOWN_CLASS,
    OutputLength,
    Server,
    SpeedEstimate,
    Terms,
    class_speed,
    marginal_cost,
)
from common.types import ServerLoad, Speed
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
    slots=st.floats(1.0, 1_000.0),
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


def test_a_round_trip_adds_itself_to_the_first_token_and_nothing_else() -> None:
    near, far = (marginal_cost(loaded(ROUND, 2), 100, 100, 50, rtt) for rtt in (0.0, 0.08))
    assert far.ttft == pytest.approx(near.ttft + 0.08)
    assert (far.decode, far.others) == (near.decode, near.others)


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
    assert isfinite(total(terms)) == (length + output <= s.speed.kv_tokens)
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


# -- Server ----------------------------------------------------------------------------------------------------------


def sums(s: Server) -> tuple[float, ...]:
    return s.n, s.w, s.p, s.k, s.r


@pytest.mark.parametrize("count", [1, 4])
def test_a_request_moves_from_waiting_to_decoding_to_gone(count: int) -> None:
    s = Server(ROUND, count=count)
    s.dispatched(800, 100, now=0.0)
    assert sums(s) == (0, 1 / count, 800 / count, 0, 100 / count)
    s.first_token(800, 850)
    assert sums(s) == (1 / count, 0, 0, 850 / count, 100 / count)
    s.ended(800, 100, 850, decoding=True)
    assert sums(s) == (0, 0, 0, 0, 0)


def test_a_request_that_ends_before_its_first_token_takes_its_prompt_back() -> None:
    s = Server(ROUND)
    s.dispatched(800, 100, now=0.0)
    s.ended(800, 100, 850, decoding=False)
    assert sums(s) == (0, 0, 0, 0, 0)


requests = st.lists(st.tuples(st.floats(1, 1e5), st.floats(1, 1e4), st.sampled_from([0, 1])), min_size=1, max_size=60)


@given(requests, st.integers(1, 7), st.randoms())
def test_emptied_removes_what_rounding_left(
    given_requests: list[tuple[float, float, int]], count: int, order: Random
) -> None:
    s = Server(ROUND, count=count)
    for prompt, output, begun in given_requests:
        s.dispatched(prompt, output, now=0.0)
        if begun:
            s.first_token(prompt, prompt)
    order.shuffle(given_requests)
    for prompt, output, begun in given_requests:
        s.ended(prompt, output, prompt, decoding=bool(begun))
    assert sums(s) == pytest.approx((0, 0, 0, 0, 0), abs=1e-6)
    s.emptied()
    assert sums(s) == (0, 0, 0, 0, 0)


def test_prefill_share_is_the_time_spent_on_prompts_of_late() -> None:
    s = Server(ROUND)
    assert s.prefill_share(now=1e9) == 0.0
    for second in range(100):
        s.dispatched(4_000, 100, now=float(second))  # 0.4 s of reading in each second
    assert s.prefill_share(100.0) == pytest.approx(0.4, rel=0.1)
    assert s.prefill_share(99.0 + SHARE_S) == pytest.approx(s.prefill_share(99.0) / exp(1))
    assert s.prefill_share(0.0) <= 0.9  # a clock that is behind makes no more of it


def test_prefill_share_has_a_ceiling() -> None:
    s = Server(ROUND)
    for _ in range(100):
        s.dispatched(100_000, 100, now=5.0)
    assert s.prefill_share(5.0) == 0.9


def test_a_quote_of_a_server_is_that_server() -> None:
    s = Server(ROUND, "h100", 3, price_usd_per_hour=2.5)
    s.models = frozenset({"m"})
    s.dispatched(800, 100, now=10.0)
    s.dispatched(600, 50, now=10.0)
    s.first_token(800, 850)
    quoted = s.load(now=12.0)
    assert (quoted.gpu, quoted.count, quoted.price_usd_per_hour, quoted.models) == ("h100", 3, 2.5, frozenset({"m"}))
    again = Server.of(quoted, now=500.0)  # another process, another clock
    assert again.load(now=500.0) == quoted
    assert marginal_cost(again, 100, 100, 50) == marginal_cost(s, 100, 100, 50)


def test_a_quote_carries_what_is_under_way() -> None:
    load = ServerLoad(ROUND, "l4", 1, 1.0, 2.0, 3.0, 4.0, 5.0, 0.5)
    assert sums(Server.of(load, now=0.0)) == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert Server.of(load, now=0.0).prefill_share(0.0) == 0.5


# -- SpeedEstimate ---------------------------------------------------------------------------------------------------


def taught(estimate: SpeedEstimate, slower: float, samples: int, draw: Callable[[], float] = lambda: 1.0) -> None:
    """Let it see a server `slower` times as slow as its prior, each time against what it predicts then."""
    for _ in range(samples):
        decode = estimate.speed.alpha_s / estimate.prior.alpha_s
        prefill = estimate.prior.prefill_tokens_per_s / estimate.speed.prefill_tokens_per_s
        estimate.learn(slower / prefill * draw(), slower / decode * draw())


def factors(estimate: SpeedEstimate) -> tuple[float, float]:
    v, p = estimate.speed, estimate.prior
    assert v.alpha_s / p.alpha_s == pytest.approx(v.beta_s / p.beta_s) == pytest.approx(v.gamma_s / p.gamma_s)
    return p.prefill_tokens_per_s / v.prefill_tokens_per_s, v.alpha_s / p.alpha_s


def test_nothing_learned_is_the_prior() -> None:
    assert SpeedEstimate(ROUND).speed == ROUND


@pytest.mark.parametrize("slower", [0.3, 0.5, 1.0, 2.0, 3.5])
def test_it_converges_to_what_the_server_does(slower: float) -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, slower, 200)
    assert factors(estimate) == pytest.approx((slower, slower), rel=0.02)


def test_noise_leaves_it_near_the_middle() -> None:
    rng, estimate = Random(5), SpeedEstimate(ROUND)
    taught(estimate, 2.0, 1_000, lambda: rng.lognormvariate(0.0, 0.5))
    assert factors(estimate) == pytest.approx((2.0, 2.0), rel=0.3)


@pytest.mark.parametrize(("slower", "limit"), [(100.0, 4.0), (1e300, 4.0), (0.001, 0.25), (inf, 4.0)])
def test_it_stays_within_four_times_the_prior(slower: float, limit: float) -> None:
    estimate = SpeedEstimate(ROUND)
    for _ in range(500):
        estimate.learn(slower, slower)
    assert factors(estimate) == pytest.approx((limit, limit))


def test_one_absurd_sample_changes_little() -> None:
    estimate = SpeedEstimate(ROUND)
    estimate.learn(1e9, 1e9)
    assert factors(estimate) == pytest.approx((1.0513, 1.0513), rel=1e-3)


def test_it_forgets() -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, 3.0, 1_000)
    taught(estimate, 0.5, 200)
    assert factors(estimate) == pytest.approx((0.5, 0.5), rel=0.02)


def test_each_part_is_learned_by_itself() -> None:
    estimate = SpeedEstimate(ROUND)
    for _ in range(50):
        estimate.learn(None, 1.5)
    assert factors(estimate)[0] == 1.0
    assert factors(estimate)[1] > 1.5
    estimate = SpeedEstimate(ROUND)
    for _ in range(50):
        estimate.learn(1.5, None)
    assert factors(estimate)[0] > 1.5
    assert factors(estimate)[1] == 1.0


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan")])
def test_a_ratio_that_is_none_teaches_nothing(ratio: float) -> None:
    estimate = SpeedEstimate(ROUND)
    estimate.learn(ratio, ratio)
    assert estimate.speed == ROUND


def test_limits_of_the_server_are_not_a_matter_of_speed() -> None:
    estimate = SpeedEstimate(ROUND)
    taught(estimate, 3.0, 100)
    v = estimate.speed
    assert (v.slots, v.kv_tokens, v.chunk_tokens, v.attention_tokens) == (4.0, 20_000.0, 1_000.0, 30_000.0)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6) | st.none(), st.floats(1e-6, 1e6) | st.none()), max_size=100))
def test_whatever_it_sees_it_stays_usable(seen: list[tuple[float | None, float | None]]) -> None:
    estimate = SpeedEstimate(ROUND)
    for ttft, decode in seen:
        estimate.learn(ttft, decode)
    assert all(abs(log(f)) <= log(4) + 1e-9 for f in factors(estimate))


# -- OutputLength ----------------------------------------------------------------------------------------------------


def taught_lengths(model: str, tenant: str, input_tokens: int, output: float, times: int) -> OutputLength:
    lengths = OutputLength()
    for _ in range(times):
        lengths.learn(model, tenant, input_tokens, output)
    return lengths


def test_before_anything_is_known_it_is_the_first_guess() -> None:
    assert OutputLength().expect("m", "", 100, None) == OutputLength.FIRST_GUESS


def test_expectation_is_capped_by_the_request_and_at_least_one_token() -> None:
    lengths = taught_lengths("m", "", 100, 400.0, 100)
    assert lengths.expect("m", "", 100, 50) == 50
    assert lengths.expect("m", "", 100, 5_000) == pytest.approx(400.0)
    assert taught_lengths("m", "", 100, 0.0, 100).expect("m", "", 100, None) == 1.0


def test_a_key_is_believed_once_it_has_seen_enough() -> None:
    lengths = taught_lengths("m", "", 1_000, 900.0, 100)  # long prompts, long answers
    for _ in range(OutputLength.ENOUGH - 1):
        lengths.learn("m", "", 10, 30.0)
    assert lengths.expect("m", "", 10, None) > 300  # still the model's mean
    lengths.learn("m", "", 10, 30.0)
    assert lengths.expect("m", "", 10, None) == pytest.approx(30.0)
    assert lengths.expect("m", "", 1_000, None) == pytest.approx(900.0)


def test_it_backs_off_from_tenant_to_bucket_to_model_to_everything() -> None:
    lengths = OutputLength()
    for tenant, input_tokens, output in [("t", 100, 10.0), ("u", 100, 20.0), ("u", 5_000, 600.0)]:
        for _ in range(200):
            lengths.learn("m", tenant, input_tokens, output)
    by_tenant = lengths.expect("m", "t", 100, None)
    by_bucket = lengths.expect("m", "unknown", 100, None)
    by_model = lengths.expect("m", "unknown", 30, None)
    assert by_tenant == pytest.approx(10.0)
    assert 10.0 < by_bucket < 20.0
    assert 100.0 < by_model < 600.0
    for _ in range(2_000):
        lengths.learn("other", "", 100, 5.0)
    assert lengths.expect("new", "", 100, None) < by_model / 2  # of everything, and most of that is the other model's


def test_one_answer_of_a_model_is_believed_over_the_first_guess() -> None:
    assert taught_lengths("m", "", 100, 700.0, 1).expect("m", "", 9, None) == 700.0


def test_prompts_of_one_size_class_share_a_key() -> None:
    lengths = taught_lengths("m", "", 1_100, 900.0, 50)
    for _ in range(50):
        lengths.learn("m", "", 10, 30.0)
    assert lengths.expect("m", "", 2_000, None) == pytest.approx(900.0)  # 2^10 to 2^11


def test_lengths_are_forgotten_over_some_five_hundred_answers() -> None:
    lengths = taught_lengths("m", "", 100, 1_000.0, 5_000)
    for _ in range(OutputLength.MEMORY):
        lengths.learn("m", "", 100, 0.0)
    assert lengths.expect("m", "", 100, None) == pytest.approx(1_000.0 / exp(1), rel=0.01)


def test_names_that_clients_make_up_do_not_grow_it_without_bound() -> None:
    lengths = OutputLength(max_keys=100)
    for i in range(5_000):
        lengths.learn(f"model-{i}", f"tenant-{i}", i, 50.0)
    assert len(lengths._means) <= 101
    assert lengths.expect("model-4999", "tenant-4999", 4_999, None) == pytest.approx(50.0)  # the mean of everything


@given(st.text(max_size=5), st.text(max_size=5), st.integers(0, 10**7), st.none() | st.integers(1, 10**6))
def test_expectation_is_always_usable(model: str, tenant: str, input_tokens: int, cap: int | None) -> None:
    lengths = OutputLength()
    lengths.learn(model, tenant, input_tokens, 250.0)
    expected = lengths.expect(model, tenant, input_tokens, cap)
    assert 1.0 <= expected <= (cap or 250.0)
