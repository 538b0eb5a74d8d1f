"""A tier's access log is a trace: what was asked can be asked again, of another policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import asdict

from common.records import Ending, RequestRecord
from common.sim.traces import TraceRow, read_trace
from common.telemetry import access_line

ASKED = RequestRecord(
    id="a" * 32,
    span_id="b" * 16,
    parent_id="",
    sampled=False,
    process="p",
    node=(),
    method="POST",
    path="/v1/chat/completions",
    started_at=5.0,
    started_wall_ns=1_700_000_000_250_000_000,
    model="llama-8b",
    input_tokens=812,
    output_tokens=64.0,
    ended_at=7.0,
    status=200,
    ending=Ending.COMPLETE,
)


def log_of(path: Path, *lines: object) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_the_access_log_can_be_replayed(tmp_path: Path) -> None:
    later = replace(ASKED, started_wall_ns=ASKED.started_wall_ns + 1_500_000_000, input_tokens=9, output_tokens=3)
    rows = read_trace(log_of(tmp_path / "log.jsonl", access_line(later), access_line(ASKED)))
    assert rows == [
        TraceRow(0.0, 812, 64, model="llama-8b"),
        TraceRow(pytest.approx(1.5), 9, 3, model="llama-8b"),  # type: ignore[arg-type]
    ]


def test_other_lines_and_what_has_no_length_are_passed_over(tmp_path: Path) -> None:
    lost = replace(ASKED, output_tokens=None, ending=Ending.BROKE_AFTER)
    embedding = replace(ASKED, path="/v1/embeddings", output_tokens=None, model="e")
    lines = ({"event": "ready", "listen": ":8080"}, access_line(lost), access_line(embedding), access_line(ASKED))
    rows = read_trace(log_of(tmp_path / "log.jsonl", *lines))
    assert [(row.model, row.output_tokens) for row in rows] == [("e", 0), ("llama-8b", 64)]


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log\.jsonl:1: arrival_s: "):
        read_trace(log_of(tmp_path / "log.jsonl", asdict(access_line(ASKED)) | {"time": None}))
    with pytest.raises(ValueError, match="no requests"):
        read_trace(log_of(tmp_path / "empty.jsonl", {"event": "ready"}))
