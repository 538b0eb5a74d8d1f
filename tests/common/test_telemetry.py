from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from common import telemetry as telemetry_module
from common.records import Ending, RequestRecord
from common.telemetry import LOG_FLUSH_S, LOG_PENDING, MODEL_LABELS, AccessLog, Telemetry, access_line
from tests.common.build import BEGAN, TRACE, attempt, record, stage


def telemetry(recent: int = 100, known: str = "mno", **options: object) -> Telemetry:
    return Telemetry(recent=recent, known_model=lambda m: m in set(known), access_log=False, **options)  # type: ignore[arg-type]


def series(t: Telemetry) -> dict[tuple[str, ...], float]:
    """(name, label values …) -> value of all series with a value that matters."""
    found = {}
    for family in t.registry.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_created", "_bucket")):
                found[sample.name, *sample.labels.values()] = sample.value
    return found


def requests_of(t: Telemetry) -> dict[tuple[str, ...], float]:
    return {key[1:]: value for key, value in series(t).items() if key[0] == "headwater_requests_total"}


def serve(t: Telemetry, **fields: object) -> RequestRecord:
    r = record(**fields)
    t.began(r)
    t.ended(r)
    return r


# -- counting --------------------------------------------------------------------------------------------------------


def test_the_gauge_of_requests_under_way_goes_up_and_returns_to_zero() -> None:
    t = telemetry()
    running = [record(span_id=f"{n:016x}", ending=ending) for n, ending in enumerate([*Ending] * 20)]
    for n, r in enumerate(running, 1):
        t.began(r)
        assert series(t)["headwater_in_flight_requests",] == n
    Random(1).shuffle(running)
    for r in running:
        t.ended(r)
    assert series(t)["headwater_in_flight_requests",] == 0


def test_a_request_that_was_refused_before_it_began_does_not_lower_the_gauge() -> None:
    t = telemetry()
    t.ended(record(ending=Ending.REFUSED, status=400, error="invalid_request"))
    assert series(t)["headwater_in_flight_requests",] == 0
    assert sum(requests_of(t).values()) == 1


def test_requests_are_counted_by_what_they_asked_and_how_they_ended() -> None:
    t = telemetry()
    for _ in range(3):
        serve(t)
    serve(t, status=500)
    serve(t, operation="embeddings", model="n")
    serve(t, status=0, ending=Ending.CLIENT_LEFT)
    assert requests_of(t) == {
        ("chat", "m", "200", "complete"): 3,
        ("chat", "m", "500", "complete"): 1,
        ("embeddings", "n", "200", "complete"): 1,
        ("chat", "m", "499", "client_left"): 1,
    }


def test_times_are_observed_of_what_went_well() -> None:
    t = telemetry()
    serve(t)
    counts = series(t)
    assert counts["headwater_time_to_first_token_seconds_sum", "m"] == pytest.approx(0.5)
    assert counts["headwater_time_per_output_token_seconds_sum", "m"] == pytest.approx(1.5 / 30)
    assert counts["headwater_request_duration_seconds_sum", "m"] == pytest.approx(2.0)


def test_an_answer_in_one_piece_has_a_duration_only() -> None:
    t = telemetry()
    serve(t, stream=False)
    assert {key[0] for key in series(t) if "seconds" in key[0]} == {
        "headwater_request_duration_seconds_count",
        "headwater_request_duration_seconds_sum",
    }


@pytest.mark.parametrize(
    "bad", [{"status": 429}, {"status": 500}, {"ending": Ending.BROKE_AFTER}, {"ending": Ending.CLIENT_LEFT}]
)
def test_times_of_what_went_wrong_are_not_mixed_in(bad: dict[str, object]) -> None:
    t = telemetry()
    serve(t, **bad)
    assert not [key for key in series(t) if "seconds" in key[0]]


@pytest.mark.parametrize("tokens", [None, 0.0, 1.0])
def test_one_token_says_nothing_of_the_time_per_token(tokens: float | None) -> None:
    t = telemetry()
    serve(t, output_tokens=tokens)
    assert ("headwater_time_per_output_token_seconds_count", "m") not in series(t)


def test_attempts_and_takeovers_are_counted() -> None:
    t = telemetry()
    serve(
        t,
        stages=[stage(("eu",), "c1", {"c1": 1.0}), stage(("eu", "c1"), "i1", {"i1": 1.0}, takeover=True)],
        attempts=[
            attempt(("eu", "c1", "i0"), error="connect_failed"),
            attempt(("eu", "c1", "i1")),
            attempt(("eu",), peer="eu-1"),
        ],
    )
    found = series(t)
    assert found["headwater_attempts_total", "instance", "connect_failed"] == 1
    assert found["headwater_attempts_total", "instance", ""] == 1
    assert found["headwater_attempts_total", "peer", ""] == 1
    assert {key: value for key, value in found.items() if key[0] == "headwater_takeovers_total"} == {
        ("headwater_takeovers_total", "instance"): 1
    }


# -- labels (C08) ----------------------------------------------------------------------------------------------------


def test_names_that_nobody_serves_share_one_label() -> None:
    t, rng = telemetry(recent=10), Random(1)
    serve(t)
    before = len(series(t))
    for _ in range(5_000):
        serve(t, model=f"model-{rng.getrandbits(64):x}" * rng.randrange(1, 20), status=404, ending=Ending.REFUSED)
    assert requests_of(t)["chat", "other", "404", "refused_here"] == 5_000
    assert len(series(t)) == before + 1
    assert requests_of(t)["chat", "m", "200", "complete"] == 1  # a real name keeps its label
    assert len(t._requests.values) < 10
    began = time.perf_counter()
    text = generate_latest(t.registry)
    assert time.perf_counter() - began < 1.0
    assert len(text) < 20_000


@pytest.mark.parametrize("model", ["", "x" * 10_000, '\x00\n"}'])
def test_a_name_of_any_kind_is_other_unless_it_is_known(model: str) -> None:
    t = telemetry()
    serve(t, model=model)
    assert [key[1] for key in requests_of(t)] == ["other"]


def test_even_of_names_that_are_served_only_so_many_get_a_label() -> None:
    t = Telemetry(recent=0, known_model=lambda m: True, access_log=False)
    for n in range(MODEL_LABELS + 500):
        serve(t, model=f"m{n}")
    serve(t, model="m0")
    counted = requests_of(t)
    assert len(counted) == MODEL_LABELS + 1
    assert counted["chat", "other", "200", "complete"] == 500
    assert counted["chat", "m0", "200", "complete"] == 2


def test_a_name_gets_its_label_once_it_is_served_and_keeps_it() -> None:
    served: set[str] = set()
    t = Telemetry(recent=0, known_model=served.__contains__, access_log=False)
    serve(t, model="new")
    served.add("new")
    serve(t, model="new")
    served.clear()
    serve(t, model="new")
    assert {key[1]: n for key, n in requests_of(t).items()} == {"other": 1, "new": 2}


# -- what is remembered ----------------------------------------------------------------------------------------------


def spans_kept(t: Telemetry, limit: int = 10**6) -> list[int]:
    return [int(r.span_id, 16) for r in t.recent(limit)]


def test_recent_requests_are_the_latest_the_newest_first() -> None:
    t = telemetry(recent=3)
    for n in range(1, 6):
        serve(t, id=f"{n:032x}", span_id=f"{n:016x}")
    assert spans_kept(t) == [5, 4, 3]
    assert spans_kept(t, 2) == [5, 4]
    assert spans_kept(t, 0) == []
    assert t.find(f"{1:032x}") == t.find("nonsense") == []
    assert [r.span_id for r in t.find(f"{4:032x}")] == [f"{4:016x}"]


def test_requests_of_one_trace_are_found_together_the_oldest_first() -> None:
    t = telemetry()
    for n, trace in enumerate("abab"):
        serve(t, id=trace * 32, span_id=f"{n:016x}")
    assert [int(r.span_id, 16) for r in t.find("a" * 32)] == [0, 2]
    assert spans_kept(t) == [3, 2, 1, 0]


def test_one_client_that_sends_everything_in_one_trace_fills_no_memory() -> None:
    t = telemetry(recent=100)
    for n in range(5_000):
        serve(t, span_id=f"{n:016x}")
    assert [int(r.span_id, 16) for r in t.find(TRACE)] == list(range(4_900, 5_000))
    assert spans_kept(t) == list(range(4_999, 4_899, -1))


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(0, 10))
def test_what_is_remembered_is_bounded_and_found_by_its_trace(traces: list[int], bound: int) -> None:
    t = telemetry(recent=bound)
    for n, trace in enumerate(traces):
        t.ended(record(id=f"{trace:032x}", span_id=f"{n:016x}"))
    kept = list(range(len(traces)))[max(0, len(traces) - bound) :] if bound else []
    assert spans_kept(t) == kept[::-1]
    for trace in range(6):
        assert [int(r.span_id, 16) for r in t.find(f"{trace:032x}")] == [n for n in kept if traces[n] == trace]
    assert len(t._by_trace) <= bound


def test_a_bound_of_zero_remembers_nothing() -> None:
    t = telemetry(recent=0)
    serve(t)
    assert t.recent(10) == t.find(TRACE) == []


def test_what_is_found_does_not_change_afterwards() -> None:
    t = telemetry(recent=1)
    serve(t)
    found = t.find(TRACE)
    serve(t, id="f" * 32)
    assert len(found) == 1


# -- what is exported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "ending", "sent"),
    [
        (True, Ending.COMPLETE, True),
        (False, Ending.COMPLETE, False),
        *((False, ending, True) for ending in Ending if ending is not Ending.COMPLETE),
    ],
)
def test_what_is_sampled_is_exported_and_what_went_wrong_always(sampled: bool, ending: Ending, sent: bool) -> None:
    exported: list[RequestRecord] = []
    t = telemetry(export=exported.append)
    r = serve(t, sampled=sampled, ending=ending)
    assert exported == ([r] if sent else [])


# -- the access log --------------------------------------------------------------------------------------------------


def test_the_access_line_of_a_request() -> None:
    r = record(
        attempts=[attempt(("eu", "c1", "i1")), attempt(("eu", "c1", "i1"))],
        from_peer=True,
        ended_at=BEGAN + 1 / 3,
        first_byte_at=BEGAN + 1 / 7,
    )
    assert access_line(r) == {
        "event": "request",
        "time": 1_700_000_000.123456,
        "trace_id": TRACE,
        "process": "eu-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "m",
        "stream": True,
        "status": 200,
        "ending": "complete",
        "error": None,
        "served_by": "eu/c1/i1",
        "from_peer": True,
        "attempts": 2,
        "input_tokens": 100,
        "output_tokens": 31.0,
        "ttft_s": 0.142857,
        "total_s": 0.333333,
    }


def test_the_access_line_of_a_request_that_came_to_nothing() -> None:
    r = record(
        model="x" * 10_000,
        output_tokens=None,
        served_by="",
        first_byte_at=None,
        status=503,
        ending=Ending.REFUSED,
        error="no_endpoints",
    )
    line = access_line(r)
    assert {k: line[k] for k in ("status", "ending", "error", "served_by", "output_tokens", "ttft_s", "attempts")} == {
        "status": 503,
        "ending": "refused_here",
        "error": "no_endpoints",
        "served_by": None,
        "output_tokens": None,
        "ttft_s": None,
        "attempts": 0,
    }
    assert len(line["model"]) == 200


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end); reading never blocks."""
    ends = os.pipe()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)


def written(end: int) -> list[dict[str, object]]:
    try:
        return [json.loads(line) for line in os.read(end, 10**6).splitlines()]
    except BlockingIOError:
        return []


async def test_lines_are_written_together_a_moment_later(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_module, "LOG_FLUSH_S", 0.02)
    log = AccessLog(pipe[1])
    for n in range(3):
        log.write(record(status=200 + n))
    assert written(pipe[0]) == []
    await asyncio.sleep(0.1)
    assert [line["status"] for line in written(pipe[0])] == [200, 201, 202]
    log.write(record(status=299))  # and again
    await asyncio.sleep(0.1)
    assert [line["status"] for line in written(pipe[0])] == [299]
    assert log.dropped == 0


async def test_a_clients_text_stays_within_its_line(pipe: tuple[int, int]) -> None:
    log = AccessLog(pipe[1])
    log.write(record(model='a\n{"event":"forged"}\r\n\x1b[2J'))
    log.flush()
    (line,) = written(pipe[0])
    assert line["event"] == "request"


async def test_what_is_queued_is_written_at_the_end(pipe: tuple[int, int]) -> None:
    log = AccessLog(pipe[1])
    log.write(record())
    log.flush()
    assert len(written(pipe[0])) == 1
    log.flush()
    await asyncio.sleep(LOG_FLUSH_S * 1.5)
    assert written(pipe[0]) == []  # once


async def test_a_log_that_cannot_be_written_loses_lines_and_no_requests() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # whoever collected the log is gone
    log = AccessLog(write_end)
    log.write(record())
    log.write(record())
    log.flush()
    os.close(write_end)
    assert log.dropped == 2


async def test_lines_that_wait_are_bounded(pipe: tuple[int, int]) -> None:
    log, r = AccessLog(pipe[1]), record()
    for _ in range(LOG_PENDING + 7):
        log.write(r)
    assert len(log._lines) == LOG_PENDING
    assert log.dropped == 7
    log._lines.clear()  # more than the pipe holds
    log.flush()


async def test_the_log_goes_to_standard_output_unless_it_is_switched_off(capfd: pytest.CaptureFixture[str]) -> None:
    t = Telemetry(recent=0, known_model=lambda m: True)
    serve(t, status=418)
    t.close()
    assert json.loads(capfd.readouterr().out)["status"] == 418
    silent = Telemetry(recent=0, known_model=lambda m: True, access_log=False)
    serve(silent)
    silent.close()
    assert capfd.readouterr().out == ""
