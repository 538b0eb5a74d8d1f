"""The simulated server as its clients see it: real sockets, and real processes where a process is the point."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import ConfigError
from common.policy.prediction import CLASS_SPEED
from services.engine_sim.config import EngineConfig, ServeConfig, engines_from
from services.engine_sim.faults import NONE, changed
from services.engine_sim.server import EngineServer
from services.engine_sim.text import BURST_TOKENS, answer, drawn_output_tokens, prefix_hashes, words

ROOT = Path(__file__).parents[3]
MODEL = "llama-8b"
QUICK = EngineConfig(profile="h100", port=0, name="e0", speed=100.0)


# --- servers ---


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[EngineServer]:
    server = EngineServer(replace(QUICK, **options))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0.0)
        await asyncio.sleep(0)


@asynccontextmanager
async def client_of(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(**options) as server, httpx.AsyncClient(base_url=server.url, timeout=10.0) as client:
        yield client


@dataclass
class Process:
    popen: subprocess.Popen[str]
    engines: list[dict[str, str]]

    @property
    def url(self) -> str:
        return self.engines[0]["url"]


@contextmanager
def process(*options: str, engines: int = 1) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "services.engine_sim", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert popen.stdout is not None
        yield Process(popen, [json.loads(popen.stdout.readline()) for _ in range(engines)])
    finally:
        popen.kill()
        popen.communicate()


def chat(content: str = "hello there", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def events_of(body: str) -> list[Any]:
    """The data of each event; `[DONE]` as it is."""
    datas = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


async def records(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = (await client.get("/sim/requests")).json()["requests"]
    return requests


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    """Metric values by name and, where there are more labels than vLLM's two, those."""
    page = (await client.get("/metrics")).text
    values = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if family.name == "process_start_time_seconds":
                continue
            assert sample.labels["engine"] == "0"
            assert sample.labels["model_name"] == MODEL
            more = "".join(f",{v}" for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name"))
            values[sample.name + more] = sample.value
    return values


async def until(client: httpx.AsyncClient, name: str, value: float) -> None:
    for _ in range(500):
        if (await samples(client))[name] == value:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{name} is not {value} after 5 s")


async def exchange(url: str, data: bytes) -> bytes:
    """Send raw bytes, read until the server closes."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 5.0)
    finally:
        writer.close()


# --- the OpenAI SDK ---


async def test_the_openai_sdk_streams_and_does_not() -> None:
    async with serving() as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 401}], max_completion_tokens=12
        )
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 101
        assert whole.usage.completion_tokens == len(str(whole.choices[0].message.content).split()) <= 12

        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                max_tokens=30,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        ]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) == 30
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 30
        assert all(c.usage is None for c in chunks[:-1])

        text = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3)
        assert [c.index for c in text.choices] == [0, 1, 2, 3]
        vectors = await client.embeddings.create(model=MODEL, input=["one", "two", "one"])
        assert vectors.data[0].embedding == vectors.data[2].embedding != vectors.data[1].embedding
        assert sum(v * v for v in vectors.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
        models = await client.models.list()
        assert [m.id for m in models.data] == [MODEL]
        with pytest.raises(openai.NotFoundError, match="The model `gpt` does not exist"):
            await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
        await client.close()


# --- streams, byte by byte ---


async def test_a_stream_ends_as_vllm_ends_it() -> None:
    async with client_of() as client:
        answered = await client.post("/v1/chat/completions", json=chat(stream=True, sim_output_tokens=5))
        assert answered.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answered.headers["x-engine-id"] == "e0"
        first, *tokens, done = events_of(answered.text)
        assert done == "[DONE]"
        assert first["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert [t["choices"][0]["finish_reason"] for t in tokens] == [None] * 4 + ["stop"]
        assert tokens[-1]["choices"][0]["stop_reason"] is None
        assert "stop_reason" not in tokens[0]["choices"][0]
        assert all("usage" not in t for t in tokens)
        assert {t["id"] for t in tokens} == {first["id"]}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
async def test_no_usage_is_sent_unless_asked_for(options: dict[str, bool] | None) -> None:
    async with client_of() as client:
        body = chat(stream=True, max_tokens=3, stream_options=options)
        events = events_of((await client.post("/v1/chat/completions", json=body)).text)
        assert all("usage" not in e for e in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_continuous_usage_counts_up(path: str) -> None:
    async with client_of() as client:
        body = {**chat(), "prompt": "hello there"} if "chat" in path else {"model": MODEL, "prompt": "hello there"}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"stream": True, "sim_output_tokens": 4, "stream_options": options}
        events = events_of((await client.post(path, json=body)).text)
        counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
        assert counts == ([0] if "chat" in path else []) + [1, 2, 3, 4, 4]
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_several_sequences_share_a_stream() -> None:
    async with client_of() as client:
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 6, "ignore_eos": True}
        events = events_of((await client.post("/v1/completions", json=body)).text)
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        indices = [e["choices"][0]["index"] for e in events[:-1]]
        assert sorted(indices) == [i for i in range(4) for _ in range(6)]


async def test_a_long_answer_is_whole_whatever_is_in_one_write() -> None:
    tokens = 3 * BURST_TOKENS + 7
    async with client_of(speed=5000.0) as client:
        streamed = await client.post("/v1/chat/completions", json=chat(stream=True, sim_output_tokens=tokens))
        whole = await client.post("/v1/chat/completions", json=chat(sim_output_tokens=tokens))
    text = "".join(e["choices"][0]["delta"]["content"] for e in events_of(streamed.text)[:-1])
    assert len(text.split()) == tokens
    assert len(whole.json()["choices"][0]["message"]["content"].split()) == tokens


# --- lengths ---


async def test_the_length_of_an_answer() -> None:
    async with client_of() as client:

        async def length(headers: dict[str, str] | None = None, **body: Any) -> tuple[int, str]:
            answered = (await client.post("/v1/chat/completions", json=chat(**body), headers=headers)).json()
            return answered["usage"]["completion_tokens"], answered["choices"][0]["finish_reason"]

        assert await length(sim_output_tokens=321) == (321, "stop")
        assert await length({"x-sim-output-tokens": "123"}) == (123, "stop")
        assert await length({"x-sim-output-tokens": "123"}, sim_output_tokens=7) == (7, "stop")
        assert await length(sim_output_tokens=321, max_tokens=9) == (9, "length")
        assert await length(max_tokens=44, ignore_eos=True) == (44, "length")
        assert await length(max_tokens=999, max_completion_tokens=5, ignore_eos=True) == (5, "length")
        assert (await length(min_tokens=2000, max_tokens=3000))[0] >= 2000
        assert await length() == await length()
        default = await client.post("/v1/completions", json={"prompt": "x", "ignore_eos": True})
        assert default.json()["usage"]["completion_tokens"] == 16


def test_drawn_lengths_have_the_mean_they_should() -> None:
    drawn = [drawn_output_tokens(b"%d" % i, 0, 200.0, 1) for i in range(5000)]
    assert 185 < sum(drawn) / len(drawn) < 215
    assert drawn[0] == drawn_output_tokens(b"0", 0, 200.0, 1)
    assert drawn != [drawn_output_tokens(b"%d" % i, 0, 200.0, 2) for i in range(5000)]


def test_words_and_hashes() -> None:
    assert b"".join(words(5, 130, 40)).decode() == answer(5, 170)[len(answer(5, 130)) :]
    a, b = prefix_hashes(b"x" * 6000), prefix_hashes(b"x" * 4096 + b"y" * 3000)
    assert (len(a), len(b)) == (2, 3)
    assert a == b[:2]
    assert prefix_hashes(b"y" * 2048 + b"x" * 4000)[1] != a[1]
    assert prefix_hashes(b"x" * 2047) == ()


async def test_token_ids_are_prompts_too_and_a_repeated_prompt_is_cached() -> None:
    async with client_of() as client:
        for cached in (0, 1008):
            body = {"model": MODEL, "prompt": list(range(1024)), "max_tokens": 1}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            assert usage["prompt_tokens"] == 1024
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        values = await samples(client)
        assert values["vllm:prefix_cache_queries_total"] == 2048
        assert values["vllm:prefix_cache_hits_total"] == 1008
        assert (await client.post("/tokenize", json={"prompt": "x" * 40})).json()["count"] == 10


# --- what it says of itself ---


async def test_metrics_are_vllms() -> None:
    async with client_of(profile="t4", speed=200.0) as client:
        before = await samples(client)
        for stream in (True, False):
            await client.post("/v1/chat/completions", json=chat("x" * 400, stream=stream, sim_output_tokens=21))
        after = await samples(client)
        v = CLASS_SPEED["t4"]
        ttft = v.alpha_s + 100 / v.prefill_tokens_per_s * (1 + 50 / v.attention_tokens)
        decode = 20 * (v.alpha_s + v.beta_s) + v.gamma_s * sum(100 + i for i in range(1, 21))
        assert after["vllm:time_to_first_token_seconds_sum"] == pytest.approx(2 * ttft / 200, rel=1e-6)
        assert after["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(2 * (ttft + decode) / 200, rel=1e-6)
        assert after["vllm:prompt_tokens_total"] == 200
        assert after["vllm:generation_tokens_total"] == 42
        assert after["vllm:request_success_total,stop"] == 2
        assert after["vllm:inter_token_latency_seconds_count"] == 40
        assert after["vllm:iteration_tokens_total_count"] == 42 > before["vllm:iteration_tokens_total_count"]
        assert after["vllm:iteration_tokens_total_sum"] == 240
        assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
        assert after["vllm:kv_cache_usage_perc"] == after["vllm:num_preemptions_total"] == 0
        assert after["vllm:cache_config_info,16,3000"] == 1


async def test_gauges_move_while_requests_run_and_an_abort_is_noticed() -> None:
    async with client_of(speed=1.0, slots=1) as client:
        body = chat(stream=True, sim_output_tokens=5000)
        async with client.stream("POST", "/v1/chat/completions", json=body) as first:
            assert first.status_code == 200
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=chat(sim_output_tokens=5000)))
            await until(client, "vllm:num_requests_waiting", 1)
            values = await samples(client)
            assert values["vllm:num_requests_running"] == 1
            assert (await client.get("/load")).json() == {"server_load": 2}
            async for _ in first.aiter_lines():
                break
            assert (await samples(client))["vllm:kv_cache_usage_perc"] > 0
            waiting.cancel()
            await until(client, "vllm:num_requests_waiting", 0)
        await until(client, "vllm:num_requests_running", 0)
        await until(client, "vllm:request_success_total,abort", 2)
        assert [r["aborted"] for r in await records(client)] == [True, True]
        assert (await records(client))[1]["executed"]
        assert 0 < (await records(client))[0]["tokens_sent"] < 5000
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_orca_headers_on_whole_answers() -> None:
    async with client_of() as client:

        async def header(form: str | None, **body: Any) -> str | None:
            headers = {"endpoint-load-metrics-format": form} if form else {}
            answered = await client.post("/v1/chat/completions", json=chat(max_tokens=2, **body), headers=headers)
            return answered.headers.get("endpoint-load-metrics")

        text, as_json = await header("TEXT"), await header("JSON")
        assert text == "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
        assert as_json is not None
        assert json.loads(as_json.removeprefix("JSON ")) == {
            "named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}
        }
        assert await header(None) is None
        assert await header("BINARY") is None
        assert await header("JSON", stream=True) is None


async def test_small_routes() -> None:
    async with client_of() as client:
        assert (await client.get("/health")).content == b""
        assert (await client.post("/ping")).status_code == 200
        assert (await client.head("/health")).status_code == 200
        assert (await client.get("/version")).json()["version"].startswith("0.")
        model = (await client.get("/v1/models?x=1")).json()["data"][0]
        assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == (
            MODEL,
            "model",
            "vllm",
            131_072,
        )
        assert model["root"] == MODEL
        missing, wrong = await client.get("/nope"), await client.get("/v1/completions")
        assert (missing.status_code, missing.json()["error"]["message"]) == (404, "Not Found")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)


async def test_requests_are_remembered() -> None:
    async with client_of(record_requests=2) as client:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = json.dumps(chat(max_tokens=1)).encode()
        for number in range(3):
            headers = {"traceparent": parent, "x-request-id": f"r{number}"}
            answered = await client.post("/v1/chat/completions", content=body, headers=headers)
            assert answered.json()["id"] == f"chatcmpl-r{number}"
        seen = (await client.get("/sim/requests")).json()
        assert (seen["engine"], seen["received"]) == ("e0", 3)
        assert [r["id"] for r in seen["requests"]] == ["r1", "r2"]
        last = seen["requests"][-1]
        assert last["traceparent"] == parent
        assert last["sha256"] == hashlib.sha256(body).hexdigest()
        assert "traceparent" in last["header_names"]
        assert (last["status"], last["executed"], last["finished"], last["aborted"]) == (200, True, True, False)
        assert last["tokens_sent"] == 1


# --- errors ---


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"model": "gpt"}, 404, "NotFoundError", "model"),
        ({"max_tokens": 200_000}, 400, "BadRequestError", "input_tokens"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"n": 0}, 400, "BadRequestError", "n"),
        ({"n": 65}, 400, "BadRequestError", "n"),
        ({"messages": []}, 400, "BadRequestError", "messages"),
        ({"messages": 7}, 400, "Bad Request", "body.messages"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
        ({"sim_output_tokens": 0}, 400, "BadRequestError", "sim_output_tokens"),
    ],
)
async def test_errors_have_vllms_shape(body: dict[str, Any], status: int, kind: str, param: str) -> None:
    async with client_of() as client:
        answered = await client.post("/v1/chat/completions", json={**chat(), **body})
        assert answered.status_code == status
        error = answered.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (kind, param, status)
        assert (await records(client))[0]["status"] == status
        assert not (await records(client))[0]["executed"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"messages": [{"content": "\\ud800"}], "max_tokens": 1}']
)
async def test_no_body_breaks_the_server(body: bytes) -> None:
    async with client_of() as client:
        answered = await client.post("/v1/chat/completions", content=body)
        assert answered.status_code in (200, 400)
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ["a", 1]}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}),
        ("/v1/embeddings", {}),
        ("/tokenize", {"prompt": 7}),
    ],
)
async def test_bad_prompts_are_the_clients_mistake(path: str, body: dict[str, Any]) -> None:
    async with client_of() as client:
        answered = await client.post(path, json=body)
        assert answered.status_code == 400
        assert answered.json()["error"]["code"] == 400


async def test_message_parts_count_their_text() -> None:
    async with client_of() as client:
        parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "data:"}}]
        messages = [{"role": "system", "content": None}, {"role": "user", "content": parts}]
        answered = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answered.json()["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("status", [503, 429])
async def test_a_full_queue_refuses(status: int) -> None:
    async with client_of(slots=1, max_queue=1, speed=1.0, queue_full_status=status, retry_after_s=7) as client:
        tasks = [
            asyncio.create_task(client.post("/v1/chat/completions", json=chat(sim_output_tokens=3000))) for _ in "ab"
        ]
        await until(client, "vllm:num_requests_waiting", 1)
        refused = await client.post("/v1/chat/completions", json=chat(n=2))
        assert refused.status_code == status
        assert refused.headers["retry-after"] == "7"
        assert "queue is full" in refused.json()["error"]["message"]
        assert not (await records(client))[-1]["executed"]
        assert (await samples(client))["vllm:num_requests_waiting"] == 1
        for task in tasks:
            task.cancel()


async def test_loading_takes_its_time() -> None:
    async with client_of(load_time_s=0.3) as client:
        for path in ("/health", "/v1/models"):
            answered = await client.get(path)
            assert answered.status_code == 503
            assert answered.json()["error"]["message"] == "Loading model"
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        await asyncio.sleep(0.35)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200


# --- HTTP ---


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def posted(body: bytes, more: bytes = b"") -> bytes:
    return POST + more + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server:
        bodies = [json.dumps(chat(sim_output_tokens=n, stream=n % 2 == 0)).encode() for n in range(1, 21)]
        last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answered = await exchange(server.url, b"".join(posted(b) for b in bodies) + last)
        assert answered.count(b"HTTP/1.1 200 OK") == 21
        assert [r.tokens_sent for r in server.engine.records] == list(range(1, 21))
        assert answered.endswith(b"x-engine-id: e0\r\n\r\n")


async def test_bodies_in_chunks_and_clients_that_ask_first() -> None:
    async with serving() as server:
        body = json.dumps(chat(max_tokens=1)).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        close = b"connection: close\r\n"
        answered = await exchange(server.url, POST + close + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert answered.startswith(b"HTTP/1.1 200 OK")
        answered = await exchange(server.url, posted(body, close + b"expect: 100-continue\r\n"))
        assert answered.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_http_1_0_gets_no_chunks() -> None:
    assert "uvloop" in type(asyncio.get_running_loop()).__module__
    async with serving() as server:
        body = json.dumps(chat(max_tokens=3, stream=True, ignore_eos=True)).encode()
        answered = await exchange(server.url, posted(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, rest = answered.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert len(events_of(rest.decode())) == 5


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (POST + b"content-length: 99999\r\n\r\n", 413),
        (POST + b"transfer-encoding: chunked\r\n\r\n" + b"7d0\r\n" + b"x" * 2000 + b"\r\n", 413),
    ],
)
async def test_what_is_no_request_is_refused_and_closed(data: bytes, status: int) -> None:
    async with serving(max_body_bytes=1024) as server:
        assert (await exchange(server.url, data)).startswith(b"HTTP/1.1 %d " % status)


async def test_idle_connections_are_closed_and_their_number_is_bounded() -> None:
    async with serving(keepalive_timeout_s=0.1, max_connections=2) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.config.port) for _ in range(3)]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(opened[2][0].read(), 5.0) == b""
        assert len(server.app.connections) == 2
        for reader, _ in opened[:2]:
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        assert not server.app.connections
        for _, writer in opened:
            writer.close()


async def test_a_client_that_does_not_read_is_not_buffered_for() -> None:
    async with serving(speed=10_000.0) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", server.config.port))
        body = json.dumps(chat(stream=True, sim_output_tokens=100_000)).encode()
        await loop.sock_sendall(sock, posted(body, b"connection: close\r\n"))
        for _ in range(500):
            if server.engine.model.finished:
                break
            await asyncio.sleep(0.01)
        assert server.engine.model.generated_tokens == 100_000
        connection = next(iter(server.app.connections))
        assert connection.paused
        assert connection.unsent_bytes < 200_000
        assert server.engine.records[0].tokens_sent < 60_000
        tail = b""
        while piece := await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 5.0):
            tail = (tail + piece)[-64:]
        sock.close()
        assert tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.engine.records[0].tokens_sent == 100_000
        assert server.engine.in_flight == set()
        assert not server.engine.streaming


async def test_nothing_is_left_of_clients_that_come_and_go() -> None:
    rng = random.Random(7)
    async with serving(speed=20.0, slots=8, max_queue=30) as server:

        async def visit() -> None:
            await asyncio.sleep(rng.random())
            reader, writer = await asyncio.open_connection("127.0.0.1", server.config.port)
            for _ in range(rng.randrange(1, 4)):
                body = chat(
                    "x" * rng.randrange(1, 9000), stream=rng.random() < 0.7, sim_output_tokens=rng.randrange(1, 300)
                )
                writer.write(posted(json.dumps({**body, "n": rng.randrange(1, 4)}).encode()))
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(rng.randrange(1, 100_000)), rng.random())
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

        await asyncio.gather(*(visit() for _ in range(200)))
        for _ in range(500):
            if not server.app.connections and not server.engine.model.running:
                break
            await asyncio.sleep(0.01)
        engine = server.engine
        assert not server.app.connections
        assert (engine.in_flight, engine.streaming) == (set(), {})
        assert (engine.model.running, engine.model.waiting, engine.model.reserved_tokens) == (0, 0, 0)
        assert any(r.aborted for r in engine.records)
        assert any(r.finished for r in engine.records)


# --- faults ---


async def broken(client: httpx.AsyncClient, fault: dict[str, Any], tokens: int = 50) -> tuple[int, str]:
    """Stream with a fault of its own: (token events received, how it ended)."""
    body = chat(stream=True, sim_output_tokens=tokens)
    headers = {"x-sim-fault": json.dumps(fault)}
    text, ended = "", "end"
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
            async for piece in stream.aiter_text():
                text += piece
    except httpx.ReadTimeout:
        ended = "silence"
    except httpx.RemoteProtocolError:
        ended = "eof"
    except httpx.ReadError:
        ended = "reset"
    events = events_of(text)
    if events and events[-1] == "[DONE]":
        ended = "error" if "error" in events[-2] else "done"
    return len([e for e in events if "choices" in e and e["choices"][0]["delta"].get("role") is None]), ended


async def test_faults_of_one_request() -> None:
    async with client_of() as client:
        client.timeout = httpx.Timeout(0.5)
        assert await broken(client, {}) == (50, "done")
        assert await broken(client, {"truncate_after_chunks": 7}) == (7, "end")
        assert await broken(client, {"error_after_chunks": 7}) == (7, "error")
        assert await broken(client, {"stall_after_chunks": 7}) == (7, "silence")
        assert await broken(client, {"drop_after_chunks": 7}) == (7, "reset")
        assert await broken(client, {"drop_after_chunks": 0}) == (0, "reset")
        assert await broken(client, {"drop_before_byte": True}) == (0, "eof")
        refused = await client.post("/v1/chat/completions", json=chat(), headers={"x-sim-fault": '{"refuse": 418}'})
        assert refused.status_code == 418
        for bad in ('{"nope": 1}', "[", "[]", '{"refuse": 7}'):
            answered = await client.post("/v1/chat/completions", json=chat(), headers={"x-sim-fault": bad})
            assert answered.status_code == 400
        await until(client, "vllm:num_requests_running", 0)
        assert await broken(client, {}) == (50, "done")


async def test_a_counted_drop_and_refusals() -> None:
    async with client_of() as client:
        assert (await client.post("/sim/faults", json={"drop_before_byte": 1})).json()["drop_before_byte"] == 1
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json=chat(max_tokens=1))
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200
        await client.post("/sim/faults", json={"refuse": 503})
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.delete("/sim/faults")).json() == (await client.get("/sim/faults")).json()
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200
        for bad in ({"nope": 1}, {"slow": 0}, {"die": "soon"}, {"refuse": 200}):
            assert (await client.post("/sim/faults", json=bad)).status_code == 400


async def test_a_stall_stops_the_counters_but_not_the_health_check() -> None:
    async with client_of() as client:
        await client.post("/sim/faults", json={"stall": True})
        task = asyncio.create_task(client.post("/v1/chat/completions", json=chat(sim_output_tokens=20)))
        await until(client, "vllm:num_requests_running", 1)
        first = await samples(client)
        await asyncio.sleep(0.1)
        assert (await samples(client))["vllm:iteration_tokens_total_count"] == first[
            "vllm:iteration_tokens_total_count"
        ]
        assert (await client.get("/health")).status_code == 200
        assert not task.done()
        await client.delete("/sim/faults")
        assert (await task).status_code == 200
        before = (await samples(client))["vllm:time_to_first_token_seconds_sum"]
        assert before > 0.1
        await client.post("/sim/faults", json={"stall": 0.1})
        assert (await client.post("/v1/chat/completions", json=chat(sim_output_tokens=20))).status_code == 200
        assert (await samples(client))["vllm:time_to_first_token_seconds_sum"] > before + 0.05
        assert (await client.get("/sim/faults")).json()["stall"] is False


async def test_slow_is_slow_and_a_hung_health_check_hangs() -> None:
    async with client_of(profile="t4", speed=100.0) as client:
        await client.post("/sim/faults", json={"slow": 4, "hang_health": True})
        await client.post("/v1/chat/completions", json=chat(sim_output_tokens=50))
        slow = (await samples(client))["vllm:e2e_request_latency_seconds_sum"]
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/health", timeout=0.1)
        await client.delete("/sim/faults")
        await client.post("/v1/chat/completions", json=chat(sim_output_tokens=50))
        both = (await samples(client))["vllm:e2e_request_latency_seconds_sum"]
        assert slow == pytest.approx(4 * (both - slow), rel=1e-3)


async def test_out_of_memory_kills_the_engine_core() -> None:
    async with client_of(speed=1.0) as client:
        await client.post("/sim/faults", json={"oom": 1000})
        body = chat(stream=True, sim_output_tokens=1000)
        async with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            fatal = await client.post("/v1/chat/completions", json=chat("x" * 8000))
            rest = [line async for line in lines if line]
        assert fatal.status_code == 500
        assert fatal.json()["error"]["type"] == "InternalServerError"
        assert "EngineCore encountered an issue" in fatal.json()["error"]["message"]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 500
        assert rest[-1] == "data: [DONE]"
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 500
        assert (await samples(client))["vllm:num_requests_running"] == 0
        await client.delete("/sim/faults")
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200


async def test_out_of_memory_may_concern_one_request_alone() -> None:
    async with client_of() as client:
        headers = {"x-sim-fault": '{"oom": true, "oom_fatal": false}'}
        failed = await client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert failed.status_code == 500
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).status_code == 200
        assert (await samples(client))["vllm:request_success_total,error"] == 1


async def test_death_among_others_resets_and_may_end() -> None:
    async with serving(speed=1.0) as server, httpx.AsyncClient(base_url=server.url, timeout=5.0) as client:
        await client.post("/sim/faults", json={"die": "after_chunks:5", "revive_after_s": 0.2})
        assert await broken(client, {}, tokens=1000) == (5, "reset")
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        for _ in range(100):
            await asyncio.sleep(0.05)
            try:
                assert (await client.get("/health")).status_code == 200
                break
            except httpx.ConnectError:
                continue
        assert (await client.get("/sim/requests")).json()["received"] == 0
        await client.post("/sim/faults", json={"die": "now"})
        await asyncio.sleep(0.05)
        with pytest.raises(httpx.TransportError):
            await client.get("/health")


def test_faults_are_set_one_by_one() -> None:
    faults = changed(changed(NONE, b'{"slow": 2}'), b'{"die": "after_chunks:9"}')
    assert (faults.slow, faults.die_after) == (2.0, 9)
    assert NONE.die_after is None


# --- processes ---


def until_refused(url: str) -> None:
    """Wait until nothing listens there."""
    for _ in range(500):
        try:
            httpx.get(url + "/health")
        except httpx.TransportError:
            return
        time.sleep(0.01)
    pytest.fail(f"{url} still answers after 5 s")


def test_a_process_of_several_engines_speaks_and_ends_in_order() -> None:
    with process("--engine", "h100:0:big", "--engine", "t4:0", "--grace", "5", engines=2) as running:
        assert running.engines[0]["engine"] == "big"
        assert running.engines[1]["engine"].startswith("t4-")
        with httpx.Client(timeout=10.0) as client:
            with client.stream(
                "POST", running.url + "/v1/chat/completions", json=chat(stream=True, sim_output_tokens=80)
            ) as stream:
                lines = stream.iter_lines()
                next(lines)
                running.popen.send_signal(signal.SIGTERM)
                until_refused(running.engines[1]["url"])
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        assert running.popen.wait(5.0) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    body = chat(stream=True, sim_output_tokens=5000)
    with (
        process("--port", "0", "--grace", "60") as running,
        httpx.stream("POST", running.url + "/v1/chat/completions", json=body),
    ):
        running.popen.send_signal(signal.SIGTERM)
        until_refused(running.url)
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(5.0) == 1


def test_death_alone_ends_the_process() -> None:
    with process("--port", "0", "--name", "solo") as running:
        assert running.engines[0] == {"engine": "solo", "url": running.url, "model": MODEL, "profile": "h100"}
        httpx.post(running.url + "/sim/faults", json={"die": "now"})
        assert running.popen.wait(5.0) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--profile", "abacus"], "profile: unknown GPU class 'abacus'"),
        (["--port", "many"], "--port"),
        (["--nope"], "No such option"),
        (["--port", "{taken}"], "port: cannot listen on 127.0.0.1:{taken}: Address already in use"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options: list[str], says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "services.engine_sim", *(o.format(taken=port) for o in options)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert says.format(taken=port) in ended.stderr


# --- configuration ---


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("profile", "abacus"),
        ("name", "a b"),
        ("model", ""),
        ("queue_full_status", 500),
        ("speed", 0.0),
        ("port", 70_000),
        ("max_queue", -1),
        ("slots", -1),
        ("prefix_fraction", 1.5),
        ("max_model_len", 500_000),
    ],
)
def test_a_bad_value_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: "):
        EngineConfig(**{option: value})


def test_engines_are_counted_or_listed() -> None:
    base = EngineConfig(port=9000, speed=2.0)
    listed = engines_from(base, ["t4:9100:small", "h100:0"], 1)
    assert [(e.profile, e.port, e.name, e.speed) for e in listed] == [("t4", 9100, "small", 2.0), ("h100", 0, "", 2.0)]
    assert [e.port for e in engines_from(base, [], 3)] == [9000, 9001, 9002]
    assert [e.port for e in engines_from(EngineConfig(port=0), [], 2)] == [0, 0]
    assert [e.name for e in engines_from(EngineConfig(name="n"), [], 2)] == ["n-0", "n-1"]
    for bad in (["t4"], ["t4:x"], ["cpux:1"]):
        with pytest.raises(ConfigError):
            engines_from(base, bad, 1)
    with pytest.raises(ConfigError, match="count"):
        engines_from(base, [], 0)
    with pytest.raises(ConfigError, match="neither count nor name"):
        engines_from(base, ["t4:1"], 2)
    for engines in ((), (base, base)):
        with pytest.raises(ConfigError):
            ServeConfig(engines)
    with pytest.raises(ConfigError, match="grace_s"):
        ServeConfig((base,), -1.0)
    small = EngineConfig(kv_tokens=1000, slots=3).engine_speed()
    assert (small.kv_tokens, small.slots) == (1000, 3)
