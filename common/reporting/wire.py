"""`types.LoadReport` to its message and back.

What comes in is another process's word and may be of another version: figures that are not finite or out of range
become unknown, and a quoted server that cannot be computed with is left out, so that no NaN reaches a policy.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

from common.proto import load_pb2
from common.types import LoadReport, Phase, ServerLoad, Speed

_PHASE_OUT: Final = {
    Phase.LOADING: load_pb2.PHASE_LOADING,
    Phase.SERVING: load_pb2.PHASE_SERVING,
    Phase.DRAINING: load_pb2.PHASE_DRAINING,
}
_PHASE_IN: Final = {
    load_pb2.PHASE_UNSPECIFIED: Phase.SERVING,
    load_pb2.PHASE_LOADING: Phase.LOADING,
    load_pb2.PHASE_SERVING: Phase.SERVING,
    load_pb2.PHASE_DRAINING: Phase.DRAINING,
}
_FIGURES: Final = ("running", "waiting", "kv_utilization", "gpu_utilization", "generated_tokens", "progress")
_LOADS: Final = (
    "decoding",
    "waiting",
    "prompt_tokens",
    "context_tokens",
    "remaining_tokens",
    "prefill_share",
    "price_usd_per_hour",
)
_SPEEDS: Final = ("alpha_s", "beta_s", "gamma_s", "prefill_tokens_per_s")
_LIMITS: Final = ("attention_tokens", "chunk_tokens", "slots", "kv_tokens")
INT64_MAX: Final = 2**63 - 1


def to_wire(report: LoadReport) -> load_pb2.LoadReport:
    """The message of a report; what is None stays absent."""
    message = load_pb2.LoadReport(
        endpoint=report.endpoint,
        age_s=report.age_s,
        servers=[_server_out(s) for s in report.servers],
        phase=_PHASE_OUT[report.phase],
    )
    for name in _FIGURES:
        value = getattr(report, name)
        if value is not None:
            setattr(message, name, value)
    if report.gpu_memory_free_bytes is not None:
        message.gpu_memory_free_bytes = min(report.gpu_memory_free_bytes, INT64_MAX)
    return message


def from_wire(message: load_pb2.LoadReport) -> LoadReport:
    """The report of a message. A phase this version does not know is taken for one that gets no new work."""
    servers = (_server_in(s) for s in message.servers)
    free = message.gpu_memory_free_bytes if message.HasField("gpu_memory_free_bytes") else -1
    return LoadReport(
        endpoint=message.endpoint,
        age_s=_positive(message.age_s) or 0.0,
        servers=tuple(s for s in servers if s is not None),
        running=_figure(message, "running"),
        waiting=_figure(message, "waiting"),
        kv_utilization=_fraction(_figure(message, "kv_utilization")),
        gpu_utilization=_fraction(_figure(message, "gpu_utilization")),
        gpu_memory_free_bytes=free if free >= 0 else None,
        generated_tokens=_figure(message, "generated_tokens"),
        progress=_figure(message, "progress"),
        phase=_PHASE_IN.get(message.phase, Phase.LOADING),
    )


def _server_out(load: ServerLoad) -> load_pb2.ServerLoad:
    speed = load_pb2.Speed(**{name: getattr(load.speed, name) for name in (*_SPEEDS, *_LIMITS)})
    message = load_pb2.ServerLoad(speed=speed, gpu=load.gpu, count=load.count, models=sorted(load.models))
    for name in _LOADS:
        setattr(message, name, getattr(load, name))
    return message


def _server_in(message: load_pb2.ServerLoad) -> ServerLoad | None:
    speed = _speed_in(message.speed)
    figures: dict[str, float] = {name: getattr(message, name) for name in _LOADS}
    if speed is None or not all(map(isfinite, figures.values())) or message.count < 1:
        return None
    # Sums kept by dead reckoning may end a rounding error below 0.
    figures = {name: max(0.0, value) for name, value in figures.items()}
    return ServerLoad(speed, message.gpu, message.count, models=frozenset(message.models), **figures)


def _speed_in(message: load_pb2.Speed) -> Speed | None:
    """None if a constant without default is missing or one is out of range; what divides has to be above 0."""
    constants = {name: _figure(message, name) for name in _SPEEDS}
    limits = {name: _figure(message, name) for name in _LIMITS if message.HasField(name)}
    known = {name: value for name, value in (constants | limits).items() if value is not None}
    divisors = [known.get(name, 1.0) for name in ("prefill_tokens_per_s", *_LIMITS)]
    if len(known) < len(constants) + len(limits) or min(divisors) <= 0.0:
        return None
    return Speed(**known)


def _figure(message: load_pb2.LoadReport | load_pb2.Speed, name: str) -> float | None:
    return _positive(getattr(message, name)) if message.HasField(name) else None


def _positive(value: float) -> float | None:
    return value if isfinite(value) and value >= 0.0 else None


def _fraction(value: float | None) -> float | None:
    return value if value is not None and value <= 1.0 else None
