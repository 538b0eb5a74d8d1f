from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from common.records import Ending, RequestRecord
from common.spans import OtlpExport, Span, render, spans_of, tree
from tests.common.build import BEGAN, TRACE, WALL_NS, attempt, record, stage


def after(seconds: float) -> int:
    """Wall clock so long after the request began."""
    return WALL_NS + round(seconds * 1e9)


def full() -> RequestRecord:
    """A request that a region sent to an instance on its second try, having run the cluster's stage itself."""
    return record(
        parent_id="d" * 16,
        stages=[
            stage(("eu", "c1")[:1], "c1", {"c1": 0.5, "c2": 0.75}, "1" * 16),
            stage(("eu", "c1"), "i1", {"i0": 0.9, "i1": 0.4, "i2": 0.6}, "2" * 16, takeover=True),
        ],
        attempts=[
            attempt(("eu", "c1", "i0"), span_id="3" * 16, first_byte_at=None, status=0, error="connect_failed"),
            attempt(("eu", "c1", "i1"), span_id="4" * 16, at=BEGAN + 0.05),
        ],
    )


# -- what a record says ----------------------------------------------------------------------------------------------


def test_the_server_span_comes_first_and_has_the_callers_span_for_parent() -> None:
    server, *others = spans_of(full())
    assert (server.trace_id, server.span_id, server.parent_id, server.kind) == (TRACE, "a" * 16, "d" * 16, "server")
    assert (server.name, server.process) == ("chat m", "eu-1")
    assert (server.start_ns, server.end_ns) == (WALL_NS, after(2.0))
    assert server.events == [("takeover", after(0.01)), ("retry", after(0.05)), ("first byte", after(0.5))]
    assert {s.parent_id for s in others} == {"a" * 16}
    assert {s.trace_id for s in others} == {TRACE}
    assert [s.span_id[0] for s in others] == ["1", "2", "3", "4"]


def test_the_server_span_says_what_the_conventions_ask_for() -> None:
    attributes = spans_of(full())[0].attributes
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 31,
        "headwater.tier": "region",
        "headwater.node": "eu",
        "headwater.ending": "complete",
        "headwater.stream": True,
        "headwater.served_by": "eu/c1/i1",
    }


def test_what_befell_it_is_told_in_the_order_of_time() -> None:
    r = record(
        attempts=[attempt(("eu", "c1", "i1")), attempt(("eu", "c1", "i2"), at=BEGAN + 0.3)],
        stages=[stage(("eu",), "c1", {"c1": 1.0}, takeover=True)],
        ending=Ending.BROKE_AFTER,
        queued_at=BEGAN + 0.1,
        queued_s=0.2,
    )
    server, wait, *_ = spans_of(r)
    assert [name for name, _ in server.events] == ["takeover", "retry", "first byte", "broken off"]
    assert (wait.name, wait.parent_id, wait.end_ns - wait.start_ns) == ("wait for room", server.span_id, 200_000_000)
    assert wait.span_id not in ("0" * 16, server.span_id)


def test_what_is_not_known_is_left_out() -> None:
    server = spans_of(record(output_tokens=None, served_by="", first_byte_at=None))[0]
    assert not {"gen_ai.usage.output_tokens", "headwater.served_by"} & server.attributes.keys()
    assert server.events == []


def test_a_clients_text_is_cut() -> None:
    server = spans_of(record(model="m" * 10_000))[0]
    assert len(server.name) < 220
    assert len(str(server.attributes["gen_ai.request.model"])) == 200


def test_a_stage_says_what_it_chose_for_which_cost_and_by_which_margin() -> None:
    _, first, second, *_ = spans_of(full())
    assert (first.name, first.kind, first.start_ns, first.end_ns) == (
        "choose cluster c1",
        "internal",
        *[after(0.01)] * 2,
    )
    assert first.attributes == {
        "headwater.stage": "region",
        "headwater.chosen": "c1",
        "headwater.policy": "predicted_completion",
        "headwater.takeover": False,
        "headwater.candidates": 2,
        "headwater.cost": 0.5,
        "headwater.cost.completion_s": 0.4,
        "headwater.cost.round_trip_s": 0.1,
        "headwater.runner_up": "c2",
        "headwater.margin": 0.25,
        "headwater.predicted_ttft_s": 0.25,
    }
    assert second.name == "choose instance i1"
    assert (second.attributes["headwater.runner_up"], second.attributes["headwater.margin"]) == ("i2", 0.2)
    assert second.attributes["headwater.takeover"] is True


def test_an_only_candidate_has_no_runner_up_and_what_costs_infinity_is_none() -> None:
    for costs in ({"c1": 0.5}, {"c1": 0.5, "c2": math.inf}):
        span = spans_of(record(stages=[stage(("eu",), "c1", costs, predicted_ttft_s=math.inf)]))[1]
        assert not {"headwater.runner_up", "headwater.margin", "headwater.predicted_ttft_s"} & span.attributes.keys()
        assert msgspec.json.decode(msgspec.json.encode(span), type=Span) == span


def test_an_attempt_says_where_it_went_and_how_it_ended() -> None:
    *_, failed, answered = spans_of(full())
    assert (failed.name, failed.kind, failed.error) == ("forward to eu/c1/i0", "client", "connect_failed")
    assert failed.events == []
    assert "http.response.status_code" not in failed.attributes
    assert (answered.start_ns, answered.end_ns) == (after(0.05), after(1.99))
    assert answered.events == [("first byte", after(0.49))]
    assert answered.attributes == {
        "url.full": "http://10.0.0.1:8000/v1/chat/completions",
        "headwater.target": "eu/c1/i1",
        "headwater.peer": "",
        "http.response.status_code": 200,
    }


def test_an_attempt_that_carries_a_stream_on_says_so() -> None:
    request = full()
    request.attempts[1].continues = True
    *_, broken, followed = spans_of(request)
    assert "headwater.continues" not in broken.attributes
    assert followed.attributes["headwater.continues"] is True


def test_an_attempt_at_a_peer_is_named_after_the_peer() -> None:
    span = spans_of(record(attempts=[attempt(("eu",), peer="eu-7")]))[1]
    assert (span.name, span.attributes["headwater.peer"]) == ("forward to eu-7", "eu-7")


def test_an_attempt_that_never_ended_ends_with_its_request() -> None:
    span = spans_of(record(attempts=[attempt(("eu", "c1", "i1"), ended_at=None)]))[1]
    assert span.end_ns == after(2.0)


def test_spans_survive_the_way_to_another_tier() -> None:
    spans = spans_of(full())
    assert msgspec.json.decode(msgspec.json.encode(spans), type=list[Span]) == spans


# -- the tree --------------------------------------------------------------------------------------------------------


def span(id_: str, parent: str = "", start: int = 0, end: int = 10, **fields: Any) -> Span:
    return Span(TRACE, id_, parent, id_, "internal", start, end, "p", **fields)


def shape(spans: list[Span]) -> str:
    return " ".join(f"{'.' * depth}{s.span_id}" for depth, s in tree(spans))


def test_children_follow_their_parent_in_the_order_of_time() -> None:
    spans = [span("d", "b", 7), span("b", "a", 9), span("r"), span("e", "b", 6), span("c", "r", 5), span("a", "r", 4)]
    assert shape(spans) == "r .a ..b ...e ...d .c"
    assert shape([span("x", "r", 5, 9), span("y", "r", 5, 7), span("r")]) == "r .y .x"


def test_a_span_whose_parent_is_elsewhere_is_a_root() -> None:
    assert shape([span("x", "missing", 5), span("y", "x"), span("r", "", 3)]) == "r x .y"


def test_the_tiers_of_one_request_make_one_tree() -> None:
    above = record(process="g-1", node=(), span_id="9" * 16, attempts=[attempt(("eu",), "eu-1", span_id="d" * 16)])
    spans = spans_of(full()) + spans_of(above)
    assert [depth for depth, _ in tree(spans)] == [0, 1, 2, 3, 3, 3, 3]
    assert [s.process for _, s in tree(spans)] == ["g-1"] * 2 + ["eu-1"] * 5


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 100)), max_size=30))
def test_every_span_of_a_forest_is_there_once_below_its_parent(links: list[tuple[int, int]]) -> None:
    spans = [span(f"s{i}", f"s{up}" if up < i else "", start) for i, (up, start) in enumerate(links)]
    ordered = tree(reversed(spans))
    assert sorted(s.span_id for _, s in ordered) == sorted(s.span_id for s in spans)
    depth = {s.span_id: d for d, s in ordered}
    place = {s.span_id: n for n, (_, s) in enumerate(ordered)}
    for s in spans:
        if s.parent_id:
            assert depth[s.span_id] == depth[s.parent_id] + 1
            assert place[s.span_id] > place[s.parent_id]
        else:
            assert depth[s.span_id] == 0


def test_rendered_it_says_when_how_long_and_why() -> None:
    lines = """
chat m  [eu-1]  +0.0 ms, 2000.0 ms  200 complete
  choose cluster c1  [eu-1]  +10.0 ms, 0.0 ms  cost 0.5 (completion_s 0.4, round_trip_s 0.1); next best c2 by 0.25
  choose instance i1  [eu-1]  +10.0 ms, 0.0 ms  cost 0.4 (completion_s 0.3, round_trip_s 0.1); next best i2 by 0.2; WHY
  forward to eu/c1/i0  [eu-1]  +20.0 ms, 1970.0 ms  error: connect_failed
  forward to eu/c1/i1  [eu-1]  +50.0 ms, 1940.0 ms  first byte after 440.0 ms
"""
    assert render(spans_of(full())) == lines.replace("WHY", "run here: its own balancers are gone").strip().split("\n")
    assert render([]) == []


# -- to a collector --------------------------------------------------------------------------------------------------


class Collector:
    """What a collector has received; answers at once."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.batches: list[otlp.ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[trace_pb2.Span]:
        return [s for b in self.batches for r in b.resource_spans for scope in r.scope_spans for s in scope.spans]

    @property
    def resource(self) -> dict[str, str]:
        (found,) = {
            tuple(sorted((a.key, a.value.string_value) for a in r.resource.attributes))
            for b in self.batches
            for r in b.resource_spans
        }
        return dict(found)


@pytest.fixture
def http() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.append(self.path)
            collector.batches.append(otlp.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield collector, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def check_received(collector: Collector) -> None:
    assert {k: v for k, v in collector.resource.items() if k.startswith("service.")} == {
        "service.name": "headwater-region",
        "service.instance.id": "eu-1",
        "service.namespace": "headwater",
    }
    received = {s.span_id.hex(): s for s in collector.spans}
    for sent in spans_of(full()):
        got = received.pop(sent.span_id)
        assert (got.trace_id.hex(), got.parent_span_id.hex(), got.name) == (TRACE, sent.parent_id, sent.name)
        assert (got.start_time_unix_nano, got.end_time_unix_nano) == (sent.start_ns, sent.end_ns)
        assert [(e.name, e.time_unix_nano) for e in got.events] == sent.events
        kinds = {"server": trace_pb2.Span.SPAN_KIND_SERVER, "client": trace_pb2.Span.SPAN_KIND_CLIENT}
        assert got.kind == kinds.get(sent.kind, trace_pb2.Span.SPAN_KIND_INTERNAL)
        attributes = {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in got.attributes}
        assert attributes.pop("error.type", "") == sent.error
        assert attributes == sent.attributes
        failed = got.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        assert (failed, got.status.message) == (bool(sent.error), sent.error)
    assert not received


def test_a_collector_receives_the_spans_as_they_are(http: tuple[Collector, str]) -> None:
    collector, url = http
    export = OtlpExport(url, "eu-1", "region")
    export(full())
    export.close(5.0)
    assert collector.paths == ["/v1/traces"]
    check_received(collector)


@pytest.mark.parametrize("path", ["/", "/v1/traces", "/v1/traces/"])
def test_the_path_of_the_collector_may_be_given_or_left_out(path: str, http: tuple[Collector, str]) -> None:
    collector, url = http
    export = OtlpExport(url + path, "eu-1", "region")
    export(record())
    export.close(5.0)
    assert collector.paths == ["/v1/traces"]


def test_a_trace_that_begins_here_has_a_root_without_parent(http: tuple[Collector, str]) -> None:
    collector, url = http
    export = OtlpExport(url, "eu-1", "region")
    export(record())
    export.close(5.0)
    assert [s.parent_span_id for s in collector.spans] == [b""]


def test_what_the_caller_did_not_sample_is_sent_when_it_is_handed_over(http: tuple[Collector, str]) -> None:
    """Whether to send is telemetry's to say: it hands over errors whatever was sampled."""
    collector, url = http
    export = OtlpExport(url, "eu-1", "region")
    export(record(sampled=False, ending=Ending.BROKE_AFTER, error="stream_broken"))
    export.close(5.0)
    assert [s.status.message for s in collector.spans] == ["stream_broken"]


def test_many_requests_all_arrive(http: tuple[Collector, str]) -> None:
    collector, url = http
    export = OtlpExport(url, "eu-1", "region")
    for n in range(300):
        export(record(span_id=f"{n + 1:016x}"))
    export.close(5.0)
    assert {int(s.span_id.hex(), 16) for s in collector.spans} == set(range(1, 301))


def test_grpc_does_as_well() -> None:
    collector = Collector()

    class Servicer(otlp_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
            collector.batches.append(request)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    otlp_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        export = OtlpExport(f"grpc://127.0.0.1:{port}", "eu-1", "region")
        export(full())
        export.close(5.0)
        check_received(collector)
    finally:
        server.stop(None)


@pytest.fixture
def refusing() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def hanging() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.mark.parametrize("collector", ["refusing", "hanging"])
def test_a_collector_that_is_dead_costs_no_time_no_memory_and_no_end(
    collector: str, request: pytest.FixtureRequest
) -> None:
    export = OtlpExport(request.getfixturevalue(collector), "eu-1", "region")
    slowest, given_ = 0.0, full()
    for _ in range(2_000):
        began = time.perf_counter()
        export(given_)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 4.0  # no connection, time-out or retry is waited for
    assert len(export._processor._batch_processor._queue) <= 2_048  # type: ignore[attr-defined]
    began = time.perf_counter()
    export.close(0.2)
    assert time.perf_counter() - began < 4.0  # its time-out is five seconds, and more than one batch is queued
    export._processor.span_exporter.shutdown()  # nothing goes on behind the tests that follow
