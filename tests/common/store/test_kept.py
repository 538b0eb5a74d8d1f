"""What etcd said last, on disk, for a start without it."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from common import backing
from common.config import Etcd
from common.errors import ConfigError, StoreUnavailable
from common.membership import Membership
from common.store.base import Snapshot
from common.store.kept import KeptMembershipStore
from common.store.memory import MemoryMembershipStore
from tests.common.membership.test_membership import A, Told, instance, running, settled
from tests.servers import EtcdServer, eventually, free_port

ROOT = "/headwater/"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.json"


async def first(store: KeptMembershipStore) -> Snapshot:
    async with aclosing(store.watch(ROOT)) as snapshots:
        return await anext(snapshots)


async def fill(file: Path) -> None:
    store = MemoryMembershipStore()
    await store.put(f"{ROOT}a", b"1")
    await store.put(f"{ROOT}route_key", b"secret")
    kept = KeptMembershipStore(store, str(file))
    assert (await first(kept)).values == {f"{ROOT}a": b"1", f"{ROOT}route_key": b"secret"}
    await eventually(file.exists, 10.0)
    await kept.close()


class Slow(MemoryMembershipStore):
    """Takes long for its first word."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def watch(self, prefix: str) -> AsyncGenerator[Snapshot, None]:
        await self.told.wait()
        async for snapshot in super().watch(prefix):
            yield snapshot


async def test_a_store_that_takes_long_for_its_first_word_is_stood_in_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(file)
    monkeypatch.setattr("common.store.kept.PATIENCE_S", 0.05)
    slow = Slow()
    kept = KeptMembershipStore(slow, str(file))
    async with aclosing(kept.watch(ROOT)) as snapshots:
        found = await anext(snapshots)
        assert (found.values[f"{ROOT}a"], found.stale) == (b"1", True)
        slow.told.set()
        found = await anext(snapshots)
        assert (found.values, found.stale) == ({}, False)
        await slow.put(f"{ROOT}b", b"2")
        assert (await anext(snapshots)).values == {f"{ROOT}b": b"2"}
    await kept.close()
    async with aclosing(KeptMembershipStore(Slow(), str(file)).watch(ROOT)) as snapshots:
        assert (await anext(snapshots)).stale  # and it may be left before the store has said anything


async def test_what_could_not_be_written_is_tried_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.store.kept.EVERY_S", 0.01)
    monkeypatch.setattr("common.store.kept.AGAIN_S", 0.05)
    store = MemoryMembershipStore()
    kept = KeptMembershipStore(store, str(file))
    await store.put(f"{ROOT}a", b"1")
    blocked = file.with_name(f"{file.name}.{os.getpid()}.new")
    blocked.mkdir()  # in the way of the new file, as a disk without room is
    assert (await first(kept)).values == {f"{ROOT}a": b"1"}
    with pytest.raises(AssertionError):
        await eventually(file.exists, 0.3)
    blocked.rmdir()
    await eventually(file.exists, 10.0)
    await kept.close()


async def test_a_start_without_the_store_has_what_it_said_last_until_it_answers(file: Path) -> None:
    await fill(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    away = MemoryMembershipStore()
    away.available = False
    kept = KeptMembershipStore(away, str(file))
    assert kept.age_s is not None
    assert kept.age_s < 60.0
    assert await kept.put_if_absent(f"{ROOT}route_key", b"another") == b"secret"
    with pytest.raises(StoreUnavailable):
        await kept.put_if_absent(f"{ROOT}new", b"x")
    async with aclosing(kept.watch(ROOT)) as snapshots:
        found = await anext(snapshots)
        assert (found.values[f"{ROOT}a"], found.stale) == (b"1", True)
        away.available = True
        found = await anext(snapshots)
        assert (found.values, found.stale) == ({}, False)
        away.available = False
        found = await anext(snapshots)
        assert (found.values, found.stale) == ({}, True)  # what it said itself counts from then on
    await kept.close()


@pytest.mark.parametrize("text", ["", "{}", "[", '{"schema": 2, "saved_at_s": 1, "revision": 1, "values": {}}'])
async def test_what_cannot_be_read_is_none(file: Path, text: str) -> None:
    file.write_text(text)
    assert KeptMembershipStore(MemoryMembershipStore(), str(file)).age_s is None


async def test_a_folder_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        KeptMembershipStore(MemoryMembershipStore(), str(tmp_path / "no" / "file"))


async def test_with_a_real_etcd_that_is_away_at_the_start_and_empty_when_it_is_back(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backing, "STORE_START_S", 2.0)
    told = Told()
    async with EtcdServer() as etcd:
        config = Etcd(urls=(etcd.url,), ttl_s=2.0, snapshot_file=str(file))
        store = await backing.membership_store(config)
        agent = Membership(store)
        for n in range(3):
            await agent.register_instance(A, instance(f"i{n}"))
        async with running(Membership(store, on_change=told)):
            await settled(lambda: len(told.ids(A)) == 3, 10.0)
            await eventually(lambda: file.exists() and b"i2" in file.read_bytes(), 10.0)
        await store.close()
        etcd.kill()
        store = await backing.membership_store(config)  # waits for it, then goes by the file
        told = Told()
        async with running(Membership(store, on_change=told, ttl_s=2.0)) as gateway:
            await settled(lambda: len(told.ids(A)) == 3, 10.0)
            assert gateway.tree["stale"]
            etcd.wipe()
            await etcd.start()
            await settled(lambda: not gateway.tree["stale"], 20.0)
            assert len(told.ids(A)) == 3  # a burst after an outage: doubted until the time to live is over
            await settled(lambda: not told.ids(A), 20.0)
        await store.close()
    nobody = Etcd(urls=(f"http://127.0.0.1:{free_port()}",), snapshot_file=str(file.with_name("none")))
    with pytest.raises(ConfigError, match="no etcd answers"):
        await backing.membership_store(nobody)
