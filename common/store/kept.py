"""A membership store that keeps on disk what it said last, for a start while it is out of reach (CASES C26).

Only watches and single reads are served from the file, and only until the store has answered; what came from it is
marked stale. It holds the key that tiers sign with, so it is for its owner alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path as FilePath
from typing import Annotated, Final

import msgspec
import structlog

from common import clock
from common.errors import ConfigError, StoreUnavailable
from common.store.base import Lease, MembershipStore, Snapshot

log = structlog.get_logger()

SCHEMA: Final = 1
EVERY_S: Final = 1.0  # it is written at most this often; some ms of a thread for 1,000 instances
AGAIN_S: Final = 10.0  # what could not be written is tried again after this
PATIENCE_S: Final = 2.0  # for the store's first word; normally it takes some milliseconds


class _File(msgspec.Struct, kw_only=True):
    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)]
    saved_at_s: float
    revision: int
    values: dict[str, str]


class KeptMembershipStore:
    """`store`, with its last words in `file`. Raises ConfigError for a file that nobody could write."""

    def __init__(self, store: MembershipStore, file: str) -> None:
        self._store = store
        self._path = FilePath(file)
        self._values: dict[str, bytes] = {}
        self._revision = 0
        self._saved_at_s: float | None = None
        self._heard: set[str] = set()  # prefixes that the store itself has answered for
        self._due: asyncio.Task[None] | None = None
        self._read()
        if not os.access(self._path.parent, os.W_OK):
            raise ConfigError(f"etcd.snapshot_file: {file}: its folder cannot be written to")

    @property
    def age_s(self) -> float | None:
        """How old the file was at the start, by the host's clock; None: there was none that could be used."""
        return None if self._saved_at_s is None else max(0.0, clock.wall_ns() / 1e9 - self._saved_at_s)

    async def lease(self, ttl_s: float) -> Lease:
        """See MembershipStore."""
        return await self._store.lease(ttl_s)

    async def watch(self, prefix: str) -> AsyncGenerator[Snapshot, None]:
        """See MembershipStore. Before the store was ever heard, what it said in an earlier life, marked stale."""
        async with aclosing(self._store.watch(prefix)) as snapshots:
            first = asyncio.ensure_future(anext(snapshots))
            try:
                await asyncio.wait({first}, timeout=PATIENCE_S)
                if not first.done() and self._under(prefix):
                    log.warning("store_takes_long", prefix=prefix, meanwhile="what the snapshot says")
                    yield Snapshot(self._under(prefix), self._revision, stale=True)
                yield self._heard_of(prefix, await first)
            finally:
                first.cancel()
                await asyncio.wait({first})
            async for snapshot in snapshots:
                yield self._heard_of(prefix, snapshot)

    def _heard_of(self, prefix: str, snapshot: Snapshot) -> Snapshot:
        if not snapshot.stale:
            self._heard.add(prefix)
            self._keep(prefix, snapshot)
        elif prefix not in self._heard:
            return Snapshot(self._under(prefix), self._revision, stale=True)
        return snapshot

    async def get(self, key: str) -> bytes | None:
        """See MembershipStore."""
        return await self._store.get(key)

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """See MembershipStore. Without the store, what it held last."""
        try:
            return await self._store.put_if_absent(key, value)
        except StoreUnavailable:
            if key in self._values:
                return self._values[key]
            raise

    async def put(self, key: str, value: bytes) -> None:
        """See MembershipStore."""
        await self._store.put(key, value)

    async def delete(self, key: str) -> bool:
        """See MembershipStore."""
        return await self._store.delete(key)

    async def ping(self, timeout_s: float) -> None:
        """See MembershipStore."""
        await self._store.ping(timeout_s)

    async def close(self) -> None:
        """See MembershipStore."""
        if self._due is not None:
            self._due.cancel()
            await asyncio.wait({self._due})
            await asyncio.to_thread(self._write, *self._words())
        await self._store.close()

    # -- the file ----------------------------------------------------------------------------------------------------

    def _under(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def _keep(self, prefix: str, snapshot: Snapshot) -> None:
        others = {key: value for key, value in self._values.items() if not key.startswith(prefix)}
        self._values = {**others, **snapshot.values}
        self._revision = snapshot.revision
        if self._due is None or self._due.done():
            self._due = asyncio.get_running_loop().create_task(self._write_soon(), name="snapshot file")

    async def _write_soon(self) -> None:
        await asyncio.sleep(EVERY_S)
        while True:
            if await asyncio.to_thread(self._write, *self._words()):
                return
            await asyncio.sleep(AGAIN_S)

    def _words(self) -> tuple[dict[str, bytes], int]:
        return self._values, self._revision

    def _write(self, values: dict[str, bytes], revision: int) -> bool:
        """Put another file in its place, whole or not at all; whether that went well."""
        texts = {key: value.decode(errors="replace") for key, value in values.items()}
        record = _File(schema=SCHEMA, saved_at_s=clock.wall_ns() / 1e9, revision=revision, values=texts)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            log.warning("snapshot_not_written", file=str(self._path), reason=str(error))
            with suppress(OSError):
                new.unlink()
            return False
        return True

    def _read(self) -> None:
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("snapshot_not_read", file=str(self._path), reason=str(error))
            return
        self._values = {key: text.encode() for key, text in record.values.items()}
        self._revision, self._saved_at_s = record.revision, record.saved_at_s
