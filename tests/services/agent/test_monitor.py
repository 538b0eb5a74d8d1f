"""What the monitor makes of servers that come, go, hang, restart and talk nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from random import Random

import pytest
from structlog.testing import capture_logs

from common import clock
from common.policy.prediction import class_speed
from common.types import Endpoint, LoadReport, Phase
from services.agent.accelerators import Accelerator
from services.agent.boot import Boot
from services.agent.config import InstanceConfig
from services.agent.engines import EngineState
from services.agent.monitor import InstanceMonitor
from tests import servers
from tests.fake_engine import FakeEngine, Script
from tests.services.agent.fake_server import FakeServer, Reply, metrics, models, vllm
from tests.services.agent.pages import Recorded

eventually = partial(servers.eventually, timeout_s=4.0, step_s=0.005)


class Seen:
    """Records what a monitor tells, and makes it look twenty times a second."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self.gone: list[str] = []
        self.reports: list[LoadReport] = []
        self.monitors: list[InstanceMonitor] = []

    def monitor(self, **options: object) -> InstanceMonitor:
        settings: dict[str, object] = {"interval_s": 0.05, "timeout_s": 0.3, "hang_after_s": 5.0}
        monitor = InstanceMonitor(
            on_endpoint=self.endpoints.append,
            on_gone=self.gone.append,
            on_report=self.reports.append,
            rng=Random(1),
            **{**settings, **options},  # type: ignore[arg-type]
        )
        self.monitors.append(monitor)
        return monitor


@pytest.fixture
async def seen() -> AsyncIterator[Seen]:
    seen = Seen()
    yield seen
    for monitor in seen.monitors:
        await monitor.close()


async def test_a_server_is_found_described_and_reported_on(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        config = InstanceConfig(url=server.url, gpu="l4", weight=2.0, price_usd_per_hour=0.7, version="v3")
        seen.monitor(agent="10.0.0.1:7000").watch({"a": config})
        await eventually(lambda: len(seen.reports) > 3)
    (endpoint,) = seen.endpoints
    assert endpoint == Endpoint(
        "a",
        url=server.url,
        agent="10.0.0.1:7000",
        models=frozenset({"tiny"}),
        engine="vllm",
        gpu="l4",
        weight=2.0,
        price_usd_per_hour=0.7,
        phase=Phase.SERVING,
        boot="v3/1790000000.50",
        capacity=endpoint.capacity,
        labels=frozenset({"version=v3"}),
    )
    assert endpoint.capacity is not None
    assert endpoint.capacity.kv_tokens == 16_000.0
    assert endpoint.capacity.alpha_s == class_speed("l4").alpha_s
    report = seen.reports[0]
    assert (report.endpoint, report.running, report.waiting, report.kv_utilization) == ("a", 3.0, 2.0, 0.25)
    assert (report.generated_tokens, report.gpu_utilization, report.gpu_memory_free_bytes) == (1000.0, None, None)
    assert 0.0 <= report.age_s < 0.2


async def test_limits_that_it_tells_replace_those_of_its_class_of_gpu(seen: Seen) -> None:
    routes = {k.removeprefix("main "): Reply(a.body, a.status) for k, a in Recorded("llamacpp-2026.10").answers.items()}
    async with FakeServer(routes) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url, gpu="l4")})
        await eventually(lambda: seen.reports)
    assert seen.endpoints[0].engine == "llamacpp"
    capacity, prior = seen.endpoints[0].capacity, class_speed("l4")
    assert capacity is not None
    assert (capacity.slots, capacity.kv_tokens, capacity.beta_s) == (2.0, 2048.0, prior.beta_s)
    assert (seen.reports[0].running, seen.reports[0].waiting) == (2.0, 3.0)


async def test_a_server_with_listeners_of_their_own(seen: Seen) -> None:
    """TorchServe: requests, management and metrics on three ports, here as configured."""
    listeners: dict[str, dict[str, Reply]] = {"main": {}, "management": {}, "metrics": {}}
    for key, answer in Recorded("torchserve-0.12").answers.items():
        listener, _, path = key.partition(" ")
        listeners[listener][path] = Reply(answer.body, answer.status)
    main, management, page = (FakeServer(routes) for routes in listeners.values())
    async with main, management, page:
        config = InstanceConfig(url=main.url, metrics_url=f"{page.url}/metrics", management_url=management.url)
        seen.monitor().watch({"a": config})
        await eventually(lambda: seen.reports)
    (endpoint,) = seen.endpoints
    assert (endpoint.engine, endpoint.models, endpoint.phase) == ("torchserve", {"echo"}, Phase.SERVING)
    assert endpoint.capacity is not None
    assert endpoint.capacity.slots == 1.0
    assert (seen.reports[0].waiting, seen.reports[0].running) == (3.0, None)


async def test_configuration_wins_over_what_the_server_says(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url, models=("mine",), engine="openai")})
        await eventually(lambda: seen.endpoints)
    assert seen.endpoints[0].models == {"mine"}
    assert seen.endpoints[0].engine == "openai"
    assert seen.endpoints[0].capacity is None


async def test_nobody_there_yet_is_nobody_until_it_comes(seen: Seen) -> None:
    server = await FakeServer(vllm()).start()
    await server.stop()
    with capture_logs() as logs:
        seen.monitor().watch({"a": InstanceConfig(url=server.url)})
        await asyncio.sleep(0.5)
        assert not seen.endpoints
        assert not seen.reports
        await server.start()
        await eventually(lambda: seen.endpoints)
    assert seen.gone == []
    await server.stop()
    assert [log["event"] for log in logs] == ["instance_trouble", "instance_trouble", "instance_found"]


async def test_loading_then_serving_then_loading(seen: Seen) -> None:
    loading = Reply(b'{"error": "Loading model"}', status=503)
    async with FakeServer({"/health": loading, "/v1/models": loading, "/metrics": metrics()}) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url)})
        await eventually(lambda: seen.endpoints)
        assert seen.endpoints[-1].phase is Phase.LOADING
        server.routes = vllm()
        await eventually(lambda: seen.endpoints[-1].phase is Phase.SERVING)
        assert seen.endpoints[-1].models == {"tiny"}
        server.routes["/health"] = loading
        await eventually(lambda: seen.endpoints[-1].phase is Phase.LOADING)
        await eventually(lambda: seen.reports[-1].phase is Phase.LOADING)
    assert seen.gone == []


async def test_gone_after_some_refusals_and_back_at_once(seen: Seen) -> None:
    server = await FakeServer(vllm()).start()
    seen.monitor(fail_after=4).watch({"a": InstanceConfig(url=server.url)})
    await eventually(lambda: seen.endpoints)
    await server.stop()
    await asyncio.sleep(0.08)
    assert seen.gone == []
    await eventually(lambda: seen.gone == ["a"])
    await eventually(lambda: seen.reports[-1].running is None)
    told = len(seen.reports)
    await asyncio.sleep(0.2)
    assert len(seen.reports) == told
    server.routes = vllm(started=1790009999.0)
    await server.start()
    await eventually(lambda: len(seen.endpoints) == 2)
    assert seen.endpoints[0].boot != seen.endpoints[1].boot
    await server.stop()


async def test_a_short_refusal_is_forgiven(seen: Seen) -> None:
    server = await FakeServer(vllm()).start()
    seen.monitor(fail_after=20).watch({"a": InstanceConfig(url=server.url)})
    await eventually(lambda: seen.endpoints)
    await server.stop()
    await eventually(lambda: seen.reports[-1].running is None)  # its figures are not believed meanwhile
    await server.start()
    await eventually(lambda: seen.reports[-1].running == 3.0)
    assert seen.gone == []
    assert len(seen.endpoints) == 1
    await server.stop()


async def test_a_silent_server_is_kept_for_long_and_not_for_ever(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        seen.monitor(timeout_s=0.1, hang_after_s=1.2, fail_after=2).watch({"a": InstanceConfig(url=server.url)})
        await eventually(lambda: seen.endpoints)
        for reply in server.routes.values():
            reply.delay_s = 9.0
        began = time.monotonic()
        await asyncio.sleep(0.8)
        assert seen.gone == []  # eight looks in vain
        await eventually(lambda: seen.gone == ["a"])
        assert time.monotonic() - began > 1.0
        server.routes = vllm()
        await eventually(lambda: len(seen.endpoints) == 2)
        assert seen.endpoints[0] == seen.endpoints[1]  # the same process


async def test_a_hung_metrics_page_costs_figures_and_nothing_else(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        with capture_logs() as logs:
            seen.monitor(timeout_s=0.1).watch({"a": InstanceConfig(url=server.url)})
            await eventually(lambda: seen.reports)
            server.routes["/metrics"] = Reply(delay_s=9.0)
            await eventually(lambda: seen.reports[-1].running is None)
            await asyncio.sleep(0.5)
            server.routes["/metrics"] = metrics()
            await eventually(lambda: seen.reports[-1].running == 3.0)
    assert len(seen.endpoints) == 1
    assert seen.gone == []
    assert [log["event"] for log in logs] == ["instance_found", "instance_trouble", "instance_trouble"]
    assert logs[1]["trouble"] == ["metrics: timed out"]


async def test_a_restart_between_two_looks_is_seen(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url)})
        await eventually(lambda: seen.endpoints)
        server.routes = vllm(started=1790000777.0, generated=5.0, blocks="None")
        await eventually(lambda: len(seen.endpoints) == 2)
    assert seen.endpoints[1].boot == "1790000777.00"
    assert seen.endpoints[1].capacity is None  # what was known of the old process is not its successor's
    assert seen.gone == []


async def test_models_come_and_go(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url)})
        await eventually(lambda: seen.endpoints)
        server.routes["/v1/models"] = models("tiny", "tiny-lora")
        await eventually(lambda: seen.endpoints[-1].models == {"tiny", "tiny-lora"})
        server.routes["/v1/models"] = Reply(status=500)
        await asyncio.sleep(0.2)
        assert len(seen.endpoints) == 2  # not known now is not gone
        server.routes["/v1/models"] = models()
        await eventually(lambda: len(seen.endpoints) == 3)
    assert seen.endpoints[-1].phase is Phase.LOADING  # an endpoint without models would be asked for any


async def test_instances_are_added_changed_and_removed(seen: Seen) -> None:
    async with FakeServer(vllm()) as one, FakeServer(vllm()) as two:
        monitor = seen.monitor()
        monitor.watch({"a": InstanceConfig(url=one.url)})
        await eventually(lambda: seen.endpoints)
        monitor.watch({"a": InstanceConfig(url=one.url, weight=3.0), "b": InstanceConfig(url=two.url)})
        await eventually(lambda: len(monitor.endpoints()) == 2 and monitor.endpoints()[0].weight == 3.0)
        assert seen.gone == []
        assert all(e.engine == "vllm" for e in seen.endpoints)
        monitor.watch({"b": InstanceConfig(url=two.url)})
        assert seen.gone == ["a"]
        one.asked.clear()
        await asyncio.sleep(0.2)
        assert not one.asked
        assert [e.id for e in monitor.endpoints()] == ["b"]


async def test_reports_age_until_the_next_look(seen: Seen) -> None:
    async with FakeServer(vllm()) as server:
        monitor = seen.monitor(interval_s=5.0)
        monitor.watch({"a": InstanceConfig(url=server.url)})
        await eventually(lambda: seen.endpoints)
        now = clock.now()
        assert monitor.report("a", now + 2.0).age_s == pytest.approx(monitor.report("a", now).age_s + 2.0)


async def test_an_unexpected_error_does_not_end_the_watch(seen: Seen) -> None:
    class Broken:
        calls = 0

        def of(self, instance: InstanceConfig, now: float) -> Accelerator:
            self.calls += 1
            if self.calls < 3:
                raise KeyError("surprise")
            return Accelerator("t4")

    async with FakeServer(vllm()) as server:
        with capture_logs() as logs:
            seen.monitor(accelerators=Broken()).watch({"a": InstanceConfig(url=server.url)})
            await eventually(lambda: seen.endpoints)
    assert seen.endpoints[0].gpu == "t4"
    assert [log["event"] for log in logs].count("look_failed") == 2


async def test_many_hung_servers_do_not_hold_up_a_good_one(seen: Seen) -> None:
    hung = dict.fromkeys(("/health", "/metrics", "/v1/models"), Reply(delay_s=9.0))
    async with FakeServer(hung) as bad, FakeServer(vllm()) as good:
        configs = {f"bad{i}": InstanceConfig(url=bad.url) for i in range(20)}
        seen.monitor(timeout_s=1.0).watch({**configs, "good": InstanceConfig(url=good.url)})
        await eventually(lambda: len(seen.reports) >= 10, timeout_s=3.0)
    assert {r.endpoint for r in seen.reports} == {"good"}


# -- another process? ------------------------------------------------------------------------------------------------


def states(*figures: dict[str, float]) -> list[tuple[bool, str]]:
    boot, out = Boot(), []
    for each in figures:
        if each.pop("gone", 0.0):
            boot.left()
        out.append((boot.changed(EngineState(**each)), boot.mark))  # type: ignore[arg-type]
    return out


def test_by_start_time() -> None:
    assert states({"started_s": 5.0}, {"started_s": 5.0}, {}, {"started_s": 6.0}) == [
        (False, "5.00"),
        (False, "5.00"),
        (False, "5.00"),
        (True, "6.00"),
    ]


def test_by_counters_that_go_back() -> None:
    assert states({"steps": 5.0}, {"steps": 9.0}, {}, {"steps": 8.0}, {"steps": 8.0}) == [
        (False, "0"),
        (False, "0"),
        (False, "0"),
        (True, "1"),
        (False, "1"),
    ]
    assert states({"generated_tokens": 5.0}, {"generated_tokens": 6.0, "gone": 1.0})[-1] == (False, "0")
    assert states({"generated_tokens": 5.0}, {"generated_tokens": 4.0, "gone": 1.0})[-1] == (True, "1")


def test_by_absence_where_there_is_nothing_else() -> None:
    assert states({}, {}, {"gone": 1.0}, {}) == [(False, "0"), (False, "0"), (True, "1"), (False, "1")]


async def test_a_server_serves_when_it_has_answered_one_token_and_again_after_a_restart(seen: Seen) -> None:
    """Until then its requests wait: it is loading."""
    slow = Script.whole(delay_s=0.4)
    async with FakeEngine("cold", slow) as engine:
        engine.then(Script.error(500, "still compiling"))
        config = InstanceConfig(url=engine.url, engine="openai", warm_up=True)
        seen.monitor(fail_after=2).watch({"a": config})
        await eventually(lambda: bool(seen.endpoints), timeout_s=10.0)
        assert seen.endpoints[0].phase is Phase.LOADING
        await eventually(lambda: seen.endpoints[-1].phase is Phase.SERVING, timeout_s=20.0)
        assert [s.ended for s in engine.seen] == ["complete", "complete"]  # the one that failed, and the warm-up
        engine.kill()
        await eventually(lambda: seen.gone == ["a"], timeout_s=10.0)
        known = len(seen.endpoints)
        await engine.start()
        await eventually(lambda: len(seen.endpoints) > known + 1, timeout_s=20.0)
        assert [e.phase for e in seen.endpoints[known:]] == [Phase.LOADING, Phase.SERVING]
        assert len(engine.seen) == 3


async def test_an_idle_server_that_does_not_answer_one_token_is_loading_until_it_does(seen: Seen) -> None:
    """Its health and metrics stay green; while it has work, or does not say, it is not asked."""
    chat = "/v1/chat/completions"
    async with FakeServer({**vllm(running=0.0, waiting=0.0), chat: Reply(b"{}")}) as server:
        seen.monitor().watch({"a": InstanceConfig(url=server.url, probe_idle_s=0.1)})
        await eventually(lambda: server.asked[chat] >= 2, timeout_s=20.0)
        assert {e.phase for e in seen.endpoints} == {Phase.SERVING}
        server.routes[chat] = Reply(b"engine dead", 500)
        await eventually(lambda: seen.endpoints[-1].phase is Phase.LOADING, timeout_s=20.0)
        server.routes[chat] = Reply(b"{}", 400)  # not for it: nothing against it
        await eventually(lambda: seen.endpoints[-1].phase is Phase.SERVING, timeout_s=20.0)
        for busy in (vllm(running=1.0, waiting=0.0), {"/v1/models": models("tiny"), "/health": Reply()}):
            server.routes = {**busy, chat: Reply(b"{}")}
            looks = server.asked["/health"]
            await eventually(lambda n=looks: server.asked["/health"] > n + 2, timeout_s=20.0)
            asked, looks = server.asked[chat], server.asked["/health"]
            await eventually(lambda n=looks: server.asked["/health"] > n + 6, timeout_s=20.0)
            assert server.asked[chat] == asked
        assert seen.endpoints[-1].phase is Phase.SERVING
