"""Presence in etcd: keys under a lease that is renewed, and put back whenever they are missing.

Two facts about etcd shape this (CASES C41). A renewal that succeeds says nothing of the keys, so each renewal also asks
which keys the lease still holds. And a plain write or delete would hit a successor's key, so every write of a key but
the first is a transaction on the lease that holds it.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any, Final

import structlog
from aetcd import rpc

from common.clock import now
from common.errors import LeaseLost, StoreError
from common.store.etcd.client import RETRY_S, Client, Method, Pauses

log = structlog.get_logger()

WRITES_AT_ONCE: Final = 32  # pipelined on the connection

_TXN: Final[Method] = lambda link: link.kv.Txn  # noqa: E731 - names for calls
_GRANT: Final[Method] = lambda link: link.lease.LeaseGrant  # noqa: E731
_REVOKE: Final[Method] = lambda link: link.lease.LeaseRevoke  # noqa: E731
_KEEP_ALIVE: Final[Method] = lambda link: link.keep_alive  # noqa: E731
_TIME_TO_LIVE: Final[Method] = lambda link: link.lease.LeaseTimeToLive  # noqa: E731


class EtcdLease:
    """See Lease. One task does all the renewing and writing; the methods tell it what ought to be there."""

    def __init__(self, client: Client, ttl_s: float, timeout_s: float) -> None:
        self._client = client
        self._ttl_s = max(1, math.ceil(ttl_s))  # etcd counts whole seconds
        self._timeout_s = timeout_s
        self._id = 0  # 0: none granted yet, or lost
        self._renew_at = 0.0
        self._values: dict[str, bytes] = {}  # what ought to be there
        self._pending: dict[str, _Write] = {}  # what is not known to be
        self._presented: set[str] = set()  # keys that were ours once: from then on a successor's claim counts
        self._superseded: set[str] = set()  # keys that a successor holds
        self._postponed: set[str] = set()  # those of them that need not be tried again before the next renewal
        self._wake = asyncio.Event()
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="etcd-lease")

    async def put(self, key: str, value: bytes) -> None:
        """See Lease."""
        self._values[key] = value
        await self._submit(key, value)

    async def delete(self, key: str) -> None:
        """See Lease."""
        if self._values.pop(key, None) is not None:
            await self._submit(key, None)

    async def close(self) -> None:
        """See Lease."""
        if self._closed:
            return
        self._closed = True
        self._task.cancel()
        await asyncio.wait({self._task})
        for write in self._pending.values():
            write.settle()
        if not self._id:
            return
        try:
            await self._client.call(_REVOKE, rpc.LeaseRevokeRequest(ID=self._id), self._timeout_s)
        except LeaseLost:
            pass
        except StoreError as error:
            log.warning("etcd lease left to expire", ttl_s=self._ttl_s, reason=str(error))

    async def _submit(self, key: str, value: bytes | None) -> None:
        if self._closed:
            return
        replaced = self._pending.get(key)
        write = self._pending[key] = _Write(value)
        if replaced is not None:
            replaced.settle()
        self._postponed.discard(key)
        self._wake.set()
        await asyncio.wait({write.done}, timeout=self._timeout_s)

    # -- the task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pauses = Pauses(longest_s=min(RETRY_S[1], self._ttl_s / 12))
        while True:
            self._wake.clear()
            try:
                await self._round()
            except StoreError as error:  # the client logs that etcd is out of reach
                if isinstance(error, LeaseLost):
                    self._lost()
                await pauses.next()
            else:
                pauses.reset()
                await self._rest()

    async def _rest(self) -> None:
        """Until the next renewal is due, or there is something to write."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._renew_at - now()) if self._id else None):
                await self._wake.wait()

    async def _round(self) -> None:
        if self._id and now() >= self._renew_at:
            await self._renew()
        if not self._id and self._pending:
            await self._grant()
        while due := [key for key in self._pending if key not in self._postponed]:
            await self._write(due[:WRITES_AT_ONCE])

    async def _grant(self) -> None:
        asked_at = now()
        answer = await self._client.call(_GRANT, rpc.LeaseGrantRequest(TTL=self._ttl_s), self._timeout_s)
        self._id, self._renew_at = answer.ID, renew_at(asked_at, answer.TTL)

    async def _renew(self) -> None:
        """Renew, then compare the keys that the lease holds with those it should. Raises StoreError."""
        timeout_s = min(self._timeout_s, self._ttl_s / 6)  # some attempts must fit between the first and the expiry
        asked_at = now()
        renewed = await self._client.call(_KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=self._id), timeout_s)
        if renewed.TTL <= 0:  # etcd does not know it
            self._lost()
            return
        self._renew_at = renew_at(asked_at, renewed.TTL)
        self._postponed.clear()
        request = rpc.LeaseTimeToLiveRequest(ID=self._id, keys=True)
        held = await self._client.call(_TIME_TO_LIVE, request, timeout_s)
        for key in sorted(self._values.keys() - {k.decode() for k in held.keys} - self._pending.keys()):
            log.warning("own key is gone from etcd, writing it again", key=key)
            self._pending[key] = _Write(self._values[key])

    def _lost(self) -> None:
        log.warning("etcd lease lost, asking for a new one", ttl_s=self._ttl_s)
        self._id = 0
        self._postponed.clear()
        for key, write in list(self._pending.items()):
            if write.value is None:  # it went with the lease
                self._settle(key, write)
        for key, value in self._values.items():
            self._pending.setdefault(key, _Write(value))

    async def _write(self, keys: list[str]) -> None:
        """Carry out what is pending of these keys. Raises StoreError when any of it failed."""
        writes = [self._write_one(key, self._pending[key]) for key in keys]
        for result in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _write_one(self, key: str, write: _Write) -> None:
        request = self._request(key.encode(), write.value, guarded=key in self._presented)
        answer = await self._client.call(_TXN, request, self._timeout_s)
        if write.value is None:
            self._presented.discard(key)
            self._superseded.discard(key)
            self._settle(key, write)
        elif answer.succeeded or answer.responses[0].response_txn.succeeded:
            self._presented.add(key)
            self._superseded.discard(key)
            self._settle(key, write)
        else:
            if key not in self._superseded:
                log.warning("own key was taken over by another lease, leaving it", key=key)
            self._superseded.add(key)
            self._postponed.add(key)
            write.settle()  # yet it stays pending, for when the successor leaves

    def _request(self, key: bytes, value: bytes | None, *, guarded: bool) -> Any:
        """A transaction: delete if ours; put if it is nobody's or ours, or (unguarded) whoever's it is."""
        ours = rpc.Compare(key=key, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=self._id)
        if value is None:
            delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
            return rpc.TxnRequest(compare=[ours], success=[delete])
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=self._id))
        if not guarded:
            return rpc.TxnRequest(success=[put])
        # A key that is absent compares as under no lease; one written by hand is under none, and has no live owner.
        nobodys = rpc.Compare(key=key, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=0)
        otherwise = rpc.RequestOp(request_txn=rpc.TxnRequest(compare=[ours], success=[put]))
        return rpc.TxnRequest(compare=[nobodys], success=[put], failure=[otherwise])

    def _settle(self, key: str, write: _Write) -> None:
        if self._pending.get(key) is write:
            del self._pending[key]
        write.settle()


def renew_at(asked_at: float, ttl_s: float) -> float:
    """When to renew a lease next, monotonic seconds.

    Counted from before the renewal was asked for, which is no later than what etcd counts from: however late its answer
    comes, the next attempt is two thirds of the time to live ahead of the expiry, or due at once.
    """
    return asked_at + ttl_s / 3


class _Write:
    """One key to set, or to delete (value None); `done` when it was, or no longer matters."""

    __slots__ = ("done", "value")

    def __init__(self, value: bytes | None) -> None:
        self.value = value
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
