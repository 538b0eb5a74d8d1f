"""EndpointSlices of an API server that runs as a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.agent.config import InstanceConfig
from services.agent.sources.base import SourceUnavailable
from services.agent.sources.config import KubernetesSource
from services.agent.sources.kubernetes import KubernetesEndpoints
from tests import servers

ROOT = Path(__file__).parents[4]

eventually = partial(servers.eventually, timeout_s=20.0)


class ApiServer(servers.Server):
    """The stub, and the calls that change what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.token = self.directory / "token"
        self.token.write_text("first\n")
        self.client = httpx.AsyncClient(base_url=self.url)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        run = "import runpy, sys; sys.path.insert(0, {!r}); runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
        code = run.format(str(ROOT), "tests.services.agent.sources.kubernetes_stub")
        return [sys.executable, "-c", code, str(self.port), str(self.token)]

    async def ready(self) -> bool:
        try:
            return (await self.client.get("/control/asked")).status_code == 200
        except httpx.HTTPError:
            return False

    def wipe(self) -> None:
        """It keeps nothing."""

    async def put(self, name: str, *endpoints: dict[str, Any], **more: Any) -> None:
        ports = more.pop("ports", [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}])
        body = {"addressType": "IPv4", "endpoints": list(endpoints), "ports": ports, **more}
        (await self.client.put(f"/control/{name}", json=body)).raise_for_status()

    async def post(self, what: str) -> None:
        (await self.client.post(f"/control/{what}")).raise_for_status()

    async def asked(self, what: str) -> int:
        return int((await self.client.get("/control/asked")).json()[what])


def pod(name: str, address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


def source(api: ApiServer, **values: Any) -> KubernetesEndpoints:
    settings = {"service": "vllm", "namespace": "ai", "port": "http", "api_url": api.url, **values}
    return KubernetesEndpoints(KubernetesSource(token_file=str(api.token), **settings))


@asynccontextmanager
async def followed(endpoints: KubernetesEndpoints) -> AsyncIterator[dict[str, str]]:
    """What it told last, by id; a test fails with what it raised."""
    seen: dict[str, str] = {}

    def tell(instances: Sequence[InstanceConfig]) -> None:
        seen.clear()
        seen.update({i.id or "": i.url for i in instances})

    task = asyncio.create_task(endpoints.follow(tell))
    try:
        yield seen
    finally:
        if task.done():
            await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_lists_and_then_watches(api: ApiServer) -> None:
    await api.put("a", pod("p1", "10.1.0.1", ready=True), pod("p2", "10.1.0.2", ready=False))
    await api.put("b", {"addresses": ["10.1.0.3"]})  # neither conditions nor a pod: ready, by its address
    await api.put("c", pod("other", "10.1.0.9"), service="another")
    async with followed(source(api)) as seen:
        await eventually(lambda: seen == {"p1": "http://10.1.0.1:8000", "": "http://10.1.0.3:8000"})
        await api.put("a", pod("p1", "10.1.0.1", ready=True), pod("p2", "10.1.0.2", ready=True))
        await eventually(lambda: seen.keys() == {"p1", "p2", ""})
        await api.put("a", pod("p1", "10.1.0.1", ready=False, serving=True, terminating=True), pod("p2", "10.1.0.2"))
        await eventually(lambda: seen.keys() == {"p2", ""})
        (await api.client.delete("/control/b")).raise_for_status()
        await eventually(lambda: seen == {"p2": "http://10.1.0.2:8000"})
    assert await api.asked("list") == 1


async def test_a_watch_that_ends_or_is_cut_goes_on_where_it_was(api: ApiServer) -> None:
    await api.put("a", pod("p1", "10.1.0.1"))
    async with followed(source(api, watch_s=1.0)) as seen:
        await eventually(lambda: "p1" in seen)
        await eventually(partial(_at_least, api, "watch", 2))
        await api.post("cut")
        await api.put("a", pod("p1", "10.1.0.1"), pod("p2", "10.1.0.2"))
        await eventually(lambda: seen.keys() == {"p1", "p2"})
    assert await api.asked("list") == 1


async def test_it_lists_again_once_the_past_is_forgotten(api: ApiServer) -> None:
    await api.put("a", pod("p1", "10.1.0.1"))
    endpoints = source(api)
    async with followed(endpoints) as seen:
        await eventually(lambda: "p1" in seen)
        await api.put("a", pod("p2", "10.1.0.2"))
        await eventually(lambda: "p2" in seen)
    await api.post("compact")
    client = endpoints._client()
    async with client as http:
        assert await endpoints._watch(http, "101", lambda: None) == ""


async def test_a_token_that_was_renewed_is_used(api: ApiServer) -> None:
    endpoints = source(api, watch_s=1.0)
    async with followed(endpoints) as seen:
        await eventually(partial(_at_least, api, "watch", 1))
        api.token.write_text("second")
        await api.put("a", pod("p1", "10.1.0.1"))
        await eventually(lambda: "p1" in seen)
        before = await api.asked("watch")
        await eventually(partial(_at_least, api, "watch", before + 1))
    wrong = source(api)
    (api.directory / "bad").write_text("nonsense")
    wrong.config = wrong.config.model_copy(update={"token_file": str(api.directory / "bad")})
    with pytest.raises(SourceUnavailable, match="status 401"):
        await wrong.follow(lambda _: None)


async def test_which_endpoints_count_and_on_which_port(api: ApiServer) -> None:
    await api.put("a", pod("p1", "10.1.0.1"), pod("p2", "10.1.0.2", ready=False))
    await api.put("six", pod("p1", "fd00::1"), pod("p3", "fd00::3"), addressType="IPv6")
    async with followed(source(api, not_ready=True, gpu="h100")) as seen:
        await eventually(
            lambda: seen == {"p1": "http://10.1.0.1:8000", "p2": "http://10.1.0.2:8000", "p3": "http://[fd00::3]:8000"}
        )
    async with followed(source(api, port="9000", scheme="https")) as seen:
        await eventually(lambda: seen.get("p1") == "https://10.1.0.1:9000")
    for port in ("", "grpc"):  # two to choose from; none of that name
        told: list[Sequence[InstanceConfig]] = []
        task = asyncio.create_task(source(api, port=port).follow(told.append))
        await eventually(lambda told=told: told == [[]])
        task.cancel()


async def test_an_agent_on_each_node_has_that_nodes_endpoints(api: ApiServer) -> None:
    await api.put("a", {**pod("p1", "10.1.0.1"), "nodeName": "gpu1"}, {**pod("p2", "10.1.0.2"), "nodeName": "gpu2"})
    endpoints = source(api)
    endpoints.node = "gpu2"
    async with followed(endpoints) as seen:
        await eventually(lambda: seen == {"p2": "http://10.1.0.2:8000"})


async def test_a_server_that_is_away_or_no_api_server_says_why(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: Sequence[InstanceConfig]) -> None:
        raise AssertionError("there was nothing to tell")

    for values, why in (
        ({"api_url": "http://127.0.0.1:1"}, "connect"),
        ({"api_url": f"{api.url}/control"}, "status 404"),
        ({"token_file": "/nowhere"}, "no token there"),
        ({"api_url": "https://127.0.0.1:1", "ca_file": "/nowhere"}, "/nowhere"),
    ):
        wrong = source(api)
        wrong.config = wrong.config.model_copy(update=values)
        with pytest.raises(SourceUnavailable, match=why):
            await wrong.follow(nobody)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    outside = source(api)
    outside.config = outside.config.model_copy(update={"api_url": None})
    with pytest.raises(SourceUnavailable, match="not in a Kubernetes cluster"):
        await outside.follow(nobody)


async def _at_least(api: ApiServer, what: str, times: int) -> bool:
    return await api.asked(what) >= times
