"""Tenants from a file that people edit, and from the store, in memory and in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from common.errors import ConfigError
from common.store.base import MembershipStore
from common.store.etcd import EtcdMembershipStore
from common.store.memory import MemoryMembershipStore
from common.tenancy.directory import Directory, TenantSpec
from common.tenancy.keys import hashed, make
from common.tenancy.sources import FileTenants, StoredTenants, TenantSource, in_yaml, read_file
from tests.servers import EtcdServer, eventually

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
A, B = "a" * 64, "b" * 64
TEXT = f"""
tenants:
  acme:
    priority: batch
    ceiling: standard
    requests_per_minute: 600
    models: [llama-8b, "qwen-*"]
    regions: [eu]
    keys:
      - {{id: one, sha256: {A}, expires: 2027-01-01}}
  other: {{}}
"""


@asynccontextmanager
async def followed(source: TenantSource) -> AsyncIterator[list[Directory]]:
    seen: list[Directory] = []

    async def follow() -> None:
        async with aclosing(source.watch()) as directories:
            async for directory in directories:
                seen.append(directory)  # noqa: PERF401 - looked at while it grows

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait({task})


# -- a file ------------------------------------------------------------------------------------------------------------


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(file)
    return str(caught.value).removeprefix(str(file))


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HEADWATER_TENANTS__FILE", "elsewhere.yaml"
    )  # the process' own settings are none of its business
    file = tmp_path / "tenants.yaml"
    file.write_text(TEXT)
    directory = read_file(file)
    acme = directory.tenants["acme"]
    assert acme.spec.requests_per_minute == 600
    assert acme.may_use("qwen-7b")
    assert directory.keys[A].tenant == "acme"
    assert directory.keys[A].expires_at == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert directory.tenants["other"].spec == TenantSpec()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants:\n  a:\n    rpm: 5\n", ":3: unknown key 'tenants.a.rpm'"),
        ("tenants:\n  a:\n    requests_per_minute: -1\n", ":3: tenants.a.requests_per_minute: "),
        ("tenants:\n  a: {}\n  a: {}\n", ":3: the key 'a' is given twice"),
        ("tenants:\n  a/b: {}\n", "must be 1 to 64 of letters"),
        ("tenants: [", "not valid YAML"),
        (
            f"tenants:\n  a: {{keys: [{{id: x, sha256: {A}}}]}}\n  b: {{keys: [{{id: y, sha256: {A}}}]}}\n",
            "is there twice",
        ),
        ("", "tenants: field required"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_a_key_in_the_place_of_its_hash_is_not_repeated(tmp_path: Path) -> None:
    key, _ = make(NOW)
    message = refused(tmp_path, f"tenants:\n  a:\n    keys:\n      - id: x\n        sha256: {key}\n")
    assert "never kept" in message
    assert key not in message


async def test_a_change_is_taken_up_and_a_bad_one_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(TEXT)
    async with followed(FileTenants(file, poll_s=0.02)) as seen:
        await eventually(lambda: seen, 20.0)
        file.write_text("tenants: {broken")
        await eventually(lambda: "tenants_file_refused" in capsys.readouterr().out, 20.0)
        assert len(seen) == 1
        file.unlink()
        replaced = tmp_path / "new.yaml"  # as editors and Kubernetes do
        replaced.write_text("tenants: {new: {}}")
        replaced.rename(file)
        await eventually(lambda: len(seen) == 2, 20.0)
        assert set(seen[1].tenants) == {"new"}


async def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        async with aclosing(FileTenants(tmp_path / "none.yaml").watch()) as directories:
            await anext(directories)


def test_the_lines_for_a_file_are_a_file(tmp_path: Path) -> None:
    key, spec = make(NOW, NOW.replace(year=2027), "build: server #1")
    text = in_yaml("acme", spec)
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    assert read_file(file).keys[hashed(key)].spec == spec
    assert key not in text
    assert yaml.safe_load(text)["tenants"]["acme"]["keys"][0]["id"] == spec.id


# -- the store ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[MembershipStore]:
    if request.param == "memory":
        yield MemoryMembershipStore()
        return
    async with EtcdServer() as server:
        store = EtcdMembershipStore([server.url])
        yield store
        await store.close()


async def test_what_one_balancer_writes_all_others_know(store: MembershipStore) -> None:
    source = StoredTenants(store, "/headwater")
    key, spec = make(NOW)
    async with followed(StoredTenants(store, "/headwater")) as seen:
        await eventually(lambda: seen, 20.0)
        assert seen[-1] == Directory()
        await source.put_tenant("acme", TenantSpec(requests_per_minute=5))
        await source.put_key("acme", spec)
        await eventually(lambda: hashed(key) in seen[-1].keys, 20.0)
        assert seen[-1].keys[hashed(key)].tenant == "acme"
        assert seen[-1].keys_of("acme")[0].sha256 == spec.sha256
        await source.put_tenant("acme", TenantSpec(requests_per_minute=6))
        await eventually(lambda: seen[-1].tenants["acme"].spec.requests_per_minute == 6, 20.0)
        await source.delete_key(spec.id)
        await eventually(lambda: not seen[-1].keys, 20.0)
        await source.put_key("acme", spec)
        await eventually(lambda: seen[-1].keys, 20.0)
        await source.delete_tenant("acme", [spec])
        await eventually(lambda: seen[-1] == Directory(), 20.0)


async def test_a_record_that_cannot_be_read_costs_itself_only(
    store: MembershipStore, capsys: pytest.CaptureFixture[str]
) -> None:
    source = StoredTenants(store, "/headwater")
    _, good = make(NOW)
    await store.put("/headwater-tenants/tenants/bad", b'{"requests_per_minute": "SECRET"}')
    await store.put("/headwater-tenants/keys/bad", b"no json SECRET")
    await store.put("/headwater-tenants/keys/zz", b'{"id":"zz","sha256":"%s","tenant":"b"}' % good.sha256.encode())
    await source.put_tenant("good", TenantSpec())
    await source.put_key("good", good)
    async with followed(source) as seen:
        await eventually(lambda: seen and seen[-1].keys, 20.0)
        assert set(seen[-1].tenants) == {"good"}
        assert seen[-1].keys[good.sha256].tenant == "good"  # and not the copy of its hash under another id
    out = capsys.readouterr().out
    assert out.count("tenant_record_refused") == 2
    assert "SECRET" not in out


async def test_with_the_store_gone_the_last_directory_goes_on() -> None:
    store = MemoryMembershipStore()
    source = StoredTenants(store, "/headwater")
    await source.put_tenant("acme", TenantSpec())
    async with followed(source) as seen:
        await eventually(lambda: seen, 20.0)
        store.available = False
        await asyncio.sleep(0.1)
        store.available = True
        await source.put_tenant("other", TenantSpec())
        await eventually(lambda: len(seen[-1].tenants) == 2, 20.0)
        assert all("acme" in directory.tenants for directory in seen)


async def test_a_store_that_was_never_there_says_nothing() -> None:
    store = MemoryMembershipStore()
    store.available = False
    async with followed(StoredTenants(store, "/headwater")) as seen:
        await asyncio.sleep(0.1)
        assert not seen
        store.available = True
        await eventually(lambda: seen == [Directory()], 20.0)
