"""A tiny HTTP server on a raw socket that answers what a test tells it to, sense or nonsense."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """An answer. `raw` is sent as it is, without a head; `delay_s` before anything; `pad` bytes of filler after it."""

    body: bytes = b""
    status: int = 200
    kind: str = "text/plain"
    headers: str = ""
    raw: bytes | None = None
    delay_s: float = 0.0
    pad: int = 0


class FakeServer:
    """`routes` is what the server is: path -> Reply. A path it has not is 404."""

    def __init__(self, routes: dict[str, Reply] | None = None) -> None:
        self.routes = routes or {}
        self.asked: Counter[str] = Counter()
        self.sent = 0  # bytes of filler that somebody took
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._writers)

    async def start(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def __aenter__(self) -> FakeServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                while await reader.readline() not in {b"\r\n", b""}:
                    pass
                path = line.split()[1].decode()
                self.asked[path] += 1
                await self._answer(self.routes.get(path, Reply(b"not found", 404)), writer)
        except (OSError, asyncio.IncompleteReadError, IndexError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reply: Reply, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(reply.delay_s)
        if reply.raw is not None:
            writer.write(reply.raw)
            with suppress(OSError):
                await writer.drain()
            writer.close()
            return
        length = len(reply.body) + reply.pad
        fields = f"content-type: {reply.kind}\r\ncontent-length: {length}\r\n{reply.headers}"
        head = f"HTTP/1.1 {reply.status} X\r\n{fields}\r\n"
        writer.write(head.encode() + reply.body)
        await writer.drain()
        for _ in range(reply.pad // 65536):
            writer.write(b"#" * 65536)
            await writer.drain()
            self.sent += 65536


def models(*names: str, owner: str = "vllm", max_len: int | None = 4096) -> Reply:
    """A `/v1/models` answer."""
    entries: list[dict[str, Any]] = [{"id": n, "object": "model", "owned_by": owner} for n in names]
    for entry in entries:
        if max_len is not None:
            entry["max_model_len"] = max_len
    return Reply(json.dumps({"object": "list", "data": entries}).encode(), kind="application/json")


def metrics(
    *,
    running: object = 3.0,
    waiting: object = 2.0,
    kv: object = 0.25,
    generated: object = 1000.0,
    steps: object = 500.0,
    started: object = 1790000000.5,
    awake: object = 1.0,
    blocks: object = 1000,
    more: str = "",
) -> Reply:
    """A `/metrics` page in the form of vLLM 0.32's, shortened to one metric of each kind."""
    labels = 'engine="0",model_name="tiny"'
    return Reply(
        f"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{labels}}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{{labels}}} {waiting}
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 77.0
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {awake}
vllm:engine_sleep_state{{{labels},sleep_state="weights_offloaded"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{{labels}}} {kv}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{labels}}} {generated}
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{{{labels}}} 1.79e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{{labels},le="1.0"}} 400.0
vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {steps}
vllm:iteration_tokens_total_count{{{labels}}} {steps}
vllm:iteration_tokens_total_sum{{{labels}}} 123456.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}",swap="None"}} 1.0
{more}""".encode()
    )


def vllm(**figures: object) -> dict[str, Reply]:
    """The routes of a healthy vLLM."""
    return {"/health": Reply(), "/v1/models": models("tiny"), "/metrics": metrics(**figures)}  # type: ignore[arg-type]
