"""Replays rows against one or several URLs, open loop: each is sent when its time has come, answered or not.

Open loop is what users are; a client that waits for answers hides the queue it would have made. Only one bound is set
to it, `max_in_flight`, and how late rows were sent because of it, or because this machine was busy, is in each sample.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common import clock
from common.sim.workload import TraceRow
from services.bench.client import Client, Target
from services.bench.exchange import DECISION, SERVED_BY, Exchange
from services.bench.prompts import Template
from services.bench.samples import Progress, Sample

__all__ = ["Choose", "Progress", "Replay", "Sample", "Template"]


Choose = Callable[[TraceRow, int], int]
"""Row and its index -> which of the targets it goes to."""


@dataclass(slots=True)
class Replay:
    """How to replay. `stream_share` (0…1) of the requests stream, evenly spread; `tls` is for https targets."""

    template: Template = field(default_factory=Template)
    stream_share: float = 1.0
    tls: ssl.SSLContext | None = None
    _runs: list[_Run] = field(default_factory=list, init=False, repr=False)

    async def run(
        self,
        rows: Iterable[TraceRow],
        target: str | Sequence[str],
        *,
        choose: Choose | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        speedup: float = 1.0,
        max_in_flight: int = 1024,
        timeout_s: float = 600.0,
        keep: int | None = None,
    ) -> list[Sample]:
        """Send every row, wait for every answer, return the samples in the order in which the requests ended.

        `rows` may be endless; the first one is sent at once and the others `speedup` times as fast as they arrived.
        Several targets are taken in turn, or as `choose` says. At `max_in_flight` requests the next row waits. A
        request that is not over after `timeout_s` ends as timeout or stalled. `keep` bounds the samples returned to
        the latest so many (None: all). `on_progress` is called at each end and must be quick.
        Raises ValueError for a target that is no URL, or bounds that are not positive.
        """
        urls = [target] if isinstance(target, str) else list(target)
        if not urls or speedup <= 0.0 or max_in_flight < 1 or timeout_s <= 0.0:
            raise ValueError("a replay needs a target, and speedup, max_in_flight and timeout_s above 0")
        clients = [Client(Target.of(url), self.tls) for url in urls]
        run = _Run(self, clients, choose, on_progress, max_in_flight, timeout_s, keep)
        self._runs.append(run)
        try:
            await run.all(rows, speedup)
        finally:
            run.close()
            self._runs.remove(run)
        return list(run.samples)

    def stop(self) -> None:
        """End the runs under way now: each returns what has ended so far, and drops the rest unmeasured."""
        for run in self._runs:
            run.stop()


class _Run:
    """One replay under way."""

    def __init__(
        self,
        replay: Replay,
        clients: Sequence[Client],
        choose: Choose | None,
        on_progress: Callable[[Progress], None] | None,
        max_in_flight: int,
        timeout_s: float,
        keep: int | None,
    ) -> None:
        self.samples: deque[Sample] = deque(maxlen=keep)
        self._replay = replay
        self._clients = clients
        self._choose = choose or (lambda row, index: index % len(clients))
        self._on_progress = on_progress
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self._progress = Progress()
        self._start_s = clock.now()
        self._stopped = asyncio.Event()
        self._sending = True
        self._idle = asyncio.Event()
        self._in_flight: set[Exchange] = set()

    async def all(self, rows: Iterable[TraceRow], speedup: float) -> None:
        """Send the rows and wait for the answers, unless stopped."""
        work = asyncio.ensure_future(self._send_all(rows, speedup))
        stop = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            stop.cancel()

    def stop(self) -> None:
        """Make `all` return."""
        self._stopped.set()

    def close(self) -> None:
        """Drop what is under way; it is not measured."""
        self._stopped.set()
        for exchange in list(self._in_flight):
            exchange.end("unfinished")
            exchange.drop()
        for client in self._clients:
            client.close()

    async def _send_all(self, rows: Iterable[TraceRow], speedup: float) -> None:
        first_s: float | None = None
        for index, row in enumerate(rows):
            first_s = row.arrival_s if first_s is None else first_s
            due_s = (row.arrival_s - first_s) / speedup
            client = self._clients[self._choose(row, index)]
            stream = self._streams(index)
            # The text is made before the row is due, so that making it delays nothing.
            target = client.target
            payload = self._replay.template.request(row, index, stream, target.authority, target.prefix)
            await self._slots.acquire()
            # Also when late: others must get their turn. Timers of uvloop go by whole milliseconds.
            await asyncio.sleep(max(0.0, self._start_s + due_s - clock.now()))
            self._send(client, payload, row, index, due_s, stream)
        self._sending = False
        if self._in_flight:
            await self._idle.wait()

    def _streams(self, index: int) -> bool:
        """Whether row `index` streams: spreads the share evenly, without a draw."""
        share = self._replay.stream_share
        return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)

    def _send(self, client: Client, payload: bytes, row: TraceRow, index: int, due_s: float, stream: bool) -> None:
        def on_end(exchange: Exchange) -> None:
            self._in_flight.discard(exchange)
            if not self._stopped.is_set():
                self._ended(self._sample(exchange, client.target.url, row, index, due_s, stream))

        exchange = Exchange(payload, self._timeout_s, on_end)
        self._in_flight.add(exchange)
        self._progress.sent += 1
        client.send(exchange)

    def _ended(self, sample: Sample) -> None:
        progress = self._progress
        progress.ok += sample.ok
        progress.rejected += sample.rejected
        progress.failed += sample.failed
        progress.elapsed_s = clock.now() - self._start_s
        progress.last = sample
        self.samples.append(sample)
        self._slots.release()
        if not self._sending and not self._in_flight:
            self._idle.set()
        if self._on_progress is not None:
            self._on_progress(progress)

    def _sample(self, exchange: Exchange, target: str, row: TraceRow, index: int, due_s: float, stream: bool) -> Sample:
        meter = exchange.meter
        assert exchange.end_s is not None
        first_s = meter.first_s if meter else None
        tokens = meter.tokens if meter else 0
        tpot_s = (meter.last_s - first_s) / (tokens - 1) if meter and first_s is not None and tokens > 1 else None
        return Sample(
            index=index,
            due_s=due_s,
            late_s=exchange.sent_s - self._start_s - due_s,
            target=target,
            client=row.client,
            session=row.session,
            stream=stream,
            input_tokens=row.input_tokens,
            output_tokens=tokens,
            status=exchange.status,
            error=exchange.error,
            ttft_s=None if first_s is None else first_s - exchange.sent_s,
            tpot_s=tpot_s,
            max_gap_s=meter.max_gap_s if meter else 0.0,
            e2e_s=exchange.end_s - exchange.sent_s,
            body_bytes=exchange.body_bytes,
            done=meter.done if meter else False,
            served_by=exchange.headers.get(SERVED_BY, ""),
            decision=exchange.headers.get(DECISION, ""),
        )
