"""The replay against a raw server that streams, refuses, fails, resets and stalls: what is counted and measured."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from common.sim.workload import TraceRow, read_trace, scaled, window
from common.types import Slo
from services.bench import report
from services.bench.__main__ import bench
from services.bench.client import Target
from services.bench.meters import StreamMeter
from services.bench.prompts import Template, block_text, prompt
from services.bench.replay import Progress, Replay, Sample

TRACES = Path(__file__).parents[4] / "shared" / "traces"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Headwater-Served-By: eu/c1/i1\r\n"
    b"x-headwater-decision: d-1\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(text: str = "word ") -> bytes:
    return event({"choices": [{"delta": {"content": text}, "finish_reason": None}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens}})


END = framed(event(b"[DONE]")) + b"0\r\n\r\n"


def answer(status: str, body: dict[str, Any], headers: str = "") -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n{headers}\r\n"
    return head.encode() + text


@dataclass
class Asked:
    head: str
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))


Behave = Callable[[Asked], Awaitable[None]]


@dataclass
class Server:
    """Answers every request with `behave` and remembers what was asked."""

    behave: Behave
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(next((line[15:] for line in head.lower().split("\r\n") if "content-length:" in line), "0"))
                body = json.loads(await reader.readexactly(length)) if length else {}
                asked = Asked(head, body, writer)
                self.asked.append(asked)
                await self.behave(asked)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def streams(asked: Asked) -> None:
    """Three tokens 20 ms apart, the first one after 30 ms, with usage."""
    asked.send(STREAM_HEAD, framed(b": still loading\n\n"))
    await asyncio.sleep(0.03)
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    asked.send(framed(role + token()))
    for _ in range(2):
        await asyncio.sleep(0.02)
        asked.send(framed(token()))
    asked.send(framed(usage(3)), END)


async def at_once(asked: Asked) -> None:
    asked.send(STREAM_HEAD, framed(token()), framed(usage(1)), END)


async def closes(asked: Asked) -> None:
    asked.writer.close()


async def breaks(asked: Asked) -> None:
    asked.send(STREAM_HEAD, framed(token()))
    await asyncio.sleep(0.01)
    asked.writer.transport.abort()


async def ends_early(asked: Asked) -> None:
    asked.send(STREAM_HEAD, framed(token()), b"0\r\n\r\n")


async def tells_error(asked: Asked) -> None:
    asked.send(STREAM_HEAD, framed(token()), framed(event({"error": {"code": "stream_broken"}})), END)


async def stalls(asked: Asked) -> None:
    asked.send(STREAM_HEAD, framed(token()))
    await asyncio.sleep(5.0)


async def is_silent(asked: Asked) -> None:
    await asyncio.sleep(5.0)


async def babbles(asked: Asked) -> None:
    asked.send(b"SMTP ready\r\n\r\n")


async def refuses(asked: Asked) -> None:
    asked.send(
        answer("429 Too Many Requests", {"error": {"code": "saturated", "type": "rate_limit"}}, "retry-after: 1\r\n")
    )


async def errs(asked: Asked) -> None:
    asked.send(answer("500 Oops", {"error": {"message": "no", "type": "server_error", "code": 500}}))


async def completes(asked: Asked) -> None:
    choices = [{"message": {"role": "assistant", "content": "hi"}}]
    asked.send(answer("200 OK", {"choices": choices, "usage": {"completion_tokens": 7}}))


async def until_close(asked: Asked) -> None:
    asked.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", token(), usage(1), event(b"[DONE]"))
    await asked.writer.drain()
    asked.writer.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Behave], Awaitable[Server]]]:
    started: list[asyncio.Server] = []

    async def start(behave: Behave) -> Server:
        server = Server(behave)
        started.append(await server.start())
        return server

    yield start
    for one in started:
        one.close()


Serve = Callable[[Behave], Awaitable[Server]]


def rows(count: int, gap_s: float = 0.0, **columns: Any) -> list[TraceRow]:
    return [TraceRow(5.0 + gap_s * index, 40, 3, **columns) for index in range(count)]


async def test_measures_a_stream(serve: Serve) -> None:
    server = await serve(streams)
    (sample,) = await Replay().run(rows(1, client="a", session="s"), server.url)
    assert (sample.ok, sample.done, sample.status, sample.output_tokens) == (True, True, 200, 3)
    # Lower bounds are the server's sleeps; upper ones are each other, for the machine may be busy.
    assert sample.ttft_s is not None
    assert sample.tpot_s is not None
    assert sample.ttft_s > 0.029  # the comment and the empty role event are no token
    assert 0.019 < sample.tpot_s <= sample.max_gap_s + 0.001
    assert sample.ttft_s + 2 * sample.tpot_s <= sample.e2e_s < 1.0
    assert sample.body_bytes > 200
    assert (sample.client, sample.session, sample.input_tokens) == ("a", "s", 40)
    assert (sample.served_by, sample.decision) == ("eu/c1/i1", "d-1")


@pytest.mark.parametrize(
    ("behave", "status", "error"),
    [
        (closes, 0, "reset"),
        (breaks, 200, "broken"),
        (ends_early, 200, "broken"),
        (tells_error, 200, "stream_error stream_broken"),
        (stalls, 200, "stalled"),
        (is_silent, 0, "timeout"),
        (babbles, 0, "bad_response"),
        (errs, 500, "500 server_error"),
        (refuses, 429, "429 saturated"),
    ],
)
async def test_says_what_went_wrong(serve: Serve, behave: Behave, status: int, error: str) -> None:
    server = await serve(behave)
    (sample,) = await Replay().run(rows(1), server.url, timeout_s=0.3)
    assert (sample.status, sample.error) == (status, error)
    assert (sample.rejected, sample.failed) == (behave is refuses, behave is not refuses)
    assert len(server.asked) == 1  # nothing is sent twice


async def test_no_listener_is_a_failure_to_connect() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    (sample,) = await Replay().run(rows(1), f"http://127.0.0.1:{port}")
    assert (sample.status, sample.error, sample.failed) == (0, "connect", True)


async def test_an_answer_without_length_ends_with_its_connection(serve: Serve) -> None:
    server = await serve(until_close)
    assert [sample.error for sample in await Replay().run(rows(2), server.url, max_in_flight=1)] == ["", ""]
    assert server.connections == 2


async def test_answers_in_one_piece_are_measured_end_to_end(serve: Serve) -> None:
    server = await serve(completes)
    samples = await Replay(stream_share=0.0).run(rows(2), server.url)
    assert [(one.ok, one.done, one.ttft_s, one.output_tokens, one.stream) for one in samples] == [
        (True, True, None, 7, False)
    ] * 2
    assert "stream" not in server.asked[0].body


async def test_the_share_of_streams_is_spread_evenly(serve: Serve) -> None:
    server = await serve(at_once)
    samples = await Replay(stream_share=0.25).run(rows(8), server.url, max_in_flight=1)
    assert [sample.stream for sample in samples] == [False, False, False, True] * 2
    assert [sample.ok for sample in samples] == [True] * 8  # a stream nobody asked for is still an answer


async def test_is_open_loop(serve: Serve) -> None:
    server = await serve(streams)
    seen: list[int] = []
    samples = await Replay().run(rows(20, 0.01), server.url, on_progress=lambda at: seen.append(at.in_flight))
    assert max(seen) > 3  # 70 ms each, one every 10 ms
    samples.sort(key=lambda sample: sample.index)
    assert [sample.due_s for sample in samples] == pytest.approx([0.01 * index for index in range(20)])
    assert all(-0.002 < sample.late_s < 0.5 for sample in samples)


async def test_speedup_and_keep_alive(serve: Serve) -> None:
    server = await serve(at_once)
    samples = await Replay().run(rows(20, 0.1), server.url, speedup=10.0, max_in_flight=1)
    assert samples[-1].due_s == pytest.approx(0.19)
    assert server.connections == 1


async def test_the_bound_holds_and_lateness_tells(serve: Serve) -> None:
    server = await serve(streams)
    most = 0

    def watch(at: Progress) -> None:
        nonlocal most
        most = max(most, at.in_flight)

    samples = await Replay().run(rows(6), server.url, max_in_flight=2, on_progress=watch)
    assert (len(samples), most, server.connections) == (6, 1, 2)  # one of the two has just ended
    assert max(sample.late_s for sample in samples) > 0.1


async def test_targets_in_turn_or_chosen(serve: Serve) -> None:
    servers = [await serve(at_once), await serve(at_once)]
    urls = [server.url for server in servers]
    await Replay().run(rows(4), urls)
    assert [len(server.asked) for server in servers] == [2, 2]
    samples = await Replay().run(rows(4), urls, choose=lambda row, index: 1)
    assert {sample.target for sample in samples} == {urls[1]}


async def test_stop_returns_what_has_ended(serve: Serve) -> None:
    server = await serve(at_once)
    replay = Replay()

    def stop_after_five(at: Progress) -> None:
        if at.ended == 5:
            replay.stop()

    endless = (TraceRow(0.005 * index, 10, 1) for index in range(10**9))
    samples = await asyncio.wait_for(replay.run(endless, server.url, on_progress=stop_after_five), 5.0)
    assert len(samples) == 5


async def test_keeps_the_latest_samples_only(serve: Serve) -> None:
    server = await serve(at_once)
    counted: list[int] = []
    samples = await Replay().run(rows(9), server.url, keep=2, on_progress=lambda at: counted.append(at.ok))
    assert (len(samples), counted[-1]) == (2, 9)


async def test_what_is_sent(serve: Serve) -> None:
    server = await serve(at_once)
    row = TraceRow(0.0, 100, 30, client="a", session="s 1\r\nx: y")
    await Replay(Template("m", sim=True, api_key={"a": "sk-1"}, seed=3)).run([row], server.url + "/v1")
    await Replay(Template("m", ignore_eos=True, path="/v1/completions")).run([row], server.url + "/base/")
    await Replay(Template("m", max_tokens=5)).run([row], server.url)
    first, second, third = server.asked
    assert first.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "authorization: Bearer sk-1\r\n" in first.head
    assert "x-session-id: 3-s%201%0D%0Ax:%20y\r\n" in first.head
    assert first.body["stream"] is True
    assert (first.body["model"], first.body["max_tokens"], first.body["sim_output_tokens"]) == ("m", 1024, 30)
    assert len(first.body["messages"][0]["content"]) == 400
    assert second.head.startswith("POST /base/v1/completions HTTP/1.1\r\n")
    assert "authorization" not in second.head
    assert (second.body["max_tokens"], second.body["ignore_eos"], len(second.body["prompt"])) == (30, True, 400)
    assert "sim_output_tokens" not in second.body
    assert third.body["max_tokens"] == 5


def test_text_is_shared_as_hashes_and_sessions_say() -> None:
    one, other = (prompt(TraceRow(0, 1200, 1, hashes), 0) for hashes in ((1, 2, 3), (1, 2, 4)))
    assert one[:4096] == other[:4096]
    assert one[4096:4160] != other[4096:4160]
    turn = prompt(TraceRow(0, 300, 1, session="s"), 0)
    assert prompt(TraceRow(9, 900, 1, session="s"), 7).startswith(turn)
    assert prompt(TraceRow(0, 300, 1), 1)[:64] != prompt(TraceRow(0, 300, 1), 2)[:64]
    assert prompt(TraceRow(0, 300, 1), 1) == prompt(TraceRow(4, 300, 1), 1)
    assert prompt(TraceRow(0, 300, 1, session="s"), 0, seed=1)[:64] != turn[:64]
    assert len(block_text("x").split()) == 512


def test_a_meter_takes_any_pieces_and_line_ends() -> None:
    error_in_text = token('an "error": {"usage":{ of sorts, [DONE]')
    whole = (
        event({"choices": [{"delta": {}}]}) + token() + b": comment\n\n" + error_in_text + token() + event(b"[DONE]")
    )
    for stream in (whole, whole.replace(b"\n", b"\r\n")):
        for size in (1, 7, 64, len(stream)):
            meter = StreamMeter()
            for at in range(0, len(stream), size):
                meter.feed(stream[at : at + size], float(at))
            assert (meter.tokens, meter.done, meter.error) == (3, True, ""), size


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h/?q=1"])
def test_a_bad_target_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="target"):
        Target.of(url)


def test_targets() -> None:
    assert Target.of("localhost:8080").authority == "localhost:8080"
    assert Target.of("https://h/v1").port == 443
    assert (Target.of("http://[::1]:80/a/v1/").authority, Target.of("http://[::1]:80/a/v1/").prefix) == (
        "[::1]:80",
        "/a",
    )


def sample(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "index": 0, "due_s": 0.0, "late_s": 0.0, "target": "u", "client": "", "session": "", "stream": True,
        "input_tokens": 10, "output_tokens": 11, "status": 200, "error": "", "ttft_s": 0.5, "tpot_s": 0.05,
        "max_gap_s": 0.1, "e2e_s": 1.0, "body_bytes": 9, "done": True, "served_by": "eu/c1/i1", "decision": "d",
    }  # fmt: skip
    return Sample(**(values | changes))


def test_summary_counts_good_rejected_and_failed() -> None:
    samples = [
        sample(),
        sample(index=1, due_s=1.0, ttft_s=3.0, served_by="eu/c1/i2"),
        sample(index=2, due_s=2.0, tpot_s=0.2, served_by="us/c9/i1"),
        sample(index=3, due_s=3.0, ttft_s=None, tpot_s=None, e2e_s=2.9),
        sample(index=4, due_s=3.0, ttft_s=None, tpot_s=None, e2e_s=3.1),
        sample(index=5, due_s=3.0, ttft_s=None, status=429, error="429 saturated", served_by=""),
        sample(index=6, due_s=3.0, status=504, error="504 deadline_exceeded"),
        sample(index=7, due_s=3.0, error="broken"),
    ]
    summary = report.summarize(samples)
    assert (summary.requests, summary.ok, summary.rejected, summary.failed, summary.good) == (8, 5, 2, 1, 2)
    assert summary.span_s == pytest.approx(6.1)
    assert summary.goodput_per_s == pytest.approx(2 / 6.1)
    assert summary.ttft_s.mean == pytest.approx(4.0 / 3.0)
    assert summary.errors == {"429 saturated": 1, "504 deadline_exceeded": 1, "broken": 1}
    assert list(report.grouped(samples, "region")) == ["-", "eu", "us"]
    assert list(report.grouped(samples, "cluster")) == ["-", "eu/c1", "us/c9"]
    assert report.grouped(samples, "instance")["eu/c1/i2"].requests == 1
    assert report.summarize(samples, Slo()).good == 5
    assert report.summarize([]).requests == 0


@pytest.fixture
def live() -> Iterator[str]:
    """A server on a loop of its own, for the command, which runs a loop itself."""

    async def behave(asked: Asked) -> None:
        if asked.head.startswith("GET /v1/models"):
            asked.send(answer("200 OK", {"data": [{"id": "tiny"}]}))
        elif len(asked.body["messages"][0]["content"]) % 3 == 0:
            await refuses(asked)
        else:
            await at_once(asked)

    loop = asyncio.new_event_loop()
    server = Server(behave)
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server.url
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def command(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_replays_and_reports(live: str, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    result = command("--target", live, "--rate", "200", "--limit", "60", "--sim", *files)
    assert result.exit_code == 0, result.output
    assert "60 requests in" in result.output
    assert "eu/c1/i1" in result.output
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["settings"]["model"] == "tiny"
    summary = written["summary"]
    assert summary["ok"] + summary["rejected"] == 60
    assert summary["errors"]["429 saturated"] == summary["rejected"] > 5
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["index"]) for line in lines] == list(range(60))


def test_the_command_replays_a_trace(live: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{at},7,1\n" for at in range(20)))
    result = command("--target", live, "--trace", str(trace), "--speedup", "200", "--copies", "2", "--start", "3")
    assert result.exit_code == 0, result.output
    assert "34 requests in" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "/no/such/file"], "/no/such/file"),
        (["--rate", "0"], "--rate"),
        (["--by", "colour"], "--by colour"),
        (["--speedup", "0"], "speedup"),
        (["--target", "nothing://x"], "target 'nothing://x'"),
        (["--target", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
    ],
)
def test_bad_input_is_one_line_and_exit_1(live: str, arguments: list[str], said: str) -> None:
    result = command("--target", live, "--limit", "3", *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.traces
@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
async def test_replays_a_public_trace(serve: Serve) -> None:
    server = await serve(at_once)
    trace = scaled(window(read_trace(TRACES / "mooncake_conversation.csv.gz"), 60.0, 40), rate=100.0)
    samples = await Replay(Template("m")).run(trace, server.url)
    assert all(sample.ok for sample in samples)
    sent = {asked.body["messages"][0]["content"] for asked in server.asked}
    assert {len(text) for text in sent} == {4 * row.input_tokens for row in trace}
    assert len({text[:2048] for text in sent}) < len(sent)  # prefixes are shared as in the trace
