"""The real Azure conversation trace through three tiers: nothing fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from common.sim.workload import read_trace, window
from services.bench import report
from services.bench.prompts import Template
from services.bench.replay import Replay
from tests.integration.clients import metrics, total
from tests.integration.system import GLOBALS, MODEL, REPOSITORY, System
from tests.servers import eventually

TRACE = REPOSITORY.parent / "shared" / "traces" / "azure2023_conv.csv.gz"
REQUESTS = 1000
DURATION_S = 30.0  # in which they are sent: seven times as fast as they came
LONGEST_OUTPUT = 400  # tokens; the few longer answers would double the time that the test takes


@pytest.mark.traces
@pytest.mark.skipif(not TRACE.exists(), reason="the public traces are not here")
async def test_the_real_trace_goes_through_all_three_tiers(system: System) -> None:
    rows = window(read_trace(TRACE), 0.0, REQUESTS)
    rows = [replace(row, output_tokens=min(row.output_tokens, LONGEST_OUTPUT)) for row in rows]
    assert len(rows) == REQUESTS
    before = await system.received()
    takeovers = sum((await system.takeovers()).values())
    replay = Replay(Template(model=MODEL, sim=True), stream_share=0.8)
    urls = [system.tiers[name].url for name in GLOBALS]
    samples = await replay.run(rows, urls, speedup=rows[-1].arrival_s / DURATION_S, timeout_s=60.0)
    for name, summary in sorted(report.grouped(samples, "instance").items()):
        ttft = summary.ttft_s
        print(f"{name}: {summary.requests} requests, TTFT p50 {ttft.p50 or 0:.3f} s, p99 {ttft.p99 or 0:.3f} s")
    print(f"sent late by up to {max(s.late_s for s in samples):.2f} s")
    assert not Counter(s.error for s in samples if not s.ok)
    assert len(samples) == REQUESTS
    assert [s.output_tokens for s in sorted(samples, key=lambda s: s.index)] == [max(r.output_tokens, 1) for r in rows]
    assert await system.received() - before == REQUESTS  # each executed once
    shares = Counter(s.served_by for s in samples)
    assert len(shares) >= len(system.servers) / 2  # like machines; one that has just restarted may be thought slow
    assert sum((await system.takeovers()).values()) == takeovers
    await eventually(system.idle, 10.0)
    for name in GLOBALS:
        samples_of = await metrics(system.tiers[name].admin_url)
        assert total(samples_of, "headwater_requests_total", ending="complete", status="200") >= REQUESTS / 2
