"""All sources together with the list, and in the agent's process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import structlog

from services.agent.config import AgentConfig, InstanceConfig
from services.agent.sources.base import SourceUnavailable, Tell
from services.agent.sources.sources import Sources
from tests import servers
from tests.servers import EtcdServer, etcd
from tests.services.agent.fake_server import FakeServer, vllm
from tests.services.agent.sources.test_docker import Engine, container

__all__ = ["etcd"]

eventually = partial(servers.eventually, timeout_s=30.0)


class Told:
    """A source that says what a test says."""

    name = "told"

    def __init__(self, *words: Sequence[str] | Exception) -> None:
        self.words = list(words)
        self.followed = 0

    async def follow(self, tell: Tell) -> None:
        self.followed += 1
        while self.words:
            word = self.words.pop(0)
            if isinstance(word, Exception):
                raise word
            tell([InstanceConfig(url=url, id=id_) for id_, url in (text.split("=") for text in word)])
        await asyncio.Event().wait()


def config(**values: Any) -> AgentConfig:
    return AgentConfig.model_validate({"region": "eu", "cluster": "c1", **values})


def sources(configured: AgentConfig, *told: Told) -> tuple[Sources, list[list[str]]]:
    seen: list[list[str]] = []
    found = Sources(configured, lambda c: seen.append([f"{c.instance_id(i)}={i.url}" for i in c.instances]), Random(1))
    found._sources = list(told)
    found._found = [()] * len(told)
    return found, seen


async def test_the_list_and_all_sources_are_one_set() -> None:
    listed = config(instances=[{"url": "http://10.0.0.1:80", "id": "one"}], discovery={"max_instances": 4})
    both, seen = sources(
        listed,
        Told(["two=http://10.0.0.2:80", "same=http://10.0.0.1:80"], ["two=http://10.0.0.2:80"]),
        Told(["two=http://10.0.0.3:80", *(f"n{i}=http://10.0.1.{i}:80" for i in range(4))]),
    )
    with structlog.testing.capture_logs() as logs:
        both.start()
        await eventually(lambda: seen and len(seen[-1]) == 4)
        await both.close()
    assert seen[-1] == [
        "one=http://10.0.0.1:80",
        "two=http://10.0.0.2:80",
        "n0=http://10.0.1.0:80",
        "n1=http://10.0.1.1:80",
    ]
    assert len(seen) == 2  # what changes nothing is not told
    left_out = [line["server"] for line in logs if line["event"] == "server_left_out"]
    assert left_out == ["n2", "n3", "two at http://10.0.0.3:80"]


async def test_a_source_that_fails_takes_nothing_away_and_is_asked_again() -> None:
    failing = Told(["a=http://10.0.0.1:80"], SourceUnavailable("away"), KeyError("a bug"), ["b=http://10.0.0.2:80"])
    found, seen = sources(config(), failing)
    with structlog.testing.capture_logs() as logs:
        found.start()
        await eventually(lambda: seen and seen[-1] == ["b=http://10.0.0.2:80"])
        await found.close()
    assert seen == [["a=http://10.0.0.1:80"], ["b=http://10.0.0.2:80"]]
    assert failing.followed == 3
    assert [line["event"] for line in logs] == [
        *("servers_changed", "source_unavailable", "source_failed", "servers_changed")
    ]
    assert logs[1]["kept"] == 1


async def test_another_list_leaves_what_the_sources_have() -> None:
    found, seen = sources(
        config(instances=[{"url": "http://10.0.0.1:80", "id": "one"}]), Told(["two=http://10.0.0.2:80"])
    )
    found.start()
    await eventually(lambda: len(seen) == 1)
    found.reconfigure(config(instances=[{"url": "http://10.0.0.3:80", "id": "three"}]))
    await found.close()
    assert seen[-1] == ["three=http://10.0.0.3:80", "two=http://10.0.0.2:80"]


async def test_an_agent_registers_what_its_source_has(tmp_path: Path, etcd: EtcdServer) -> None:
    """The whole process: a container appears and goes, and so does its key."""
    key = "/headwater/regions/eu/clusters/c1/instances/gpu"
    file = tmp_path / "agent.yaml"
    values = {
        "region": "eu",
        "cluster": "c1",
        "etcd": {"urls": [etcd.url], "ttl_s": 2},
        "scrape_interval_s": 0.2,
        "discovery": {"docker": [{"url": f"unix://{tmp_path}/docker.sock", "refresh_s": 0.2}]},
    }
    file.write_text(json.dumps(values))
    async with FakeServer(vllm()) as server, Engine(tmp_path) as engine:
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.cli.__main__", "agent", "--config", str(file)),
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")},
            )
        try:
            here = container("gpu", {"port": str(server.port)})
            here["NetworkSettings"] = {"Networks": {"host": {}}}

            async def known() -> bool:
                return key in await etcd.keys()

            async def forgotten() -> bool:
                return key not in await etcd.keys()

            engine.containers = [here]
            await eventually(known)
            engine.containers = []
            await eventually(forgotten)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20.0) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert "Traceback" not in (tmp_path / "log").read_text()
