"""W3C trace context: who called, and what to tell the next hop. Malformed input starts a fresh trace.

Source: W3C Trace Context, Recommendation of 23 November 2021, sections 2.2 and 3.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACESTATE_BYTES = 512  # what the recommendation asks everybody to carry


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A caller's trace: 32 and 16 hex digits; `parent_id` "" when the trace begins here."""

    trace_id: str
    parent_id: str
    sampled: bool
    state: str = ""

    def header(self, span_id: str) -> bytes:
        """The header lines for a next hop whose parent is `span_id`."""
        line = f"traceparent: 00-{self.trace_id}-{span_id}-{'01' if self.sampled else '00'}\r\n"
        return (line + (f"tracestate: {self.state}\r\n" if self.state else "")).encode("latin-1")


def new_span_id(rng: Random) -> str:
    """A random span id, never all zero."""
    return f"{rng.getrandbits(64) or 1:016x}"


def read(headers: list[tuple[bytes, bytes]], rng: Random, sample_ratio: float) -> TraceContext:
    """The caller's context, or a fresh one (sampled by `sample_ratio`) where there is none or it is malformed."""
    parents = [value for key, value in headers if key == b"traceparent"]
    if len(parents) == 1:
        match = _TRACEPARENT.fullmatch(parents[0].decode("latin-1").strip())
        if match and _valid(match):
            state = b",".join(value for key, value in headers if key == b"tracestate")
            text = state.decode("latin-1") if len(state) <= MAX_TRACESTATE_BYTES else ""
            return TraceContext(match[2], match[3], bool(int(match[4], 16) & 1), text)
    return fresh(rng, sample_ratio)


def fresh(rng: Random, sample_ratio: float) -> TraceContext:
    """A trace that begins here."""
    return TraceContext(f"{rng.getrandbits(128) or 1:032x}", "", rng.random() < sample_ratio)


def _valid(match: re.Match[str]) -> bool:
    version, trace_id, parent_id, _, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return False
    return trace_id.strip("0") != "" and parent_id.strip("0") != ""
