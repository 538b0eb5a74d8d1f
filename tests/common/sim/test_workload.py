"""Traces are read strictly, reshaped without loss, and generated traffic has the statistics it claims."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from common.sim.workload import (
    BLOCK_TOKENS,
    Conversations,
    TraceRow,
    mean_rate,
    read_trace,
    scaled,
    spread,
    superposed,
    window,
)
from common.types import Priority

TRACES = Path(__file__).parents[4] / "shared" / "traces"


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_reads_csv_with_every_column_and_ignores_others(tmp_path: Path, name: str) -> None:
    text = (
        "arrival_s,input_tokens,output_tokens,hash_ids_512,client,priority,session,colour\n"
        "1.5,600,7,4 5,a,critical,s1,red\n"
        "0.5,10,1,,,,,\n"
    )
    assert read_trace(write(tmp_path / name, text)) == [
        TraceRow(0.5, 10, 1),
        TraceRow(1.5, 600, 7, (4, 5), "a", Priority.CRITICAL, "s1"),
    ]


def test_reads_jsonl(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0, "input_tokens": 5, "output_tokens": 2, "prefix_hashes": [1, 2], "client": 7, "priority": 2},
        {"arrival_s": 1.25, "input_tokens": 6, "output_tokens": 3, "session": "s"},
    ]
    rows = read_trace(write(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert rows == [TraceRow(0.0, 5, 2, (1, 2), "7", Priority.BATCH), TraceRow(1.25, 6, 3, session="s")]


def test_reads_azures_own_header(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(write(tmp_path / "azure.csv", text))
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: no column arrival_s"),
        ("arrival_s,output_tokens\n1,2\n", ":1: no column input_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", ":1: no requests"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\n1,x,3\n", ":3: input_tokens: "),
        ("arrival_s,input_tokens,output_tokens\n-1,2,3\n", ":2: arrival_s: "),
        ("arrival_s,input_tokens,output_tokens\nnan,2,3\n", ":2: arrival_s: "),
        ("arrival_s,input_tokens,output_tokens\n1,2,3.5\n", ":2: output_tokens: "),
        ("arrival_s,input_tokens,output_tokens\n1,2\n", ":2: 2 values under 3 columns"),
        ("arrival_s,input_tokens,output_tokens,priority\n1,2,3,urgent\n", ":2: priority: "),
        ("arrival_s,input_tokens,output_tokens,prefix_hashes\n1,2,3,4 b\n", ":2: prefix_hashes: "),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", ":2: TIMESTAMP: "),
        ('{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n{"arrival_s": 1}\n', ":2: no input_tokens"),
        ('{"arrival_s": 1, "input_tokens": true, "output_tokens": 3}\n', ":1: input_tokens: "),
        ('{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n[1]\n', ":2: not a JSON object"),
        ('{"arrival_s": 1, "input_tokens": 2, "output_tokens": 3}\n{1\n', ":2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ValueError, match=r"bad\.csv") as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_what_is_not_text_is_said_to_be_so(tmp_path: Path) -> None:
    whole = gzip.compress(b"arrival_s,input_tokens,output_tokens\n" + b"1,2,3\n" * 1000)
    for content in (whole[: len(whole) // 2], b"\xff\xfe\x00\x01"):
        path = tmp_path / "cut.csv.gz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.csv\.gz:\d+: not readable"):
            read_trace(path)


ROWS = [TraceRow(10.0 + second, 100, 10, (second,), session=f"s{second}") for second in range(11)]


def test_scaled_changes_the_rate_and_nothing_else() -> None:
    assert mean_rate(ROWS) == pytest.approx(1.0)
    assert mean_rate(scaled(ROWS, rate=20.0)) == pytest.approx(20.0)
    assert [row.arrival_s for row in scaled(ROWS, factor=2.0)][:3] == [5.0, 5.5, 6.0]
    assert [row.session for row in scaled(ROWS, factor=2.0)] == [row.session for row in ROWS]
    for bad in ({}, {"rate": 1.0, "factor": 1.0}, {"rate": 0.0}, {"factor": -1.0}):
        with pytest.raises(ValueError, match=r"rate|factor"):
            scaled(ROWS, **bad)
    with pytest.raises(ValueError, match="no rate"):
        scaled(ROWS[:1], rate=1.0)


def test_spread_moves_each_arrival_within_its_stamp() -> None:
    stamped = [TraceRow(3.0 * (i // 10), 100, 10, session=str(i)) for i in range(100)]
    moved = spread(stamped, 3.0, Random(1))
    assert [row.arrival_s for row in moved] == sorted(row.arrival_s for row in moved)
    assert len({row.arrival_s for row in moved}) == 100
    assert all(0.0 <= row.arrival_s - 3.0 * (int(row.session) // 10) <= 3.0 for row in moved)


def test_window_starts_at_zero() -> None:
    cut = window(ROWS, start_s=12.5, count=3)
    assert [row.arrival_s for row in cut] == [0.0, 1.0, 2.0]
    assert [row.session for row in cut] == ["s3", "s4", "s5"]
    assert len(window(ROWS, start_s=12.5)) == 8
    assert window(ROWS, start_s=99.0, count=3) == []


def test_superposed_multiplies_the_rate_with_other_people() -> None:
    merged = superposed(ROWS, copies=3, shift_s=3.5)
    assert len(merged) == 3 * len(ROWS)
    assert [row.arrival_s for row in merged] == sorted(row.arrival_s for row in merged)
    assert mean_rate(merged) == pytest.approx(3.0, rel=0.1)
    assert len({row.session for row in merged}) == len({row.prefix_hashes for row in merged}) == len(merged)


@pytest.fixture(scope="module")
def generated() -> list[TraceRow]:
    return Conversations(Random(20231116), rate=8.0).rows(30_000)


@pytest.mark.parametrize(
    ("column", "mean", "quantiles"),
    [("input_tokens", 1155, (1020, 2734, 4083, 4142)), ("output_tokens", 211, (129, 424, 451, 601))],
)
def test_lengths_match_the_published_ones(
    generated: list[TraceRow], column: str, mean: float, quantiles: tuple[float, ...]
) -> None:
    values = sorted(getattr(row, column) for row in generated)
    assert fmean(values) == pytest.approx(mean, rel=0.02)
    for share, published in zip((0.5, 0.9, 0.95, 0.99), quantiles, strict=True):
        assert values[int(share * len(values))] == pytest.approx(published, rel=0.04), share


def test_arrivals_match_the_published_burstiness(generated: list[TraceRow]) -> None:
    gaps = [later.arrival_s - row.arrival_s for row, later in pairwise(generated)]
    assert 1.0 / fmean(gaps) == pytest.approx(8.0, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.09, rel=0.03)


def test_follow_ups_hold_what_was_said_before(generated: list[TraceRow]) -> None:
    last: dict[str, TraceRow] = {}
    follow_ups = 0
    for row in generated:
        before = last.get(row.session)
        if before:
            follow_ups += 1
            assert row.input_tokens > before.input_tokens + before.output_tokens
            assert row.prefix_hashes[: len(before.prefix_hashes)] == before.prefix_hashes
            assert (row.client, row.priority) == (before.client, before.priority)
            assert row.arrival_s > before.arrival_s + before.output_tokens * 0.03
        assert (len(row.prefix_hashes) - 1) * BLOCK_TOKENS < row.input_tokens
        last[row.session] = row
    assert follow_ups / len(generated) == pytest.approx(0.5, abs=0.05)


def test_tenants_are_many_and_unequal(generated: list[TraceRow]) -> None:
    counts = sorted((sum(row.client == f"tenant-{one}" for row in generated) for one in range(8)), reverse=True)
    assert sum(counts) == len(generated)
    assert counts[0] / len(generated) == pytest.approx(1.0 / 2.718, rel=0.1)  # 1 / (1 + 1/2 + … + 1/8)
    assert counts[-1] > 0


def test_the_same_seed_is_the_same_traffic_and_another_is_not() -> None:
    again = [Conversations(Random(seed), priorities=(Priority.CRITICAL, Priority.BATCH)).rows(50) for seed in (1, 1, 2)]
    assert again[0] == again[1]
    assert {row.session for row in again[0]}.isdisjoint(row.session for row in again[2])
    assert {row.priority for row in again[0]} == {Priority.CRITICAL, Priority.BATCH}


def test_rows_continue_where_the_last_call_ended() -> None:
    parts = Conversations(Random(3))
    assert parts.rows(20) + parts.rows(30) == Conversations(Random(3)).rows(50)


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"follow_up_share": 1.0}, {"tenants": 0}, {"priorities": ()}])
def test_impossible_traffic_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="traffic needs"):
        Conversations(Random(0), **bad)  # type: ignore[arg-type]


@pytest.mark.traces
@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize(
    ("name", "rows", "rate"),
    [
        ("azure2023_conv", 19_366, 5.53),
        ("mooncake_conversation", 12_031, 3.40),
        ("servegen_m-mid_sampled", 30_000, 50.4),
    ],
)
def test_reads_the_public_traces(name: str, rows: int, rate: float) -> None:
    trace = read_trace(TRACES / f"{name}.csv.gz")
    assert len(trace) == rows
    assert mean_rate(trace) == pytest.approx(rate, rel=0.01)
    if name.startswith("mooncake"):
        assert all((len(row.prefix_hashes) - 1) * BLOCK_TOKENS < row.input_tokens for row in trace)
