"""What is done to a world while it runs, each at its time: servers that die, return, slow down, or are new; and bursts.

Written as `KIND@SECONDS[:TARGET[:VALUE]]`:

    die@60:h100-0             the process ends at 60 s with all that is on it; membership tells some seconds later
    return@90:h100-0:30       it is started again at 90 s, loads for 30 s, then serves, empty
    slow@60:a100-1:0.5        from 60 s on it runs at half its speed; 1 restores it
    join@60:a100:30           a new server of that class comes, and loads for 30 s
    drain@60:l4-0             membership says that it takes no more requests
    burst@60:5:10             from 60 s on requests arrive 5 times as fast, for 10 s (of the time they then take)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.sim.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing done at `at_s`. `target` is an instance's id, or a GPU class for join; `value` depends on `kind`."""

    kind: str
    at_s: float
    target: str = ""
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.kind!r}: not one of {', '.join(KINDS)}")
        least, most = KINDS[self.kind]
        if not least <= self.value <= most:
            raise ValueError(f"fault {self.kind}: {self.value:g} is not within {least:g} and {most:g}")
        if self.at_s < 0.0:
            raise ValueError(f"fault {self.kind}: it cannot happen before the start")


KINDS: dict[str, tuple[float, float]] = {
    "die": (0.0, 0.0),
    "return": (0.0, 86_400.0),  # seconds it loads
    "slow": (0.001, 1_000.0),  # factor of speed
    "join": (0.0, 86_400.0),  # seconds it loads
    "drain": (0.0, 0.0),
}
"""Kind -> least and most value."""


@dataclass(frozen=True, slots=True)
class Burst:
    """From `at_s` on traffic comes `factor` times as fast, for `duration_s` of the run's time."""

    at_s: float
    factor: float
    duration_s: float

    def __post_init__(self) -> None:
        if not (self.at_s >= 0.0 and 0.0 < self.factor <= 1_000.0 and self.duration_s > 0.0):
            raise ValueError("burst: needs a time, a factor above 0 and a duration above 0")


def parse(text: str) -> Fault | Burst:
    """Read one of the forms above. Raises ValueError, which says what is wrong with it."""
    kind, at, rest = text.partition("@")
    parts = rest.split(":")
    try:
        if not at:
            raise ValueError("no @SECONDS")
        if kind == "burst":
            if len(parts) != 3:
                raise ValueError("burst@SECONDS:FACTOR:SECONDS")
            return Burst(float(parts[0]), float(parts[1]), float(parts[2]))
        if len(parts) not in (2, 3):
            raise ValueError("KIND@SECONDS:TARGET[:VALUE]")
        default = 1.0 if kind == "slow" else 0.0
        return Fault(kind, float(parts[0]), parts[1], float(parts[2]) if len(parts) == 3 else default)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def compressed(rows: Sequence[TraceRow], bursts: Iterable[Burst]) -> list[TraceRow]:
    """The same requests, arriving faster within each burst; what follows a burst comes earlier by what it saved."""
    made = list(rows)
    for burst in sorted(bursts, key=lambda b: b.at_s):
        length_s = burst.duration_s * burst.factor  # of the original's time that goes into the burst
        saved_s = length_s - burst.duration_s
        made = [replace(row, arrival_s=_moved(row.arrival_s, burst, length_s, saved_s)) for row in made]
    return made


def _moved(at_s: float, burst: Burst, length_s: float, saved_s: float) -> float:
    if at_s <= burst.at_s:
        return at_s
    if at_s <= burst.at_s + length_s:
        return burst.at_s + (at_s - burst.at_s) / burst.factor
    return at_s - saved_s
