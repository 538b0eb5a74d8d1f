"""Containers by their labels, from an API on a Unix socket that a process of its own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import structlog

from services.agent.config import InstanceConfig
from services.agent.sources.base import SourceUnavailable
from services.agent.sources.config import DockerSource
from services.agent.sources.docker import DockerContainers
from tests import servers

eventually = partial(servers.eventually, timeout_s=20.0)


class Engine:
    """What an engine says of its containers, on a socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "docker.sock"
        self.containers: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.raw: bytes | None = None

    async def __aenter__(self) -> Engine:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.asked.append(head.split()[1].decode())
        body = json.dumps(self.containers).encode()
        writer.write(
            self.raw or b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        await writer.drain()
        writer.close()

    def source(self, **values: Any) -> DockerContainers:
        return DockerContainers(DockerSource(url=f"unix://{self.socket}", refresh_s=0.2, **values))


def container(name: str, labels: dict[str, str], **networks: str) -> dict[str, Any]:
    return {
        "Id": name * 12,
        "Names": [f"/{name}"],
        "Labels": {f"headwater.{key}": value for key, value in labels.items()} | {"other": "x"},
        "State": "running",
        "NetworkSettings": {"Networks": {net: {"IPAddress": ip} for net, ip in networks.items()}},
    }


async def test_labels_say_what_a_server_is(tmp_path: Path) -> None:
    async with Engine(tmp_path) as engine:
        labels = {
            "port": "8000",
            "models": "llama-8b, 7",
            "engine": "vllm",
            "gpu": "h100",
            "devices": "0,GPU-12",
            "weight": "2.5",
            "price_usd_per_hour": "4",
            "version": "v2",
        }
        host = container("d", {"port": "8003"})
        host["NetworkSettings"] = {"Networks": {"host": {"IPAddress": ""}}}
        engine.containers = [
            container("a", labels, bridge="172.17.0.2"),
            container("b", {"port": "8001", "id": "named"}, bridge="172.17.0.3"),
            host,
        ]
        told: list[Sequence[InstanceConfig]] = []
        task = asyncio.create_task(engine.source(price_usd_per_hour=1.0).follow(told.append))
        await eventually(lambda: len(told) > 1)
        full, named, on_host = told[0]
        assert (full.id, full.url, full.models, full.engine) == (
            "a",
            "http://172.17.0.2:8000",
            ("llama-8b", "7"),
            "vllm",
        )
        assert (full.gpu, full.devices, full.weight, full.price_usd_per_hour) == ("h100", (0, "GPU-12"), 2.5, 4.0)
        assert full.version == "v2"
        assert (named.id, named.url, named.price_usd_per_hour) == ("named", "http://172.17.0.3:8001", 1.0)
        assert on_host.url == "http://127.0.0.1:8003"
        url = urlsplit(engine.asked[0])
        assert url.path == "/v1.41/containers/json"
        assert json.loads(parse_qs(url.query)["filters"][0]) == {"label": ["headwater.port"], "status": ["running"]}
        engine.containers = engine.containers[1:]
        await eventually(lambda: len(told[-1]) == 2)
        task.cancel()


async def test_what_a_label_has_wrong_costs_that_container_alone_and_is_said_once(tmp_path: Path) -> None:
    async with Engine(tmp_path) as engine:
        engine.containers = [
            container("a", {"port": "http"}, bridge="172.17.0.2"),
            container("b", {"port": "8000", "wieght": "2"}, bridge="172.17.0.3"),
            container("c", {"port": "8000", "weight": "-1"}, bridge="172.17.0.4"),
            container("d", {"port": "8000"}, one="172.18.0.2", two="172.19.0.2"),
            container("e", {"port": "8000"}),
            container("f", {"port": "8000", "engine": "nonesuch"}, bridge="172.17.0.5"),
            container("g", {"port": "8000"}, bridge="172.17.0.6"),
        ]
        told: list[Sequence[InstanceConfig]] = []
        with structlog.testing.capture_logs() as logs:
            task = asyncio.create_task(engine.source().follow(told.append))
            await eventually(lambda: len(told) > 3)
            task.cancel()
        assert [[i.id for i in instances] for instances in told] == [["g"]] * len(told)
        why = {line["server"]: line["why"] for line in logs if line["event"] == "server_ignored"}
        assert len(logs) == 6
        assert why["a"] == "the label headwater.port is no port: 'http'"
        assert why["b"].startswith("wieght: Extra inputs")
        assert why["c"].startswith("weight: ")
        assert why["d"] == "it is in several networks (one, two): say which with `network`"
        assert why["e"] == "it has no address in the network (none)"
        assert "engine 'nonesuch' is not known" in why["f"]


async def test_a_named_network_is_the_one_that_counts(tmp_path: Path) -> None:
    async with Engine(tmp_path) as engine:
        engine.containers = [container("d", {"port": "8000"}, one="172.18.0.2", two="172.19.0.2")]
        told: list[Sequence[InstanceConfig]] = []
        task = asyncio.create_task(engine.source(network="two").follow(told.append))
        await eventually(lambda: told)
        assert [i.url for i in told[0]] == ["http://172.19.0.2:8000"]
        task.cancel()


@pytest.mark.parametrize(
    "raw",
    [b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"nonsense"],
)
async def test_an_engine_that_answers_nonsense_is_unavailable(tmp_path: Path, raw: bytes) -> None:
    async with Engine(tmp_path) as engine:
        engine.raw = raw
        with pytest.raises(SourceUnavailable):
            await engine.source().follow(lambda _: None)
    with pytest.raises(SourceUnavailable):  # and one that is not there
        await DockerContainers(DockerSource(url=f"unix://{tmp_path}/none.sock")).follow(lambda _: None)
