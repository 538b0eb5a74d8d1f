"""What a client may say of its request in headers: service levels, priority, deadline, how long an answer it expects.

    x-slo-ttft-ms, x-slo-tpot-ms       the first token, and each one after it, within so many milliseconds
    x-priority                         critical, standard or batch
    x-deadline-ms                      complete within so many milliseconds, or refused at once
    x-expected-output-tokens           how many tokens it expects back

They go on to the server as they are. One that makes no sense is refused: what is ignored cannot be noticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.apis.bodies import Header
from common.errors import BadRequest
from common.types import NO_SLO, Priority, Slo

MOST_MS = 86_400_000.0
MOST_TOKENS = 10_000_000.0
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,6})?")


@dataclass(frozen=True, slots=True)
class Hints:
    """None: not said."""

    slo: Slo
    priority: Priority | None = None
    deadline_s: float | None = None
    output_tokens: float | None = None


HINTS = frozenset((b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-priority", b"x-deadline-ms", b"x-expected-output-tokens"))
"""The headers that are read here."""
NOTHING = Hints(NO_SLO)


def read_hints(header: Header) -> Hints:
    """The hints of a request. Raises BadRequest for one that cannot be meant."""
    ttft = _number(header, b"x-slo-ttft-ms", MOST_MS)
    tpot = _number(header, b"x-slo-tpot-ms", MOST_MS)
    deadline = _number(header, b"x-deadline-ms", MOST_MS)
    tokens = _number(header, b"x-expected-output-tokens", MOST_TOKENS)
    priority = header(b"x-priority")
    if priority is None and all(x is None for x in (ttft, tpot, deadline, tokens)):
        return NOTHING
    return Hints(
        NO_SLO if ttft is None and tpot is None else Slo(_seconds(ttft), _seconds(tpot)),
        None if priority is None else _priority(priority),
        _seconds(deadline),
        tokens,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


def _number(header: Header, name: bytes, most: float) -> float | None:
    text = header(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text.strip()) or not 0.0 < float(text) <= most:
        raise BadRequest(f"the header {name.decode()} must be a number above 0 and at most {most:.0f}")
    return float(text)


def _priority(text: str) -> Priority:
    try:
        return Priority[text.strip().upper()]
    except KeyError:
        known = ", ".join(p.name.lower() for p in Priority)
        raise BadRequest(f"the header x-priority must be one of {known}") from None
