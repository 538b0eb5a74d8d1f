"""One request through three tiers, each a process of its own, with real etcd and Redis; and tiers that are gone."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from hashlib import sha256

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.integration.clients import Raw, ask, body_of, chat, events, get, metrics, post, total
from tests.integration.system import ENGINES, GLOBALS, LONER, MODEL, REGIONS, System, headwater, run
from tests.servers import eventually

PATH = "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"
GONE_S = 2.0
LEAVE_S = 15.0  # until what is dead is known to be dead everywhere; generous
TEXT = "The quick brown fox jumps over the lazy dog. " * 200  # long enough for a warm cache to matter


def openai(system: System, name: str = GLOBALS[0]) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{system.tiers[name].url}/v1", api_key="none", max_retries=0, timeout=30.0)


# -- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [GLOBALS[0], "region-east", "instance-west-b"])
async def test_the_openai_client_streams_and_lists_models_at_any_tier(system: System, tier: str) -> None:
    async with openai(system, tier) as client:
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=5
        )
        assert whole.choices[0].message.content
        with pytest.raises(NotFoundError) as unknown:
            await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "Hi"}])
        assert unknown.value.code == "model_not_found"


async def test_completions_and_embeddings(system: System) -> None:
    async with openai(system) as client:
        text = await client.completions.create(model=MODEL, prompt="Once", max_tokens=7)
        assert text.choices[0].text
        stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=7, stream=True)
        assert "".join([c.choices[0].text async for c in stream if c.choices])
        embedded = await client.embeddings.create(model=MODEL, input=["one", "two"])
        assert [len(e.embedding) for e in embedded.data] == [16, 16]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_curl_streams_and_lists_models(system: System) -> None:
    code, out, _ = await run("curl", "-sS", "--fail", f"{system.url}/v1/models")
    assert code == 0
    assert [m["id"] for m in json.loads(out)["data"]] == [MODEL]
    body = chat(MODEL, stream=True, max_tokens=6, ignore_eos=True).decode()
    code, out, err = await run("curl", "-sSN", "--fail", "-d", body, f"{system.url}{PATH}")
    assert (code, err) == (0, "")
    *tokens, end = events(out.encode())
    assert end == b"[DONE]"
    assert tokens[-1]["choices"][0]["finish_reason"] == "length"


# -- what arrives ------------------------------------------------------------------------------------------------------


async def test_the_body_arrives_byte_for_byte_and_our_headers_stay_ours(system: System) -> None:
    body = chat(MODEL, text="Grüße, \U0001f30a\u2028 and 1e0 ", max_tokens=2, temperature=1.0, seed=2**63)
    forged = "x-headwater-route: eyJub2RlIjpbIndlc3QiXX0.AAAA"
    response = await ask(
        system.url,
        PATH,
        body,
        "x-request-id: byte-for-byte",
        "x-headwater-attempts: 99",
        "X_Headwater_Route: forged",
        forged,
        "x-kept: yes",
        "connection: keep-alive, x-hop",
        "x-hop: no",
    )
    assert response.status == 200
    assert response.header("x-headwater-served-by") is not None
    assert response.header("x-headwater-decision") is not None
    assert response.header("x-headwater-attempts") is None  # for peers alone
    (record,) = [r for rs in (await system.requests()).values() for r in rs if r["id"] == "byte-for-byte"]
    assert record["sha256"] == sha256(body).hexdigest()
    assert not [name for name in record["header_names"] if "headwater" in name]
    assert "x-kept" in record["header_names"]
    assert "x-hop" not in record["header_names"]


async def test_a_forged_route_header_is_ignored_at_every_tier(system: System) -> None:
    """Whatever it says, the request is read, routed from the top and counted as a client's."""
    valid = await ask(system.url, PATH, chat(MODEL, max_tokens=2))
    for tier in (GLOBALS[0], "region-west", "instance-east-b"):
        for value in ("x", "e30.e30", "a" * 9000, "=.=", f"{valid.header('x-headwater-decision')}.{'A' * 32}"):
            response = await ask(
                system.tiers[tier].url, PATH, chat("nobody", max_tokens=2), f"x-headwater-route: {value}"
            )
            assert response.status == 404, (tier, value)
        admin = system.tiers[tier].admin_url
        assert not any(r["from_peer"] for r in (await get(f"{admin}/admin/v1/requests?limit=5")).json())


async def test_one_trace_from_the_client_to_the_server(system: System) -> None:
    parent = "b7ad6b7169203331"
    response = await system.chat(f"traceparent: 00-{TRACE}-{parent}-01", "tracestate: vendor=1", "x-request-id: traced")
    assert response.header("x-headwater-decision") == TRACE
    served_by = response.header("x-headwater-served-by")
    (record,) = [r for rs in (await system.requests()).values() for r in rs if r["id"] == "traced"]
    version, trace_id, span_id, flags = record["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    assert span_id != parent
    assert "tracestate" in record["header_names"]

    async def printed() -> bool:
        nonlocal lines
        code, out, _ = await run(*headwater("trace", TRACE, "--admin", system.admin_url))
        lines = out.splitlines()
        return code == 0 and len(lines) == 9

    lines: list[str] = []
    await eventually(printed, 10.0)
    region, cluster, instance = (served_by or "").split("/")
    text = "\n".join(lines)
    print(text)
    for expected in (f"choose region {region}", f"choose cluster {cluster}", f"choose instance {instance}"):
        assert expected in text
    for process in (GLOBALS[0], f"region-{region}", f"instance-{cluster}"):
        assert sum(f"[{process}]" in line for line in lines) == 3
    depths = [len(line) - len(line.lstrip()) for line in lines]
    assert depths == [0, 2, 2, 4, 6, 6, 8, 10, 10]  # each tier under the attempt that reached it
    code, out, err = await run(*headwater("trace", "f" * 32, "--admin", system.admin_url))
    assert (code, out) == (1, "")
    assert len(err.strip().splitlines()) == 1


# -- sessions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["header", "body"])
async def test_a_session_returns_to_its_server_also_through_another_balancer(system: System, by: str) -> None:
    for turn in range(3):
        session = f"session-{by}-{turn}-{time.monotonic()}"
        headers = [f"x-session-id: {session}"] if by == "header" else []
        fields = {} if by == "header" else {"prompt_cache_key": session}
        places = []
        for name in (GLOBALS[0], GLOBALS[0], GLOBALS[1], GLOBALS[1], "region-west", GLOBALS[0]):
            response = await system.chat(*headers, url=system.tiers[name].url, text=TEXT, **fields)
            places.append(response.header("x-headwater-served-by"))
            await asyncio.sleep(0.1)  # the place is written behind the answer
        assert len(set(places)) == 1, places


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_end_the_work_at_the_servers(system: System, stream: bool) -> None:
    names = [f"left-{stream}-{i}-{time.monotonic()}" for i in range(10)]
    clients = [await Raw.connect(system.tiers[GLOBALS[i % 2]].url) for i in range(len(names))]
    for raw, name in zip(clients, names, strict=True):
        raw.send(post(PATH, chat(MODEL, stream=stream, max_tokens=8000, ignore_eos=True), f"x-request-id: {name}"))
    if stream:
        await asyncio.gather(*(raw.until(b"data:", 3) for raw in clients))
    else:
        await eventually(lambda: _executed(system, names, 10), 10.0)
    for i, raw in enumerate(clients):
        raw.rst() if i % 2 else raw.fin()
    took = await eventually(lambda: _aborted(system, names, 10), 5 * GONE_S)
    print(f"all ten seen by the servers after {took * 1000:.0f} ms")
    await eventually(system.idle, 10.0)
    assert await _executed(system, names, 10)


async def _executed(system: System, names: list[str], count: int) -> bool:
    return len([r for rs in (await system.requests()).values() for r in rs if r["id"] in names]) == count


async def _aborted(system: System, names: list[str], count: int) -> bool:
    records = [r for rs in (await system.requests()).values() for r in rs if r["id"] in names]
    return len([r for r in records if r["aborted"]]) == count


# -- takeover ----------------------------------------------------------------------------------------------------------


async def _served_regions(system: System, count: int, name: str = GLOBALS[0]) -> list[str]:
    """Where so many requests were served; every one of them was."""
    responses = await asyncio.gather(*(system.chat(url=system.tiers[name].url, stream=True) for _ in range(count)))
    assert {r.status for r in responses} == {200}
    return [(r.header("x-headwater-served-by") or "").split("/")[0] for r in responses]


async def _preferred(system: System) -> str:
    """The region that most requests go to now; which one that is depends on what the policies have learned."""
    return Counter(await _served_regions(system, 8)).most_common(1)[0][0]


async def test_a_region_without_balancers_is_run_by_the_global_tier_and_handed_back(system: System) -> None:
    region = await _preferred(system)
    before = await system.takeovers()
    system.kill(f"region-{region}")
    began = time.monotonic()
    regions = await _served_regions(system, 4)
    print(f"four requests after the kill were served within {(time.monotonic() - began) * 1000:.0f} ms")
    while region not in regions:
        assert time.monotonic() - began < LEAVE_S
        regions = await _served_regions(system, 8)
    samples = await metrics(system.admin_url)
    assert total(samples, "headwater_takeovers_total", stage="region") > before[GLOBALS[0]]
    await eventually(lambda: _without(system, f"region-{region}"), LEAVE_S)  # its lease is over
    for name in GLOBALS:  # whichever region they prefer, each serves
        assert set(await _served_regions(system, 24, name)) <= set(REGIONS)
    await system.processes[f"region-{region}"].start()
    print(f"handed back {await system.settled():.1f} s after it was ready again")
    before = await system.takeovers()
    await _served_regions(system, 24)
    assert await system.takeovers() == before


async def _without(system: System, name: str) -> bool:
    return not [key for key in await system.etcd.keys("/headwater") if key.endswith(f"/{name}")]


async def test_a_cluster_without_balancers_is_run_by_its_region_and_handed_back(system: System) -> None:
    region = await _preferred(system)
    admin = system.tiers[f"region-{region}"].admin_url
    before = total(await metrics(admin), "headwater_takeovers_total", stage="instance")
    system.kill(*(f"instance-{cluster}" for cluster in REGIONS[region]))
    began = time.monotonic()
    while region not in await _served_regions(system, 8):
        assert time.monotonic() - began < LEAVE_S
    assert total(await metrics(admin), "headwater_takeovers_total", stage="instance") > before
    await system.heal()
    assert set(await _served_regions(system, 24)) <= set(REGIONS)


async def test_with_all_lower_balancers_dead_the_global_tier_serves_alone(system: System) -> None:
    dead = [name for name in system.tiers if name not in GLOBALS]
    system.kill(*dead)
    for _ in range(3):
        assert set(await _served_regions(system, 8)) <= set(REGIONS)
    samples = await metrics(system.admin_url)
    assert total(samples, "headwater_takeovers_total", stage="region") > 0
    assert total(samples, "headwater_takeovers_total", stage="instance") > 0
    await eventually(lambda: _without(system, "instance-east-a"), LEAVE_S)
    assert set(await _served_regions(system, 16)) <= set(REGIONS)


async def test_with_all_global_balancers_dead_a_region_serves(system: System) -> None:
    system.kill(*GLOBALS)
    assert set(await _served_regions(system, 16, "region-east")) <= set(REGIONS)
    samples = await metrics(system.tiers["region-east"].admin_url)
    assert total(samples, "headwater_takeovers_total", stage="global") > 0  # requests begin at the top, here as there


# -- servers that are gone ---------------------------------------------------------------------------------------------


async def test_a_region_without_servers_is_passed_over(system: System) -> None:
    system.kill(LONER, "engines-east", "agent-east-a", "agent-east-b")
    for _ in range(3):
        assert set(await _served_regions(system, 8)) == {"west"}
    await eventually(lambda: _no_instances(system, "east"), LEAVE_S)
    for tier in (*GLOBALS, "region-east", "instance-east-a"):  # its balancers are alive, and send elsewhere
        assert set(await _served_regions(system, 8, tier)) == {"west"}


async def _no_instances(system: System, region: str) -> bool:
    return not [key for key in await system.etcd.keys(f"/headwater/regions/{region}") if "/instances/" in key]


async def test_with_all_servers_dead_the_answer_is_a_503_in_bounded_time(system: System) -> None:
    system.kill(LONER, *ENGINES)
    slowest = 0.0
    for _ in range(10):
        for name in (GLOBALS[0], "region-east", "instance-west-b"):
            began = time.monotonic()
            response = await system.chat(url=system.tiers[name].url)
            slowest = max(slowest, time.monotonic() - began)
            assert response.status in (502, 503), response
            assert {"message", "type", "param", "code"} <= response.json()["error"].keys()
    print(f"slowest refusal: {slowest * 1000:.0f} ms")
    assert slowest < 5.0
    response = await system.chat()
    assert response.status == 503
    assert int(response.header("retry-after") or 0) >= 1


async def test_when_all_servers_refuse_each_request_costs_two_tries_at_most(system: System) -> None:
    before = await system.received()
    await system.set_faults(system.servers, refuse=503)
    responses = await asyncio.gather(*(system.chat() for _ in range(50)))
    assert {r.status for r in responses} <= {429, 503}
    assert all("error" in r.json() for r in responses)
    assert await system.received() - before <= 100
    await system.set_faults(system.servers, refuse=0)

    async def served() -> bool:
        return all(r.status == 200 for r in await asyncio.gather(*(system.chat() for _ in range(8))))

    print(f"all served again after {await eventually(served, 15.0):.1f} s")


async def test_a_stream_that_breaks_at_the_server_ends_with_one_error_event(system: System) -> None:
    async with await Raw.connect(system.url) as raw:
        body = chat(MODEL, stream=True, max_tokens=50, ignore_eos=True)
        raw.send(post(PATH, body, 'x-sim-fault: {"drop_after_chunks": 3}'))
        received = await raw.to_end()
    assert not received.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in received
    values = events(body_of(received))
    assert [("error" in v) for v in values].count(True) == 1
    assert "error" in values[-1]
