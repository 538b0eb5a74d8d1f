"""Finished requests for the tests of what is told of them."""

from __future__ import annotations

from typing import Any

from common.records import AttemptRecord, Ending, RequestRecord, StageRecord
from common.types import Endpoint, InferenceRequest, Path, Pick, Reservation

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
WALL_NS = 1_700_000_000_123_456_789
BEGAN = 1000.0  # monotonic seconds


def record(**fields: Any) -> RequestRecord:
    """A streamed chat of 2 s: first byte after 0.5 s, 31 tokens, all well."""
    values: dict[str, Any] = {
        "id": TRACE,
        "span_id": "a" * 16,
        "parent_id": "",
        "sampled": True,
        "process": "eu-1",
        "node": ("eu",),
        "method": "POST",
        "path": "/v1/chat/completions",
        "started_at": BEGAN,
        "started_wall_ns": WALL_NS,
        "operation": "chat",
        "model": "m",
        "stream": True,
        "input_tokens": 100,
        "output_tokens": 31.0,
        "served_by": "eu/c1/i1",
        "first_byte_at": BEGAN + 0.5,
        "ended_at": BEGAN + 2.0,
        "status": 200,
        "ending": Ending.COMPLETE,
    }
    return RequestRecord(**(values | fields))


def stage(
    path: Path,
    chosen: str,
    costs: dict[str, float],
    span_id: str = "b" * 16,
    **fields: Any,
) -> StageRecord:
    """A decision by two terms, the second of which is a tenth of a second for all."""
    pick = Pick(
        Endpoint(chosen),
        Reservation(1, chosen, path),
        fields.pop("policy", "predicted_completion"),
        tuple(costs),
        tuple(costs.values()),
        (("completion_s", [total - 0.1 for total in costs.values()]), ("round_trip_s", [0.1] * len(costs))),
        fields.pop("predicted_ttft_s", 0.25),
        fields.pop("predicted_total_s", 1.5),
    )
    values: dict[str, Any] = {"path": path, "pick": pick, "takeover": False, "at": BEGAN + 0.01, "span_id": span_id}
    return StageRecord(**(values | fields))


def asked(**fields: Any) -> InferenceRequest:
    """What the stages saw of `record()`."""
    values: dict[str, Any] = {"id": TRACE, "model": "m", "stream": True, "input_tokens": 100, "output_tokens": 30.0}
    return InferenceRequest(**(values | fields))


def attempt(target: Path, peer: str = "", span_id: str = "c" * 16, **fields: Any) -> AttemptRecord:
    values: dict[str, Any] = {
        "target": target,
        "peer": peer,
        "url": "http://10.0.0.1:8000",
        "at": BEGAN + 0.02,
        "span_id": span_id,
        "first_byte_at": BEGAN + 0.49,
        "ended_at": BEGAN + 1.99,
        "status": 200,
    }
    return AttemptRecord(**(values | fields))
