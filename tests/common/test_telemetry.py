from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from random import Random

import pytest
from msgspec.structs import asdict
from prometheus_client import generate_latest

from common import telemetry as telemetry_module
from common.policy.stages import Hop
from common.records import Ending, RequestRecord
from common.telemetry import LOG_FLUSH_S, LOG_PENDING, MODEL_LABELS, AccessLog, Telemetry, access_line
from common.types import Pick, Shed, Slo
from tests.common.build import BEGAN, TRACE, attempt, record, stage
from tests.common.explain.build import AT, pool
from tests.common.policy.build import ask, balancer_of, region


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


def test_what_choosing_took_is_told_by_the_stage_it_began_with() -> None:
    t = telemetry()
    for seconds in (0.0001, 0.0002):
        t.chose(("eu",), seconds)
    t.chose((), 0.004)
    seen = series(t)
    assert seen["headwater_decision_seconds_count", "region"] == 2
    assert seen["headwater_decision_seconds_sum", "region"] == pytest.approx(0.0003)
    assert seen["headwater_decision_seconds_count", "global"] == 1


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
    assert counts["headwater_time_to_first_token_seconds_sum", "chat", "m"] == pytest.approx(0.5)
    assert counts["headwater_time_per_output_token_seconds_sum", "chat", "m"] == pytest.approx(1.5 / 30)
    assert counts["headwater_request_duration_seconds_sum", "chat", "m"] == pytest.approx(2.0)


def test_an_answer_in_one_piece_has_a_duration_only() -> None:
    t = telemetry()
    serve(t, stream=False)
    assert {key[0] for key in series(t) if "seconds" in key[0]} == {
        f"{name}_{part}"
        for name in ("headwater_request_duration_seconds", "gen_ai_server_request_duration_seconds")
        for part in ("count", "sum")
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
    assert ("headwater_time_per_output_token_seconds_count", "chat", "m") not in series(t)


def test_attempts_are_counted_and_those_after_the_first_by_what_came_before() -> None:
    t = telemetry()
    serve(
        t,
        attempts=[
            attempt(("eu", "c1", "i0"), error="connect_failed"),
            attempt(("eu", "c1", "i1"), status=503),
            attempt(("eu",), peer="eu-1"),
        ],
    )
    found = series(t)
    assert found["headwater_attempts_total", "instance", "connect_failed"] == 1
    assert found["headwater_attempts_total", "instance", ""] == 1
    assert found["headwater_attempts_total", "peer", ""] == 1
    assert found["headwater_retries_total", "connect_failed"] == 1
    assert found["headwater_retries_total", "status_503"] == 1


# -- decisions -------------------------------------------------------------------------------------------------------


def counted(t: Telemetry, name: str) -> dict[tuple[str, ...], float]:
    return {key[1:]: value for key, value in series(t).items() if key[0] == name}


def test_decisions_are_noted_and_counted_when_they_are_made() -> None:
    """By reason: there was no other, the session was there, it cost least; and takeovers as soon as they happen."""
    t, rng = telemetry(), Random(1)
    cluster, alone = pool("a", "b"), balancer_of(region("c1"), parent=("eu",))
    balancers = {b.parent: b for b in (cluster, alone)}
    r, request = record(), ask()
    for request in (ask(), ask(warm=("eu", "c1", "b"), warm_tokens=390)):
        hops = []
        for balancer, takeover in ((alone, False), (cluster, True)):
            pick = balancer.pick(request, AT, rng)
            assert isinstance(pick, Pick)
            hops.append(Hop(balancer.parent, pick, takeover))
        t.decided(r, request, hops, balancers, rng)
        r.attempts.append(attempt(("eu", "c1", "b")))
    assert [(s.path, s.attempt, s.takeover, s.pool_size) for s in r.stages] == [
        (("eu",), 0, False, 1),
        (("eu", "c1"), 0, True, 2),
        (("eu",), 1, False, 1),
        (("eu", "c1"), 1, True, 2),
    ]
    assert len({s.span_id for s in r.stages}) == 4
    assert r.request is request
    assert counted(t, "headwater_decisions_total") == {
        ("region", "predicted_completion", "only_candidate"): 2,
        ("instance", "predicted_completion", "lowest_cost"): 1,
        ("instance", "predicted_completion", "session"): 1,
    }
    assert counted(t, "headwater_takeovers_total") == {("instance",): 2}


def test_what_nobody_could_take_is_counted_by_its_reason() -> None:
    t, r = telemetry(), record()
    t.shed(r, ask(), Shed("saturated", 1.0))
    assert r.shed == Shed("saturated", 1.0)
    assert counted(t, "headwater_sheds_total") == {("saturated",): 1}


def test_predictions_are_held_against_what_came_of_them_stage_by_stage() -> None:
    t = telemetry()
    first = stage(("eu",), "c1", {"c1": 1.0}, predicted_ttft_s=0.49, predicted_total_s=0.995)
    other = stage(("eu", "c1"), "i1", {"i1": 1.0}, predicted_ttft_s=None, predicted_total_s=None)
    failed = stage(("eu",), "c0", {"c0": 1.0}, predicted_ttft_s=9.0, predicted_total_s=9.0)
    failed.attempt, first.attempt, other.attempt = 0, 1, 1
    serve(
        t,
        stages=[failed, first, other],
        attempts=[attempt(("eu",), error="connect_failed"), attempt(("eu",))],
        predicted_output_tokens=62.0,
    )
    assert counted(t, "headwater_prediction_ratio_count") == {
        ("region", "ttft"): 1,
        ("region", "total"): 1,
        ("request", "output_tokens"): 1,
    }
    assert counted(t, "headwater_prediction_ratio_sum") == {
        ("region", "ttft"): pytest.approx(1.0),
        ("region", "total"): pytest.approx(2.0),
        ("request", "output_tokens"): pytest.approx(0.5),
    }


@pytest.mark.parametrize(
    ("warm", "result"), [((), "new"), (("eu", "c1", "i1"), "returned"), (("eu", "c1", "i2"), "moved")]
)
def test_sessions_are_counted_by_where_they_went(warm: tuple[str, ...], result: str) -> None:
    t = telemetry()
    serve(t, request=ask(session="s", warm=warm))
    serve(t, request=ask(session="s", warm=warm), from_peer=True)  # told by the tier above, which has counted it
    serve(t, request=ask())
    assert counted(t, "headwater_affinity_total") == {(result,): 1}


def test_waits_are_observed_of_those_that_waited() -> None:
    t = telemetry()
    serve(t)
    serve(t, queued_at=BEGAN, queued_s=0.25)
    assert counted(t, "headwater_queue_wait_seconds_count") == {(): 1}
    assert counted(t, "headwater_queue_wait_seconds_sum") == {(): 0.25}


def test_the_names_of_the_convention_have_the_same_figures() -> None:
    t = telemetry()
    serve(t)
    serve(t, output_tokens=None)
    for ours, theirs in (
        ("headwater_time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds"),
        ("headwater_time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds"),
        ("headwater_request_duration_seconds", "gen_ai_server_request_duration_seconds"),
    ):
        for part in ("_count", "_sum"):
            assert counted(t, ours + part) == counted(t, theirs + part) != {}
    assert counted(t, "gen_ai_client_token_usage_sum") == {("chat", "m", "input"): 200, ("chat", "m", "output"): 31}
    (family,) = [f for f in t.registry.collect() if f.name == "gen_ai_client_token_usage"]
    assert set(family.samples[0].labels) - {"le"} == {
        "gen_ai_operation_name",
        "gen_ai_request_model",
        "gen_ai_token_type",
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


# -- what is exported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "slow"),
    [
        ({"first_byte_at": BEGAN + 1.9, "ended_at": BEGAN + 3.0}, False),
        ({"first_byte_at": BEGAN + 2.1, "ended_at": BEGAN + 3.0}, True),
        ({"first_byte_at": BEGAN + 0.1, "ended_at": BEGAN + 3.3}, True),  # a tenth of a second a token
        ({"first_byte_at": BEGAN + 2.1, "ended_at": BEGAN + 3.0, "stream": False}, False),  # in one piece, and long
        ({"first_byte_at": BEGAN + 0.3, "request": ask(slo=Slo(ttft_s=0.2))}, True),
        ({"first_byte_at": BEGAN + 2.9, "ended_at": BEGAN + 3.0, "request": ask(slo=Slo(ttft_s=5.0))}, False),
    ],
)
def test_what_is_slow_is_exported_although_it_was_not_sampled(fields: dict[str, object], slow: bool) -> None:
    exported: list[RequestRecord] = []
    t = telemetry(export=exported.append)
    r = serve(t, sampled=False, **fields)
    assert t.slow(r) is slow
    assert exported == ([r] if slow else [])


def test_an_error_of_the_server_is_exported_although_it_was_not_sampled() -> None:
    exported: list[RequestRecord] = []
    serve(telemetry(export=exported.append), sampled=False, status=502)
    assert len(exported) == 1


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
    assert asdict(access_line(r)) == {
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
        "shadow_of": None,
        "tenant": None,
        "attempts": 2,
        "queued_s": 0.0,
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
    line = asdict(access_line(r))
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
