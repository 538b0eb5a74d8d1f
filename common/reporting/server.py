"""Offers load reports: every subscriber gets each endpoint's newest, on change and at least every interval.

Nothing is queued for anyone: a report is made at the moment it is sent, so a subscriber that reads slowly gets fewer
reports, and the ones it gets are true. That needs gRPC to push back early (see `_OPTIONS`); left alone it lets a
stream buffer tens of thousands of reports for a reader that stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc
import grpc.aio
import structlog

from common import clock
from common.errors import ConfigError
from common.proto import load_pb2, load_pb2_grpc
from common.reporting.tls import Tls
from common.reporting.wire import to_wire
from common.types import LoadReport

log = structlog.get_logger()

Source = Callable[[float], LoadReport]
"""The report of one endpoint as of the given monotonic time, its age included. Called on the event loop; quick."""

INTERVAL_S: Final = 0.2  # DESIGN: a quote older than this begins to mislead at some hundred requests a second
MIN_INTERVAL_S: Final = 0.02  # a change is told this soon after the last, so that a burst costs 50 messages a second
BOUNDS_S: Final = (0.005, 60.0)  # what a subscriber may ask for
MAX_SUBSCRIBERS: Final = 256  # balancers of the tier above, and a few that are taking over; more is a loop somewhere
PINGS_MS: Final = 1000  # keep-alive pings may come this often without counting as abuse

_OPTIONS: Final = [
    ("grpc.so_reuseport", 0),  # a taken port is an error and not a second listener that gets half the calls
    ("grpc.http2.write_buffer_size", 1),  # a write is done when the bytes left, which is what slows the writer down
    ("grpc.http2.min_ping_interval_without_data_ms", PINGS_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),  # a subscriber whose host is gone is let go of after 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
]

_Context = grpc.aio.ServicerContext[load_pb2.WatchRequest, load_pb2.LoadReport]
_PingContext = grpc.aio.ServicerContext[load_pb2.PingRequest, load_pb2.PingReply]


class ReportServer:
    """Listens for subscribers and reports on what is offered. All methods belong to the event loop's thread."""

    def __init__(
        self,
        *,
        interval_s: float = INTERVAL_S,
        min_interval_s: float = MIN_INTERVAL_S,
        max_subscribers: int = MAX_SUBSCRIBERS,
        tls: Tls | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.min_interval_s = min_interval_s
        self.max_subscribers = max_subscribers
        self.port = 0
        self._tls = tls
        self._sources: dict[str, Source] = {}
        self._subscribers: set[_Subscriber] = set()
        self._server: grpc.aio.Server | None = None
        self._closing = False

    async def start(self, listen: str) -> int:
        """Listen on `host:port` (port 0: any free one) and return the port. Raises ConfigError if that cannot be."""
        credentials = self._tls.server_credentials() if self._tls is not None else None
        server = grpc.aio.server(options=_OPTIONS)
        load_pb2_grpc.add_LoadReportingServicer_to_server(_Servicer(self), server)
        try:
            if credentials is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"cannot listen for load reports on {listen}: {error}") from error
        await server.start()
        self._server, self.port = server, port
        return port

    def offer(self, endpoint: str, source: Source) -> None:
        """Report on an endpoint from now on; a second offer of the same one replaces the first."""
        self._sources[endpoint] = source
        self.changed(endpoint)

    def withdraw(self, endpoint: str) -> None:
        """Report on it no more."""
        self._sources.pop(endpoint, None)

    def changed(self, endpoint: str) -> None:
        """Its load is another one: tell subscribers before the interval is over. Cheap enough for every request."""
        for subscriber in self._subscribers:
            subscriber.notice(endpoint)

    @property
    def subscribers(self) -> int:
        """How many streams are open."""
        return len(self._subscribers)

    async def close(self, grace_s: float = 0.5) -> None:
        """End all streams and stop listening; takes at most about `grace_s`."""
        self._closing = True
        for subscriber in self._subscribers:
            subscriber.wake.set()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def serve(self, request: load_pb2.WatchRequest, context: _Context) -> None:
        """One subscriber's stream, until either side ends it."""
        subscriber = _Subscriber(self, request)
        self._subscribers.add(subscriber)
        log.info("report_subscriber_came", subscriber=request.subscriber, peer=context.peer())
        try:
            while not self._closing:
                for endpoint in subscriber.due(sorted(self._sources)):
                    source = self._sources.get(endpoint)  # may be withdrawn while an earlier one was being sent
                    if source is not None:
                        now = clock.now()
                        message = to_wire(source(now))
                        message.elapsed_s = now - subscriber.began_at
                        await context.write(message)
                if subscriber.silent:
                    await context.write(load_pb2.LoadReport())
                await subscriber.pause()
        except grpc.aio.InternalError:
            pass  # it left while it was being told; gRPC has cancelled the stream, or is about to
        finally:
            self._subscribers.discard(subscriber)
            log.info("report_subscriber_left", subscriber=request.subscriber, peer=context.peer())


class _Subscriber:
    """What one stream has still to be told: at most the ids of the endpoints offered, never reports."""

    def __init__(self, server: ReportServer, request: load_pb2.WatchRequest) -> None:
        low, high = BOUNDS_S
        least = request.min_interval_s if request.HasField("min_interval_s") else server.min_interval_s
        most = request.max_interval_s if request.HasField("max_interval_s") else server.interval_s
        self.min_interval_s = min(max(least, low), high)
        self.interval_s = min(max(most, self.min_interval_s), high)
        self.wanted = frozenset(request.endpoints)
        self.wake = asyncio.Event()
        self.silent = False  # a whole round had nothing to say
        self._dirty: set[str] = set()
        self.began_at = self._round_at = clock.now()
        self._sent_at = 0.0

    def wants(self, endpoint: str) -> bool:
        return not self.wanted or endpoint in self.wanted

    def notice(self, endpoint: str) -> None:
        if endpoint not in self._dirty and self.wants(endpoint):
            self._dirty.add(endpoint)
            self.wake.set()

    def due(self, offered: list[str]) -> list[str]:
        """Whom to report on now: everything once an interval, in between what changed."""
        now = clock.now()
        whole = now >= self._round_at
        endpoints = [e for e in offered if (whole or e in self._dirty) and self.wants(e)]
        self._dirty.clear()
        self.silent = whole and not endpoints
        self._sent_at = now
        if whole:
            self._round_at = now + self.interval_s
        return endpoints

    async def pause(self) -> None:
        """Until a change or the end of the interval, but not before the least distance between two sendings."""
        await asyncio.sleep(self._sent_at + self.min_interval_s - clock.now())
        left = self._round_at - clock.now()
        if left > 0.0 and not self._dirty:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), left)
        self.wake.clear()


class _Servicer(load_pb2_grpc.LoadReportingServicer):
    def __init__(self, reports: ReportServer) -> None:
        self._reports = reports

    async def Watch(self, request: load_pb2.WatchRequest, context: _Context) -> None:  # noqa: N802 - the wire's name
        if self._reports.subscribers >= self._reports.max_subscribers:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many subscribers")
        await self._reports.serve(request, context)

    async def Ping(self, request: load_pb2.PingRequest, context: _PingContext) -> load_pb2.PingReply:  # noqa: N802
        return load_pb2.PingReply()
