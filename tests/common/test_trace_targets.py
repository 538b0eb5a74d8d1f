"""What docs/observing.md says of Jaeger, Tempo, Datadog, Elastic APM: a receiver with these settings gets the spans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from common.config import Tracing
from common.spans import OtlpExport
from tests.common.build import TRACE, record

ROWS = re.findall(
    r"^\| (Jaeger|Grafana Tempo|Datadog|Elastic APM)[^|]*\| `(\{otlp_endpoint: [^`]+\})`(.*)\|$",
    (Path(__file__).parents[2] / "docs" / "observing.md").read_text(),
    re.MULTILINE,
)
Got = list[tuple[str, str | None, bytes]]
"""(path or method, Authorization, trace id) of each batch."""


def first_trace(request: otlp.ExportTraceServiceRequest) -> bytes:
    return bytes(request.resource_spans[0].scope_spans[0].spans[0].trace_id)


@contextmanager
def http(got: Got) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = otlp.ExportTraceServiceRequest.FromString(body)
            got.append((self.path, self.headers["authorization"], first_trace(request)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_(got: Got) -> Iterator[int]:
    from concurrent.futures import ThreadPoolExecutor

    class Service(otlp_grpc.TraceServiceServicer):
        def Export(self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext):  # noqa: N802 - of the generated code
            headers = {key: str(value) for key, value in context.invocation_metadata()}
            got.append(("Export", headers.get("authorization"), first_trace(request)))
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0.5).wait()


def test_the_document_has_all_four() -> None:
    assert [name for name, _, _ in ROWS] == ["Jaeger", "Grafana Tempo", "Datadog", "Elastic APM"]


@pytest.mark.parametrize(("name", "snippet", "more"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_receiver_with_its_settings_gets_the_spans(
    name: str, snippet: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Tracing.model_validate(yaml.safe_load(snippet))
    scheme = urlsplit(settings.otlp_endpoint).scheme
    header = re.search(r'OTEL_EXPORTER_OTLP_HEADERS="Authorization=Bearer …"', more)
    if header is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer secret-token")
    got: Got = []
    with (grpc_ if scheme == "grpc" else http)(got) as port:
        export = OtlpExport(f"{scheme}://127.0.0.1:{port}", "eu-1", "region")
        export(record())
        export.close(10.0)
    assert {(path, authorization) for path, authorization, _ in got} == {
        ("Export" if scheme == "grpc" else "/v1/traces", "Bearer secret-token" if header else None)
    }
    assert {trace.hex() for _, _, trace in got} == {TRACE}
    assert (header is not None) == (name == "Elastic APM")
