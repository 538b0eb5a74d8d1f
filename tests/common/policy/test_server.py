from __future__ import annotations

from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.prediction import marginal_cost
from common.policy.server import SHARE_S, Server
from common.types import ServerLoad
from tests.common.policy.build import ROUND


def sums(s: Server) -> tuple[float, ...]:
    return s.n, s.w, s.p, s.k, s.r


@pytest.mark.parametrize("count", [1, 4])
def test_a_request_moves_from_waiting_to_decoding_to_gone(count: int) -> None:
    s = Server(ROUND, count=count)
    s.dispatched(800, 100, now=0.0)
    assert sums(s) == (0, 1 / count, 800 / count, 0, 100 / count)
    s.first_token(800, 850, 800, now=1.0)
    assert sums(s) == (1 / count, 0, 0, 850 / count, 100 / count)
    s.ended(800, 100, 850, now=2.0, decoding=True)
    assert sums(s) == (0, 0, 0, 0, 0)


def test_a_request_that_ends_before_its_first_token_takes_its_prompt_back() -> None:
    s = Server(ROUND)
    s.dispatched(800, 100, now=0.0)
    s.ended(800, 100, 850, now=2.0, decoding=False)
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
            s.first_token(prompt, prompt, prompt, now=1.0)
    order.shuffle(given_requests)
    for prompt, output, begun in given_requests:
        s.ended(prompt, output, prompt, now=2.0, decoding=bool(begun))
    assert sums(s) == pytest.approx((0, 0, 0, 0, 0), abs=1e-6)
    s.emptied(3.0)
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
    s.first_token(800, 850, 800, now=1.0)
    quoted = s.load(now=12.0)
    assert (quoted.gpu, quoted.count, quoted.price_usd_per_hour, quoted.models) == ("h100", 3, 2.5, frozenset({"m"}))
    again = Server.of(quoted, now=500.0)  # another process, another clock
    assert again.load(now=500.0) == quoted
    assert marginal_cost(again, 100, 100, 50) == marginal_cost(s, 100, 100, 50)


def test_a_quote_carries_what_is_under_way() -> None:
    load = ServerLoad(ROUND, "l4", 1, 1.0, 2.0, 3.0, 4.0, 5.0, 0.5)
    assert sums(Server.of(load, now=0.0)) == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert Server.of(load, now=0.0).prefill_share(0.0) == 0.5


def test_integrals_are_of_what_was_decoding_when() -> None:
    s = Server(ROUND)
    s.dispatched(800, 100, now=0.0)
    s.first_token(800, 1_000, 820, now=2.0)
    s.dispatched(600, 50, now=3.0)
    s.first_token(600, 500, 610, now=4.0)
    s.ended(800, 100, 1_000, now=10.0, decoding=True)
    assert s.decoding_s == pytest.approx(2 * 1 + 6 * 2)
    assert s.context_s == pytest.approx(2 * 1_000 + 6 * 1_500)
    assert s.read_tokens == 820 + 610
