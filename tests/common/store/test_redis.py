"""Affinity against a real Redis that is frozen, slow, demoted, killed and flushed (CASES C27, C43)."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.errors import ConfigError, StoreUnavailable
from common.store.base import Placement
from common.store.redis import KEY_PREFIX, RedisAffinityStore
from common.store.redis_client import server_name
from tests.common.store.test_etcd import authority
from tests.servers import RedisSentinel, RedisServer, Relay, eventually

BUDGET_S = 0.1
AMPLE_MS = 3000.0  # where the outcome counts and not the time: the machine may be busy
LATE_S = 0.25  # what a busy machine may add to a time
HERE = Placement(("eu", "a", "i1"), 100)


@asynccontextmanager
async def opened(url: str, *, budget_ms: float = BUDGET_S * 1000, **kwargs: Any) -> AsyncIterator[RedisAffinityStore]:
    store = RedisAffinityStore(url, budget_ms=budget_ms, **kwargs)
    try:
        yield store
    finally:
        await store.close()


async def timed(call: Any) -> tuple[float, Any]:
    """Seconds and outcome: a value, or the StoreUnavailable."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    try:
        outcome = await call
    except StoreUnavailable as error:
        outcome = error
    return loop.time() - begin, outcome


async def traffic(store: RedisAffinityStore, for_s: float, per_s: float = 200.0) -> list[tuple[float, Any]]:
    """Lookups at a steady rate; how long each took, and what came of it."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    tasks = []
    while loop.time() - begin < for_s:
        tasks.append(asyncio.create_task(timed(store.get("s"))))
        await asyncio.sleep(1.0 / per_s)
    return await asyncio.gather(*tasks)


# -- trouble (C27)


@pytest.mark.parametrize("trouble", ["frozen", "slow", "killed"])
async def test_trouble_costs_two_budgets_and_a_log_line(redis_server: RedisServer, trouble: str) -> None:
    async with Relay(redis_server.port) as relay, opened(relay.redis_url) as store:
        await store.ping(5.0)
        await store.put("s", HERE, 60.0)
        with structlog.testing.capture_logs() as lines:
            if trouble == "frozen":
                redis_server.pause()
            elif trouble == "slow":
                relay.delay_s = 0.3
            else:
                redis_server.kill()
                relay.cut()
            for _ in range(2):
                assert store.state == "up"
                took, outcome = await timed(store.get("s"))
                assert isinstance(outcome, StoreUnavailable)
                assert took < BUDGET_S + LATE_S
            assert store.state == "down"
            commands = len(store._commands)
            results = await traffic(store, 0.5)
            assert all(isinstance(outcome, StoreUnavailable) for _, outcome in results)
            assert statistics.median(took for took, _ in results) < 0.01  # nobody waits any more
            assert len(store._commands) <= commands

            if trouble == "frozen":
                redis_server.resume()
            elif trouble == "slow":
                relay.delay_s = 0.0
            else:
                await redis_server.start()
            assert await eventually(lambda: store.state == "up", 10.0) < 5.0
            assert await store.get("s") == HERE
        assert [line["log_level"] for line in lines] == ["warning", "info"]


async def test_when_it_freezes_under_load_no_call_exceeds_its_budget(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, max_connections=4) as store:
        await store.ping(5.0)
        calls = asyncio.create_task(traffic(store, 0.7, per_s=300))
        await asyncio.sleep(0.3)
        redis_server.pause()
        results = await calls
        assert max(took for took, _ in results) < BUDGET_S + LATE_S
        redis_server.resume()


async def test_a_demoted_server_goes_on_reading(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        with structlog.testing.capture_logs() as lines:
            await redis_server.cli("REPLICAOF", "127.0.0.1", "1")
            for _ in range(5):
                with pytest.raises(StoreUnavailable):
                    await store.put("s", HERE, 60.0)
            assert store.state == "read_only"
            assert await store.get("s") == HERE
            await asyncio.sleep(0.5)
            assert store.state == "read_only"
            await redis_server.cli("REPLICAOF", "NO", "ONE")
            await eventually(lambda: store.state == "up", 5.0)
            await store.put("s", HERE, 60.0)
        assert len(lines) == 2


async def test_waiting_for_a_connection_is_no_failure_of_redis(redis_server: RedisServer) -> None:
    async with Relay(redis_server.port) as relay, opened(relay.redis_url, budget_ms=500, max_connections=2) as store:
        await asyncio.gather(*(timed(store.ping(5.0)) for _ in range(2)))
        await store.put("s", HERE, 60.0)
        relay.delay_s = 0.1
        results = await asyncio.gather(*(timed(store.get("s")) for _ in range(40)))
        assert store.state == "up"
        assert 2 <= sum(outcome == HERE for _, outcome in results) < 40
        assert max(took for took, _ in results) < 0.5 + LATE_S
        assert relay.accepted <= 4
        relay.delay_s = 0.0
        await eventually(lambda: not store._commands, 2.0)
        assert await store.get("s") == HERE


async def test_waiting_calls_are_bounded(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS, max_connections=1, max_waiting=3) as store:
        await store.ping(5.0)
        results = await asyncio.gather(*(timed(store.get("s")) for _ in range(10)))
        assert sum(outcome is None for _, outcome in results) == 4
        assert store.state == "up"


async def test_flushed_data_is_only_forgotten(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        await redis_server.cli("FLUSHALL")
        assert await store.get("s") is None
        await store.put("s", HERE, 60.0)
        assert await store.get("s") == HERE


async def test_a_restart_between_two_calls_is_not_noticed(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        await redis_server.restart()
        assert await store.get("s") == HERE


async def test_a_slow_connection_is_ready_for_a_later_call(redis_server: RedisServer) -> None:
    """Connecting may take longer than the budget; it goes on behind the call that began it."""
    async with Relay(redis_server.port) as relay, opened(relay.redis_url, budget_ms=300) as store:
        relay.delay_s = 0.2  # twice: for the handshake, and for the command
        with pytest.raises(StoreUnavailable):
            await store.put("s", HERE, 60.0)
        relay.delay_s = 0.0
        await eventually(lambda: not store._commands, 2.0)
        assert await store.get("s") == HERE
        assert relay.accepted == 1


async def test_a_busy_loop_is_not_mistaken_for_a_dead_redis(redis_server: RedisServer) -> None:
    import time

    async with opened(redis_server.url, budget_ms=300, command_timeout_s=10.0) as store:
        await store.put("s", HERE, 60.0)
        await asyncio.gather(*(store.get("s") for _ in range(4)))  # four connections
        calls = [asyncio.create_task(timed(store.get("s"))) for _ in range(4)]
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(0.6)  # somebody computes; the replies are in the sockets by then
        assert [outcome for _, outcome in await asyncio.gather(*calls)] == [HERE] * 4
        assert store.state == "up"


async def test_unreachable_at_the_start() -> None:
    async with opened("redis://127.0.0.1:1") as store:
        took, outcome = await timed(store.ping(0.2))
        assert isinstance(outcome, StoreUnavailable)
        assert took < 0.2 + LATE_S
        for _ in range(3):
            took, outcome = await timed(store.get("s"))
            assert isinstance(outcome, StoreUnavailable)
        assert store.state == "down"


async def test_after_close_nothing_is_asked(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
    with pytest.raises(StoreUnavailable):
        await store.get("s")
    await store.close()


# -- cancelled callers (C43)


@pytest.mark.parametrize(
    ("connections", "budget_ms", "protocol"), [(1, 3000, 2), (4, 3000, 2), (4, 3000, 3), (4, 60, 2)]
)
async def test_a_cancelled_lookup_never_answers_another(
    redis_server: RedisServer, connections: int, budget_ms: float, protocol: int
) -> None:
    rng = random.Random(1)
    placements = {f"s{n}": Placement(("eu", "a", f"i{n}"), n) for n in range(200)}
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as writer:
        for session, placement in placements.items():
            await writer.put(session, placement, 60.0)
    async with (
        Relay(redis_server.port) as relay,
        opened(f"{relay.redis_url}?protocol={protocol}", budget_ms=budget_ms, max_connections=connections) as store,
    ):
        await asyncio.gather(*(timed(store.get("s0")) for _ in range(connections)))
        relay.delay_s = 0.005
        checked = 0

        async def look(session: str, abort_after_s: float | None) -> None:
            nonlocal checked
            try:
                async with asyncio.timeout(abort_after_s):
                    found = await store.get(session)
            except (TimeoutError, StoreUnavailable):
                return
            assert found == placements[session]
            checked += 1

        for _ in range(6 if connections > 1 else 2):
            batch = rng.sample(sorted(placements), 100 if connections > 1 else 40)
            await asyncio.gather(*(look(s, rng.uniform(0.0, 0.02) if n % 2 else None) for n, s in enumerate(batch)))
        assert checked >= 20 or budget_ms < AMPLE_MS  # with a short budget and a busy machine the breaker may open
        relay.delay_s = 0.0
        for session, placement in placements.items():
            await eventually(lambda: store.state == "up", 10.0)
            _, outcome = await timed(store.get(session))
            assert outcome == placement or isinstance(outcome, StoreUnavailable)


async def test_cancelled_callers_leave_nothing_behind(redis_server: RedisServer) -> None:
    async with Relay(redis_server.port) as relay, opened(relay.redis_url, max_connections=3) as store:
        await store.ping(5.0)
        for _ in range(20):
            calls = [asyncio.create_task(store.get("s")) for _ in range(10)]
            await asyncio.sleep(0.0005)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await eventually(lambda: not store._commands, 3.0)
        assert store._free._value == 3
        assert store._waiting == 0
        assert relay.open <= 4


async def test_a_hanging_command_loses_its_connection(redis_server: RedisServer) -> None:
    async with (
        Relay(redis_server.port) as relay,
        opened(relay.redis_url, budget_ms=300, command_timeout_s=0.5) as store,
    ):
        await store.put("s", HERE, 60.0)
        relay.stall(existing_only=True)
        with pytest.raises(StoreUnavailable):
            await store.get("s")
        await eventually(lambda: not store._commands, 2.0)
        assert await store.get("s") == HERE
        assert relay.accepted == 2


# -- addresses


async def test_a_unix_socket(redis_server: RedisServer) -> None:
    async with opened(redis_server.unix_url, budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        assert await store.get("s") == HERE
    assert await redis_server.cli("GET", KEY_PREFIX + "s") == b"eu/a/i1 100"
    assert await redis_server.cli("PTTL", KEY_PREFIX + "s") > 50_000


async def test_what_another_version_wrote_is_no_placement(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, budget_ms=AMPLE_MS) as store:
        for value in ("", "eu/a/i1", "eu/a/i1 x", "\xff", '{"v":2}', "eu/a/i1 ²"):
            await redis_server.cli("SET", KEY_PREFIX + "s", value)
            assert await store.get("s") is None
        await redis_server.cli("DEL", KEY_PREFIX + "s")
        await redis_server.cli("LPUSH", KEY_PREFIX + "s", "x")
        with pytest.raises(StoreUnavailable):
            await store.get("s")


async def test_user_and_password(redis_server: RedisServer) -> None:
    await redis_server.cli("CONFIG", "SET", "requirepass", "p@ss")
    async with opened(f"redis://:p%40ss@127.0.0.1:{redis_server.port}/2", budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        assert await store.get("s") == HERE
    with structlog.testing.capture_logs() as lines:
        async with opened(f"redis://:wrong@127.0.0.1:{redis_server.port}") as store:
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await store.get("s")
    assert len(lines) == 1
    assert "wrong" not in str(lines).replace("WRONGPASS", "")


async def test_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "node.pem", tmp_path / "node.key")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", redis_server.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while chunk := await source.read(4096):
                sink.write(chunk)
            sink.close()

        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with opened(f"rediss://127.0.0.1:{port}?ssl_ca_certs={tmp_path}/ca.pem", budget_ms=AMPLE_MS) as store:
        await store.put("s", HERE, 60.0)
        assert await store.get("s") == HERE
    async with opened(f"rediss://127.0.0.1:{port}", budget_ms=AMPLE_MS) as store:
        with pytest.raises(StoreUnavailable):
            await store.get("s")
    server.close()


async def test_sentinels_name_the_master(redis_server: RedisServer) -> None:
    async with RedisServer("--replicaof", "127.0.0.1", str(redis_server.port)) as replica:
        sentinel = RedisSentinel(redis_server)
        async with sentinel:
            await eventually(lambda: _replicas(sentinel), 15.0)
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main/0"
            async with opened(url, budget_ms=500) as store:
                await store.ping(5.0)
                await store.put("s", HERE, 60.0)
                await eventually(lambda: replica.cli("GET", KEY_PREFIX + "s"), 2.0)
                redis_server.kill()
                for _ in range(2):
                    with pytest.raises(StoreUnavailable):
                        await store.get("s")
                await eventually(lambda: store.state == "up", 20.0)
                assert await store.get("s") == HERE


async def _replicas(sentinel: RedisSentinel) -> bool:
    return len(await sentinel.cli("SENTINEL", "REPLICAS", "main")) == 1


async def test_a_cluster() -> None:
    async with RedisServer("--cluster-enabled", "yes") as server:
        await server.cli("CLUSTER", "ADDSLOTS", *range(16384))
        await eventually(lambda: _cluster_up(server), 5.0)
        async with opened(f"redis+cluster://127.0.0.1:1,127.0.0.1:{server.port}", budget_ms=AMPLE_MS) as store:
            await store.ping(2.0)
            placements = {f"s{n}": Placement(("eu", "a", f"i{n}"), n) for n in range(20)}
            await asyncio.gather(*(store.put(s, p, 60.0) for s, p in placements.items()))
            calls = [asyncio.create_task(store.get("s1")) for _ in range(5)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            for session, placement in placements.items():
                assert await store.get(session) == placement


async def _cluster_up(server: RedisServer) -> bool:
    return b"cluster_state:ok" in await server.cli("CLUSTER", "INFO")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://x",
        "redis+sentinel://h:1",
        "redis+cluster://h:1/2",
        "redis+x://h",
        "redis+sentinel:///m",
    ],
)
def test_a_bad_url_ends_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        RedisAffinityStore(url)


def test_no_log_shows_a_password() -> None:
    assert server_name("redis://user:secret@host:1/0") == "host:1"
    assert server_name("unix:///run/redis.sock?password=secret") == "/run/redis.sock"
    assert server_name("redis+sentinel://u:secret@a:1,b:2/main") == "a:1,b:2"
    logging.getLogger("redis").debug("quiet")
