"""Real proxies in front of two balancers, with the configuration files that are in deploy/behind."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import httpx
import pytest

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import chat
from tests.integration.relay.cases import PATH
from tests.integration.system import Tiers, run, tiers
from tests.proxies import FRONTS, Front
from tests.servers import eventually

FORGED = "6.6.6.6"


@dataclass
class Fronted:
    """A proxy, the two balancers behind it, each with its own engine, and a client that trusts the proxy."""

    proxy: Front
    balancers: list[Tiers]
    engines: list[FakeEngine]
    client: httpx.AsyncClient

    def answer(self, script: Script) -> None:
        """What the engines do from now on."""
        for engine in self.engines:
            engine.script = script

    async def chat(self, **fields: Any) -> httpx.Response:
        """One whole chat of a client that says it is somebody else."""
        headers = {"content-type": "application/json", "x-forwarded-for": FORGED, "x-forwarded-proto": "gopher"}
        return await self.client.post(self.proxy.url + PATH, content=chat(MODEL, **fields), headers=headers)

    async def begin(self) -> httpx.Response:
        """A streamed one, as soon as its head is here."""
        request = self.client.build_request("POST", self.proxy.url + PATH, content=chat(MODEL, stream=True))
        return await self.client.send(request, stream=True)

    @property
    def seen(self) -> list[Any]:
        """Requests that reached an engine."""
        return [seen for engine in self.engines for seen in engine.seen]


@asynccontextmanager
async def fronted(kind: type[Front], script: Script) -> AsyncIterator[Fronted]:
    async with AsyncExitStack() as stack:
        engines = [FakeEngine(name, script) for name in "ab"]
        balancers = [await stack.enter_async_context(tiers(engine, drain={"notice_s": 3.0})) for engine in engines]
        proxy = await stack.enter_async_context(kind(*(b.top.port for b in balancers)))
        trust = ssl.create_default_context(cafile=proxy.ca)
        client = await stack.enter_async_context(httpx.AsyncClient(verify=trust, timeout=30.0, trust_env=False))

        async def works() -> bool:
            """In its first moments a proxy may have no certificate yet, or no server that it has found well."""
            with suppress(httpx.TransportError):
                return (await client.get(f"{proxy.url}/v1/models")).status_code == 200
            return False

        async with asyncio.timeout(20.0):
            while not await works():
                await asyncio.sleep(0.1)
        yield Fronted(proxy, balancers, engines, client)


@pytest.mark.parametrize("kind", FRONTS, ids=lambda k: k.__name__.lower())
async def test_a_proxy_passes_on_what_it_has_to(kind: type[Front]) -> None:
    async with fronted(kind, Script.whole()) as f:
        await streams_come_token_by_token(f)
        await prompts_and_addresses_arrive(f)
        await errors_stay_what_they_are(f)
        await clients_get_http_2(f)
        await leaving_is_noticed(f)
        await a_balancer_that_leaves_costs_no_request(f)


async def streams_come_token_by_token(f: Fronted) -> None:
    f.answer(Script.stream(*"abcdefgh", gap_s=0.15))
    answer = await f.begin()
    received = ""
    async for text in answer.aiter_text():
        if not received:
            assert not any(e.ended("complete") for e in f.engines), "the proxy holds streams back"
        received += text
    assert received.endswith("[DONE]\n\n")
    assert answer.headers["x-headwater-served-by"]


async def prompts_and_addresses_arrive(f: Fronted) -> None:
    f.answer(Script.whole())
    assert (await f.chat(padding="x" * 3_000_000)).status_code == 200
    [seen] = [s for s in f.seen if len(s.body) > 3_000_000]
    assert seen.body == chat(MODEL, padding="x" * 3_000_000)
    assert str(ip_address(seen.header("x-forwarded-for"))) != FORGED
    assert seen.header("x-forwarded-proto") == "https"


async def errors_stay_what_they_are(f: Fronted) -> None:
    f.answer(Script.error(400, headers=(("retry-after", "7"),)))
    refused = await f.chat()
    assert (refused.status_code, refused.headers["retry-after"]) == (400, "7")
    assert refused.json()["error"]["message"]
    assert refused.headers["x-headwater-decision"]


async def clients_get_http_2(f: Fronted) -> None:
    f.answer(Script.stream("a", "b"))
    trust = ssl.create_default_context(cafile=f.proxy.ca)
    trust.set_alpn_protocols(["h2", "http/1.1"])

    def offered() -> str | None:
        plain = socket.create_connection(("127.0.0.1", f.proxy.port), 10.0)
        with trust.wrap_socket(plain, server_hostname="localhost") as wrapped:
            return wrapped.selected_alpn_protocol()

    assert await asyncio.to_thread(offered) == "h2"
    if shutil.which("curl") is not None:  # which speaks it
        ask = ["--http2", "-sN", "--cacert", f.proxy.ca, f.proxy.url + PATH, "-H", "content-type: application/json"]
        ask += ["-d", chat(MODEL, stream=True).decode(), "-w", "%{http_version}"]
        _, out, _ = await run("curl", *ask)
        assert out.endswith("[DONE]\n\n2")


async def leaving_is_noticed(f: Fronted) -> None:
    f.answer(Script.stream(*"abcdefgh", gap_s=5.0))
    answer = await f.begin()
    await anext(answer.aiter_bytes())
    await answer.aclose()
    await eventually(lambda: any(e.ended("aborted") for e in f.engines), 4.0)


async def a_balancer_that_leaves_costs_no_request(f: Fronted) -> None:
    f.answer(Script.whole())
    wrong: list[int] = []
    going = True

    async def traffic() -> None:
        while going:
            answer = await f.chat()
            if answer.status_code != 200:
                wrong.append(answer.status_code)
            await asyncio.sleep(0.02)

    task = asyncio.ensure_future(traffic())
    before = [len(e.seen) for e in f.engines]
    await eventually(lambda: all(len(e.seen) > b + 3 for e, b in zip(f.engines, before, strict=True)), 10.0)
    await f.balancers[0].top.stop()  # as SIGTERM does
    served = len(f.seen)
    await eventually(lambda: len(f.seen) > served + 20, 10.0)
    going = False
    await task
    assert wrong == []
