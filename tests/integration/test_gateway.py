"""A real Envoy carries the bytes, the instance tier picks the server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FileDescriptor

from common.policy.health import State
from common.tenancy.keys import make
from common.types import Endpoint
from services.instance_lb.__main__ import start_picker
from services.instance_lb.config import InstanceConfig
from services.instance_lb.picker import PickerServer
from services.instance_lb.picker.proto import (
    core_pb2,
    external_processor_pb2,
    health_pb2,
    http_status_pb2,
    processing_mode_pb2,
)
from services.instance_lb.picker.proto.core_pb2 import HeaderMap, HeaderValue
from services.instance_lb.picker.proto.external_processor_pb2 import (
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from services.instance_lb.picker.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
from services.instance_lb.picker.proto.processing_mode_pb2 import ProcessingMode
from tests import tools
from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, ask, body_of, chat, events, get
from tests.integration.relay.cases import PATH, is_error, streamed
from tests.integration.system import CLUSTER, Tiers, tiers
from tests.proxies import Gateway as GatewayEnvoy
from tests.servers import eventually

MODES = [
    ("FULL_DUPLEX_STREAMED", "STREAMED"),
    ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    ("BUFFERED", "STREAMED"),
]


@dataclass
class Gateway:
    """An Envoy, the instance tier it asks, and its engines."""

    url: str
    world: Tiers
    picker: PickerServer

    async def last(self) -> dict[str, Any]:
        """The instance tier's record of the newest request, when nothing is under way, nor reserved."""
        await eventually(lambda: self.world.idle() and not self.picker.open, 10.0)
        found = await get(f"http://127.0.0.1:{self.world.bottom.admin_port}/admin/v1/requests?limit=1")
        return dict(found.json()[0])


@asynccontextmanager
async def picking(*engines: FakeEngine, **settings: Any) -> AsyncIterator[tuple[Tiers, PickerServer]]:
    async with tiers(*engines, depth=3, **settings) as world:
        config = InstanceConfig(region=CLUSTER[0], cluster=CLUSTER[1])
        picker = await start_picker(world.bottom, config, "127.0.0.1:0")
        yield world, picker


@asynccontextmanager
async def gateway(*engines: FakeEngine, modes: tuple[str, str] = MODES[0], **settings: Any) -> AsyncIterator[Gateway]:
    async with picking(*engines, **settings) as (world, picker):
        changes = {
            "port_value: 9002": f"port_value: {picker.port}",
            "request_body_mode: FULL_DUPLEX_STREAMED": f"request_body_mode: {modes[0]}",
            "response_body_mode: STREAMED #": f"response_body_mode: {modes[1]} #",
        }
        async with GatewayEnvoy(changes) as envoy:
            yield Gateway(envoy.url, world, picker)


@pytest.mark.parametrize("modes", MODES, ids="/".join)
async def test_bytes_go_through_the_gateway_and_the_choice_is_ours(modes: tuple[str, str]) -> None:
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with gateway(*engines, modes=modes) as g:
        body = chat(MODEL, padding="x" * 300_000)
        lines = ["x-gateway-destination-endpoint: 127.0.0.1:1", "x-headwater-route: forged", "x-mine: 1"]
        answer = await ask(g.url, PATH, body, *lines)
        assert answer.status == 200
        assert answer.json()["choices"][0]["message"]["content"] == "Hello."
        [engine] = [e for e in engines if e.seen]
        assert answer.header("x-headwater-served-by") == "/".join((*CLUSTER, engine.name))
        record = await g.last()
        assert answer.header("x-headwater-decision") == record["trace_id"]
        [seen] = engine.seen
        assert seen.body == body
        assert seen.header("x-mine") == "1"
        assert seen.header("x-headwater-route") is None
        assert record["trace_id"] in (seen.header("traceparent") or "")
        assert (record["status"], record["ending"], record["output_tokens"]) == (200, "complete", 2.0)


async def test_a_stream_passes_token_by_token_and_is_learned_from() -> None:
    words = "abcdefgh"
    engine = FakeEngine("a", Script.stream(*words, gap_s=0.1))
    async with (
        gateway(engine) as g,
        await Raw.connect(g.url) as raw,
    ):
        raw.send(streamed())
        await raw.until(b"data:", 2)
        assert not engine.ended("complete"), "the gateway has held the stream back"
        received = await raw.until(b"[DONE]")
        told = [e["choices"][0]["delta"].get("content") for e in events(body_of(received)) if isinstance(e, dict)]
        assert told[: len(words)] == list(words)
        record = await g.last()
        assert record["output_tokens"] == len(words)
        assert record["ttft_s"] < record["total_s"] - 0.3


async def test_tenants_are_asked_for_their_keys_behind_a_gateway_too(tmp_path: Path) -> None:
    key, kept = make(datetime(2026, 1, 1, tzinfo=UTC))
    keys = [{"id": kept.id, "sha256": kept.sha256}]
    limits = {"requests_per_minute": 3, "models": [MODEL], "concurrent_requests": 1}
    (tmp_path / "tenants.yaml").write_text(json.dumps({"tenants": {"acme": {**limits, "keys": keys}}}))
    engine = FakeEngine("a")
    async with gateway(engine, tenants={"file": str(tmp_path / "tenants.yaml")}) as g:
        shown = f"authorization: Bearer {key}"
        assert is_error(await ask(g.url, PATH, chat(MODEL)), 401)
        assert is_error(await ask(g.url, PATH, chat(MODEL), "authorization: Bearer hw-other"), 401)
        assert not engine.seen
        for left in ("2", "1", "0"):
            answer = await ask(g.url, PATH, chat(MODEL), shown)
            assert answer.status == 200
            assert answer.header("x-ratelimit-remaining-requests") == left
            assert (await g.last())["tenant"] == "acme"
        refused = await ask(g.url, PATH, chat(MODEL), shown)
        assert is_error(refused, 429)
        assert refused.header("retry-after")
        assert len(engine.seen) == 3
        assert all(seen.header("authorization") is None for seen in engine.seen)


async def test_a_client_that_leaves_takes_its_request_along() -> None:
    engine = FakeEngine("a", Script.stream(*"abcdefgh", gap_s=5.0))
    async with gateway(engine) as g:
        async with await Raw.connect(g.url) as raw:
            raw.send(streamed())
            await raw.until(b"data:")
        await eventually(lambda: bool(engine.ended("aborted")), 10.0)
        assert (await g.last())["ending"] == "client_left"


async def test_an_answer_under_way_ends_before_the_picker_does() -> None:
    engine = FakeEngine("a", Script.stream(*"abcdefgh", gap_s=0.2))
    async with gateway(engine) as g, await Raw.connect(g.url) as raw:
        raw.send(streamed())
        await raw.until(b"data:", 2)
        stopped = asyncio.ensure_future(g.world.bottom.stop())
        await raw.until(b"[DONE]")
        await stopped
        assert engine.ended("complete")
        assert g.world.idle()


async def test_what_needs_no_server_is_answered_at_once() -> None:
    async with gateway(FakeEngine("a")) as g:
        assert is_error(await ask(g.url, PATH, chat("nobody-has-this")), 404)
        assert is_error(await ask(g.url, PATH, b"{"), 400)
        assert is_error(await ask(g.url, "/v1/unheard-of", b"{}"), 404)
        listed = await get(f"{g.url}/v1/models")
        assert [m["id"] for m in listed.json()["data"]] == [MODEL]
        assert (await g.last())["ending"] == "refused_here"


async def test_a_server_that_cannot_be_reached_is_left_alone() -> None:
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with gateway(*engines) as g:
        engines[0].refuse()
        answers = [(await ask(g.url, PATH, chat(MODEL))).status for _ in range(10)]
        assert answers.count(503) <= 1  # the one that found out
        assert answers[-5:] == [200] * 5
        assert g.world.candidate(engines[0]).breaker.state is State.OPEN or 503 not in answers
        await g.last()


async def test_where_nobody_has_room_a_request_waits_for_its_server() -> None:
    engine = FakeEngine("a", Script.stream(*"abcd", gap_s=0.3))
    async with gateway(engine, upstream={"max_in_flight": 1}) as g, await Raw.connect(g.url) as raw:
        raw.send(streamed())
        await raw.until(b"data:")
        engine.script = Script.whole()
        waited = asyncio.ensure_future(ask(g.url, PATH, chat(MODEL)))
        await raw.until(b"[DONE]")
        assert (await waited).status == 200
        assert [s.ended for s in engine.seen] == ["complete", "complete"]


async def test_a_full_cluster_says_so_and_a_server_that_fails_is_ejected() -> None:
    engine = FakeEngine("a", Script.stream("a", "b", gap_s=30.0))
    settings = {"upstream": {"max_in_flight": 1}, "health": {"eject_after": 2}, "queue": {"max_requests": 0}}
    async with gateway(engine, **settings) as g:
        async with await Raw.connect(g.url) as raw:
            raw.send(streamed())
            await raw.until(b"data:")
            refused = await ask(g.url, PATH, chat(MODEL))
            assert is_error(refused, 429)
        await g.last()
        engine.script = Script.error(500)
        for _ in range(2):
            assert (await ask(g.url, PATH, chat(MODEL))).status == 500
            await g.last()
        assert (await ask(g.url, PATH, chat(MODEL))).status == 503


# -- the protocol itself -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def stream(picker: PickerServer) -> AsyncIterator[Any]:
    """A stream to a picker, as a gateway opens it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
        process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        call = process()
        yield call
        call.cancel()


def request_headers(*, ends: bool = True, path: str = "/v2/models/m/ready", method: str = "GET") -> ProcessingRequest:
    fields = {":method": method, ":path": path, "content-type": "application/json"}
    headers = HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()])
    return ProcessingRequest(request_headers=HttpHeaders(headers=headers, end_of_stream=ends))


async def test_only_servers_of_the_subset_that_a_gateway_names_are_picked() -> None:
    engines = [FakeEngine(name, model="m") for name in "abc"]
    async with picking(*engines) as (world, picker):
        for wanted in ([engines[1]], [engines[2]], [engines[0], engines[2]], []):
            addresses = [f"127.0.0.1:{e.port}" for e in wanted]
            async with stream(picker) as call:
                asked = request_headers(path="/v2/models/m/ready")
                hint = asked.metadata_context.filter_metadata["envoy.lb.subset_hint"]
                hint.update({"x-gateway-destination-endpoint-subset": addresses})
                await call.write(asked)
                told: ProcessingResponse = await call.read()
            if not wanted:
                assert told.immediate_response.status.code == 503
                continue
            picked = told.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
            assert picked in addresses
            options = told.request_headers.response.header_mutation.set_headers
            named = {o.header.key: o.header.raw_value.decode() for o in options}
            assert named["x-gateway-destination-endpoint"] == picked
        await eventually(lambda: world.idle() and not picker.open, 10.0)


async def test_a_server_known_by_name_is_told_by_its_address() -> None:
    async with picking() as (world, picker):
        endpoint = Endpoint("named", url="http://localhost:8123", models=frozenset({"m"}))
        await world.bottom.membership.register_instance(CLUSTER, endpoint)
        await eventually(lambda: world.bottom.balancing.serving, 10.0)
        async with stream(picker) as call:
            await call.write(request_headers())
            told: ProcessingResponse = await call.read()
        assert told.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] in ("127.0.0.1:8123", "[::1]:8123")


async def test_a_gateway_that_is_set_up_wrongly_is_told_what_is_needed() -> None:
    async with picking(FakeEngine("a")) as (_, picker):
        for request_mode, response_mode in (
            (ProcessingMode.NONE, ProcessingMode.STREAMED),
            (ProcessingMode.STREAMED, ProcessingMode.STREAMED),
            (ProcessingMode.BUFFERED, ProcessingMode.NONE),
        ):
            async with stream(picker) as call:
                asked = request_headers(ends=False, path=PATH, method="POST")
                config = ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=response_mode)
                asked.protocol_config.CopyFrom(config)
                await call.write(asked)
                told: ProcessingResponse = await call.read()
            assert told.immediate_response.status.code == 500
            assert b"request_body_mode" in told.immediate_response.body


async def test_health_is_what_the_protocol_asks_for() -> None:
    async with (
        picking(FakeEngine("a")) as (world, picker),
        grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel,
    ):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )

        async def status(service: str) -> int:
            return int((await check(HealthCheckRequest(service=service))).status)

        ours = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await status(s) for s in ours] == [HealthCheckResponse.SERVING] * 3
        assert await status("another") == HealthCheckResponse.SERVICE_UNKNOWN
        world.bottom.draining = True
        assert [await status(s) for s in ours] == [HealthCheckResponse.NOT_SERVING] * 3
        assert await status("liveness") == HealthCheckResponse.SERVING


def published(file: FileDescriptor) -> Iterator[tuple[str, str, int, int, str]]:
    """(message, field, number, type, message type) of all in a file, and (enumeration, value, number, 0, "")."""
    pending = list(file.message_types_by_name.values())
    enums = list(file.enum_types_by_name.values())
    while pending:
        message = pending.pop()
        pending += message.nested_types
        enums += message.enum_types
        for field in message.fields:
            kind = field.message_type or field.enum_type
            yield message.full_name, field.name, field.number, field.type, kind.full_name if kind else ""
    for enum in enums:
        for value in enum.values:
            yield enum.full_name, value.name, value.number, 0, ""


LOOK = """
import json, sys
from google.protobuf import descriptor_pool
from envoy.service.ext_proc.v3 import external_processor_pb2
pool, wrong = descriptor_pool.Default(), []
for owner, name, number, kind, of in json.load(sys.stdin):
    if not kind:
        found = pool.FindEnumTypeByName(owner).values_by_name[name].number == number
    else:
        field = pool.FindMessageTypeByName(owner).fields_by_name[name]
        there = field.message_type or field.enum_type
        found = (field.number, field.type, there.full_name if there else "") == (number, kind, of)
    if not found:
        wrong.append((owner, name))
print(json.dumps(wrong))
"""


def test_names_and_numbers_are_those_of_the_published_protocol() -> None:
    files = (core_pb2, external_processor_pb2, http_status_pb2, processing_mode_pb2)
    ours = [row for file in files for row in published(file.DESCRIPTOR)]
    assert len(ours) > 60
    run = [tools.python(), "-c", LOOK]
    done = subprocess.run(run, input=json.dumps(ours), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert health_pb2.DESCRIPTOR.package == "grpc.health.v1"
