"""Every adapter against every server's recorded answers: which kind it is, and what it shows."""

from __future__ import annotations

import json
from math import isfinite
from random import Random
from typing import Any

import pytest

from common.types import Phase
from services.agent.engines import ADAPTERS, Adapter, Answer, EngineState, Unreachable, adapter_for, detect
from tests.services.agent.fake_server import FakeServer, Reply
from tests.services.agent.pages import NAMES, Recorded, engine_of
from tests.services.agent.test_engines import scraper

__all__ = ["scraper"]

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"
GEMMA = "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"
IMITATIONS = {("sglang-2026.07", "ollama")}  # SGLang has Ollama's API as well; it is asked first

EXPECTED: dict[str, EngineState] = {
    "vllm-0.32": EngineState(
        models=frozenset({"tiny"}),
        adapters=frozenset(),
        max_model_len=2048,
        running=0.0,
        waiting=0.0,
        kv_utilization=0.0,
        kv_tokens=1_048_576.0,
        generated_tokens=933.0,
        steps=644.0,
        started_s=1795981710.88,
    ),
    "vllm-0.32-lora": EngineState(
        models=frozenset({"tiny", "tiny-lora"}),
        adapters=frozenset({"tiny-lora"}),
        max_model_len=2048,
        running=4.0,
        waiting=2.0,
        kv_utilization=0.002930045171529727,
        kv_tokens=1_048_576.0,
        generated_tokens=2741.0,
        steps=686.0,
        started_s=1795988615.23,
    ),
    "vllm-0.8": EngineState(
        models=frozenset({"m"}),
        adapters=frozenset(),
        max_model_len=8192,
        running=5.0,
        waiting=1.0,
        kv_utilization=0.125,
        kv_tokens=32_000.0,
        generated_tokens=4242.0,
        tokens_per_s=120.25,
        prompt_tokens_per_s=900.5,
    ),
    "sglang-2026.07": EngineState(
        models=frozenset({LLAMA, "sql-lora"}),
        adapters=frozenset({"sql-lora"}),
        versions=frozenset({(LLAMA, "step-1200"), ("sql-lora", "step-1200")}),
        max_model_len=131_072,
        max_running=96.0,
        running=7.0,
        waiting=1.0,
        kv_utilization=0.375,
        kv_tokens=323_442.0,
        generated_tokens=11_000.0,
        steps=20_000.0,
        tokens_per_s=202.0,
    ),
    "sglang-0.4": EngineState(
        models=frozenset({LLAMA}),
        adapters=frozenset(),
        max_model_len=131_072,
        running=162.0,
        waiting=2826.0,
        kv_utilization=0.28,
        generated_tokens=7_557_572.0,
        steps=7_400_757.0,
        tokens_per_s=86.50814177726902,
    ),
    "tgi-3.3": EngineState(
        models=frozenset({MISTRAL}),
        versions=frozenset({(MISTRAL, "3ad372fc79158a2148299e3318516c786aeded6c")}),
        max_model_len=4096,
        running=8.0,
        waiting=5.0,
        generated_tokens=64_000.0,
        steps=60_250.0,
        tokens_per_s=400.0,
    ),
    "tgi-2.0": EngineState(
        models=frozenset({MISTRAL}),
        max_model_len=4096,
        max_running=64.0,
        running=8.0,
        waiting=5.0,
        kv_utilization=0.25,
        kv_tokens=32_768.0,
        generated_tokens=64_000.0,
        steps=60_250.0,
        tokens_per_s=400.0,
    ),
    "tgi-3.3-lost": EngineState(
        phase=Phase.LOADING,
        models=frozenset({MISTRAL}),
        max_model_len=4096,
        running=8.0,
        waiting=5.0,
        generated_tokens=64_000.0,
        steps=60_250.0,
        tokens_per_s=400.0,
    ),
    "llamacpp-2026.10": EngineState(
        models=frozenset({"tiny.gguf"}),
        warm_models=frozenset({"tiny.gguf"}),
        max_model_len=1024,
        max_running=2.0,
        running=2.0,
        waiting=3.0,
        kv_tokens=2048.0,
        generated_tokens=50.0,
        steps=772.0,
    ),
    "llamacpp-2026.10-asleep": EngineState(
        models=frozenset({"tiny.gguf"}),
        warm_models=frozenset(),
        max_model_len=2048,
        max_running=4.0,
        kv_tokens=8192.0,
        problems=frozenset({"metrics: switched off (start it with --metrics)"}),
    ),
    "llamacpp-2025.02": EngineState(
        models=frozenset({"gpt-4o-mini"}),
        warm_models=frozenset({"gpt-4o-mini"}),
        max_model_len=4096,
        max_running=4.0,
        running=3.0,
        waiting=1.0,
        kv_utilization=0.375,
        kv_tokens=16_384.0,
        generated_tokens=900.0,
        steps=950.0,
        tokens_per_s=42.25,
        prompt_tokens_per_s=321.5,
    ),
    "llamacpp-loading": EngineState(
        phase=Phase.LOADING, problems=frozenset({"models: status 503", "metrics: status 503"})
    ),
    "llamacpp-router": EngineState(
        models=frozenset({GEMMA, "gemma", "small", "asleep", "cold"}),
        warm_models=frozenset({GEMMA, "gemma", "small"}),
        running=3.0,
        waiting=1.0,
        generated_tokens=150.0,
        steps=150.0,
        tokens_per_s=80.0,
    ),
    "ollama-2026.08": EngineState(
        models=frozenset({"llama3.2:latest", "llama3.2", "qwen3:8b", "gpt-oss:120b-cloud"}),
        versions=frozenset(
            {
                ("llama3.2:latest", "a80c4f17acd5"),
                ("qwen3:8b", "500a1f067a9f"),
                ("gpt-oss:120b-cloud", "569662207105"),
            }
        ),
        warm_models=frozenset({"llama3.2:latest", "llama3.2", "gpt-oss:120b-cloud"}),
        max_model_len=4096,
    ),
    "ollama-empty": EngineState(models=frozenset(), warm_models=frozenset()),
    "triton-2.51": EngineState(
        models=frozenset({"double"}), versions=frozenset({("double", "1")}), waiting=3.0, steps=3.0
    ),
    "triton-2.51-unloaded": EngineState(models=frozenset()),  # it calls itself ready; the monitor knows better
    "triton-trtllm": EngineState(
        models=frozenset({"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}),
        versions=frozenset({(m, "1") for m in ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing")}),
        max_running=64.0,
        running=7.0,
        waiting=5.0,
        kv_utilization=0.25,
        kv_tokens=25_600.0,
        steps=150.0,
    ),
    "torchserve-0.12": EngineState(
        models=frozenset({"echo"}), versions=frozenset({("echo", "1.0")}), max_running=1.0, waiting=3.0, steps=6.0
    ),
    "torchserve-0.12-starting": EngineState(phase=Phase.LOADING, models=frozenset(), waiting=0.0),
    "trtllm-2026": EngineState(
        models=frozenset({"TinyLlama-1.1B-Chat-v1.0"}),
        adapters=frozenset(),
        running=4.0,
        waiting=2.0,
        kv_utilization=0.62,
        kv_tokens=32_000.0,
        steps=321.0,
    ),
    "openai-llamacpp-python": EngineState(models=frozenset({"local"}), adapters=frozenset()),
}


def adapter_of(name: str) -> Adapter:
    adapter = adapter_for(engine_of(name))
    assert adapter is not None
    return adapter


# -- which kind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
async def test_each_server_is_recognised_by_its_adapter_alone(name: str) -> None:
    engine = engine_of(name)
    for adapter in ADAPTERS:
        known = await adapter.recognise(Recorded(name))
        listed = adapter.engine == "openai" and await lists_models(name)
        assert known == (adapter.engine == engine or listed or (name, adapter.engine) in IMITATIONS), adapter.engine


async def lists_models(name: str) -> bool:
    page = (await Recorded(name)("/v1/models")).json()
    return isinstance(page, dict) and isinstance(page.get("data"), list)


@pytest.mark.parametrize("name", NAMES)
async def test_each_server_is_detected(name: str) -> None:
    ask = Recorded(name)
    found = await detect(ask)
    if engine_of(name) == "other":
        assert found == Unreachable(refused=False, why="not recognised (/v1/models: status 404); name its engine")
    else:
        assert not isinstance(found, Unreachable)
        assert found.engine == engine_of(name)
    assert len(set(ask.asked)) == len(ask.asked)  # each path once
    assert all(a.startswith("main ") for a in ask.asked)  # a port that may be another server's is not touched


async def test_what_tells_at_once_is_asked_little() -> None:
    asked = {}
    for name in ("vllm-0.32", "sglang-2026.07", "trtllm-2026", "llamacpp-2026.10"):
        ask = Recorded(name)
        await detect(ask)
        asked[name] = [a.removeprefix("main ") for a in ask.asked]
    assert asked["vllm-0.32"] == ["/v1/models"]
    assert asked["trtllm-2026"] == ["/v1/models"]  # whose /metrics is emptied by reading it
    assert asked["sglang-2026.07"] == ["/v1/models", "/metrics"]


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_each_fixture_has_its_expected_state() -> None:
    assert {n for n in NAMES if engine_of(n) != "other"} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
async def test_what_each_server_shows(name: str) -> None:
    assert await adapter_of(name).look(Recorded(name)) == EXPECTED[name]


async def test_a_look_changes_nothing() -> None:
    """No path that loads a model, wakes a server or empties a list."""
    for name in EXPECTED:
        ask = Recorded(name)
        await adapter_of(name).look(ask)
        paths = [a.partition(" ")[2] for a in ask.asked]
        assert not any(p.startswith("/slots") for p in paths)
        assert all("autoload=false" in p for p in paths if p.startswith("/metrics?"))
        assert "/metrics" not in paths or engine_of(name) != "trtllm"
        assert len(paths) <= 6


async def test_absent_parts_are_unknown() -> None:
    """Each answer taken away in turn: what it told is not known, what the others told stays, and nothing breaks."""
    for name, full in EXPECTED.items():
        for key in Recorded(name).answers:
            seen = await adapter_of(name).look(Recorded(name, {key: Answer(404)}))
            assert isinstance(seen, EngineState)
            for figure in FIGURES:
                assert getattr(seen, figure) in {None, getattr(full, figure)} or (name, key, figure) in OTHER_SOURCES


FIGURES = ("running", "kv_utilization", "kv_tokens", "generated_tokens", "max_running", "models")
OTHER_SOURCES = {  # the same from elsewhere, and a little different
    ("triton-2.51-unloaded", "main /v2/models/stats", "models"),  # a label stays when its model was unloaded
    # A router without its list of models looks like a server with one.
    ("llamacpp-router", "main /v1/models", "models"),
}


async def test_sglang_without_metrics_or_without_loads() -> None:
    adapter, full = adapter_of("sglang-2026.07"), EXPECTED["sglang-2026.07"]
    quiet = await adapter.look(Recorded("sglang-2026.07", {"main /metrics": Answer(404)}))
    assert isinstance(quiet, EngineState)
    assert (quiet.running, quiet.waiting, quiet.kv_tokens) == (full.running, full.waiting, full.kv_tokens)
    assert (quiet.steps, quiet.problems) == (None, frozenset())
    older = await adapter.look(Recorded("sglang-2026.07", {"main /v1/loads": Answer(404)}))
    assert isinstance(older, EngineState)
    assert (older.running, older.waiting, older.kv_utilization) == (full.running, full.waiting, full.kv_utilization)
    assert (older.kv_tokens, older.tokens_per_s, older.max_running) == (full.kv_tokens, full.tokens_per_s, None)
    blind = await adapter.look(
        Recorded("sglang-2026.07", {"main /metrics": Answer(404), "main /v1/loads": Answer(404)})
    )
    assert isinstance(blind, EngineState)
    assert blind.problems == {"metrics: status 404 (start it with --enable-metrics)"}


async def test_sglang_warming_up() -> None:
    seen = await adapter_of("sglang-0.4").look(Recorded("sglang-0.4", {"main /health": Answer(503)}))
    assert isinstance(seen, EngineState)
    assert seen.phase is Phase.LOADING


async def test_copies_of_tensor_parallel_ranks_are_not_summed() -> None:
    page = b"".join(
        b'sglang:num_running_reqs{tp_rank="%d",dp_rank="%d"} %d\n' % (tp, dp, 3 + dp)
        for tp in range(4)
        for dp in (0, 1)
    )
    seen = await adapter_of("sglang-0.4").look(Recorded("sglang-0.4", {"main /metrics": Answer(200, page)}))
    assert isinstance(seen, EngineState)
    assert seen.running == 7.0


async def test_vllm_asleep() -> None:
    page = b'vllm:num_requests_running 0\nvllm:engine_sleep_state{sleep_state="awake"} 0.0\n'
    seen = await adapter_of("vllm-0.8").look(Recorded("vllm-0.8", {"main /metrics": Answer(200, page)}))
    assert isinstance(seen, EngineState)
    assert seen.phase is Phase.LOADING


async def test_triton_without_statistics_names_its_models_from_the_metrics() -> None:
    seen = await adapter_of("triton-2.51").look(Recorded("triton-2.51", {"main /v2/models/stats": Answer(400)}))
    assert isinstance(seen, EngineState)
    assert (seen.models, seen.versions, seen.steps) == ({"double"}, {("double", "1")}, 3.0)
    gone = {"main /v2/models/stats": Answer(400), "metrics /metrics": Answer(0, problem="no connection", refused=True)}
    blind = await adapter_of("triton-2.51").look(Recorded("triton-2.51", gone))
    assert isinstance(blind, EngineState)
    assert blind.models is None
    assert blind.problems == {"models: status 400", "metrics: no connection"}


async def test_torchserve_whose_management_is_closed() -> None:
    keys = {k: Answer(400) for k in Recorded("torchserve-0.12").answers if k.startswith("management")}
    seen = await adapter_of("torchserve-0.12").look(Recorded("torchserve-0.12", keys))
    assert isinstance(seen, EngineState)
    assert (seen.phase, seen.models, seen.waiting) == (Phase.SERVING, None, None)
    assert seen.problems == {"models: status 400"}


async def test_torchserve_of_which_one_model_cannot_be_described() -> None:
    hung = {"management /models/echo/all": Answer(0, problem="timed out")}
    seen = await adapter_of("torchserve-0.12").look(Recorded("torchserve-0.12", hung))
    assert isinstance(seen, EngineState)
    assert (seen.phase, seen.models, seen.waiting) == (Phase.SERVING, None, None)
    assert seen.problems == {"models: timed out"}
    many = json.dumps({"models": [{"modelName": f"m{i}"} for i in range(32)], "nextPageToken": "32"}).encode()
    seen = await adapter_of("torchserve-0.12").look(
        Recorded("torchserve-0.12", {"management /models?limit=32": Answer(200, many)})
    )
    assert isinstance(seen, EngineState)
    assert seen.models is None
    assert seen.problems == {"models: more than 32; name them in the configuration"}


# -- nonsense --------------------------------------------------------------------------------------------------------

NASTY: tuple[Any, ...] = (
    None, True, -1, -5.5, 1e400, 10**400, "", "x" * 5000, "NaN", [], {}, [[]], [None], {"a": 1}, [{}] * 3,
    {"data": [{"id": {}}]}, {"models": 3}, {"loads": [7]}, {"model_stats": {}}, {"name": "x", "extensions": [[]]},
)  # fmt: skip
PAGES = (
    b"", b"<html>down</html>", b"\xff" * 100, b"[" * 50_000, b"null", b'"', b"{", b'{"data":[1e999]}',
    b"sglang:num_running_reqs NaN\nvllm:num_requests_running -1\ntgi_batch_current_size +Inf\n",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPECTED))
async def test_nonsense_does_no_harm(name: str) -> None:
    """Any part of any answer made into something else: no exception, and no figure that cannot be."""
    rng = Random(name)
    keys = sorted(Recorded(name).answers)
    for _ in range(60):
        key = rng.choice(keys)
        before = Recorded(name).answers[key]
        page = before.json()
        changed = json.dumps(mutated(page, rng)).encode() if page is not None else rng.choice(PAGES)
        ask = Recorded(name, {key: Answer(rng.choice((200, 200, 200, 204, 500, 302)), changed)})
        sensible(await adapter_of(name).look(ask))
        await detect(ask)


def mutated(page: Any, rng: Random) -> Any:
    """The same with one part of it replaced."""
    if isinstance(page, dict) and page and rng.random() < 0.85:
        key = rng.choice(sorted(page))
        return {**page, key: mutated(page[key], rng)}
    if isinstance(page, list) and page and rng.random() < 0.85:
        at = rng.randrange(len(page))
        return [mutated(p, rng) if i == at else p for i, p in enumerate(page)]
    return rng.choice(NASTY)


def sensible(seen: EngineState | Unreachable) -> None:
    if isinstance(seen, Unreachable):
        return
    for figure in (seen.running, seen.waiting, seen.generated_tokens, seen.steps, seen.tokens_per_s, seen.started_s):
        assert figure is None or (isfinite(figure) and figure >= 0.0)
    for capacity in (seen.kv_tokens, seen.max_running, seen.max_model_len):
        assert capacity is None or (isfinite(capacity) and capacity > 0)
    assert seen.kv_utilization is None or 0.0 <= seen.kv_utilization <= 1.0
    for names in (seen.models, seen.warm_models, seen.adapters):
        assert all(isinstance(n, str) and 0 < len(n) <= 256 for n in names or ())


ANY_PATH = sorted({k.partition(" ")[2] for n in EXPECTED for k in Recorded(n).answers} | {"/models/echo/all"})


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.engine)
@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"<html>gateway</html>", kind="text/html"),
        Reply(b"{}", pad=20 * 1024 * 1024),
        Reply(raw=b"\x00\x01 nonsense\r\n\r\n"),
        Reply(status=500),
    ],
    ids=["html", "huge", "broken", "500"],
)
async def test_every_path_of_a_real_socket_in_trouble(scraper: Any, adapter: Adapter, reply: Reply) -> None:
    async with FakeServer(dict.fromkeys(ANY_PATH, reply)) as server:
        seen = await adapter.look(scraper.of(server.url, metrics_url=server.url, management_url=server.url))
    sensible(seen)
    if isinstance(seen, EngineState):
        assert (seen.models, seen.running, seen.kv_utilization) == (None, None, None)
        assert seen.problems


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.engine)
async def test_a_hung_server_is_unreachable_and_soon(scraper: Any, adapter: Adapter) -> None:
    async with FakeServer(dict.fromkeys(ANY_PATH, Reply(delay_s=9.0))) as server:
        ask = scraper.of(server.url, metrics_url=server.url, management_url=server.url)
        assert await adapter.look(ask) == Unreachable(refused=False, why="timed out")


# -- other listeners -------------------------------------------------------------------------------------------------


async def test_a_configured_metrics_page_is_read_wherever_it_is(scraper: Any) -> None:
    recorded = Recorded("triton-2.51").answers
    main = {k.removeprefix("main "): Reply(a.body, a.status) for k, a in recorded.items() if k.startswith("main")}
    page = Reply(recorded["metrics /metrics"].body)
    async with FakeServer(main) as server, FakeServer({"/metrics": page, "/triton/prom": page}) as beside:
        for url in (beside.url, f"{beside.url}/triton/prom"):
            seen = await adapter_of("triton-2.51").look(scraper.of(server.url, metrics_url=url))
            assert seen == EXPECTED["triton-2.51"]


async def test_a_port_that_cannot_be(scraper: Any) -> None:
    answer = await scraper.of("http://127.0.0.1:65535")("/metrics", ports_up=2)
    assert answer.status == 0
    assert answer.problem
