"""Follows load reports: one stream an address, made anew whenever it is lost.

Lost is: the stream ended or failed, or nothing came for several intervals although this process was awake. A stream
that stays open over a frozen peer or a cut network is the usual way to believe in the dead. The time an answer to a
ping takes is sampled on the same connection, which is how far away the address is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Final

import grpc
import grpc.aio
import structlog

from common import clock
from common.errors import ConfigError
from common.proto import load_pb2, load_pb2_grpc
from common.reporting.delay import Delay
from common.reporting.tls import Tls
from common.reporting.wire import from_wire
from common.types import LoadReport

log = structlog.get_logger()

OnReport = Callable[[str, LoadReport], None]
OnState = Callable[[str, bool], None]
OnRoundTrip = Callable[[str, float], None]

SILENT_INTERVALS: Final = 5  # so many intervals without a message, and at least SILENT_S, is a lost peer
SILENT_S: Final = 1.0
FIRST_S: Final = 3.0  # for the first message: connection, TLS and call are five round trips, 0.3 s each at worst
STEADY_S: Final = 5.0  # a stream that lasted this long was a good one: the next is tried without delay
BACKOFF_S: Final = (0.1, 5.0)  # doubles from the first to the second, each time shortened by up to half at random
PING_EVERY_S: Final = 2.0
PING_TIMEOUT_S: Final = 2.0
PINGS: Final = 3  # the least of three: what is above it is scheduling, not distance

_OPTIONS: Final = [
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel to this address is given the old, dead connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    # How much may wait in the connection for a reader that is busy: one long quote or a hundred short reports.
    ("grpc.http2.lookahead_bytes", 8192),
    ("grpc.http2.bdp_probe", 0),
]


class ReportClient:
    """Follows any number of addresses. Call-backs are made synchronously, on the event loop, as messages arrive.

    `on_report(address, report)` for each report, `on_state(address, connected)` when that changes and once for the
    first try, `on_round_trip(address, seconds)` every few seconds while connected.
    """

    def __init__(
        self,
        subscriber: str,
        rng: Random,
        *,
        on_report: OnReport,
        on_state: OnState | None = None,
        on_round_trip: OnRoundTrip | None = None,
        interval_s: float | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`interval_s`: at least this often a message is asked for; None leaves it to the sender (0.2 s)."""
        self.subscriber = subscriber
        self.rng = rng
        self.interval_s = interval_s
        self.silent_s = max(SILENT_S, SILENT_INTERVALS * (interval_s or 0.2))
        self.tls = tls
        self.on_report = on_report
        self.on_state = on_state
        self.on_round_trip = on_round_trip
        self._links: dict[str, _Link] = {}

    def follow(self, address: str, endpoints: Iterable[str] = ()) -> None:
        """Have the reports of these endpoints (none: all that is offered) from `host:port`; again to change them."""
        wanted = frozenset(endpoints)
        link = self._links.get(address)
        if link is None:
            self._links[address] = _Link(self, address, wanted)
        else:
            link.want(wanted)

    def unfollow(self, address: str) -> None:
        """Let go of an address; no call-back is made for it any more."""
        link = self._links.pop(address, None)
        if link is not None:
            link.task.cancel()

    @property
    def followed(self) -> frozenset[str]:
        """The addresses followed, connected or not."""
        return frozenset(self._links)

    async def close(self) -> None:
        """Let go of all addresses."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)


class _Link:
    """The stream to one address, and the task that keeps it."""

    def __init__(self, client: ReportClient, address: str, wanted: frozenset[str]) -> None:
        self.client = client
        self.address = address
        self.wanted = wanted
        self.connected: bool | None = None
        self._call: grpc.aio.UnaryStreamCall[load_pb2.WatchRequest, load_pb2.LoadReport] | None = None
        self._again = False
        self._heard_at = 0.0
        self._delay = Delay()
        self._up = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"reports of {address}")
        self.task.add_done_callback(_crashed)

    def want(self, wanted: frozenset[str]) -> None:
        """Ask for other endpoints, on the same connection."""
        if wanted != self.wanted:
            self.wanted = wanted
            if self._call is not None:
                self._again = True
                self._call.cancel()

    async def _run(self) -> None:
        first, most = BACKOFF_S
        delay = first
        while True:
            began = clock.now()
            why = await self._connect()
            self._state(False, why)
            delay = first if clock.now() - began > STEADY_S else min(delay * 2.0, most)
            await asyncio.sleep(delay * self.client.rng.uniform(0.5, 1.0))

    async def _connect(self) -> str:
        """One connection from its making to its loss; returns what ended it."""
        try:
            channel = self._channel()
        except ConfigError as error:  # files of a certificate that is being renewed
            return str(error)
        async with channel:
            stub = load_pb2_grpc.LoadReportingStub(channel)
            pings = asyncio.create_task(self._ping(stub))
            try:
                while True:
                    self._again = False
                    why = await self._stream(stub)
                    if not self._again:
                        return why
            finally:
                pings.cancel()

    def _channel(self) -> grpc.aio.Channel:
        tls = self.client.tls
        if tls is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
        return grpc.aio.secure_channel(self.address, tls.channel_credentials(), options=[*_OPTIONS, *name])

    async def _stream(self, stub: load_pb2_grpc.LoadReportingStub) -> str:
        request = load_pb2.WatchRequest(subscriber=self.client.subscriber, endpoints=sorted(self.wanted))
        if self.client.interval_s is not None:
            request.max_interval_s = self.client.interval_s
        self._call = call = stub.Watch(request)
        self._delay = Delay()
        # The first message may take as long as a connection does; later ones are due every interval.
        self._heard_at = clock.now() + max(0.0, FIRST_S - self.client.silent_s)
        watchdog = asyncio.create_task(self._end_when_silent(call))
        try:
            while isinstance(message := await call.read(), load_pb2.LoadReport):  # else the end of the stream
                self._heard_at = clock.now()
                self._state(True)
                self._take(message)
            return "ended"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name.lower()}: {error.details()}"
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # ours, not the call's
                raise
            return "silent"
        finally:
            self._call = None
            watchdog.cancel()
            call.cancel()

    async def _end_when_silent(
        self, call: grpc.aio.UnaryStreamCall[load_pb2.WatchRequest, load_pb2.LoadReport]
    ) -> None:
        """Cancel the call when nothing came for too long; a time in which this process itself stood still is not held
        against the peer, since its messages are waiting in the socket.
        """
        tick = self.client.silent_s / 8.0
        before = clock.now()
        while True:
            await asyncio.sleep(tick)
            now = clock.now()
            if now - before > 2.0 * tick:
                self._heard_at = max(self._heard_at, now)
            elif now - self._heard_at > self.client.silent_s:
                call.cancel()
                return
            before = now

    def _take(self, message: load_pb2.LoadReport) -> None:
        if not message.endpoint or (self.wanted and message.endpoint not in self.wanted):
            return
        report = from_wire(message)
        if message.HasField("elapsed_s"):
            report = replace(report, age_s=report.age_s + self._delay.of(message.elapsed_s, self._heard_at))
        _tell(self.client.on_report, self.address, report)

    def _state(self, connected: bool, why: str = "") -> None:
        if connected == self.connected:
            return
        if connected:
            self._up.set()
            log.info("reports_connected", address=self.address)
        else:
            self._up.clear()
            log.warning("reports_lost", address=self.address, why=why)
        self.connected = connected
        if self.client.on_state is not None:
            _tell(self.client.on_state, self.address, connected)

    async def _ping(self, stub: load_pb2_grpc.LoadReportingStub) -> None:
        while self.client.on_round_trip is not None:
            await self._up.wait()
            seconds = await self._round_trip(stub)
            if seconds is not None:
                _tell(self.client.on_round_trip, self.address, seconds)
            await asyncio.sleep(PING_EVERY_S * self.client.rng.uniform(0.8, 1.2))

    @staticmethod
    async def _round_trip(stub: load_pb2_grpc.LoadReportingStub) -> float | None:
        """Seconds to the address and back, the least of a few; None if it does not answer."""
        least: float | None = None
        for _ in range(PINGS):
            began = clock.now()
            try:
                await stub.Ping(load_pb2.PingRequest(), timeout=PING_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return least
            took = clock.now() - began
            least = took if least is None else min(least, took)
        return least


def _tell(call_back: Callable[..., None], *args: object) -> None:
    """A consumer's mistake is logged and costs one call, not the stream that others live on."""
    try:
        call_back(*args)
    except Exception:
        log.exception("report_call_back_failed", address=args[0])


def _crashed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("report_link_crashed", task=task.get_name(), exc_info=task.exception())
