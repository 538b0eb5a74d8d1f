"""What a tier stands on, made as its configuration says: the store of members, the store of sessions, the shared keys.

Imports that cost are made here, when they are needed: gRPC for etcd, the Redis client for Redis.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from typing import Any

import structlog

from common import clock
from common.config import Auth, Etcd, Redis, Tracing
from common.errors import ConfigError, StoreUnavailable
from common.explain.stream import DecisionStream
from common.records import RequestRecord
from common.route import RouteSigner
from common.store.base import AffinityStore, MembershipStore
from common.store.kept import KeptMembershipStore
from common.store.memory import MemoryAffinityStore, MemoryMembershipStore

log = structlog.get_logger()

STORE_START_S = 5.0  # etcd must answer within this when a tier starts
FIRST_WORD_S = 60.0  # … and then say what there is; it takes milliseconds, unless the machine has no time
STORE_AGAIN_S = 0.2  # between two attempts within that
LEAST_KEY_BYTES = 16


def verify(etcd: Etcd, redis: Redis) -> None:
    """Raise ConfigError for addresses that are none. Connects to nothing."""
    if redis.url:
        from common.store.redis_client import connect  # noqa: PLC0415

        connect(redis.url, max_connections=1, timeout_s=1.0)
    for name, file in (("ca_file", etcd.ca_file), ("cert_file", etcd.cert_file), ("key_file", etcd.key_file)):
        if file and not os.access(file, os.R_OK):
            raise ConfigError(f"etcd.{name}: {file} cannot be read")
    if bool(etcd.user) != bool(etcd.password):
        raise ConfigError("etcd: a user needs a password, and a password a user")


async def membership_store(etcd: Etcd) -> MembershipStore:
    """etcd, or this process's memory. Raises ConfigError when no etcd answers and no snapshot says what it held."""
    if not etcd.urls:
        return MemoryMembershipStore()
    from common.store.etcd import EtcdMembershipStore, EtcdTls  # noqa: PLC0415 - gRPC is not needed without it

    store: MembershipStore = EtcdMembershipStore(
        etcd.urls,
        user=etcd.user,
        password=etcd.password,
        tls=EtcdTls(etcd.ca_file, etcd.cert_file, etcd.key_file),
        check_interval_s=etcd.ttl_s / 5.0,
    )
    kept = None
    if etcd.snapshot_file:
        store = kept = KeptMembershipStore(store, etcd.snapshot_file)
    try:
        await store.ping(STORE_START_S)
    except StoreUnavailable as error:
        if kept is not None and kept.age_s is not None:
            log.warning("etcd_unavailable", reason=str(error), meanwhile=f"a snapshot {kept.age_s:.0f} s old")
            return store
        await store.close()
        raise ConfigError(f"etcd.urls: no etcd answers at {', '.join(etcd.urls)}: {error}") from None
    return store


def affinity_store(redis: Redis, max_sessions: int) -> AffinityStore:
    """Redis, or this process's memory, for so many sessions."""
    if not redis.url:
        return MemoryAffinityStore(max_sessions=max_sessions)
    from common.store.redis import RedisAffinityStore  # noqa: PLC0415

    return RedisAffinityStore(redis.url, budget_ms=redis.budget_ms)


async def warm(store: AffinityStore) -> None:
    """Connect to the affinity store before the first request, whose budget a handshake would not fit into."""
    try:
        await store.ping(STORE_START_S)
    except StoreUnavailable as error:
        log.warning("affinity_store_unavailable", reason=str(error))


class RouteKeys:
    """The keys that sign route headers: configured ones, or those that all tiers of an etcd share.

    The shared ones stand under `{prefix}/route_key`, separated by commas, the first one signing and all verifying, and
    are made by whichever tier comes first. They are rotated there, in three steps, each after the tiers have heard of
    the last (seconds): `OLD,NEW`, then `NEW,OLD`, then `NEW`.
    """

    def __init__(self, auth: Auth, etcd: Etcd, store: MembershipStore) -> None:
        self._configured = tuple(key.encode() for key in auth.route_keys)
        self._name = f"{etcd.prefix}/route_key"
        self._store = store

    async def signer(self) -> RouteSigner:
        """A signer with the keys as they are. Raises ConfigError when they cannot be read."""
        if self._configured:
            return RouteSigner(self._configured)
        deadline = clock.now() + STORE_START_S
        while True:  # a store that is only slow, on a machine where everything starts at once, is waited for
            try:
                value = await self._store.put_if_absent(self._name, secrets.token_hex(32).encode())
                break
            except StoreUnavailable as error:
                if clock.now() >= deadline:
                    raise ConfigError(f"etcd.urls: the route key cannot be read: {error}") from None
                await asyncio.sleep(STORE_AGAIN_S)
        keys = keys_in(value)
        if not keys:
            raise ConfigError(f"etcd: {self._name} holds no key of at least {LEAST_KEY_BYTES} characters")
        return RouteSigner(keys)

    async def follow(self, signer: RouteSigner) -> None:
        """Give the signer other keys whenever the shared ones change, until cancelled; without any it keeps its own."""
        if self._configured:
            return
        async for snapshot in self._store.watch(self._name):
            if self._name not in snapshot.values and not snapshot.stale:
                await self._put_back(signer)  # or whoever starts next makes another one, which nobody believes yet
                continue
            keys = keys_in(snapshot.values.get(self._name, b""))
            if keys and keys != signer.keys:
                signer.keys = keys
                log.info("route_keys_changed", keys=len(keys))

    async def _put_back(self, signer: RouteSigner) -> None:
        try:
            await self._store.put_if_absent(self._name, b",".join(signer.keys))
        except StoreUnavailable as error:
            log.warning("route_keys_not_put_back", reason=str(error))


def keys_in(value: bytes) -> tuple[bytes, ...]:
    """The keys of a list; none if one of them is too short to be one."""
    keys = tuple(key.strip() for key in value.split(b",") if key.strip())
    return keys if all(len(key) >= LEAST_KEY_BYTES for key in keys) else ()


def decision_stream(tracing: Tracing, redis: Redis, view: Callable[[RequestRecord], Any]) -> DecisionStream | None:
    """The stream that `tracing` names, None for none."""
    if not tracing.decisions_stream:
        return None
    from common.store.redis_stream import StreamWriter  # noqa: PLC0415 - costs where it is not needed

    writer = StreamWriter(redis.url, tracing.decisions_stream, tracing.decisions_stream_entries, field="decision")
    return DecisionStream(writer, view)
