"""One request and what came back: the place that decides how an exchange ended, and the only one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common import clock
from services.bench.meters import Meter, StreamMeter

SERVED_BY = b"x-headwater-served-by"
DECISION = b"x-headwater-decision"
_SHOWN = (SERVED_BY, DECISION)


class Exchange:
    """One request and what came back. `error` is "" if all is well, `end_s` is None while it is under way.

    Errors: connect (no connection), reset (ended before a byte), broken (ended before its end), timeout (no answer in
    time), stalled (began, then out of time), bad_response (not HTTP, or not what was asked for), stream_error … (told
    in an event of the stream), "429 code" and so on for a status other than 200.
    """

    __slots__ = (
        *("_on_end", "_timer", "body_bytes", "drop", "end_s", "error", "headers"),
        *("meter", "payload", "sent_s", "status"),
    )

    def __init__(self, payload: bytes, timeout_s: float, on_end: Callable[[Exchange], None]) -> None:
        self.payload = payload
        self.sent_s = clock.now()
        self.end_s: float | None = None
        self.status = 0
        self.headers: dict[bytes, str] = {}
        self.meter: Meter | None = None
        self.body_bytes = 0
        self.error = ""
        self.drop: Callable[[], object] = _nothing  # how to let go of the connection that carries it
        self._on_end = on_end
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def header(self, name: bytes, value: bytes) -> None:
        """Take note of a header of the answer, if it is one that is measured by."""
        name = name.lower()
        if name in _SHOWN:
            self.headers[name] = value.decode("latin-1")[:200]
        elif name == b"content-type" and value.lower().startswith(b"text/event-stream"):
            self.meter = StreamMeter()

    def end(self, error: str) -> None:
        """It is over, and `error` says how; what was told in the answer itself goes first. Later calls do nothing."""
        if self.end_s is not None:
            return
        self.end_s = clock.now()
        self._timer.cancel()
        if self.meter is not None:
            self.meter.close()
        told = self.meter.error if self.meter is not None else ""
        if not error and self.status != 200:
            error = f"{self.status} {told}".strip()
        elif not error and not told and (self.meter is None or not self.meter.done):
            error = "broken" if isinstance(self.meter, StreamMeter) else "bad_response"
        self.error = told if told and self.status == 200 else error
        self._on_end(self)

    def _expire(self) -> None:
        self.end("timeout" if self.status == 0 else "stalled")
        self.drop()


def _nothing() -> None:
    """Nothing carries it yet."""
