"""Tenants end to end: two global balancers over a region and a cluster, real etcd and Redis, the OpenAI SDK as client.

Tenants and keys are made by the command line, as people do it; what one balancer admits the other one knows of.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, NotFoundError, PermissionDeniedError, RateLimitError

from tests.integration.clients import Raw, ask, chat, get, metrics, total
from tests.integration.system import MODEL, PORTS, Addresses, Process, engine_process, headwater, run_command
from tests.servers import EtcdServer, RedisServer, Server, eventually

PATH = "/v1/chat/completions"
STREAM = "usage"
ETCD_S, START_S, SEEN_S = 10.0, 90.0, 20.0


async def command(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What one of our commands writes."""
    return await run_command(headwater(*arguments), code=code)


class World:
    """Eight processes. `keys` has every key that was ever made, so that it can be looked for afterwards."""

    def __init__(self) -> None:
        self.etcd, self.redis, self.engine_port = EtcdServer(), RedisServer(), PORTS.take()
        self.etcd.port, self.etcd._peer_port, self.redis.port = PORTS.take(), PORTS.take(), PORTS.take()
        self.tiers = {n: Addresses(PORTS.take(), PORTS.take()) for n in ("one", "two", "region", "instance")}
        engine = engine_process("engine", {"e": self.engine_port}, "--speed", "20")
        self.processes: list[Server] = [self.etcd, self.redis, engine]
        self.files = self.etcd.directory
        server = {"id": "e", "url": self.engine_url, "gpu": "h100"}
        agent = {"id": "a", "region": "eu", "cluster": "c", "scrape_interval_s": 0.5, "instances": [server]}
        self._add("agent", "agent", agent)
        self._add_tier("instance", "instance", {"region": "eu", "cluster": "c"})
        self._add_tier("region", "region", {"region": "eu"})
        for name in ("one", "two"):
            usage = {"usage_stream": STREAM, "usage_file": str(self.files / f"usage-{name}")}
            prices = {"*": {"input_usd": 1.0, "output_usd": 2.0}}
            self._add_tier("global", name, {"tenants": {"stored": True, "budget_ms": 5000, "prices": prices, **usage}})
        self.keys: list[str] = []

    def _add_tier(self, command: str, name: str, values: dict[str, Any]) -> None:
        listen = {"listen": f"127.0.0.1:{self.tiers[name].data}", "admin": f"127.0.0.1:{self.tiers[name].admin}"}
        redis = {"url": self.redis.url, "budget_ms": 500}
        values = {"id": name, "redis": redis, "drain": {"grace_s": 5}, **listen, **values}
        self._add(command, name, values, f"{self.tiers[name].admin_url}/readyz")

    def _add(self, command: str, name: str, values: dict[str, Any], url: str = "") -> None:
        config = self.files / f"{name}.yaml"
        config.write_text(json.dumps({**values, "etcd": {"urls": [self.etcd.url], "ttl_s": 5}}))
        argv = headwater(command, "--config", str(config))
        self.processes.append(Process(name, argv, url, "" if url else "agent_started"))

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def admin(self) -> str:
        return self.tiers["one"].admin_url

    async def start(self) -> None:
        await asyncio.gather(*(p.start() for p in self.processes[:3]))
        await asyncio.gather(*(p.start() for p in self.processes[3:]))
        key = await self.tenant("probe")

        async def passes() -> bool:
            """Whether requests go by both replicas, each stage by its own tier."""
            for name in ("one", "two"):
                if (await self.chat(key, name)).status != 200:
                    return False
                samples = await metrics(self.tiers[name].admin_url)
                if total(samples, "headwater_attempts_total", to="peer") < 1.0:
                    return False
            return True

        await eventually(passes, START_S, step_s=0.2)

    async def tenant(self, name: str, *settings: str) -> str:
        """A new tenant; its key, once both replicas know it."""
        await command("tenant", "set", name, *settings, "--admin", self.admin)
        return await self.key(name)

    async def key(self, name: str, *flags: str) -> str:
        out, err = await command("key", "new", name, *flags, "--admin", self.admin)
        assert len(out.strip()) == 46, "the key alone"
        assert out.strip() not in err
        return await self.known(out.strip())

    async def known(self, key: str) -> str:
        self.keys.append(key)
        await eventually(lambda: self.knows(key), SEEN_S)
        return key

    async def knows(self, key: str) -> bool:
        statuses = [await self.status(name, key) for name in ("one", "two")]
        return statuses == [200, 200]

    async def status(self, name: str, key: str) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.tiers[name].url}/v1/models", headers={"x-api-key": key})).status_code

    async def chat(self, key: str, name: str = "one", *headers: str, **fields: Any) -> Any:
        body = chat(MODEL, **{"max_tokens": 4, "ignore_eos": True, **fields})
        return await ask(self.tiers[name].url, PATH, body, f"authorization: Bearer {key}", *headers)

    def client(self, key: str, name: str = "one") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.tiers[name].url}/v1", api_key=key, max_retries=0, timeout=60.0)

    async def usage(self) -> list[dict[str, Any]]:
        found = await self.redis.cli("XRANGE", STREAM, "-", "+")
        return [json.loads(fields[b"usage"]) for _, fields in found]


@pytest.fixture(scope="module")
def running() -> Iterator[World]:
    world = World()
    try:
        asyncio.run(world.start())
        yield world
    finally:
        for process in reversed(world.processes):
            process.discard()


@pytest.fixture
def world(running: World) -> World:
    return running


# -- who ---------------------------------------------------------------------------------------------------------------


async def test_the_sdk_with_a_key_and_without(world: World) -> None:
    key = await world.tenant("sdk", "requests_per_minute=1000", "tokens_per_minute=100000")
    for name in ("one", "two"):
        async with world.client(key, name) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello."}], max_tokens=5, extra_body={"n": 1}
            )
            assert raw.parse().usage.completion_tokens > 0
            assert raw.headers["x-ratelimit-limit-requests"] == "1000"
            assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
            assert 0 < int(raw.headers["x-ratelimit-remaining-requests"]) < 1000
            assert 0 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 100_000
            assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello."}], max_tokens=5, stream=True
            )
            assert [c async for c in stream]
            assert [m.id async for m in client.models.list()] == [MODEL]
        async with world.client("hw-" + "A" * 43, name) as client:
            with pytest.raises(AuthenticationError) as caught:
                await client.models.list()
            assert caught.value.code == "invalid_api_key"
            with pytest.raises(AuthenticationError) as caught:
                await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}])
            assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
    anthropic = await ask(world.tiers["one"].url, "/v1/messages", b"{}")
    assert (anthropic.status, anthropic.json()["error"]["type"]) == (401, "authentication_error")
    assert (await get(f"{world.tiers['one'].url}/health")).status == 200


async def test_a_rotated_key_overlaps_and_a_revoked_one_ends_everywhere(world: World) -> None:
    old = await world.tenant("rotating")
    (listed,) = json.loads((await command("key", "list", "rotating", "--json", "--admin", world.admin))[0])
    out, _ = await command("key", "rotate", listed["id"], "--overlap", "1h", "--admin", world.admin)
    new = await world.known(out.strip())
    assert [(await world.chat(k, n)).status for k in (old, new) for n in ("one", "two")] == [200] * 4
    await command("key", "revoke", listed["id"], "--admin", world.admin)

    async def refused() -> bool:
        return [await world.status(n, old) for n in ("one", "two")] == [401, 401]

    await eventually(refused, SEEN_S)
    assert (await world.chat(new, "two")).status == 200


async def test_an_expired_key_is_refused_by_its_own_name(world: World) -> None:
    await world.tenant("expiring")
    out, _ = await command("key", "new", "expiring", "--expires", "2020-01-01", "--admin", world.admin)
    world.keys.append(out.strip())

    async def told() -> bool:
        reply = await world.chat(out.strip(), "two")
        return bool(reply.status == 401 and reply.json()["error"]["code"] == "expired_api_key")

    await eventually(told, SEEN_S)


# -- what each may -----------------------------------------------------------------------------------------------------


async def test_requests_a_minute_hold_over_both_replicas(world: World) -> None:
    """The limit is exact here: 40 are admitted, by whichever replica, and not one more."""
    key = await world.tenant("limited", "requests_per_minute=40")
    began = time.monotonic()
    replies = await asyncio.gather(*(world.chat(key, ("one", "two")[i % 2]) for i in range(100)))
    counts = Counter(r.status for r in replies)
    print(f"{counts} within {time.monotonic() - began:.1f} s")
    if time.monotonic() - began < 50.0:  # else a part of the minute was over
        assert counts == {200: 40, 429: 60}
    refused = next(r for r in replies if r.status == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.header("x-ratelimit-remaining-requests") == "0"
    assert 1 <= int(refused.header("retry-after")) <= 62
    async with world.client(key, "two") as client:
        with pytest.raises(RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}])


async def test_streams_at_once_hold_over_both_replicas(world: World) -> None:
    key = await world.tenant("streaming", "concurrent_requests=3")
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(world.client(key, n)) for n in ("one", "two")]

        async def begin(client: AsyncOpenAI) -> Any:
            return await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi."}],
                max_tokens=8000,
                stream=True,
                extra_body={"ignore_eos": True},
            )

        streams = [await begin(client) for client in (clients[0], clients[1], clients[0])]
        for client in clients:
            with pytest.raises(RateLimitError) as caught:
                await begin(client)
            assert caught.value.code == "concurrency_limit_exceeded"
        await streams[0].close()

        async def room() -> bool:
            try:
                streams.append(await begin(clients[1]))
            except RateLimitError:
                return False
            return True

        await eventually(room, SEEN_S)
        for stream in streams[1:]:
            await stream.close()


async def test_models_and_regions(world: World) -> None:
    key = await world.tenant("narrow", "models=other-*")
    async with world.client(key) as client:
        assert [m.id async for m in client.models.list()] == []
        with pytest.raises(NotFoundError):
            await client.models.retrieve(MODEL)
        with pytest.raises(PermissionDeniedError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}])
        assert caught.value.code == "model_not_allowed"
    elsewhere = await world.tenant("elsewhere", "regions=us,ap")
    reply = await world.chat(elsewhere)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "no_endpoints")
    here = await world.tenant("here", "regions=us,eu", "priority=batch")
    assert (await world.chat(here)).status == 200
    assert (await world.chat(here, "one", "x-priority: urgent")).status == 400


async def test_a_budget_of_a_month_ends(world: World) -> None:
    key = await world.tenant("budget", "monthly_tokens=200")

    async def over() -> bool:
        reply = await world.chat(key, "two", max_tokens=50)
        assert reply.status in (200, 429), reply
        return bool(reply.status == 429 and reply.json()["error"]["code"] == "insufficient_quota")

    await eventually(over, SEEN_S)

    async def settled() -> bool:
        """What one replica has spent, the other one tells of; no more than the budget and an answer's length."""
        shown = (await get(f"{world.admin}/admin/v1/tenants/budget")).json()["month"]
        return bool(50 <= shown["tokens"] <= 260 and shown["usd"] > 0.0)

    await eventually(settled, SEEN_S)
    await command("tenant", "set", "budget", "monthly_tokens=", "--admin", world.admin)
    await eventually(lambda: _admitted(world, key), SEEN_S)


async def _admitted(world: World, key: str) -> bool:
    return bool((await world.chat(key, "two")).status == 200)


# -- what is told of it ------------------------------------------------------------------------------------------------


async def test_each_request_leaves_one_usage_record(world: World) -> None:
    key = await world.tenant("billed")
    replies = [await world.chat(key, n, stream=s, max_tokens=6) for n in ("one", "two") for s in (False, True)]
    ids = {r.header("x-headwater-decision") for r in replies}
    assert len(ids) == 4
    raw = await Raw.connect(world.tiers["one"].url)  # and one whose client leaves in the middle
    body = chat(MODEL, stream=True, max_tokens=8000, ignore_eos=True)
    head = f"POST {PATH} HTTP/1.1\r\nhost: t\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    raw.send(head.encode() + body)
    await raw.until(b"data:", 5)
    raw.rst()

    async def written() -> list[dict[str, Any]]:
        return [r for r in await world.usage() if r["tenant"] == "billed"]

    async def all_written() -> bool:
        return len(await written()) >= 5

    await eventually(all_written, SEEN_S)
    records = {r["trace_id"]: r for r in await written()}
    assert len(records) == 5
    for reply in replies:
        record = records.pop(reply.header("x-headwater-decision"))
        assert (record["status"], record["ending"], record["model"]) == (200, "complete", MODEL)
        assert record["served_by"] == "eu/c/e"
        assert record["credential"].startswith("key:k")
        assert record["output_tokens"] in (5, 6, 7)
        assert record["usd"] == pytest.approx((record["input_tokens"] + 2.0 * record["output_tokens"]) / 1e6)
    (left,) = records.values()
    assert (left["status"], left["ending"]) == (200, "client_left")
    assert left["output_tokens"] >= 2

    async def both_sinks() -> bool:
        text = "".join((world.files / f"usage-{name}").read_text() for name in ("one", "two"))
        filed = {json.loads(line)["record"] for line in text.splitlines()}
        return filed >= {r["record"] for r in await written()}

    await eventually(both_sinks, SEEN_S)


async def test_keys_are_found_nowhere(world: World) -> None:
    """Not in a log, a span, a metric or a store, not at the server, and not at the tiers below."""
    key = await world.tenant("secretive")
    asked = [
        await world.chat(key, "one", "x-request-id: secretive"),
        await ask(world.tiers["two"].url, f"{PATH}?api_key={key}&x=1", chat(MODEL, max_tokens=2), f"x-api-key: {key}"),
        await world.chat("hw-" + "B" * 43),
    ]
    assert [r.status for r in asked] == [200, 200, 401]
    await asyncio.sleep(1.0)  # for logs and records that are written behind
    secrets = [*world.keys, "hw-" + "B" * 43]
    etcd = await world.etcd.ctl("get", "--prefix", "/headwater")
    redis_keys = await world.redis.cli("KEYS", "*")
    await world.redis.cli("CONFIG", "SET", "rdbcompression", "no")
    await world.redis.cli("SAVE")
    dump = (world.redis.directory / "dump.rdb").read_bytes()
    places = {"etcd": etcd.encode(), "redis": dump, "redis keys": repr(redis_keys).encode()}
    for name, tier in world.tiers.items():
        recent = (await get(f"{tier.admin_url}/admin/v1/requests?limit=1000")).json()
        traces = [(await get(f"{tier.admin_url}/admin/v1/traces/{r['trace_id']}")).body for r in recent[:50]]
        samples = (await get(f"{tier.admin_url}/metrics")).body
        places[name] = b"".join((json.dumps(recent).encode(), *traces, samples))
    for process in world.processes:
        places[f"log of {type(process).__name__} {getattr(process, 'name', '')}"] = process.log.encode()
    for name in ("one", "two"):
        places[f"usage of {name}"] = (world.files / f"usage-{name}").read_bytes()
        places[f"tenants of {name}"] = (await get(f"{world.tiers[name].admin_url}/admin/v1/tenants/secretive")).body
    records = (await get(f"{world.engine_url}/sim/requests")).json()["requests"]
    places["engine"] = json.dumps(records).encode()
    empty = [place for place, text in places.items() if not text]
    assert not {p for p in empty if not p.startswith("log of ")}, empty
    assert places["log of Process one"]
    assert b"secretive" in etcd.encode()
    found = [(place, secret[:6]) for place, text in places.items() for secret in secrets if secret.encode() in text]
    assert not found
    seen = next(r for r in records if r["id"] == "secretive")
    assert not {"authorization", "x-api-key", "api-key"} & set(seen["header_names"])


# -- one process, and a file -------------------------------------------------------------------------------------------


async def test_up_with_a_file_of_tenants(tmp_path: Path) -> None:
    """The file is made of what the command prints; it is read again when it changes, and the admin API shows it."""
    key, lines = await command("key", "new", "acme", "--yaml")
    file = tmp_path / "tenants.yaml"
    file.write_text(lines.replace("  acme:\n", "  acme:\n    requests_per_minute: 3\n"))
    at, port = Addresses(PORTS.take(), PORTS.take()), PORTS.take()
    flags = ("--instance", f"http://127.0.0.1:{port}", "--listen", f"127.0.0.1:{at.data}")
    argv = ["/usr/bin/env", f"HEADWATER_TENANTS__FILE={file}"]
    argv += headwater("up", *flags, "--admin", f"127.0.0.1:{at.admin}")
    engine = engine_process("engine", {"e": port}, "--speed", "20")
    async with engine, Process("up", argv, f"{at.admin_url}/readyz") as process:
        client = AsyncOpenAI(base_url=f"{at.url}/v1", api_key=key.strip(), max_retries=0, timeout=60.0)
        for left in (2, 1, 0):
            raw = await client.chat.completions.with_raw_response.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi."}], max_tokens=2
            )
            assert raw.headers["x-ratelimit-remaining-requests"] == str(left)
        with pytest.raises(RateLimitError):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}])
        _, err = await command("tenant", "set", "acme", "disabled=yes", "--admin", at.admin_url, code=1)
        assert str(file) in err
        out, _ = await command("tenant", "list", "--admin", at.admin_url)
        assert out.splitlines()[1].split()[:3] == ["acme", "standard", "3"]
        file.write_text(lines.replace("  acme:\n", "  acme:\n    disabled: true\n"))

        async def disabled() -> bool:
            try:
                await client.models.list()
            except PermissionDeniedError as error:
                return error.code == "tenant_disabled"
            return False

        await eventually(disabled, SEEN_S)
        file.write_text("tenants: {acme: {nonsense: 1}}")
        await eventually(lambda: "tenants_file_refused" in process.log, SEEN_S)
        assert await disabled()
        await client.close()
        assert key.strip() not in process.log
