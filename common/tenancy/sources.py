"""Where tenants and keys come from: a file that people write, or the store where the admin API keeps them.

Both give one directory after another, each whole and valid. What cannot be read changes nothing: the last directory
goes on, and the log says what is wrong, once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path as FilePath
from typing import Final, Protocol, TypeVar

import structlog
import yaml
from pydantic import BaseModel, ValidationError

from common.config import load
from common.errors import ConfigError
from common.store.base import MembershipStore, Snapshot
from common.tenancy.directory import (
    MAX_KEYS,
    MAX_TENANTS,
    Directory,
    KeySpec,
    TenantsFile,
    TenantSpec,
)

log = structlog.get_logger()

POLL_S: Final = 1.0  # a file is looked at this often: a stat, and no more while it is the same

M = TypeVar("M", bound=BaseModel)


class TenantSource(Protocol):
    """Gives directories."""

    def watch(self) -> AsyncGenerator[Directory, None]:
        """The present directory, and each one after it."""


class FileTenants:
    """Tenants in a strict YAML file, read again when it changes."""

    def __init__(self, file: str | FilePath, *, poll_s: float = POLL_S) -> None:
        self.file = FilePath(file)
        self._poll_s = poll_s

    def read(self) -> Directory:
        """The file as it is now. Raises ConfigError, with file, line and key."""
        return read_file(self.file)

    async def watch(self) -> AsyncGenerator[Directory, None]:
        """See TenantSource. Raises ConfigError when the file is of no use at first."""
        seen = await asyncio.to_thread(self._mark)
        yield await asyncio.to_thread(self.read)
        while True:
            await asyncio.sleep(self._poll_s)
            mark = await asyncio.to_thread(self._mark)
            if mark == seen:
                continue
            seen = mark
            try:
                directory = await asyncio.to_thread(self.read)
            except ConfigError as error:
                log.error("tenants_file_refused", reason=str(error), going_on="with the tenants read before")
            else:
                log.info("tenants_read", file=str(self.file), tenants=len(directory.tenants), keys=len(directory.keys))
                yield directory

    def _mark(self) -> tuple[int, int, int] | None:
        """Changes when the file does; a replaced file and a link that points elsewhere included. None: no file."""
        try:
            there = os.stat(self.file)
        except OSError:
            return None
        return there.st_mtime_ns, there.st_size, there.st_ino


def read_file(file: FilePath) -> Directory:
    """A file of tenants. Raises ConfigError, with file, line and key."""
    entries = load(TenantsFile, file, environ={}).tenants
    specs = {name: TenantSpec(**entry.model_dump(exclude={"keys"})) for name, entry in entries.items()}
    try:
        return Directory.of(specs, {name: entry.keys for name, entry in entries.items()})
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None


class _StoredKey(KeySpec):
    tenant: str


class StoredTenants:
    """Tenants in the membership store (etcd), beside what membership keeps there and not below it.

    A prefix of its own lets etcd's roles keep the hashes from whoever has to see the rest.
    """

    def __init__(self, store: MembershipStore, root: str) -> None:
        self.store = store
        self.prefix = f"{root.rstrip('/')}-tenants/"
        self._read: dict[str, tuple[bytes, BaseModel | None]] = {}  # what was read of each value

    async def watch(self) -> AsyncGenerator[Directory, None]:
        """See TenantSource. With the store gone, what was known last goes on."""
        known = False
        async with aclosing(self.store.watch(self.prefix)) as snapshots:
            async for snapshot in snapshots:
                if snapshot.stale and (known or not snapshot.values):
                    continue
                known = True
                yield await asyncio.to_thread(self._directory, snapshot)  # some 100 ms for the most there may be

    async def put_tenant(self, name: str, spec: TenantSpec) -> None:
        """Create a tenant or replace what it may. Raises StoreUnavailable."""
        await self.store.put(f"{self.prefix}tenants/{name}", _json(spec))

    async def delete_tenant(self, name: str, keys: list[KeySpec]) -> None:
        """Delete a tenant after its keys. Raises StoreUnavailable; then it may be done again."""
        for key in keys:
            await self.store.delete(f"{self.prefix}keys/{key.id}")
        await self.store.delete(f"{self.prefix}tenants/{name}")

    async def put_key(self, tenant: str, key: KeySpec) -> None:
        """Keep a key, or change what is kept of it. Raises StoreUnavailable."""
        await self.store.put(f"{self.prefix}keys/{key.id}", _json(_StoredKey(**{**dict(key), "tenant": tenant})))

    async def delete_key(self, id_: str) -> None:
        """Forget a key: it is refused from now on. Raises StoreUnavailable."""
        await self.store.delete(f"{self.prefix}keys/{id_}")

    def _directory(self, snapshot: Snapshot) -> Directory:
        tenants: dict[str, TenantSpec] = {}
        keys: dict[str, list[KeySpec]] = {}
        digests: set[str] = set()
        for key, value in sorted(snapshot.values.items()):
            kind, _, name = key.removeprefix(self.prefix).partition("/")
            if kind == "tenants" and len(tenants) < MAX_TENANTS:
                spec = self._value(key, value, TenantSpec)
                if spec is not None:
                    tenants[name] = spec
            elif kind == "keys" and len(digests) < MAX_KEYS:
                stored = self._value(key, value, _StoredKey)
                if stored is not None and stored.id == name and stored.sha256 not in digests:
                    digests.add(stored.sha256)
                    keys.setdefault(stored.tenant, []).append(stored)
        for gone in self._read.keys() - snapshot.values.keys():
            del self._read[gone]
        return Directory.of(tenants, {tenant: tuple(specs) for tenant, specs in keys.items()})

    def _value(self, key: str, value: bytes, model: type[M]) -> M | None:
        before, read = self._read.get(key, (None, None))
        if before != value:
            try:
                read = model.model_validate_json(value)
            except ValidationError as error:
                # Not the error's own words, which quote the value.
                log.error("tenant_record_refused", key=key, reason=error.errors()[0]["type"])
                read = None
            self._read[key] = (value, read)
        return read if isinstance(read, model) else None


def _json(spec: BaseModel) -> bytes:
    return spec.model_dump_json(exclude_defaults=True).encode()


def in_yaml(tenant: str, key: KeySpec) -> str:
    """The lines that put a key into a file of tenants."""
    entry = {"tenants": {tenant: {"keys": [key.model_dump(mode="json", exclude_defaults=True)]}}}
    return yaml.safe_dump(entry, sort_keys=False, allow_unicode=True)
