"""Following one prefix of etcd: the view that listings and events add up to, and the stream that brings the events.

A watch that says nothing may be idle or dead, so it is asked for a sign of life whenever it has been silent. What ends
it (compaction, a lost connection, a member without its cluster) ends in a new listing that replaces the view, deletions
included; nothing is resumed (CASES C42).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio
from aetcd import rpc

from common.clock import now
from common.errors import StoreError
from common.store.base import Snapshot
from common.store.etcd.client import Link, Refused, Unreachable, bare, mapped, retrieve

COALESCE_S: Final = 0.02  # events within this share a snapshot: 50 rebuilds a second at most, for 20 ms of delay


class View:
    """What is known of one prefix. Pure: told by listings and by watch responses."""

    def __init__(self, prefix: str) -> None:
        self.revision = 0
        self.seen = False  # whether there has been a listing
        self.stale = False  # whether the last snapshot given out said so
        self._values: dict[str, bytes] = {}
        self._removed: dict[str, bytes] = {}  # since the last snapshot
        self.key = prefix.encode()
        self.end = self.key[:-1] + bytes([self.key[-1] + 1])  # the first key after those with the prefix

    def snapshot(self, *, stale: bool = False) -> Snapshot:
        """The view as it is now, to be given out."""
        self.stale = stale
        removed, self._removed = self._removed, {}
        return Snapshot(dict(self._values), self.revision, stale, removed)

    def replace(self, listing: Any) -> list[Snapshot]:
        """Take a RangeResponse as the truth; the snapshots to give out, none if nothing changed."""
        values = {kv.key.decode(errors="replace"): kv.value for kv in listing.kvs}
        # A lower revision is another history: etcd lost its data or was restored. That is an outage, if an unseen one.
        before = [self.snapshot(stale=True)] if listing.header.revision < self.revision and not self.stale else []
        changed = not self.seen or self.stale or values != self._values
        self._values, self.revision, self.seen = values, listing.header.revision, True
        return [*before, self.snapshot()] if changed else []

    def apply(self, response: Any) -> bool:
        """Apply a WatchResponse; whether anything changed. Raises Refused when it ends the watch."""
        if response.canceled:
            compacted = f"compacted at revision {response.compact_revision}" if response.compact_revision else ""
            raise Refused(f"etcd ended the watch: {compacted or response.cancel_reason or 'no reason given'}")
        # Events up to the listing may still be under way, and the header's revision may be ahead of later events.
        events = [event for event in response.events if event.kv.mod_revision > self.revision]
        for event in events:
            key = event.kv.key.decode(errors="replace")
            if event.type == rpc.Event.DELETE:
                if key in self._values:
                    self._removed[key] = self._values.pop(key)
            else:
                self._values[key] = event.kv.value
        if events and not response.fragment:
            self.revision = max(event.kv.mod_revision for event in events)
        return bool(events)


class Stream:
    """One watch call on one link, from the revision after the view's."""

    def __init__(self, link: Link, view: View, check_interval_s: float) -> None:
        self._call = link.watch.Watch(metadata=link.metadata)
        self._floor = view.revision
        self._create = rpc.WatchCreateRequest(
            key=view.key, range_end=view.end, start_revision=view.revision + 1, fragment=True
        )
        self._check_interval_s = check_interval_s
        self._read: asyncio.Task[Any] | None = None

    async def open(self) -> None:
        """Ask for the events. Raises Unreachable within the check interval."""
        await self._write(rpc.WatchRequest(create_request=self._create))

    async def batch(self) -> list[Any]:
        """The next response, and if it has events those within COALESCE_S after it.

        Raises Unreachable when nothing at all came for twice the check interval, or the stream ended.
        """
        response = await self._next(self._check_interval_s)
        if response is None:
            await self._write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
            response = await self._next(self._check_interval_s)
        if response is None:
            raise Unreachable("etcd: the watch stalled")
        if response.header.revision < self._floor and not response.canceled:  # those carry no revision
            raise Unreachable("etcd: the watch is at an older state than the listing")
        responses = []
        until = now() + COALESCE_S
        while response is not None:
            responses.append(response)
            left_s = until - now()
            response = await self._next(left_s) if response.events and left_s > 0.0 else None
        return responses

    def close(self) -> None:
        """End the call and with it the read, and let go of it: one that is only cancelled keeps its TCP connection."""
        self._call.cancel()
        self._call = None

    async def _next(self, timeout_s: float) -> Any:
        """One response, None if there is none in time. The read goes on then: to cancel it would end the call."""
        if self._read is None:
            self._read = asyncio.create_task(self._receive())
            self._read.add_done_callback(retrieve)
        await asyncio.wait({self._read}, timeout=timeout_s)
        if not self._read.done():
            return None
        read, self._read = self._read, None
        response = read.result()
        if isinstance(response, StoreError):
            raise response
        return response

    async def _receive(self) -> Any:
        """The next response, or the error that ended the stream (as a value: see `bare`)."""
        try:
            with mapped():
                response = await self._call.read()
        except StoreError as error:
            return bare(error)
        return Unreachable("etcd ended the watch stream") if response is grpc.aio.EOF else response

    async def _write(self, request: Any) -> None:
        try:
            async with asyncio.timeout(self._check_interval_s):
                with mapped():
                    await self._call.write(request)
        except TimeoutError:
            raise Unreachable("etcd: the watch takes no requests") from None
