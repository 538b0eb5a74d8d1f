"""Replicas that come when they are asked for and go when they are not, as processes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.integration.clients import Raw, ask, chat, get, metrics, post, total
from tests.integration.system import PORTS, Addresses, Process, headwater
from tests.servers import eventually

MODEL = "tiny"
PATH = "/v1/chat/completions"
COLD_START_S = 90.0  # of a process, on a machine that runs other tests as well


def configured(tmp_path: Path, addresses: Addresses, **model: Any) -> Path:
    engine = [sys.executable, "-m", "services.engine_sim", "--model", MODEL, "--profile", "t4", "--port", "{port}"]
    group = {"gpu": "t4", "max_replicas": 3, "cold_start_s": 2.0}
    group["process"] = {"command": engine, "first_port": PORTS.take(), "log_dir": str(tmp_path), "stop_s": 5.0}
    config = {
        "listen": f"127.0.0.1:{addresses.data}",
        "admin": f"127.0.0.1:{addresses.admin}",
        "scrape_interval_s": 0.2,
        "queue": {"timeout_s": COLD_START_S},
        "log": {"format": "json"},
        "scaling": {"interval_s": 0.25, "models": {MODEL: {"groups": {"local": group}, **model}}},
    }
    file = tmp_path / "up.yaml"
    file.write_text(json.dumps(config))
    return file


async def patient(addresses: Addresses) -> int:
    """The status of an answer that a server has to be started for."""
    async with await Raw.connect(addresses.url) as raw:
        raw.send(post(PATH, chat(MODEL, max_tokens=3)))
        return (await raw.response(COLD_START_S)).status


async def scaling(addresses: Addresses) -> dict[str, Any]:
    return dict((await get(f"{addresses.admin_url}/admin/v1/scaling")).json()["models"][MODEL])


async def serving(addresses: Addresses, count: int) -> bool:
    return bool((await scaling(addresses))["groups"]["local"]["serving"] == count)


async def test_requests_wait_for_the_first_replica_more_come_for_more_and_none_stays_when_idle(
    tmp_path: Path,
) -> None:
    addresses = Addresses(PORTS.take(), PORTS.take())
    quick = {"idle_s": 4.0, "cooldown_s": 4.0, "panic_s": 4.0, "panic_window_s": 2.0, "bucket_s": 1.0}
    file = configured(tmp_path, addresses, utilization=0.2, **quick)
    up = Process("up", headwater("up", "--config", str(file)), f"{addresses.admin_url}/readyz")
    async with up:
        idle = await scaling(addresses)
        assert (idle["reason"], idle["groups"]["local"]["desired"]) == ("idle", 0)  # nobody has asked
        first = await asyncio.gather(*(patient(addresses) for _ in range(3)))
        assert first == [200, 200, 200]  # they have waited for it
        assert (await scaling(addresses))["groups"]["local"]["desired"] >= 1
        assert (await ask(addresses.url, PATH, chat("another"))).status == 404

        statuses: list[int] = []

        async def client() -> None:
            while not await serving(addresses, 3):
                answer = await ask(addresses.url, PATH, chat(MODEL, max_tokens=40, ignore_eos=True))
                statuses.append(answer.status)

        async with asyncio.timeout(90.0):
            await asyncio.gather(*(client() for _ in range(20)))
        assert set(statuses) == {200}
        seen = await metrics(addresses.admin_url)
        assert total(seen, "headwater_scaling_desired_replicas") == 3.0

        await eventually(lambda: serving(addresses, 0), 60.0)  # idle
        assert (await scaling(addresses))["groups"]["local"]["desired"] == 0
        assert await patient(addresses) == 200  # and from nothing again
    logs = [log.read_text() for log in tmp_path.glob("*.log")]
    assert len(logs) == 3


async def test_a_replica_that_dies_is_replaced_and_none_outlives_its_balancer(tmp_path: Path) -> None:
    addresses = Addresses(PORTS.take(), PORTS.take())
    file = configured(tmp_path, addresses, min_replicas=1)
    up = Process("up", headwater("up", "--config", str(file)), f"{addresses.admin_url}/readyz")
    async with up:
        await eventually(lambda: serving(addresses, 1), COLD_START_S)
        (first,) = pids(up)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: pids(up) not in ([], [first]), 30.0)
        await eventually(lambda: serving(addresses, 1), COLD_START_S)
        assert (await ask(addresses.url, PATH, chat(MODEL, max_tokens=3))).status == 200
        second = pids(up)
        assert len(second) == 1
        os.kill(up.pid, signal.SIGTERM)
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in second), 40.0)


def pids(up: Process) -> list[int]:
    """Of the replicas that run."""
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"engine_sim" in Path(f"/proc/{pid}/cmdline").read_bytes()]
