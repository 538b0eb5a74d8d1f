from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import tracecontext
from common.tracecontext import MAX_TRACESTATE_BYTES, TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
WELL_FORMED = re.compile(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-0[01]\r\n")


def read(*headers: tuple[str, str], ratio: float = 0.0, seed: int = 1) -> TraceContext:
    raw = [(key.encode(), value.encode("latin-1")) for key, value in headers]
    return tracecontext.read(raw, Random(seed), ratio)


def is_fresh(context: TraceContext) -> bool:
    return (
        context.trace_id != TRACE
        and re.fullmatch("[0-9a-f]{32}", context.trace_id) is not None
        and context.trace_id.strip("0") != ""
        and context.parent_id == ""
        and context.state == ""
    )


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # other flags are nobody's business yet
        (f"00-{TRACE}-{SPAN}-02", False),
        (f" {GOOD} ", True),
        (f"01-{TRACE}-{SPAN}-01", True),  # a later version is read as far as it is known
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_valid_parent_is_kept(value: str, sampled: bool) -> None:
    assert read(("traceparent", value)) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        GOOD.upper(),
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"{GOOD}-x",
        f"{GOOD}-",
        f"{GOOD}x",
        f"01-{TRACE}-{SPAN}-01x",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00_{TRACE}_{SPAN}_01",
        f"{GOOD},{GOOD}",
        f"00-{TRACE}-{SPAN}-0\xe9",
        f"00-{TRACE}-{SPAN}-0١".encode().decode("latin-1"),  # an Arabic one
    ],
)
def test_a_malformed_parent_starts_a_fresh_trace(value: str) -> None:
    assert is_fresh(read(("traceparent", value), ("tracestate", "a=1")))


def test_two_parents_or_none_start_a_fresh_trace() -> None:
    assert is_fresh(read(("traceparent", GOOD), ("traceparent", GOOD)))
    assert is_fresh(read(("tracestate", "a=1")))
    assert is_fresh(read())


def test_state_is_carried_with_its_parent() -> None:
    assert read(("traceparent", GOOD), ("tracestate", "a=1,b=2")).state == "a=1,b=2"
    assert read(("traceparent", GOOD), ("tracestate", "a=1"), ("tracestate", "b=2")).state == "a=1,b=2"
    assert read(("tracestate", "a=1"), ("traceparent", GOOD)).state == "a=1"  # in whatever order


def test_state_is_bounded() -> None:
    fits, long = "a" * MAX_TRACESTATE_BYTES, "a" * 8192
    assert read(("traceparent", GOOD), ("tracestate", fits)).state == fits
    context = read(("traceparent", GOOD), ("tracestate", long))
    assert context == TraceContext(TRACE, SPAN, True)  # the trace goes on without it
    half = "a" * (MAX_TRACESTATE_BYTES // 2 + 1)
    assert read(("traceparent", GOOD), ("tracestate", half), ("tracestate", half)).state == ""


def test_a_large_baggage_changes_nothing() -> None:
    assert read(("traceparent", GOOD), ("baggage", "a=" + "b" * 20_000)) == TraceContext(TRACE, SPAN, True)


def test_a_fresh_trace_is_sampled_by_the_ratio_and_a_callers_as_it_says() -> None:
    assert not any(read(seed=seed, ratio=0.0).sampled for seed in range(100))
    assert all(read(seed=seed, ratio=1.0).sampled for seed in range(100))
    assert 60 <= sum(read(seed=seed, ratio=0.1).sampled for seed in range(1000)) <= 140
    assert read(("traceparent", GOOD), ratio=0.0).sampled
    assert not read(("traceparent", f"00-{TRACE}-{SPAN}-00"), ratio=1.0).sampled


def test_the_next_hop_gets_one_well_formed_parent() -> None:
    assert TraceContext(TRACE, SPAN, True).header("a" * 16) == f"traceparent: 00-{TRACE}-{'a' * 16}-01\r\n".encode()
    unsampled = TraceContext(TRACE, "", False, "a=1,b=2").header("b" * 16)
    assert unsampled == f"traceparent: 00-{TRACE}-{'b' * 16}-00\r\ntracestate: a=1,b=2\r\n".encode()


def test_state_goes_on_as_the_bytes_it_came_in() -> None:
    context = read(("traceparent", GOOD), ("tracestate", "a=caf\xe9"))
    assert context.header(SPAN).endswith(b"tracestate: a=caf\xe9\r\n")


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate", b"x"]), st.binary(max_size=80)), max_size=5))
def test_whatever_comes_in_a_well_formed_parent_goes_out(headers: list[tuple[bytes, bytes]]) -> None:
    context = tracecontext.read(headers, Random(1), 0.5)
    line = context.header(tracecontext.new_span_id(Random(2)))
    match = WELL_FORMED.match(line)
    assert match is not None
    assert match[1].strip(b"0")
    assert match[2].strip(b"0")


class Zeros(Random):
    """A source that draws nothing but zeros."""

    def getrandbits(self, k: int) -> int:
        return 0

    def random(self) -> float:
        return 0.0


def test_ids_are_never_all_zero_and_differ() -> None:
    assert tracecontext.new_span_id(Zeros()).strip("0")
    assert tracecontext.read([], Zeros(), 0.5).trace_id.strip("0")
    rng = Random(1)
    ids = {tracecontext.new_span_id(rng) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-f]{16}", i) for i in ids)
