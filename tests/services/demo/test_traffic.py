"""The demo's traffic: what it consists of, what its lines say, and that it runs, stops and tells failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from common.sim.workload import Conversations, TraceRow
from services.bench.samples import Progress, Sample
from services.demo.layout import MODEL
from services.demo.traffic import LONGEST_OUTPUT, Watcher, fitting

OK = Sample(
    index=0,
    due_s=0.0,
    late_s=0.0,
    target="http://a",
    client="",
    session="",
    stream=True,
    input_tokens=10,
    output_tokens=10,
    status=200,
    error="",
    ttft_s=0.2,
    tpot_s=0.02,
    max_gap_s=0.02,
    e2e_s=0.4,
    body_bytes=100,
    done=True,
    served_by="eu-west/eu-west-a/eu-west-a-0-h100",
    decision="d1",
)


def test_rows_fit_every_server():
    rows = list(fitting(Conversations(Random(1), rate=10.0).rows(2000)))
    assert 1800 < len(rows) <= 2000
    assert max(row.output_tokens for row in rows) == LONGEST_OUTPUT
    assert max(row.input_tokens for row in rows) < 8000


def test_rows_too_long_are_left_out_and_the_others_are_as_they_were():
    short, long = TraceRow(0.0, 10, 20), TraceRow(1.0, 7000, 1000)
    assert list(fitting([short, long])) == [short]


def told(*samples: Sample) -> Watcher:
    watcher, progress = Watcher(), Progress()
    for sample in samples:
        progress.sent += 1
        progress.ok += sample.ok
        progress.rejected += sample.rejected
        progress.failed += sample.failed
        progress.last, progress.elapsed_s = sample, 61.0
        watcher.saw(progress)
    return watcher


def test_a_line_says_how_it_goes():
    watcher = told(OK, OK, replace(OK, served_by="us-east/a/b", ttft_s=0.4, decision="d2"))
    watcher.state.takeovers = {"region": 3}
    assert watcher.line() == (
        "01:01  sent 3  ok 3  in flight 0  rejected 0  failed 0  cut 0 | now eu-west 2, us-east 1"
        " | TTFT p50 200 ms, p99 396 ms | takeovers region 3 | trace d2"
    )
    assert "now nobody serves | takeovers" in watcher.line()  # what was told is not told again


def test_a_stream_that_was_broken_off_is_told_from_a_request_that_failed():
    broken = replace(OK, error="stream_error stream_broken", done=False)
    refused = replace(OK, error="503 no_endpoints", status=503)
    watcher = told(OK, broken, refused, replace(OK, error="connect", status=0), replace(broken, stream=False))
    state = watcher.state
    assert (state.sent, state.ok, state.rejected, state.failed, state.cut, state.in_flight) == (5, 1, 1, 2, 1, 0)
    assert "(503 no_endpoints 1, connect 1, stream_error stream_broken 2)" in watcher.line()


def test_takeovers_are_added_up_over_tiers_and_their_restarts():
    watcher = Watcher()
    watcher.counted("a", Counter(region=3))
    watcher.counted("b", Counter(region=1, instance=2))
    watcher.counted("a", Counter(region=5))
    watcher.counted("b", Counter())  # started anew
    watcher.counted("b", Counter(region=4))
    assert watcher.state.takeovers == {"region": 10, "instance": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A simulated server, fast."""
    command = [sys.executable, "-m", "services.engine_sim", "--port", "0", "--speed", "20", "--model", MODEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield str(json.loads(process.stdout.readline())["url"])
        process.terminate()


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.demo.traffic", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_sends_so_many_and_ends(url, tmp_path):
    file = tmp_path / "traffic.json"
    with start("--target", url, "--requests", "40", "--rate", "80", "--every", "0.2", "--state", str(file)) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    state = json.loads(file.read_text())
    assert (state["sent"], state["ok"]) == (40, 40)
    assert "  sent 40  ok 40  in flight 0  " in out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["traffic.json"]


def test_it_ends_in_good_order_when_told(url):
    with start("--target", url, "--every", "0.2") as process:
        assert process.stdout
        process.stdout.readline()
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert time.monotonic() - began < 5.0


def test_a_target_that_is_not_there_is_named():
    with start("--target", "http://127.0.0.1:1", "--wait", "0.3") as process:
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, f"traffic: http://127.0.0.1:1 does not serve {MODEL} within 0.3 s\n")
