"""Reads traces: when requests came, how long they were, what they shared.

Formats: CSV with a header line, or one JSON object a line; either may be gzipped. Columns (others are ignored):

    arrival_s      seconds from the start of the trace; or Azure's TIMESTAMP (a date and time, first request = 0)
    input_tokens   or Azure's ContextTokens          output_tokens  or Azure's GeneratedTokens
    hash_ids_512   or prefix_hashes: ids of the prompt's leading blocks, by spaces (or a JSON list); may be absent
    client, priority (critical, standard, batch, or 0…2), session, model: may be absent

A tier's access log is a trace too: of its JSON lines those with `"event": "request"` count, the rest of a process's log
is passed over. What ended without a count of output tokens cannot be replayed and is left out, embeddings excepted.

Reading is strict: a value that is not what its column says is a ValueError with file, line and column.
Source of the Azure header: github Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv (Splitwise, ISCA'24).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from common.types import Priority

BLOCK_TOKENS = 512  # what one prefix hash stands for: the block size of the public traces (Mooncake, FAST'25)

_REQUIRED = ("arrival_s", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    `prefix_hashes` names the blocks of BLOCK_TOKENS tokens the prompt begins with, the last one perhaps cut short;
    equal ids at equal positions mean equal text. `client` is a tenant, `session` a conversation; "" for neither, and
    for a `model` that the trace does not name.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    client: str = ""
    priority: Priority = Priority.STANDARD
    session: str = ""
    model: str = ""


def read_trace(path: str | Path) -> list[TraceRow]:
    """All rows of the trace at `path`, in order of arrival.

    Raises ValueError naming file, line and column where the trace is wrong, and OSError where it cannot be read.
    """
    path = Path(path)
    rows: list[TraceRow] = []
    dated = False
    line = 0
    try:
        with _open(path) as text:
            for line, record in _records(path, text):
                columns = _of_access_log(record) if "event" in record else record
                if columns is not None:
                    dated = dated or "TIMESTAMP" in columns or columns is not record
                    rows.append(_row(path, line, columns))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
        raise ValueError(f"{path}:{line + 1}: not readable as text: {error}") from error
    if not rows:
        raise ValueError(f"{path}:1: no requests in this trace")
    rows.sort(key=lambda row: row.arrival_s)
    if dated:
        first_s = rows[0].arrival_s
        rows = [replace(row, arrival_s=row.arrival_s - first_s) for row in rows]
    return rows


def _open(path: Path) -> TextIO:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    if zipped:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _records(path: Path, text: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and columns of every request; the first character tells JSON from CSV."""
    first = text.readline()
    if first.lstrip().startswith("{"):
        return _json_records(path, first, text)
    return _csv_records(path, first, text)


def _json_records(path: Path, first: str, rest: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_chain(first, rest), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        yield number, record


def _csv_records(path: Path, first: str, rest: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(_chain(first, rest), strict=True)
    header = [name.strip() for name in next(reader, [])]
    for wanted in _REQUIRED:
        if not any(_COLUMNS[name][0] == wanted for name in header if name in _COLUMNS):
            raise ValueError(f"{path}:1: no column {wanted}")
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise ValueError(f"{path}:{reader.line_num}: {len(cells)} values under {len(header)} columns")
        yield reader.line_num, dict(zip(header, cells, strict=True))


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _row(path: Path, line: int, record: dict[str, Any]) -> TraceRow:
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name in _COLUMNS:
            field, convert = _COLUMNS[name]
            try:
                values[field] = convert(value)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{line}: {name}: {error}") from error
    for name in _REQUIRED:
        if name not in values:
            raise ValueError(f"{path}:{line}: no {name}")
    return TraceRow(**values)


def _of_access_log(record: dict[str, Any]) -> dict[str, Any] | None:
    """The columns of one line of a process's log, as `telemetry.access_line` writes it; None if it is no request."""
    if record["event"] != "request":
        return None
    output_tokens = record.get("output_tokens")
    if output_tokens is None and str(record.get("path", "")).endswith("/embeddings"):
        output_tokens = 0
    if output_tokens is None:
        return None
    if isinstance(output_tokens, float) and output_tokens.is_integer():
        output_tokens = int(output_tokens)  # a balancer counts tokens in floats
    return {
        "arrival_s": record.get("time"),
        "input_tokens": record.get("input_tokens"),
        "output_tokens": output_tokens,
        "model": record.get("model", ""),
    }


def _seconds(value: Any) -> float:
    seconds = math.nan if isinstance(value, bool) else float(value)
    if not (math.isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"{value!r} is not a number of seconds, 0 or more")
    return seconds


def _date(value: Any) -> float:
    """Seconds since the epoch of a date and time; only differences are used, so a missing zone does no harm."""
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _count(value: Any) -> int:
    number = int(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{value!r} is not a whole number of tokens, 0 or more")
    return number


def _hashes(value: Any) -> tuple[int, ...]:
    parts = value.split() if isinstance(value, str) else value
    if not isinstance(parts, list) or any(isinstance(part, bool | float) for part in parts):
        raise ValueError(f"{value!r} is not a list of whole numbers")
    return tuple(int(part) for part in parts)


def _name(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | float | list | dict):
        raise ValueError(f"{value!r} is not a name")
    return str(value).strip()


def _priority(value: Any) -> Priority:
    text = _name(value).upper()
    if not text:
        return Priority.STANDARD
    if text in Priority.__members__:
        return Priority[text]
    if text in {"0", "1", "2"}:
        return Priority(int(text))
    raise ValueError(f"{value!r} is not critical, standard, batch or 0…2")


_COLUMNS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "arrival_s": ("arrival_s", _seconds),
    "TIMESTAMP": ("arrival_s", _date),
    "input_tokens": ("input_tokens", _count),
    "ContextTokens": ("input_tokens", _count),
    "output_tokens": ("output_tokens", _count),
    "GeneratedTokens": ("output_tokens", _count),
    "hash_ids_512": ("prefix_hashes", _hashes),
    "prefix_hashes": ("prefix_hashes", _hashes),
    "client": ("client", _name),
    "priority": ("priority", _priority),
    "session": ("session", _name),
    "model": ("model", _name),
}
"""Column name of a file -> field of TraceRow, and what turns the one into the other."""
