"""Usage records: what they say, and that none is lost quietly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import outbox
from common.outbox import Outbox, Writer
from common.store.redis_stream import StreamWriter
from common.tenancy.gate import Used
from common.tenancy.usage import FileWriter, cost_micro_usd
from tests.common.tenancy.test_gate import Fixed, PriceOf, admit, gated
from tests.servers import RedisServer, eventually


@asynccontextmanager
async def logging_to(writer: Writer) -> AsyncIterator[Outbox]:
    sink = Outbox(writer)
    task = asyncio.create_task(sink.run())
    try:
        yield sink
    finally:
        task.cancel()
        await asyncio.wait({task})
        await sink.close()


def test_the_price_of_a_request() -> None:
    prices = {"m": PriceOf(2.0, 8.0, 0.5), "n": PriceOf(1.0, 1.0), "*": PriceOf(3.0, 0.0)}
    assert cost_micro_usd(prices, "m", 1000, 400, 10) == 1200 + 200 + 80
    assert cost_micro_usd(prices, "m", 100, 400, 0) == 50  # no more is cached than there is
    assert cost_micro_usd(prices, "n", 1000, 400, 10) == 1010
    assert cost_micro_usd(prices, "other", 10, 0, 99) == 30
    assert cost_micro_usd({}, "m", 10, 0, 99) == 0


async def test_a_record_says_who_used_how_much_and_what_it_costs(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    sink = Outbox(FileWriter(str(file)))
    source = Fixed(acme={})
    async with gated(source, prices={"m": PriceOf(2.0, 8.0)}, usage=[sink]) as gate:
        ended = Used(100, 20, 30, 200, "complete", "eu/a/i1", "chat", 1_700_000_000_123_456_789, 1.5)
        (await admit(gate, source, input_tokens=90)).end(ended)
        (await admit(gate, source, input_tokens=90)).end(Used(None, None, 7, 200, "client_left"))
        (await admit(gate, source, input_tokens=90)).end(Used(status=503, ending="refused_here"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    first = lines[0]
    assert first.pop("record") != lines[1]["record"]
    assert first == {
        "time": 1_700_000_000.123456,
        "trace_id": "0" * 32,
        "tenant": "acme",
        "credential": f"key:{source.keys['acme'][0].id}",
        "operation": "chat",
        "model": "m",
        "input_tokens": 100,
        "cached_tokens": 20,
        "output_tokens": 30,
        "estimated": False,
        "usd": 0.00044,
        "status": 200,
        "ending": "complete",
        "served_by": "eu/a/i1",
        "duration_s": 1.5,
    }
    assert (lines[1]["input_tokens"], lines[1]["output_tokens"], lines[1]["estimated"]) == (90, 7, True)
    assert (lines[2]["input_tokens"], lines[2]["output_tokens"], lines[2]["usd"]) == (0, 0, 0.0)
    assert source.secrets["acme"] not in file.read_text()


async def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "usage.jsonl"
    async with logging_to(FileWriter(str(file))) as sink:
        sink.add(b"1")
        await eventually(lambda: sink.written == 1, 20.0)
        file.rename(tmp_path / "usage.jsonl.1")
        sink.add(b"2")
        await eventually(lambda: sink.written == 2, 20.0)
    assert file.read_text() == "2\n"
    assert (tmp_path / "usage.jsonl.1").read_text() == "1\n"


async def test_records_wait_for_a_disk_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outbox, "RETRY_S", (0.05, 0.05))
    directory = tmp_path / "later"
    async with logging_to(FileWriter(str(directory / "usage.jsonl"))) as sink:
        for n in range(5):
            sink.add(b"%d" % n)
        await eventually(lambda: "usage_not_written" in capsys.readouterr().out, 20.0)
        assert sink.pending == 5
        directory.mkdir()
        await eventually(lambda: sink.written == 5, 20.0)
    assert (directory / "usage.jsonl").read_text() == "0\n1\n2\n3\n4\n"
    assert sink.dropped == 0


async def test_a_full_disk_is_an_error_like_any_other() -> None:
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        await FileWriter("/dev/full").write([b"1"])


class Broken:
    """Takes nothing."""

    async def write(self, lines: Sequence[bytes]) -> None:
        raise OSError("no")

    async def close(self) -> None:
        pass


async def test_what_is_kept_is_bounded_and_what_is_lost_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = Outbox(Broken(), max_pending=10)
    for n in range(25):
        sink.add(b"%d" % n)
    assert (sink.pending, sink.dropped) == (10, 15)
    await sink.close()
    assert sink.dropped == 25
    assert "usage_lost" in capsys.readouterr().out


async def test_records_go_into_a_stream_of_bounded_length(redis_server: RedisServer) -> None:
    async with logging_to(StreamWriter(redis_server.url, "headwater:usage", 1000, field="usage")) as sink:
        for n in range(1500):
            sink.add(b'{"n":%d}' % n)
        await eventually(lambda: sink.written == 1500, 20.0)
        entries: list[Any] = await redis_server.cli("XREVRANGE", "headwater:usage", "+", "-", "COUNT", 1)
        assert entries[0][1] == {b"usage": b'{"n":1499}'}
        assert 1000 <= await redis_server.cli("XLEN", "headwater:usage") <= 1200


async def test_records_wait_for_redis(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "RETRY_S", (0.05, 0.05))
    async with logging_to(StreamWriter(redis_server.url, "u", 1000, field="usage")) as sink:
        sink.add(b"1")
        await eventually(lambda: sink.written == 1, 20.0)
        redis_server.kill()
        sink.add(b"2")
        await asyncio.sleep(0.5)
        assert sink.pending == 1
        await redis_server.start()
        await eventually(lambda: sink.written == 2, 30.0)
        assert await redis_server.cli("XLEN", "u") >= 2


@dataclass
class Slow:
    """Takes what it is given, after a moment; remembers."""

    lines: list[bytes]

    async def write(self, lines: Sequence[bytes]) -> None:
        await asyncio.sleep(0.05)
        self.lines += lines

    async def close(self) -> None:
        pass


async def test_the_end_waits_for_what_is_left() -> None:
    slow = Slow([])
    async with logging_to(slow) as sink:
        for n in range(1200):
            sink.add(b"%d" % n)
    assert [int(line) for line in slow.lines] == list(range(1200))
