"""The membership store: leases, watches and single keys in one etcd cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import structlog
from aetcd import rpc

from common.clock import now
from common.errors import StoreError, StoreUnavailable
from common.store.base import Snapshot
from common.store.etcd.client import RETRY_S, Client, EtcdTls, Link, Method, Pauses, Refused, Unreachable
from common.store.etcd.lease import EtcdLease
from common.store.etcd.watch import Stream, View

log = structlog.get_logger()

TIMEOUT_S: Final = 2.0  # of one call; etcd answers in some ms, during an election after 1 to 2 s
CHECK_INTERVAL_S: Final = 1.0  # a fifth of the default time to live
RELIST_INTERVAL_S: Final = 60.0  # the last net under lost events; 400 kB for 1,000 instances

_RANGE: Final[Method] = lambda link: link.kv.Range  # noqa: E731 - names for calls
_PUT: Final[Method] = lambda link: link.kv.Put  # noqa: E731
_DELETE: Final[Method] = lambda link: link.kv.DeleteRange  # noqa: E731
_TXN: Final[Method] = lambda link: link.kv.Txn  # noqa: E731


class EtcdMembershipStore:
    """Membership in the etcd cluster behind `urls` (http://host:port or https://…), tried in turn.

    `timeout_s` bounds each call. A dead watch is noticed within twice `check_interval_s`, an outage within three times:
    a fifth of the shortest time to live under the watched prefix makes an outage known before it lets leases expire.
    Raises ConfigError for no URL, for one that is none, and for a user without a password.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        user: str = "",
        password: str = "",
        tls: EtcdTls | None = None,
        timeout_s: float = TIMEOUT_S,
        check_interval_s: float = CHECK_INTERVAL_S,
        relist_interval_s: float = RELIST_INTERVAL_S,
    ) -> None:
        self._client = Client(urls, user, password, tls or EtcdTls())
        self._timeout_s = timeout_s
        self._check_interval_s = check_interval_s
        self._relist_interval_s = relist_interval_s

    async def lease(self, ttl_s: float) -> EtcdLease:
        """See MembershipStore. etcd counts whole seconds and may grant more than asked (by default 2 s at least)."""
        return EtcdLease(self._client, ttl_s, self._timeout_s)

    async def watch(self, prefix: str) -> AsyncGenerator[Snapshot, None]:
        """See MembershipStore."""
        view = View(prefix)
        pauses = Pauses()
        while not self._client.closed:
            listed = False
            try:
                for snapshot in await self._list(view):
                    yield snapshot
                listed = True
                async with aclosing(self._follow(view, pauses)) as snapshots:
                    async for snapshot in snapshots:
                        yield snapshot
            except StoreError as error:
                if self._client.closed:
                    return
                if listed:
                    log.info("etcd watch interrupted, listing again", prefix=prefix, reason=str(error))
                elif not view.stale:
                    yield view.snapshot(stale=True)
            await pauses.next()

    async def get(self, key: str) -> bytes | None:
        """See MembershipStore."""
        answer = await self._client.call(_RANGE, rpc.RangeRequest(key=key.encode()), self._timeout_s)
        return bytes(answer.kvs[0].value) if answer.kvs else None

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """See MembershipStore."""
        k = key.encode()
        request = rpc.TxnRequest(  # safe to repeat: a repetition finds the value of the first
            compare=[rpc.Compare(key=k, target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=0)],
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=k, value=value))],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=k))],
        )
        answer = await self._client.call(_TXN, request, self._timeout_s)
        return value if answer.succeeded else bytes(answer.responses[0].response_range.kvs[0].value)

    async def put(self, key: str, value: bytes) -> None:
        """See MembershipStore."""
        await self._client.call(_PUT, rpc.PutRequest(key=key.encode(), value=value), self._timeout_s)

    async def delete(self, key: str) -> bool:
        """See MembershipStore."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        # A repetition finds nothing left to delete, so of a reply that was lost it is told that nothing was there.
        return bool((await self._client.call(_DELETE, request, self._timeout_s)).deleted)

    async def ping(self, timeout_s: float) -> None:
        """See MembershipStore. It is a read that needs the cluster: a member alone does not count."""
        deadline = now() + timeout_s
        pauses = Pauses()
        while True:
            try:
                request = rpc.RangeRequest(key=b"/headwater", count_only=True)
                await self._client.call(_RANGE, request, max(deadline - now(), 0.001))
            except Refused:
                raise
            except StoreUnavailable:
                if now() + RETRY_S[0] > deadline:
                    raise
                await pauses.next(deadline)
            else:
                return

    async def close(self) -> None:
        """See MembershipStore."""
        await self._client.close(self._timeout_s)

    async def _follow(self, view: View, pauses: Pauses) -> AsyncGenerator[Snapshot, None]:
        """Snapshots from a watch, until it breaks or is no longer to be believed (StoreError)."""
        link: Link | None = None
        stream: Stream | None = None
        relist_at = now() + self._relist_interval_s
        try:
            link = await self._client.link(self._timeout_s)
            stream = Stream(link, view, self._check_interval_s)
            await stream.open()
            while True:
                responses = await stream.batch()
                pauses.reset()
                changes = [view.apply(response) for response in responses]
                if any(changes):
                    yield view.snapshot()
                if now() >= relist_at:
                    for snapshot in await self._list(view):
                        yield snapshot
                    relist_at = now() + self._relist_interval_s
        except Unreachable:
            self._client.drop(link)  # or the listing that follows would wait on the same dead connection
            raise
        finally:
            if stream is not None:
                stream.close()

    async def _list(self, view: View) -> list[Snapshot]:
        """Replace the view by what is stored; the snapshots to give out."""
        # A watch that stalled has used up much of the time in which an outage should be known.
        in_time = view.seen and not view.stale
        timeout_s = min(self._timeout_s, self._check_interval_s) if in_time else self._timeout_s
        request = rpc.RangeRequest(key=view.key, range_end=view.end)
        return view.replace(await self._client.call(_RANGE, request, timeout_s))
