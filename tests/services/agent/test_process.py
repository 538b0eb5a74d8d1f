"""The agent as a process: real etcd, NVML by LD_LIBRARY_PATH, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests import servers
from tests.servers import EtcdServer, etcd
from tests.services.agent.fake_server import FakeServer, vllm
from tests.services.agent.nvml_stub import build, compiler

__all__ = ["etcd"]

RUN = """
import sys, uvloop
from common.config import load
from services.agent.__main__ import run
from services.agent.config import AgentConfig
uvloop.run(run(load(AgentConfig, sys.argv[1])))
"""
KEY = "/headwater/regions/eu/clusters/c1/instances/one"

eventually = partial(servers.eventually, timeout_s=8.0)


@asynccontextmanager
async def agent(folder: Path, etcd_url: str, server: FakeServer) -> AsyncIterator[asyncio.subprocess.Process]:
    config = folder / "agent.yaml"
    config.write_text(
        json.dumps(
            {
                "region": "eu",
                "cluster": "c1",
                "etcd": {"urls": [etcd_url], "ttl_s": 2},
                "scrape_interval_s": 0.2,
                "instances": [{"url": server.url, "id": "one", "devices": [0]}],
            }
        )
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, str(config), stdout=log, stderr=log, env=environment
        )
    try:
        yield process
    except AssertionError:
        print((folder / "log").read_text())
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_registers_under_a_lease_and_revokes_it_when_told_to_leave(tmp_path: Path, etcd: EtcdServer) -> None:
    if compiler() is not None:
        build(tmp_path)
    async with FakeServer(vllm()) as server, agent(tmp_path, etcd.url, server) as process:

        async def registered() -> bool:
            return KEY in await etcd.keys()

        await eventually(registered)
        assert await etcd.lease_of(KEY) != "0"
        if compiler() is not None:

            async def classified() -> bool:
                return '"gpu":"h100"' in await etcd.ctl("get", KEY)

            await eventually(classified)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5.0) == 0
        assert time.monotonic() - began < 2.5
        assert KEY not in await etcd.keys()
        log = (tmp_path / "log").read_text()
        assert "Traceback" not in log
        assert "agent_left" in log


async def test_it_starts_without_etcd_and_registers_when_there_is_one(tmp_path: Path) -> None:
    late = EtcdServer()
    try:
        async with FakeServer(vllm()) as server, agent(tmp_path, late.url, server) as process:
            await eventually(lambda: server.asked["/metrics"] > 3)
            await late.start()

            async def registered() -> bool:
                return KEY in await late.keys()

            await eventually(registered)
            assert process.returncode is None
    finally:
        late.discard()


async def test_it_leaves_at_once_even_if_etcd_never_came(tmp_path: Path) -> None:
    async with FakeServer(vllm()) as server, agent(tmp_path, "http://127.0.0.1:1", server) as process:
        await eventually(lambda: server.asked["/metrics"] > 1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 8.0) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("values", [{"etcd": {"urls": []}}, {"listen": "203.0.113.1:1"}])
async def test_what_cannot_work_ends_start_up(values: dict[str, object]) -> None:
    from common.errors import ConfigError
    from services.agent.__main__ import run
    from services.agent.config import AgentConfig

    config = AgentConfig.model_validate({"region": "eu", "cluster": "c1", "advertise": "h", **values})
    with pytest.raises(ConfigError):
        await run(config)
