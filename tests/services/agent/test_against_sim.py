"""The agent's monitor against the simulated server: what it speaks is vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import httpx

from common.types import Endpoint, LoadReport, Phase
from services.agent.config import InstanceConfig
from services.agent.monitor import InstanceMonitor
from services.engine_sim.config import EngineConfig
from services.engine_sim.server import EngineServer
from tests.services.agent.test_agent import eventually


async def test_a_simulated_server_through_its_life() -> None:
    endpoints: list[Endpoint] = []
    reports: list[LoadReport] = []
    gone: list[str] = []
    server = EngineServer(EngineConfig(profile="t4", model="small", port=0, load_time_s=0.3, speed=2.0))
    await server.start()
    monitor = InstanceMonitor(
        on_endpoint=endpoints.append, on_gone=gone.append, on_report=reports.append, rng=Random(1), interval_s=0.05
    )
    monitor.watch({"s": InstanceConfig(url=server.url, gpu="t4")})
    await eventually(lambda: endpoints)
    assert endpoints[0].phase is Phase.LOADING
    await eventually(lambda: endpoints[-1].phase is Phase.SERVING)
    assert endpoints[-1].models == {"small"}
    assert endpoints[-1].engine == "vllm"
    assert endpoints[-1].capacity is not None
    assert endpoints[-1].capacity.kv_tokens == 48_000.0

    body = {"model": "small", "prompt": "hello " * 50, "max_tokens": 40}
    async with httpx.AsyncClient(timeout=20.0, trust_env=False) as client:
        answers = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body)) for _ in range(4)]
        await eventually(lambda: reports[-1].running == 4.0)
        assert (reports[-1].kv_utilization or 0.0) > 0.0
        assert {(await a).status_code for a in answers} == {200}
    await eventually(lambda: reports[-1].running == 0.0 and reports[-1].generated_tokens == 160.0)

    told = len(endpoints)
    server.kill()
    await eventually(lambda: gone == ["s"])
    successor = EngineServer(replace(server.config))
    await successor.start()
    await eventually(lambda: len(endpoints) > told and endpoints[-1].phase is Phase.SERVING)
    assert endpoints[-1].boot != endpoints[told - 1].boot  # its counters begin again
    await monitor.close()
    successor.kill()
