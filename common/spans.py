"""Records as spans: a tree for people, OpenTelemetry for collectors.

One server span a tier, below it one span a stage with its decision and one an attempt; the next tier's server span is
the child of the attempt that reached it. Spans are made when a request has ended, so a collector that is slow, dead or
absent never touches a request, and errors are kept whatever was sampled.
Source: OpenTelemetry semantic conventions 1.37 for HTTP and generative AI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from threading import Thread
from typing import TYPE_CHECKING, Any

import msgspec

from common.records import AttemptRecord, Ending, RequestRecord, StageRecord
from common.types import Tier

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


WAIT = 0x9E3779B97F4A7C15  # makes another span id out of the request's


class Span(msgspec.Struct, omit_defaults=True):
    """One span; times are nanoseconds since the epoch, ids are hex."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str  # server, client, internal
    start_ns: int
    end_ns: int
    process: str
    attributes: dict[str, str | int | float | bool] = {}
    events: list[tuple[str, int]] = []
    error: str = ""


def spans_of(record: RequestRecord) -> list[Span]:
    """The spans of one request in this process, the server span first."""

    def wall(at: float) -> int:
        return record.started_wall_ns + round((at - record.started_at) * 1e9)

    tier = Tier.of(record.node).value
    attributes: dict[str, str | int | float | bool] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": record.operation,
        "gen_ai.request.model": record.model[:200],
        "gen_ai.usage.input_tokens": record.input_tokens,
        "headwater.tier": tier,
        "headwater.node": "/".join(record.node),
        "headwater.ending": record.ending.value,
        "headwater.stream": record.stream,
    }
    if record.tenant:
        attributes["headwater.tenant"] = record.tenant
    if record.output_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = int(record.output_tokens)
    if record.served_by:
        attributes["headwater.served_by"] = record.served_by
    if record.shadow_of:
        attributes["headwater.shadow_of"] = record.shadow_of
    events = _events(record, wall)
    server = Span(
        record.id,
        record.span_id,
        record.parent_id,
        f"{record.operation} {record.model[:200]}".strip(),
        "server",
        record.started_wall_ns,
        wall(record.ended_at),
        record.process,
        attributes,
        events,
        record.error,
    )
    stages = [_stage(record, stage, wall(stage.at)) for stage in record.stages]
    attempts = [_attempt(record, attempt, wall) for attempt in record.attempts]
    return [server, *_wait(record, wall), *stages, *attempts]


def _events(record: RequestRecord, wall: Callable[[float], int]) -> list[tuple[str, int]]:
    """What befell a request, in the order of time."""
    found = [("retry", wall(attempt.at)) for attempt in record.attempts[1:]]
    found += [("takeover", wall(stage.at)) for stage in record.stages if stage.takeover]
    if record.first_byte_at is not None:
        found.append(("first byte", wall(record.first_byte_at)))
    if record.ending is Ending.BROKE_AFTER:
        found.append(("broken off", wall(record.ended_at)))
    elif record.ending is Ending.CLIENT_LEFT:
        found.append(("client left", wall(record.ended_at)))
    return sorted(found, key=lambda event: event[1])


def _wait(record: RequestRecord, wall: Callable[[float], int]) -> list[Span]:
    """The time in the waiting room, if it was there."""
    if record.queued_at is None:
        return []
    began, ended = wall(record.queued_at), wall(record.queued_at + record.queued_s)
    span_id = f"{(int(record.span_id, 16) ^ WAIT) or 1:016x}"
    return [Span(record.id, span_id, record.span_id, "wait for room", "internal", began, ended, record.process)]


def _stage(record: RequestRecord, stage: StageRecord, at_ns: int) -> Span:
    child, pick = Tier.of(stage.path).child, stage.pick
    chosen_id, scores = pick.endpoint.id, pick.scores
    attributes: dict[str, str | int | float | bool] = {
        "headwater.stage": Tier.of(stage.path).value,
        "headwater.chosen": chosen_id,
        "headwater.policy": pick.policy,
        "headwater.takeover": stage.takeover,
        "headwater.candidates": len(scores),
    }
    ranked = sorted(scores, key=lambda s: s.total)
    chosen = next((s for s in scores if s.endpoint == chosen_id), None)
    if chosen is not None:
        attributes["headwater.cost"] = round(chosen.total, 6)
        attributes |= {f"headwater.cost.{t}": round(v, 6) for t, v in zip(pick.terms, chosen.terms, strict=True)}
        # What could never hold the request is no alternative, and JSON has no infinity.
        second = next((s for s in ranked if s.endpoint != chosen_id and isfinite(s.total)), None)
        if second is not None:
            attributes["headwater.runner_up"] = second.endpoint
            attributes["headwater.margin"] = round(second.total - chosen.total, 6)
    if pick.predicted_ttft_s is not None and isfinite(pick.predicted_ttft_s):
        attributes["headwater.predicted_ttft_s"] = round(pick.predicted_ttft_s, 6)
    return Span(
        record.id,
        stage.span_id,
        record.span_id,
        f"choose {child} {chosen_id}",
        "internal",
        at_ns,
        at_ns,
        record.process,
        attributes,
    )


def _attempt(record: RequestRecord, attempt: AttemptRecord, wall: Any) -> Span:
    to = attempt.peer or "/".join(attempt.target)
    attributes: dict[str, str | int | float | bool] = {
        "url.full": attempt.url + record.path,
        "headwater.target": "/".join(attempt.target),
        "headwater.peer": attempt.peer,
    }
    if attempt.continues:
        attributes["headwater.continues"] = True
    if attempt.status:
        attributes["http.response.status_code"] = attempt.status
    events = [] if attempt.first_byte_at is None else [("first byte", wall(attempt.first_byte_at))]
    ended = attempt.ended_at if attempt.ended_at is not None else record.ended_at
    return Span(
        record.id,
        attempt.span_id,
        record.span_id,
        f"forward to {to}",
        "client",
        wall(attempt.at),
        wall(ended),
        record.process,
        attributes,
        events,
        attempt.error,
    )


def read_spans(content: bytes) -> list[Span]:
    """Spans as the admin API sends them. Raises msgspec.DecodeError."""
    return msgspec.json.decode(content, type=list[Span])


def tree(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Spans in the order of a tree, each with its depth; a span whose parent is missing is a root."""
    by_parent: dict[str, list[Span]] = {}
    spans = list(spans)
    ids = {span.span_id for span in spans}
    for span in spans:
        by_parent.setdefault(span.parent_id if span.parent_id in ids else "", []).append(span)
    ordered: list[tuple[int, Span]] = []

    def walk(parent: str, depth: int) -> None:
        for span in sorted(by_parent.get(parent, []), key=lambda s: (s.start_ns, s.end_ns)):
            ordered.append((depth, span))
            walk(span.span_id, depth + 1)

    walk("", 0)
    return ordered


class OtlpExport:
    """Sends spans to a collector in the background; a full queue drops them."""

    def __init__(self, endpoint: str, process: str, tier: str) -> None:
        # Imported here: the SDK costs a third of a tier's start, and most have no collector.
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        self._resource = Resource.create(
            {"service.name": f"headwater-{tier}", "service.instance.id": process, "service.namespace": "headwater"}
        )
        self._processor = BatchSpanProcessor(_exporter(endpoint), export_timeout_millis=5_000)

    def __call__(self, record: RequestRecord) -> None:
        """Queue the spans of one request."""
        for span in spans_of(record):
            self._processor.on_end(_readable(span, self._resource))

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most `timeout_s`."""
        # The SDK's own time-outs do not hold while a collector hangs; its threads end with the process.
        closing = Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


def _exporter(endpoint: str) -> SpanExporter:
    if endpoint.startswith("grpc://"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc  # noqa: PLC0415

        return Grpc(endpoint="http://" + endpoint.removeprefix("grpc://"), insecure=True, timeout=5)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http  # noqa: PLC0415

    url = endpoint.rstrip("/")
    return Http(endpoint=url if url.endswith("/v1/traces") else f"{url}/v1/traces", timeout=5)


def _readable(span: Span, resource: Any) -> Any:
    from opentelemetry.sdk.trace import Event, ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags  # noqa: PLC0415

    def context(span_id: str) -> SpanContext:
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), False, TraceFlags(1))

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=context(span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=span.attributes | ({"error.type": span.error} if span.error else {}),
        events=[Event(name, timestamp=at) for name, at in span.events],
        kind={"server": SpanKind.SERVER, "client": SpanKind.CLIENT}.get(span.kind, SpanKind.INTERNAL),
        instrumentation_scope=InstrumentationScope("headwater"),
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def render(spans: Sequence[Span]) -> list[str]:
    """The tree as lines of text, times in milliseconds from its first span."""
    ordered = tree(spans)
    if not ordered:
        return []
    began = min(span.start_ns for _, span in ordered)
    lines = []
    for depth, span in ordered:
        start, took = (span.start_ns - began) / 1e6, (span.end_ns - span.start_ns) / 1e6
        lines.append(f"{'  ' * depth}{span.name}  [{span.process}]  +{start:.1f} ms, {took:.1f} ms{_why(span)}")
    return lines


def _why(span: Span) -> str:
    """What a person wants to know of a span beside its times."""
    a = span.attributes
    parts = []
    if "headwater.stage" in a:
        terms = ", ".join(f"{k.removeprefix('headwater.cost.')} {v:g}" for k, v in a.items() if "cost." in k)
        parts.append(f"cost {a.get('headwater.cost', 0):g}" + (f" ({terms})" if terms else ""))
        if "headwater.runner_up" in a:
            parts.append(f"next best {a['headwater.runner_up']} by {a['headwater.margin']:g}")
        if a["headwater.takeover"]:
            parts.append("run here: its own balancers are gone")
    elif span.kind == "client" and span.events:
        parts.append(f"first byte after {(span.events[0][1] - span.start_ns) / 1e6:.1f} ms")
    elif span.kind == "server":
        parts.append(f"{a['http.response.status_code']} {a['headwater.ending']}")
    if span.error:
        parts.append(f"error: {span.error}")
    return "  " + "; ".join(parts) if parts else ""
