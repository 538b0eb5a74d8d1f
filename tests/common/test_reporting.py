"""Reports over real gRPC on the loopback, under uvloop as in production."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random

import grpc
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.proto import load_pb2, load_pb2_grpc
from common.reporting import ReportClient, ReportServer, Tls, from_wire, to_wire
from common.reporting import client as client_module
from common.reporting.delay import Delay
from common.types import LoadReport, Phase, ServerLoad, Speed
from tests import servers
from tests.servers import Relay

eventually = partial(servers.eventually, timeout_s=5.0, step_s=0.005)


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


class Listener:
    """Records what a ReportClient tells."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, LoadReport]] = []
        self.states: list[tuple[str, bool]] = []
        self.round_trips: list[tuple[str, float]] = []

    def client(self, **options: object) -> ReportClient:
        return ReportClient(
            "tester",
            Random(1),
            on_report=lambda a, r: self.reports.append((a, r)),
            on_state=lambda a, c: self.states.append((a, c)),
            on_round_trip=lambda a, s: self.round_trips.append((a, s)),
            **options,  # type: ignore[arg-type]
        )

    def of(self, endpoint: str) -> list[LoadReport]:
        return [r for _, r in self.reports if r.endpoint == endpoint]


@pytest.fixture
async def server() -> AsyncIterator[ReportServer]:
    server = ReportServer()
    await server.start("127.0.0.1:0")
    yield server
    await server.close()


@pytest.fixture
async def heard() -> Listener:
    return Listener()


# -- the messages ----------------------------------------------------------------------------------------------------

amount = st.floats(0.0, 1e15, allow_nan=False)
positive = st.floats(1e-9, 1e9, allow_nan=False)
fraction = st.floats(0.0, 1.0)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
speeds = st.builds(Speed, amount, amount, amount, positive, positive, positive, positive, positive)
server_loads = st.builds(
    ServerLoad,
    speeds,
    names,
    st.integers(1, 10_000),
    *[amount] * 5,
    fraction,
    amount,
    st.frozensets(names, max_size=4),
)
reports = st.builds(
    LoadReport,
    names,
    amount,
    st.lists(server_loads, max_size=4).map(tuple),
    st.none() | amount,
    st.none() | amount,
    st.none() | fraction,
    st.none() | fraction,
    st.none() | st.integers(0, 2**63 - 1),
    st.none() | amount,
    st.sampled_from(Phase),
)


@given(reports)
def test_a_report_survives_the_wire(report: LoadReport) -> None:
    data = to_wire(report).SerializeToString()
    assert from_wire(load_pb2.LoadReport.FromString(data)) == report


def test_absent_stays_absent_and_zero_stays_zero() -> None:
    absent = from_wire(load_pb2.LoadReport.FromString(to_wire(LoadReport("a")).SerializeToString()))
    assert absent == LoadReport("a")
    assert absent.running is None
    assert absent.gpu_memory_free_bytes is None
    zero = LoadReport("a", running=0.0, waiting=0.0, kv_utilization=0.0, gpu_memory_free_bytes=0)
    assert from_wire(load_pb2.LoadReport.FromString(to_wire(zero).SerializeToString())) == zero


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_nonsense_from_a_peer_is_unknown(bad: float) -> None:
    message = load_pb2.LoadReport(endpoint="a", age_s=bad, running=bad, kv_utilization=bad, gpu_memory_free_bytes=-5)
    assert from_wire(message) == LoadReport("a")
    assert from_wire(load_pb2.LoadReport(endpoint="a", kv_utilization=40.0)).kv_utilization is None  # per cent


def test_a_server_that_cannot_be_computed_with_is_left_out() -> None:
    good = to_wire(LoadReport("a", servers=(ServerLoad(Speed(0.01, 0.0, 0.0, 1000.0), decoding=-1e-12),)))
    assert from_wire(good).servers == (ServerLoad(Speed(0.01, 0.0, 0.0, 1000.0)),)
    for change in (
        lambda s: s.speed.ClearField("prefill_tokens_per_s"),
        lambda s: setattr(s.speed, "slots", 0.0),
        lambda s: setattr(s.speed, "alpha_s", math.nan),
        lambda s: setattr(s, "decoding", math.nan),
        lambda s: setattr(s, "count", 0),
    ):
        message = load_pb2.LoadReport()
        message.CopyFrom(good)
        change(message.servers[0])
        assert from_wire(message).servers == ()


def test_other_versions_are_understood() -> None:
    older = load_pb2.LoadReport(endpoint="a")  # says no phase
    assert from_wire(older).phase is Phase.SERVING
    newer = load_pb2.LoadReport.FromString(older.SerializeToString() + b"\x50\x63" + b"\xa2\x06\x03new")
    assert newer.phase == 99
    assert from_wire(newer).phase is Phase.LOADING  # whatever it is, no new work
    speed = load_pb2.Speed(alpha_s=0.01, beta_s=0.0, gamma_s=0.0, prefill_tokens_per_s=1000.0)
    quote = load_pb2.LoadReport(endpoint="a", servers=[load_pb2.ServerLoad(speed=speed, count=1)])
    assert from_wire(quote).servers[0].speed == Speed(0.01, 0.0, 0.0, 1000.0)  # limits from the defaults


def test_a_hold_up_is_told_from_distance_and_drift() -> None:
    delay = Delay()
    for i in range(1000):  # clocks 1e6 s apart, 0.1 s of distance, the sender's 100 ppm slow
        assert delay.of(i * (1.0 - 1e-4), 1e6 + i + 0.1) < 1e-3
    assert delay.of(1000.0 * (1.0 - 1e-4), 1e6 + 1000.0 + 0.1 + 2.5) == pytest.approx(2.5, abs=1e-2)
    assert delay.of(1001.0, 1e6 + 1001.0) == 0.0  # a quicker way is the new measure
    assert delay.of(math.nan, 1e6 + 1002.0) == 0.0


# -- the stream ------------------------------------------------------------------------------------------------------


async def test_reports_come_at_once_on_change_and_every_interval(server: ReportServer, heard: Listener) -> None:
    load = [1.0]
    server.offer("a", lambda now: LoadReport("a", running=load[0]))
    server.offer("b", lambda now: LoadReport("b"))
    client = heard.client()
    address = f"127.0.0.1:{server.port}"
    client.follow(address)
    await eventually(lambda: heard.of("a") and heard.of("b"))
    assert heard.states == [(address, True)]
    assert heard.of("b")[0].running is None

    await asyncio.sleep(0.7)
    assert 3 <= len(heard.of("b")) <= 6  # every 0.2 s

    await asyncio.sleep(0.1)
    load[0] = 2.0
    server.changed("a")
    assert await eventually(lambda: heard.of("a")[-1].running == 2.0) < 0.1
    await client.close()
    await eventually(lambda: server.subscribers == 0)


async def test_a_burst_of_changes_is_told_in_few_messages(server: ReportServer, heard: Listener) -> None:
    count = [0.0]
    server.offer("a", lambda now: LoadReport("a", running=count[0]))
    client = heard.client()
    client.follow(f"127.0.0.1:{server.port}")
    await eventually(lambda: heard.reports)
    before = len(heard.reports)
    for _ in range(200):
        for _ in range(50):
            count[0] += 1.0
            server.changed("a")
        await asyncio.sleep(0.001)
    await eventually(lambda: heard.of("a")[-1].running == count[0])
    assert len(heard.reports) - before < 40  # 10,000 changes in about 0.3 s, at most one message in 20 ms
    await client.close()


async def test_only_what_was_asked_for_and_asking_again(server: ReportServer, heard: Listener) -> None:
    for name in ("a", "b"):
        server.offer(name, lambda now, name=name: LoadReport(name))  # type: ignore[misc]
    client = heard.client()
    address = f"127.0.0.1:{server.port}"
    client.follow(address, ["a"])
    await eventually(lambda: len(heard.of("a")) > 1)
    assert not heard.of("b")
    client.follow(address, ["b"])
    await eventually(lambda: heard.of("b"))
    heard.reports.clear()
    await asyncio.sleep(0.5)
    assert heard.of("b")
    assert not heard.of("a")
    assert heard.states == [(address, True)]  # the connection stayed
    client.unfollow(address)
    await eventually(lambda: server.subscribers == 0)
    heard.reports.clear()
    await asyncio.sleep(0.3)
    assert not heard.reports
    assert heard.states == [(address, True)]
    await client.close()


async def test_a_server_with_nothing_to_offer_is_alive(server: ReportServer, heard: Listener) -> None:
    client = heard.client()
    client.follow(f"127.0.0.1:{server.port}")
    await asyncio.sleep(1.3)
    assert [c for _, c in heard.states] == [True]
    assert heard.reports == []
    server.offer("late", lambda now: LoadReport("late"))
    assert await eventually(lambda: heard.of("late")) < 0.15
    server.withdraw("late")
    await asyncio.sleep(0.1)
    heard.reports.clear()
    await asyncio.sleep(0.5)
    assert heard.reports == []
    await client.close()


async def test_it_connects_again_after_the_server_died(heard: Listener) -> None:
    first = ReportServer()
    port = await first.start("127.0.0.1:0")
    first.offer("a", lambda now: LoadReport("a", running=1.0))
    client = heard.client()
    client.follow(f"127.0.0.1:{port}")
    await eventually(lambda: heard.reports)
    await first.close(grace_s=0.0)
    assert await eventually(lambda: heard.states[-1][1] is False) < 0.5
    await asyncio.sleep(0.5)
    second = ReportServer()
    await second.start(f"127.0.0.1:{port}")
    second.offer("a", lambda now: LoadReport("a", running=2.0))
    assert await eventually(lambda: heard.states[-1][1]) < 3.0
    assert heard.of("a")[-1].running == 2.0
    assert [c for _, c in heard.states] == [True, False, True]
    await client.close()
    await second.close()


async def test_nobody_there_is_said_once(heard: Listener) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        client = heard.client()
        client.follow(f"127.0.0.1:{taken.getsockname()[1]}")
        await asyncio.sleep(0.6)
        assert [c for _, c in heard.states] == [False]
        await client.close()


async def test_a_peer_that_falls_silent_is_lost_within_two_seconds(server: ReportServer, heard: Listener) -> None:
    server.offer("a", lambda now: LoadReport("a"))
    async with Relay(server.port) as relay:
        client = heard.client()
        client.follow(f"127.0.0.1:{relay.port}")
        await eventually(lambda: heard.reports)
        relay.stall()
        assert 0.8 < await eventually(lambda: heard.states[-1][1] is False) < 2.0
        relay.resume()
        assert await eventually(lambda: heard.states[-1][1]) < 4.0
        await client.close()


async def test_a_far_peer_reports_as_often_and_its_distance_is_seen(server: ReportServer, heard: Listener) -> None:
    quote = ServerLoad(Speed(0.01, 1e-4, 1e-6, 1e4), "h100", 3, 10.0, models=frozenset({"a-model-of-some-name"}))
    server.offer("a", lambda now: LoadReport("a", servers=(quote,) * 16))
    async with Relay(server.port) as relay:
        relay.delay_s = relay.request_delay_s = 0.15
        client = heard.client()
        client.follow(f"127.0.0.1:{relay.port}")
        await eventually(lambda: heard.round_trips)
        assert 0.3 <= heard.round_trips[0][1] < 0.4
        heard.reports.clear()
        await asyncio.sleep(1.1)
        assert len(heard.reports) >= 4  # flow control costs a large quote no round trip
        assert heard.states == [(f"127.0.0.1:{relay.port}", True)]
        await client.close()


async def test_our_own_stall_is_not_the_peers_silence(server: ReportServer, heard: Listener) -> None:
    server.offer("a", lambda now: LoadReport("a"))
    client = heard.client()
    client.follow(f"127.0.0.1:{server.port}")
    await eventually(lambda: heard.reports)
    time.sleep(1.3)  # the whole process stands still
    await asyncio.sleep(0.4)
    assert [c for _, c in heard.states] == [True]
    await client.close()


async def test_a_slow_subscriber_gets_the_newest_and_nothing_piles_up() -> None:
    made = [0]

    def source(now: float) -> LoadReport:
        made[0] += 1
        return LoadReport("a", servers=(quote,) * 4, running=float(made[0]))

    quote = ServerLoad(Speed(0.01, 1e-4, 1e-6, 1e4), "h100", 3, 10.0, 2.0, 1e3, 1e4, 1e3, 0.2, 4.0, frozenset({"m"}))
    server = ReportServer(interval_s=0.005, min_interval_s=0.005)
    port = await server.start("127.0.0.1:0")
    server.offer("a", source)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_module._OPTIONS) as channel:
        call = load_pb2_grpc.LoadReportingStub(channel).Watch(load_pb2.WatchRequest())
        await call.read()
        await asyncio.sleep(1.5)  # 300 intervals without reading
        newest = made[0]
        assert newest < 40
        behind = 0
        while True:
            message = await call.read()
            assert isinstance(message, load_pb2.LoadReport)
            if message.running >= newest:
                break
            behind += 1
        began = time.monotonic()
        assert behind <= newest
        message = await call.read()
        assert isinstance(message, load_pb2.LoadReport)
        assert time.monotonic() - began < 0.5
        call.cancel()
    await server.close()


async def test_a_report_that_was_held_up_says_so(server: ReportServer, heard: Listener) -> None:
    server.offer("a", lambda now: LoadReport("a"))
    async with Relay(server.port) as relay:
        client = heard.client()
        client.follow(f"127.0.0.1:{relay.port}")
        await eventually(lambda: len(heard.reports) > 2)
        assert heard.reports[-1][1].age_s < 0.1
        heard.reports.clear()
        relay.stall()
        await asyncio.sleep(0.8)
        relay.resume()
        await eventually(lambda: len(heard.reports) > 5)
        ages = [r.age_s for r in heard.of("a")]
        assert max(ages) > 0.4
        assert ages[-1] < 0.1
        await client.close()


async def test_the_age_of_a_report_is_of_the_moment_it_leaves(server: ReportServer, heard: Listener) -> None:
    seen_at = time.monotonic()
    server.offer("a", lambda now: LoadReport("a", age_s=now - seen_at))
    client = heard.client()
    client.follow(f"127.0.0.1:{server.port}")
    await asyncio.sleep(0.7)
    await client.close()
    ages = [r.age_s for r in heard.of("a")]
    assert len(ages) >= 3
    assert ages == sorted(ages)
    assert ages[-1] > 0.3


async def test_the_round_trip_is_measured(server: ReportServer, heard: Listener) -> None:
    client = heard.client()
    address = f"127.0.0.1:{server.port}"
    client.follow(address)
    await eventually(lambda: heard.round_trips)
    assert heard.round_trips[0][0] == address
    assert 0.0 < heard.round_trips[0][1] < 0.1
    await client.close()


async def test_a_subscriber_chooses_its_interval_within_bounds(server: ReportServer, heard: Listener) -> None:
    server.offer("a", lambda now: LoadReport("a"))
    client = heard.client(interval_s=0.05)
    client.follow(f"127.0.0.1:{server.port}")
    await eventually(lambda: heard.reports)
    heard.reports.clear()
    await asyncio.sleep(0.6)
    assert 8 <= len(heard.reports) <= 15
    await client.close()
    frantic = Listener()
    client = frantic.client(interval_s=math.nan)
    client.follow(f"127.0.0.1:{server.port}")
    await eventually(lambda: frantic.reports)
    await asyncio.sleep(0.3)
    assert len(frantic.reports) < 70
    await client.close()


async def test_a_failing_consumer_keeps_its_stream(server: ReportServer) -> None:
    seen: list[str] = []

    def on_report(address: str, report: LoadReport) -> None:
        seen.append(report.endpoint)
        raise KeyError(report.endpoint)

    server.offer("a", lambda now: LoadReport("a"))
    client = ReportClient("tester", Random(1), on_report=on_report, interval_s=0.05)
    client.follow(f"127.0.0.1:{server.port}")
    await eventually(lambda: len(seen) > 2)
    await client.close()


async def test_a_subscriber_that_leaves_while_it_is_told_ends_its_stream_and_nothing_else(server: ReportServer) -> None:
    """gRPC's race between a write and a reset connection cannot be had on demand: this raises what it raises then."""

    class Left:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def write(self, message: load_pb2.LoadReport) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    server.offer("a", lambda now: LoadReport("a"))
    await server.serve(load_pb2.WatchRequest(), Left())  # type: ignore[arg-type]
    assert server.subscribers == 0


async def test_subscribers_are_bounded(heard: Listener) -> None:
    server = ReportServer(max_subscribers=1)
    port = await server.start("127.0.0.1:0")
    client = heard.client()
    client.follow(f"127.0.0.1:{port}")
    await eventually(lambda: heard.states)
    second = Listener()
    other = second.client()
    other.follow(f"127.0.0.1:{port}")
    await eventually(lambda: second.states)
    assert second.states[0][1] is False
    await client.close()
    await eventually(lambda: second.states[-1][1])  # a place is free
    await other.close()
    await server.close()


async def test_a_taken_port_is_a_config_error(server: ReportServer) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}"):
        await ReportServer().start(f"127.0.0.1:{server.port}")
    with pytest.raises(ConfigError, match="cannot listen"):
        await ReportServer().start("no.such.host.invalid:1")


# -- TLS -------------------------------------------------------------------------------------------------------------


def certificates(folder: Path) -> Path:
    """An authority, a server certificate for `agents.test` and a client certificate, made by the openssl command."""

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "san").write_text("subjectAltName=DNS:agents.test")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)
    return folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_mutual_tls(tmp_path: Path) -> None:
    files = certificates(tmp_path)
    ca = str(files / "ca.pem")
    server = ReportServer(tls=Tls(str(files / "server.pem"), str(files / "server.key"), ca))
    port = await server.start("127.0.0.1:0")
    server.offer("a", lambda now: LoadReport("a"))
    known, unknown, plain = Listener(), Listener(), Listener()
    clients = [
        known.client(tls=Tls(str(files / "client.pem"), str(files / "client.key"), ca, "agents.test")),
        unknown.client(tls=Tls(ca=ca, server_name="agents.test")),
        plain.client(),
    ]
    for client in clients:
        client.follow(f"127.0.0.1:{port}")
    await eventually(lambda: known.reports and unknown.states and plain.states)
    assert unknown.states[0][1] is False
    assert plain.states[0][1] is False
    assert not unknown.reports
    for client in clients:
        await client.close()
    await server.close()


async def test_tls_files_are_checked_at_start() -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.key"):
        await ReportServer(tls=Tls("/no/such.pem", "/no/such.key")).start("127.0.0.1:0")
    with pytest.raises(ConfigError, match="certificate and a key"):
        await ReportServer(tls=Tls(ca="")).start("127.0.0.1:0")
