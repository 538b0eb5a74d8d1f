"""A configuration that changes: what counts, what is refused, and that it is all or nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from common import reload as reload_module
from common.config import TierConfig, load
from common.errors import ConfigError
from common.reload import Reloader, Source, changes
from tests.servers import eventually

GOOD = "retry: {attempts: 2}\nlimits: {max_body_bytes: 5000}\nlisten: 127.0.0.1:8080\n"


class World:
    """A file, and a reloader on it whose applied configurations are kept."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.applied: list[TierConfig] = []
        self.registry = CollectorRegistry()
        self.reloader: Reloader[TierConfig] = Reloader(
            load(TierConfig, file),
            Source(lambda: load(TierConfig, file), file),
            self.applied.append,
            live=("retry", "limits", "tracing.sample_ratio"),
            check=self.check,
            registry=self.registry,
        )

    @staticmethod
    def check(config: TierConfig) -> None:
        if config.retry.attempts == 7:
            raise ConfigError("seven is not to be")

    @property
    def attempts(self) -> list[int]:
        return [config.retry.attempts for config in self.applied]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"headwater_config_{name}", labels) or 0.0

    async def refused(self, count: int = 1) -> None:
        await eventually(lambda: self.metric("reloads_total", result="refused") >= count, 10.0)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(reload_module, "LOOK_S", 0.05)
    file = tmp_path / "headwater.yaml"
    file.write_text(GOOD)
    found = World(file)
    task = asyncio.create_task(found.reloader.run())
    await asyncio.sleep(0)  # from here on it listens to SIGHUP
    yield found
    task.cancel()
    await asyncio.wait({task})
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


def test_changes_are_named_by_their_keys() -> None:
    old = TierConfig()
    new = TierConfig.model_validate(
        {"retry": {"attempts": 5}, "cors": {"allowed_origins": ["*"]}, "listen": "127.0.0.1:1"}
    )
    assert list(changes(old, new)) == ["listen", "retry.attempts", "cors.allowed_origins"]
    assert not list(changes(old, TierConfig()))


async def test_another_content_is_taken_over_as_a_whole(world: World) -> None:
    world.file.write_text(GOOD.replace("attempts: 2", "attempts: 5").replace("5000", "6000"))
    await eventually(lambda: world.attempts == [5], 10.0)
    assert world.applied[0].limits.max_body_bytes == 6000
    assert world.reloader.config is world.applied[0]
    assert world.metric("valid") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "retry: {attempts: 5",
        "retry: {attempts: 5}\nlimits: {max_body_bytes: -1}\nlisten: 127.0.0.1:8080",
        "retry: {attempts: 5}\nlisten: 127.0.0.1:8081",
        "retry: {attempts: 7}\nlisten: 127.0.0.1:8080",
        None,
    ],
    ids=["syntax", "a value in the second section", "a key that is fixed", "what a check refuses", "no file"],
)
async def test_a_bad_one_changes_nothing_is_told_once_and_is_over_with_the_old_one(
    world: World, text: str | None
) -> None:
    with capture_logs() as logs:
        world.file.unlink() if text is None else world.file.write_text(text)
        await world.refused()
        await world.reloader.reload()
        assert world.metric("valid") == 0.0
        assert world.reloader.error
        world.file.write_text(GOOD)
        await eventually(lambda: world.metric("valid") == 1.0, 10.0)
    assert not world.applied
    assert [entry["event"] for entry in logs] == ["config_refused", "config_valid_again"]


async def test_what_is_fixed_is_named(world: World) -> None:
    world.file.write_text(GOOD.replace("8080", "8081") + "etcd: {ttl_s: 9}\n")
    await world.refused()
    assert world.reloader.error == f"{world.file}: listen, etcd.ttl_s cannot change while the process runs"


async def test_one_key_of_a_fixed_section_may_be_live(world: World) -> None:
    world.file.write_text(GOOD + "tracing: {sample_ratio: 0.5}\n")
    await eventually(lambda: world.applied and world.applied[-1].tracing.sample_ratio == 0.5, 10.0)
    world.file.write_text(GOOD + "tracing: {sample_ratio: 0.5, recent: 5}\n")
    await world.refused()


async def test_of_two_writes_in_a_row_the_last_wins(world: World) -> None:
    world.file.write_text(GOOD.replace("attempts: 2", "attempts: 5"))
    await asyncio.sleep(0.05)
    world.file.write_text(GOOD.replace("attempts: 2", "attempts: 6"))
    await eventually(lambda: world.attempts and world.attempts[-1] == 6, 10.0)


async def test_a_rename_over_it_and_another_target_of_a_link_count(tmp_path: Path, world: World) -> None:
    def other(name: str, attempts: int) -> Path:
        path = tmp_path / name
        path.write_text(GOOD.replace("attempts: 2", f"attempts: {attempts}"))
        return path

    other("new", 3).rename(world.file)
    await eventually(lambda: world.attempts == [3], 10.0)
    (tmp_path / "link").symlink_to(other("one", 4))
    (tmp_path / "link").rename(world.file)
    await eventually(lambda: world.attempts == [3, 4], 10.0)
    (tmp_path / "link").symlink_to(other("two", 5))
    (tmp_path / "link").rename(world.file)
    await eventually(lambda: world.attempts == [3, 4, 5], 10.0)


async def test_sighup_reads_it_again(world: World) -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    await eventually(lambda: world.metric("reloads_total", result="unchanged") == 1.0, 10.0)
    assert not world.applied


async def test_without_a_file_sighup_does_no_harm() -> None:
    applied: list[Any] = []
    reloader: Reloader[TierConfig] = Reloader(TierConfig(), Source(TierConfig), applied.append, live=())
    task = asyncio.create_task(reloader.run())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGHUP)
    before = reloader.loaded_at_ns
    await eventually(lambda: reloader.loaded_at_ns != before, 10.0)
    task.cancel()
    await asyncio.wait({task})
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert not applied
