"""The load that an engine tells on its own answer, and what else may stand there."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.orca import MAX_READ, NOTHING, EngineLoad, parse


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # A live vLLM 0.32, both forms.
        (
            b"TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.4",
            EngineLoad(kv_utilization=0.4, waiting=3.0),
        ),
        (
            b'JSON {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}}',
            EngineLoad(kv_utilization=0.0, waiting=0.0),
        ),
        # Triton's TensorRT-LLM backend, as its source has it.
        (
            b"TEXT named_metrics.kv_cache_utilization=0.5,named_metrics.max_token_capacity=8192",
            EngineLoad(kv_utilization=0.5),
        ),
        (
            b'JSON {"cpu_utilization": 0.3, "named_metrics": {"kv_cache_utilization": 1, "max_token_capacity": 8192}}',
            EngineLoad(kv_utilization=1.0),
        ),
        # llm-d's simulator tells the third.
        (b"text named_metrics.num_requests_running=7", EngineLoad(running=7.0)),
        (b"TEXT cpu_utilization=0.3, named_metrics.num_requests_waiting = 2", EngineLoad(waiting=2.0)),
        (b"  TEXT   num_requests_waiting=1 ", EngineLoad(waiting=1.0)),
    ],
)
def test_what_engines_tell(value: bytes, expected: EngineLoad) -> None:
    assert parse(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"TEXT",
        b"TEXT ",
        b"JSON",
        b"BIN abc",
        b"0.4",
        b"TEXT ,,,==,=1",
        b"TEXT named_metrics.num_requests_waiting",
        b"TEXT named_metrics.num_requests_waiting=x",
        b"TEXT named_metrics.num_requests_waiting=NaN",
        b"TEXT named_metrics.num_requests_waiting=inf, named_metrics.kv_cache_usage_perc=-inf",
        b"TEXT named_metrics.num_requests_waiting=-1, named_metrics.kv_cache_usage_perc=-0.1",
        b"TEXT named_metrics.kv_cache_usage_perc=40",
        b"TEXT \xff\xfe=1",
        b"JSON {",
        b"JSON []",
        b"JSON null",
        b'JSON {"named_metrics": 5}',
        b'JSON {"named_metrics": {"num_requests_waiting": "3"}}',
        b'JSON {"named_metrics": {"num_requests_waiting": true, "kv_cache_usage_perc": null}}',
        b'JSON {"named_metrics": {"num_requests_waiting": 1e999, "kv_cache_usage_perc": NaN}}',
        b'JSON {"named_metrics": {"num_requests_waiting": ' + b"9" * 1000 + b"}}",
        b"JSON " + b"[" * 3000,
    ],
)
def test_nonsense_is_unknown(value: bytes) -> None:
    assert parse(value) == NOTHING


def test_a_rounding_error_is_full_and_a_percentage_nothing() -> None:
    assert parse(b"TEXT kv_cache_usage_perc=1.0000001").kv_utilization == 1.0
    assert parse(b"TEXT kv_cache_usage_perc=1.5").kv_utilization is None


def test_one_figure_that_makes_no_sense_leaves_the_others() -> None:
    told = b"TEXT named_metrics.kv_cache_usage_perc=NaN, named_metrics.num_requests_waiting=2"
    assert parse(told) == EngineLoad(waiting=2.0)


def test_only_so_much_is_read() -> None:
    filler = b"TEXT " + b"x" * MAX_READ + b"=1, named_metrics.num_requests_waiting=2"
    assert parse(filler) == NOTHING
    huge = b"TEXT " + b"a=1," * 1_000_000
    began = time.perf_counter()
    for _ in range(50):
        parse(huge)
    assert (time.perf_counter() - began) / 50 < 0.01


@given(st.sampled_from([b"TEXT ", b"JSON ", b""]), st.binary(max_size=300))
def test_nothing_breaks_it(form: bytes, rest: bytes) -> None:
    load = parse(form + rest)
    assert load.kv_utilization is None or 0.0 <= load.kv_utilization <= 1.0
    assert all(v is None or 0.0 <= v < 1e15 for v in (load.waiting, load.running))
