"""Adapters against a server that answers with sense and with nonsense."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator

import pytest

from common.types import Phase
from services.agent.engines import ADAPTERS, Adapter, EngineState, Scraper, Unreachable, adapter_for, detect, http
from tests.servers import eventually
from tests.services.agent.fake_server import FakeServer, Reply, metrics, models, vllm

HTML = Reply(b"<html><body>vllm:num_requests_running 5</body></html>", kind="text/html")


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    async with Scraper(timeout_s=0.25) as scraper:
        yield scraper


async def look(scraper: Scraper, routes: dict[str, Reply], engine: str = "vllm") -> EngineState | Unreachable:
    adapter = adapter_for(engine)
    assert adapter is not None
    async with FakeServer(routes) as server:
        return await adapter.look(scraper.of(server.url))


async def state(scraper: Scraper, routes: dict[str, Reply], engine: str = "vllm") -> EngineState:
    seen = await look(scraper, routes, engine)
    assert isinstance(seen, EngineState)
    return seen


async def kind(scraper: Scraper, routes: dict[str, Reply]) -> str | Unreachable:
    async with FakeServer(routes) as server:
        found = await detect(scraper.of(server.url))
        assert max(server.asked.values()) == 1  # adapters share what was asked
        return found if isinstance(found, Unreachable) else found.engine


# -- what a vLLM says ------------------------------------------------------------------------------------------------


async def test_a_healthy_vllm(scraper: Scraper) -> None:
    assert await state(scraper, vllm()) == EngineState(
        phase=Phase.SERVING,
        models=frozenset({"tiny"}),
        adapters=frozenset(),
        max_model_len=4096,
        running=3.0,
        waiting=2.0,
        kv_utilization=0.25,
        kv_tokens=16_000.0,
        generated_tokens=1000.0,
        steps=500.0,
        started_s=1790000000.5,
    )


async def test_data_parallel_engines_add_up(scraper: Scraper) -> None:
    second = """
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0
"""
    seen = await state(scraper, vllm(more=second))
    assert (seen.running, seen.kv_utilization, seen.kv_tokens) == (7.0, 0.5, 24_000.0)


async def test_older_names(scraper: Scraper) -> None:
    page = Reply(b'vllm:num_requests_running{model_name="m"} 1\nvllm:gpu_cache_usage_perc{model_name="m"} 0.125\n')
    seen = await state(scraper, {"/metrics": page, "/health": Reply(), "/v1/models": models("m", max_len=None)})
    assert (seen.running, seen.kv_utilization, seen.waiting, seen.max_model_len) == (1.0, 0.125, None, None)
    assert seen.generated_tokens is None


async def test_kv_capacity_where_it_is_given_and_where_not_yet(scraper: Scraper) -> None:
    assert (await state(scraper, vllm(blocks="None"))).kv_tokens is None
    given = vllm()
    given["/metrics"].body = given["/metrics"].body.replace(
        b'engine="0",num_gpu', b'kv_cache_size_tokens="463459",num_gpu'
    )
    assert (await state(scraper, given)).kv_tokens == 463_459.0


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_not_ready_by_its_own_word(scraper: Scraper, status: int) -> None:
    seen = await state(scraper, {**vllm(), "/health": Reply(status=status)})
    assert seen.phase is Phase.LOADING
    assert seen.running == 3.0


async def test_asleep_takes_no_work(scraper: Scraper) -> None:
    assert (await state(scraper, vllm(awake=0.0))).phase is Phase.LOADING


# -- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["NaN", "-1", "+Inf", "-Inf", "x", "1e999", ""])
async def test_figures_that_cannot_be_are_absent(scraper: Scraper, bad: str) -> None:
    seen = await state(
        scraper,
        vllm(running=bad, waiting=bad, kv=bad, generated=bad, steps=bad, started=bad, blocks=bad),
    )
    assert seen.phase is Phase.SERVING
    assert seen.models == frozenset({"tiny"})
    figures = (seen.running, seen.waiting, seen.kv_utilization, seen.generated_tokens, seen.steps, seen.started_s)
    assert figures == (None,) * 6
    assert seen.kv_tokens is None
    assert seen.problems == {"metrics: no number of running requests"}


async def test_a_percentage_is_no_fraction(scraper: Scraper) -> None:
    assert (await state(scraper, vllm(kv=45.0))).kv_utilization is None
    assert (await state(scraper, vllm(kv=1.0000001))).kv_utilization == 1.0


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (HTML, "metrics: none of vLLM's"),
        (Reply(status=404), "metrics: status 404"),
        (Reply(b"\xff\x00" * 1000), "metrics: none of vLLM's"),
        (Reply(b"vllm:num_requests_running 1\n", pad=20 * 1024 * 1024), "metrics: larger than 4194304 bytes"),
        (Reply(delay_s=5.0), "metrics: timed out"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:"), "metrics: broken answer"),
        (Reply(raw=b"\x00\x01 nonsense\r\n\r\n"), "metrics: broken answer"),
        (Reply(raw=b""), "metrics: broken answer"),
        (Reply(gzip.compress(b"vllm:x 1\n"), headers="content-encoding: gzip\r\n"), "metrics: compressed"),
        (Reply(status=302, headers="location: http://127.0.0.1:1/\r\n"), "metrics: status 302"),
    ],
)
async def test_a_metrics_page_that_is_none(scraper: Scraper, reply: Reply, problem: str) -> None:
    began = time.monotonic()
    seen = await state(scraper, {**vllm(), "/metrics": reply})
    assert time.monotonic() - began < 2.0
    assert seen.phase is Phase.SERVING
    assert seen.models == frozenset({"tiny"})
    assert seen.running is None
    assert seen.kv_utilization is None
    assert [p[: len(problem)] for p in seen.problems] == [problem]


async def test_a_page_without_end_is_cut_early(scraper: Scraper) -> None:
    async with FakeServer({**vllm(), "/metrics": Reply(b"vllm:x 1\n", pad=1024 * 1024 * 1024)}) as server:
        adapter = adapter_for("vllm")
        assert adapter is not None
        assert isinstance(await adapter.look(scraper.of(server.url)), EngineState)
        await asyncio.sleep(0.1)
        assert server.sent < 32 * 1024 * 1024


@pytest.mark.parametrize(
    "reply",
    [
        HTML,
        Reply(b"[" * 100_000),
        Reply(b'{"data": 5}'),
        Reply(b"[]"),
        Reply(b"null"),
        Reply(b'{"data": [1, null'),
        Reply(status=401),
    ],
)
async def test_models_that_are_none_are_unknown(scraper: Scraper, reply: Reply) -> None:
    for engine in ("vllm", "openai"):
        seen = await state(scraper, {**vllm(), "/v1/models": reply}, engine)
        assert seen.models is None
        assert seen.max_model_len is None
        assert seen.phase is Phase.SERVING
        assert [p[:7] for p in seen.problems] == ["models:"]


async def test_models_that_make_no_sense_are_left_out(scraper: Scraper) -> None:
    listing = Reply(
        b'{"data": [1, null, {}, {"id": 5}, {"id": ""}, {"id": "good", "max_model_len": "x"}, {"id": "'
        + b"x" * 500
        + b'"}]}'
    )
    seen = await state(scraper, {**vllm(), "/v1/models": listing})
    assert seen.models == frozenset({"good"})
    assert seen.max_model_len is None


# -- nobody there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ADAPTERS)
async def test_a_refusal_is_told_from_a_hang(scraper: Scraper, adapter: Adapter) -> None:
    server = await FakeServer().start()
    await server.stop()
    gone = await adapter.look(scraper.of(server.url))
    assert isinstance(gone, Unreachable)
    assert gone.refused


async def test_half_hung_is_there(scraper: Scraper) -> None:
    slow = Reply(delay_s=9)
    seen = await state(scraper, {**vllm(), "/health": slow, "/v1/models": slow})
    assert seen.phase is Phase.SERVING
    assert seen.running == 3.0
    assert seen.models is None


# -- which kind ------------------------------------------------------------------------------------------------------


async def test_kinds_are_recognised(scraper: Scraper) -> None:
    assert await kind(scraper, vllm()) == "vllm"
    assert await kind(scraper, {"/v1/models": models("m")}) == "vllm"  # statistics switched off
    assert await kind(scraper, {"/metrics": metrics(), "/v1/models": Reply(status=503)}) == "vllm"  # loading
    assert await kind(scraper, {"/v1/models": models("m", owner="me")}) == "openai"
    assert await kind(scraper, {"/v1/models": models("m", owner="sglang")}) == "sglang"
    assert await kind(scraper, {"/v1/models": models("m", owner="x"), "/metrics": Reply(b"sglang:x 1")}) == "sglang"


async def test_what_nobody_knows_says_why(scraper: Scraper) -> None:
    assert await kind(scraper, {"/": HTML}) == Unreachable(
        refused=False, why="not recognised (/v1/models: status 404); name its engine"
    )
    assert await kind(scraper, {"/v1/models": HTML}) == Unreachable(
        refused=False, why="not recognised (/v1/models: not understood); name its engine"
    )
    server = await FakeServer().start()
    await server.stop()
    gone = await detect(scraper.of(server.url))
    assert isinstance(gone, Unreachable)
    assert gone.refused


async def test_the_generic_adapter(scraper: Scraper) -> None:
    seen = await state(scraper, {"/v1/models": models("a", "b", owner="x", max_len=None)}, "openai")
    assert seen == EngineState(models=frozenset({"a", "b"}), adapters=frozenset())
    loading = {"/v1/models": models("a"), "/health": Reply(status=503)}
    assert (await state(scraper, loading, "openai")).phase is Phase.LOADING
    assert (await state(scraper, {"/v1/models": Reply(status=503)}, "openai")).phase is Phase.LOADING


def test_adapters_by_name() -> None:
    assert adapter_for("sim") is adapter_for("vllm")
    assert adapter_for("nothing") is None


# -- what stays open -------------------------------------------------------------------------------------------------


async def test_no_connection_is_left_behind_where_the_loop_is_late() -> None:
    async with FakeServer(vllm()) as server, Scraper(timeout_s=0.01) as scraper:
        ask = scraper.of(server.url)
        for steps in range(60):  # of the loop, after which it stands still until time is out
            asking = asyncio.ensure_future(ask("/metrics"))
            for _ in range(steps):
                await asyncio.sleep(0)
            time.sleep(0.012)
            await asking
        await eventually(lambda: server.connections <= 1, 10.0)


async def test_connections_to_servers_that_are_asked_no_more_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer(vllm()) as gone, FakeServer(vllm()) as kept, Scraper(timeout_s=5.0) as scraper:
        await scraper.of(gone.url)("/health")
        await scraper.of(kept.url)("/health")
        assert (gone.connections, kept.connections) == (1, 1)
        monkeypatch.setattr(http, "FORGET_S", 0.0)
        await scraper.of(kept.url)("/health")
        await eventually(lambda: gone.connections == 0, 10.0)
