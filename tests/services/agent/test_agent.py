"""The whole agent: servers on one side, a registry and a subscriber on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path as FilePath
from random import Random

import pytest

from common.errors import StoreUnavailable
from common.membership import Membership
from common.reporting import ReportClient
from common.store.memory import MemoryMembershipStore
from common.types import Endpoint, LoadReport, Path, Phase, Pool
from services.agent.agent import Agent
from services.agent.config import AgentConfig, InstanceConfig
from tests import servers as waiting
from tests.services.agent.fake_server import FakeServer, Reply, vllm
from tests.services.agent.nvml_stub import build, compiler, loaded

eventually = partial(waiting.eventually, timeout_s=4.0, step_s=0.005)


class Book:
    """A registry that remembers, and refuses on request."""

    def __init__(self) -> None:
        self.entries: dict[Path, Endpoint] = {}
        self.history: list[tuple[str, str]] = []
        self.refuse = 0
        self.slow_s = 0.0
        self.closed = False

    async def register_instance(self, path: Path, endpoint: Endpoint) -> None:
        await self._ask()
        self.history.append(("register", endpoint.id))
        self.entries[*path, endpoint.id] = endpoint

    async def deregister(self, path: Path, id_: str) -> None:
        await self._ask()
        self.history.append(("deregister", id_))
        self.entries.pop((*path, id_), None)

    async def close(self) -> None:
        self.closed = True
        self.entries.clear()

    async def _ask(self) -> None:
        await asyncio.sleep(self.slow_s)
        if self.refuse:
            self.refuse -= 1
            raise StoreUnavailable("away")

    def of(self, id_: str) -> Endpoint | None:
        return self.entries.get(("eu", "c1", id_))


@pytest.fixture
async def book() -> Book:
    return Book()


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeServer]]:
    servers = [await FakeServer(vllm()).start() for _ in range(2)]
    yield servers
    for server in servers:
        await server.stop()


def config(servers: list[FakeServer], **more: object) -> AgentConfig:
    instances = [InstanceConfig(url=s.url, id=f"i{n}") for n, s in enumerate(servers)]
    values = {"region": "eu", "cluster": "c1", "instances": instances, "scrape_interval_s": 0.2, **more}
    return AgentConfig.model_validate(values)


async def test_it_registers_reports_and_leaves(book: Book, servers: list[FakeServer]) -> None:
    agent = Agent(config(servers), book, Random(1))
    await agent.start()
    await eventually(lambda: len(book.entries) == 2)
    entry = book.of("i0")
    assert entry is not None
    assert entry.url == servers[0].url
    assert entry.agent == f"127.0.0.1:{agent.reports.port}"

    reports: list[LoadReport] = []
    client = ReportClient("lb", Random(1), on_report=lambda _, r: reports.append(r))
    client.follow(entry.agent, ["i0", "i1"])
    await eventually(lambda: {r.endpoint for r in reports} == {"i0", "i1"})
    assert reports[0].running == 3.0
    servers[0].routes = vllm(running=9.0)
    await eventually(lambda: any(r.running == 9.0 for r in reports))

    await servers[1].stop()
    await eventually(lambda: book.of("i1") is None)
    await asyncio.sleep(0.1)
    reports.clear()
    await asyncio.sleep(0.5)
    assert {r.endpoint for r in reports} == {"i0"}
    servers[1].routes = vllm(started=1790001234.0)
    await servers[1].start()
    await eventually(lambda: book.of("i1"))
    await eventually(lambda: "i1" in {r.endpoint for r in reports})

    began = time.monotonic()
    await agent.close()
    assert time.monotonic() - began < 1.5
    assert book.closed
    await client.close()


async def test_phases_reach_the_registry(book: Book, servers: list[FakeServer]) -> None:
    agent = Agent(config(servers[:1]), book, Random(1))
    await agent.start()
    await eventually(lambda: book.of("i0"))
    servers[0].routes["/health"] = Reply(status=503)
    await eventually(lambda: (book.of("i0") or Endpoint("")).phase is Phase.LOADING)
    servers[0].routes["/health"] = Reply()
    await eventually(lambda: (book.of("i0") or Endpoint("", phase=Phase.LOADING)).phase is Phase.SERVING)
    await agent.close()


async def test_a_registry_that_is_away_delays_nothing_and_is_told_the_newest(
    book: Book, servers: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.agent.agent.RETRY_S", 0.2)
    book.refuse, book.slow_s = 1, 0.3
    agent = Agent(config(servers[:1]), book, Random(1))
    await agent.start()
    await eventually(lambda: servers[0].asked["/metrics"] > 4)
    servers[0].routes["/health"] = Reply(status=503)
    await eventually(lambda: (book.of("i0") or Endpoint("")).phase is Phase.LOADING)
    assert len(book.history) <= 2
    await agent.close()


async def test_instances_follow_the_configuration(book: Book, servers: list[FakeServer]) -> None:
    agent = Agent(config(servers), book, Random(1))
    await agent.start()
    await eventually(lambda: len(book.entries) == 2)
    agent.reconfigure(config(servers[:1]))
    await eventually(lambda: book.of("i1") is None)
    assert book.of("i0") is not None
    await agent.close()


async def test_through_membership_to_whoever_watches(servers: list[FakeServer]) -> None:
    store = MemoryMembershipStore()
    pools: list[Mapping[Path, Pool]] = []
    watching = Membership(store, on_change=pools.append)
    watch = asyncio.create_task(watching.run())
    agent = Agent(config(servers), Membership(store), Random(1))
    await agent.start()

    def there() -> list[Endpoint]:
        return list(watching.pool(("eu", "c1")).endpoints)

    await eventually(lambda: [e.id for e in there()] == ["i0", "i1"])
    assert there()[0].capacity is not None
    assert there()[0].boot == "1790000000.50"
    await servers[0].stop()
    await eventually(lambda: [e.id for e in there()] == ["i1"])
    await agent.close()
    await eventually(lambda: there() == [])
    watch.cancel()


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
async def test_nvml_in_trouble_costs_figures_and_nothing_else(
    book: Book, servers: list[FakeServer], tmp_path: FilePath
) -> None:
    reports: list[LoadReport] = []
    with loaded(build(tmp_path)) as stub:
        agent = Agent(config(servers[:1]), book, Random(1))
        agent._gpus.interval_s, agent._gpus.stale_s = 0.05, 0.5
        await agent.start()
        client = ReportClient("lb", Random(1), on_report=lambda _, r: reports.append(r))
        client.follow(f"127.0.0.1:{agent.reports.port}")
        await eventually(lambda: reports and reports[-1].gpu_utilization is not None)
        assert reports[-1].gpu_utilization == pytest.approx(0.425)
        await eventually(lambda: (book.of("i0") or Endpoint("")).gpu == "h100")
        stub.blocked = 1
        await eventually(lambda: reports[-1].gpu_utilization is None)
        reports.clear()
        lag = 0.0
        for _ in range(50):
            began = time.monotonic()
            await asyncio.sleep(0.02)
            lag = max(lag, time.monotonic() - began)
        assert lag < 0.2  # the event loop never waits
        assert len(reports) >= 4
        assert all(r.running == 3.0 and r.gpu_utilization is None for r in reports)
        entry = book.of("i0")
        assert entry is not None
        assert entry.gpu == "h100"  # what it is does not depend on a figure that has gone
        stub.blocked = 0
        await eventually(lambda: reports[-1].gpu_utilization is not None)
        await client.close()
        await agent.close()
        agent._gpus._thread.join(2.0)
    assert [h for h in book.history if h[0] == "deregister"] == []
