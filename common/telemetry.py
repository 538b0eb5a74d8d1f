"""What the outside is told of requests: metrics, the access log, recent requests, and spans for a collector.

Everything is derived from a `RequestRecord` when its request ends, off the path of its bytes; a label is never a
client's text unless somebody serves a model of that name.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import Thread
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from common.metrics import Counts, Level, Scrape, Spread
from common.records import Ending, RequestRecord
from common.types import Tier

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
TOTAL_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
MODEL_LABELS = 200  # distinct model labels; further ones are counted as "other"
LOG_FLUSH_S = 0.2  # access-log lines are written together this often
LOG_CLOSE_S = 1.0  # a log that is not read is left behind after this
LOG_PENDING = 10_000  # lines kept while the log cannot be written; older ones are dropped and counted


class AccessLog:
    """One JSON line a request, written in batches by a thread: a log that is read slowly holds no request up."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: Thread | None = None
        self.dropped = 0

    def write(self, record: RequestRecord) -> None:
        """Queue the line of a finished request."""
        if len(self._lines) >= LOG_PENDING:
            self.dropped += 1
            return
        self._lines.append(msgspec.json.encode(access_line(record)))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOG_FLUSH_S, self._flush_behind)

    def _flush_behind(self) -> None:
        self._timer = None
        if self._writing is None or not self._writing.is_alive():
            self._hand_over()
        elif self._lines:
            self._timer = asyncio.get_running_loop().call_later(LOG_FLUSH_S, self._flush_behind)

    def _hand_over(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            # A daemon, so that a process can leave although nobody reads its log.
            self._writing = Thread(target=self._write, args=(lines,), name="access-log", daemon=True)
            self._writing.start()

    def _write(self, lines: list[bytes]) -> None:
        try:
            os.write(self._fd, b"\n".join(lines) + b"\n")
        except OSError:
            self.dropped += len(lines)  # a full or closed log must not end requests; the counter tells

    def flush(self) -> None:
        """Write what is queued, waiting for at most LOG_CLOSE_S."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hand_over()
        if self._writing is not None:
            self._writing.join(LOG_CLOSE_S)


def access_line(r: RequestRecord) -> dict[str, Any]:
    """A finished request as the access log has it; seconds rounded to microseconds."""
    return {
        "event": "request",
        "time": r.started_wall_ns // 1000 / 1e6,
        "trace_id": r.id,
        "process": r.process,
        "method": r.method,
        "path": r.path,
        "tenant": r.tenant or None,
        "model": r.model[:200],
        "stream": r.stream,
        "status": r.status,
        "ending": r.ending.value,
        "error": r.error or None,
        "served_by": r.served_by or None,
        "from_peer": r.from_peer,
        "attempts": len(r.attempts),
        "input_tokens": r.input_tokens,
        "output_tokens": r.output_tokens,
        "queued_s": round(r.queued_s, 6),
        "ttft_s": None if r.ttft_s is None else round(r.ttft_s, 6),
        "total_s": round(r.total_s, 6),
    }


class Telemetry:
    """Takes finished requests in, and offers what they add up to."""

    def __init__(
        self,
        *,
        recent: int,
        known_model: Callable[[str], bool],
        access_log: bool = True,
        export: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.log = AccessLog(sys.stdout.fileno()) if access_log else None
        self._known_model = known_model
        self._export = export
        self._max_recent = recent
        self._recent: deque[RequestRecord] = deque()  # oldest first
        self._by_trace: dict[str, deque[RequestRecord]] = {}
        self._models: set[str] = set()
        self._make_metrics()

    def _make_metrics(self) -> None:
        self.in_flight = Level("headwater_in_flight_requests", "Requests under way in this process")
        self.queued = Level("headwater_queued_requests", "Requests that wait for a server with room")
        self._requests = Counts("headwater_requests", "Finished requests", ("operation", "model", "status", "ending"))
        self._ttft = Spread(
            "headwater_time_to_first_token_seconds",
            "From the request's last byte to the first of a streamed answer",
            ("model",),
            TTFT_BUCKETS,
        )
        self._tpot = Spread(
            "headwater_time_per_output_token_seconds",
            "Of streamed answers, after the first token",
            ("model",),
            TPOT_BUCKETS,
        )
        self._total = Spread(
            "headwater_request_duration_seconds",
            "From the request's last byte to the answer's last byte",
            ("model",),
            TOTAL_BUCKETS,
        )
        self._attempts = Counts("headwater_attempts", "Tries at a peer or an instance", ("to", "error"))
        self._takeovers = Counts("headwater_takeovers", "Stages run here because their own tier was gone", ("stage",))
        self.registry.register(
            Scrape(
                self.in_flight,
                self.queued,
                self._requests,
                self._ttft,
                self._tpot,
                self._total,
                self._attempts,
                self._takeovers,
            )
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    def began(self, record: RequestRecord) -> None:
        """A request was understood and is on its way."""
        self.in_flight.value += 1
        record.counted = True

    def ended(self, record: RequestRecord) -> None:
        """A request ended, in whatever way."""
        if record.counted:
            self.in_flight.value -= 1
        model = self._model_label(record.model)
        status = str(record.status or 499)  # 499, as nginx has it: the client left before an answer began
        self._requests.add((record.operation, model, status, record.ending.value))
        if record.ending is Ending.COMPLETE and record.status < 400:
            labels = (model,)
            self._total.see(labels, record.ended_at - record.started_at)
            if record.stream:
                ttft, tpot = record.ttft_s, record.tpot_s
                if ttft is not None:
                    self._ttft.see(labels, ttft)
                if tpot is not None:
                    self._tpot.see(labels, tpot)
        for attempt in record.attempts:
            self._attempts.add(("peer" if attempt.peer else "instance", attempt.error))
        for stage in record.stages:
            if stage.takeover:
                self._takeovers.add((Tier.of(stage.path).value,))
        self._keep(record)
        if self.log is not None:
            self.log.write(record)
        if self._export is not None and (record.sampled or record.ending is not Ending.COMPLETE):
            self._export(record)

    def _model_label(self, model: str) -> str:
        if model in self._models:
            return model
        if not model or not self._known_model(model) or len(self._models) >= MODEL_LABELS:
            return "other"
        self._models.add(model)
        return model

    # -- what is remembered ------------------------------------------------------------------------------------------

    def _keep(self, record: RequestRecord) -> None:
        if not self._max_recent:
            return
        self._recent.append(record)
        self._by_trace.setdefault(record.id, deque()).append(record)
        if len(self._recent) > self._max_recent:
            oldest = self._recent.popleft().id
            self._by_trace[oldest].popleft()
            if not self._by_trace[oldest]:
                del self._by_trace[oldest]

    def find(self, trace_id: str) -> list[RequestRecord]:
        """Recent requests of one trace, oldest first (a client may send several in one trace)."""
        return list(self._by_trace.get(trace_id, ()))

    def recent(self, limit: int) -> list[RequestRecord]:
        """The latest finished requests, newest first."""
        return list(islice(reversed(self._recent), limit))

    def close(self) -> None:
        """Write what is still queued."""
        if self.log is not None:
            self.log.flush()
