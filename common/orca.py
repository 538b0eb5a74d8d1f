"""An engine's load on its own answer: the header of ORCA (Open Request Cost Aggregation), read for free.

A request with `endpoint-load-metrics-format: TEXT` is answered with `endpoint-load-metrics` by vLLM (whole answers of
chat and completions, not streams, as seen on 0.32) and by Triton (inference of the TensorRT-LLM backend). Of the forms
of ORCA's HTTP binding both readable ones are read; the binary one is asked for by nobody here.

Source: cncf/xds `xds/data/orca/v3/orca_load_report.proto`; vLLM `entrypoints/openai/orca_metrics.py`; Triton
`src/orca_http.cc`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple

REQUEST: Final = (b"endpoint-load-metrics-format", b"TEXT")
"""What to send to be told."""
HEADER: Final = b"endpoint-load-metrics"
ENGINES: Final = ("vllm", "triton")
"""Those that tell."""
MAX_READ: Final = 2048  # bytes of a header that are read; vLLM's has 90
MAX_FIGURES: Final = 64

KV_UTILIZATION: Final = ("kv_cache_usage_perc", "kv_cache_utilization", "gpu_cache_usage_perc")
WAITING: Final = ("num_requests_waiting",)
RUNNING: Final = ("num_requests_running",)


class EngineLoad(NamedTuple):
    """What an engine said of itself when it answered; None is what it did not say, or said nonsense of."""

    kv_utilization: float | None = None  # fraction, 0…1
    waiting: float | None = None  # requests
    running: float | None = None  # requests


NOTHING: Final = EngineLoad()


def parse(value: bytes) -> EngineLoad:
    """The load in the header's value. Never raises; takes some microseconds, whatever the value."""
    kind, _, rest = value[:MAX_READ].strip().partition(b" ")
    if kind.upper() == b"JSON":
        figures = _json(rest)
    elif kind.upper() == b"TEXT":
        figures = _text(rest)
    else:
        return NOTHING
    utilization = _first(figures, KV_UTILIZATION)
    if utilization is not None and utilization > 1.0:
        utilization = 1.0 if utilization <= 1.01 else None  # a rounding error, or a percentage
    return EngineLoad(utilization, _first(figures, WAITING), _first(figures, RUNNING))


def _json(text: bytes) -> Mapping[str, Any]:
    try:
        page = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    named = page.get("named_metrics") if isinstance(page, dict) else None
    return named if isinstance(named, dict) else {}


def _text(text: bytes) -> Mapping[str, Any]:
    figures = {}
    for pair in text.split(b",", MAX_FIGURES)[:MAX_FIGURES]:
        name, _, figure = pair.partition(b"=")
        try:
            figures[name.strip().removeprefix(b"named_metrics.").decode("ascii", "replace")] = float(figure)
        except ValueError:
            continue
    return figures


def _first(figures: Mapping[str, Any], names: Iterable[str]) -> float | None:
    """The first of these that is there and can be a count or a share."""
    for name in names:
        value = figures.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            return float(value) if isfinite(value) and value >= 0.0 else None
    return None
