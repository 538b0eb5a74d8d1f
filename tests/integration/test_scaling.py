"""Replicas that come when they are asked for and go when they are not, as processes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.fake_engine import FakeEngine, Script
from tests.integration.clients import Raw, ask, chat, get, metrics, post, total
from tests.integration.system import PORTS, Addresses, Process, headwater
from tests.servers import EtcdServer, RedisServer, eventually

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


async def test_what_a_client_of_the_global_tier_waits_for_is_started_by_its_cluster(tmp_path: Path) -> None:
    engine, beside = FakeEngine("i1", Script.whole()), FakeEngine("i2", Script.whole())
    engine.port = PORTS.take()
    await beside.start()  # of another model: a cluster without any server is taken to serve whatever it is asked for
    asked: list[dict[str, Any]] = []

    async def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What the webhook reaches: it starts the server that the agent looks for."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
        asked.append(json.loads(await reader.readexactly(length)))
        if asked[-1]["replicas"] and engine._server is None:
            await engine.start()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    hook = await asyncio.start_server(start, "127.0.0.1", 0)
    webhook = {"url": f"http://127.0.0.1:{hook.sockets[0].getsockname()[1]}/scale"}
    groups = {"local": {"gpu": "t4", "max_replicas": 1, "cold_start_s": 2.0, "webhook": webhook}}
    tiers: dict[str, dict[str, Any]] = {
        "global": {"models": {"on_demand": [MODEL]}},
        "region": {"region": "eu"},
        "instance": {
            "region": "eu",
            "cluster": "c1",
            "scaling": {"interval_s": 0.25, "models": {MODEL: {"groups": groups, "idle_s": 600.0}}},
        },
    }
    async with AsyncExitStack() as stack:
        etcd, redis = await stack.enter_async_context(EtcdServer()), await stack.enter_async_context(RedisServer())
        places = {name: Addresses(PORTS.take(), PORTS.take()) for name in tiers}
        for name, settings in tiers.items():
            values = {
                "listen": f"127.0.0.1:{places[name].data}",
                "admin": f"127.0.0.1:{places[name].admin}",
                "etcd": {"urls": [etcd.url]},
                "redis": {"url": redis.url, "budget_ms": 500},
                "queue": {"timeout_s": COLD_START_S},
                **settings,
            }
            file = tmp_path / f"{name}.yaml"
            file.write_text(json.dumps(values))
            argv = headwater(name, "--config", str(file))
            await stack.enter_async_context(Process(name, argv, f"{places[name].admin_url}/readyz"))
        file = tmp_path / "agent.yaml"
        instances = [
            {"id": e.name, "url": e.url, "gpu": "t4", "engine": "openai", "models": [model]}
            for e, model in ((engine, MODEL), (beside, "other"))
        ]
        agent = {"region": "eu", "cluster": "c1", "etcd": {"urls": [etcd.url]}, "instances": instances}
        file.write_text(json.dumps(agent | {"scrape_interval_s": 0.2}))
        await stack.enter_async_context(
            Process("agent", headwater("agent", "--config", str(file)), ready_line="agent_started")
        )
        await eventually(lambda: serves(places["global"], "other"), 20.0)
        assert await patient(places["global"]) == 200
        assert asked[-1]["replicas"] == 1
        unknown = await ask(places["global"].url, PATH, chat("another"))
        assert unknown.status == 404
    hook.close()
    engine.kill()
    beside.kill()


async def serves(addresses: Addresses, model: str) -> bool:
    return (await ask(addresses.url, PATH, chat(model))).status == 200


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
