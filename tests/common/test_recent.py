"""Remembered requests are bounded, found by trace and by number, and weigh what is said of them."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.recent import RecentRequests
from common.records import RequestRecord
from common.types import Removed
from tests.common.build import TRACE, asked, attempt, record, stage


def numbers(records: list[RequestRecord]) -> list[int]:
    return [int(r.span_id, 16) for r in records]


def numbered(n: int, **fields: object) -> RequestRecord:
    return record(span_id=f"{n:016x}", **fields)


def test_the_latest_come_first_and_the_oldest_leave():
    kept = RecentRequests(3, 10**9)
    for n in range(1, 6):
        kept.add(numbered(n, id=f"{n:032x}"))
    assert numbers(kept.latest(10**6)) == [5, 4, 3]
    assert numbers(kept.latest(2)) == [5, 4]
    assert kept.latest(0) == []
    assert kept.find(f"{1:032x}") == kept.find("nonsense") == []
    assert numbers(kept.find(f"{4:032x}")) == [4]
    assert (len(kept), kept.added) == (3, 5)


def test_requests_of_one_trace_are_found_together_the_oldest_first():
    kept = RecentRequests(100, 10**9)
    for n, trace in enumerate("abab"):
        kept.add(numbered(n, id=trace * 32))
    assert numbers(kept.find("a" * 32)) == [0, 2]


def test_one_client_that_sends_everything_in_one_trace_fills_no_memory():
    kept = RecentRequests(100, 10**9)
    for n in range(5_000):
        kept.add(numbered(n))
    assert numbers(kept.find(TRACE)) == list(range(4_900, 5_000))


def busy(kept: RecentRequests, rate: int, seconds: float, rng: Random, began: float = 0.0) -> list[RequestRecord]:
    sent = [
        numbered(n, id=f"{rng.getrandbits(128):032x}", ended_at=began + n / rate) for n in range(int(rate * seconds))
    ]
    for r in sent:
        kept.add(r)
    return sent


def test_at_a_high_rate_what_is_kept_goes_back_a_while_and_tiers_keep_the_same():
    one, other = (RecentRequests(1000, 10**9, 10.0) for _ in range(2))
    busy(one, 1000, 30.0, Random(1))
    ends = [r.ended_at for r in one.latest(1000)]
    assert len(ends) == 1000
    assert 5.0 < ends[0] - ends[-1] < 12.0
    assert max(a - b for a, b in pairwise(ends)) < 0.2  # evenly
    sent = busy(one, 1000, 30.0, Random(2), began=40.0)
    for r in sent[::3]:  # a tier below has a part of it
        other.add(r)
    above = {r.id for r in one.latest(1000)}
    below = {r.id for r in other.latest(1000)}
    assert {r.id for r in sent[::3][-1600:]} & above <= below


def test_at_a_low_rate_and_in_a_burst_after_it_each_is_kept():
    kept = RecentRequests(1000, 10**9, 10.0)
    for r in busy(kept, 50, 60.0, Random(1)):
        assert kept.find(r.id) or r.ended_at < 40.0
    burst = busy(kept, 1000, 0.3, Random(2), began=60.0)
    assert all(kept.find(r.id) for r in burst)


def test_what_is_notable_is_kept_at_any_rate():
    kept = RecentRequests(1000, 10**9, 10.0, lambda r: r.status >= 500)
    busy(kept, 2000, 5.0, Random(1))
    bad = numbered(7, id="f" * 32, status=502, ended_at=5.0)
    kept.add(bad)
    kept.add(numbered(8, id="e" * 31 + "f", ended_at=5.0))
    assert kept.find(bad.id)
    assert not kept.find("e" * 31 + "f")


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 10))
def test_it_is_bounded_and_each_is_found_by_its_trace(traces: list[int], bound: int):
    kept = RecentRequests(bound, 10**9)
    for n, trace in enumerate(traces):
        kept.add(numbered(n, id=f"{trace:032x}"))
    left = list(range(len(traces)))[max(0, len(traces) - bound) :] if bound else []
    assert numbers(kept.latest(100)) == left[::-1]
    for trace in range(6):
        assert numbers(kept.find(f"{trace:032x}")) == [n for n in left if traces[n] == trace]
    assert len(kept) <= bound


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 60_000))
def test_bytes_are_bounded_too_but_for_the_latest_one(sizes: list[int], most: int):
    kept = RecentRequests(1000, most)
    for n, size in enumerate(sizes):
        kept.add(numbered(n, stages=[stage(("eu",), "c0", {f"c{i}": 1.0 for i in range(size)} or {"c0": 1.0})]))
        assert kept.bytes == sum(r.footprint() for r in kept.latest(1000))
        assert kept.bytes <= most or len(kept) == 1
    assert numbers(kept.latest(1)) == ([len(sizes) - 1] if sizes else [])


def test_what_is_new_since_a_number():
    kept = RecentRequests(4, 10**9)
    assert kept.since(0, 10) == []
    for n in range(1, 7):
        kept.add(numbered(n))
    assert numbers(kept.since(4, 10)) == [5, 6]
    assert kept.since(6, 10) == []
    assert numbers(kept.since(0, 10)) == [3, 4, 5, 6]  # those before are gone
    assert numbers(kept.since(0, 2)) == [5, 6]
    assert numbers(kept.since(99, 10)) == [3, 4, 5, 6]  # a number of before this process began: everything is new


@pytest.mark.parametrize(("candidates", "stages", "hashes"), [(3, 1, 0), (18, 3, 4), (128, 2, 64), (1, 1, 0)])
def test_a_record_weighs_no_more_than_it_says(candidates: int, stages: int, hashes: int):
    """What many records take together, as the interpreter counts it, is within what their footprints say."""
    rng = Random(1)
    names = [f"instance-{i}" for i in range(candidates)]  # the pool's own strings, as in life

    def made(n: int) -> RequestRecord:
        hops = []
        for _ in range(stages):
            costs = {name: rng.random() for name in names}
            hop = stage(("eu", "c1"), "instance-0", costs, span_id=f"{rng.getrandbits(64):016x}")
            gone = tuple(f"gone-{rng.getrandbits(32)}" for _ in range(3))
            hop.pick = hop.pick._replace(removed=(Removed("not_ejected", 3, gone),))
            hops.append(hop)
        request = asked(id=f"{n:032x}", prefix_hashes=tuple(rng.getrandbits(64) for _ in range(hashes)))
        return record(
            id=request.id,
            span_id=f"{n:016x}",
            request=replace(request, warm=("eu", "c1", "instance-0")),
            stages=hops,
            attempts=[attempt(("eu", "c1", f"instance-{n % 7}"), span_id=f"{n:016x}")],
        )

    made(0)
    gc.collect()
    tracemalloc.start()
    records = [made(n) for n in range(200)]
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    said = sum(r.footprint() for r in records)
    assert taken <= said, (taken / 200, said / 200)
    assert said <= 4 * taken, (taken / 200, said / 200)  # and it is no wild guess
