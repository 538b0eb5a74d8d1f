"""Who is believed: headers that name servers, keys that leak (C18), certificates between tiers and towards clients."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from tests.common.store.test_etcd import authority
from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, chat, get, metrics, post
from tests.integration.relay.cases import PATH, seen
from tests.integration.system import Tiers, tiers
from tests.servers import eventually

BODY = chat(MODEL)


def naming(port: int) -> list[str]:
    """Headers by which a client would have something else called: other products', and our own in any spelling."""
    there = f"127.0.0.1:{port}"
    return [
        *(f"x-gateway-destination-endpoint: {there}", f"X-Gateway-Destination-Endpoint: {there}"),
        *(
            f"x_gateway_destination_endpoint: {there}",
            f"x-prefiller-host-port: {there}",
            f"x-prefiller-url: http://{there}",
        ),
        *(f"x-data-parallel-host-port: {there}", f"x-encoder-hosts-ports: {there}"),
        *(f"x-headwater-route: {there}", f"X-HEADWATER-ROUTE: {there}", f"x_headwater_route: {there}"),
        *("x-headwater-attempts: 99", "x-headwater-rejected: saturated", "X_Headwater-Served_By: r/c/evil"),
        *(f"x-forwarded-host: {there}", f"forwarded: host={there}"),
    ]


async def test_no_header_names_who_is_called_and_no_key_is_told(depth: int, capfd: pytest.CaptureFixture[str]) -> None:
    called = 0

    def listener(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal called
        called += 1
        writer.close()

    server = await asyncio.start_server(listener, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = FakeEngine("a")
    secrets = ("authorization: Bearer CANARY1", "x-api-key: CANARY2", "proxy-authorization: Basic CANARY3")
    async with tiers(engine, depth=depth, log={"access": True, "level": "debug"}) as world:
        for script in (
            Script.whole(),
            Script.error(307, headers=(("location", f"http://127.0.0.1:{port}/"),)),
            Script.error(500, "it broke"),
            Script.error(429),
        ):
            engine.script = script
            async with await Raw.connect(world.url) as raw:
                raw.send(post(f"{PATH}?api_key=CANARY4", BODY, *secrets, *naming(port)))
                response = await raw.response()
            assert response.status == script.status
            assert b"CANARY" not in response.body
            assert "x-headwater-attempts" not in dict(response.headers)
            world.candidate(engine).busy_until = 0.0
        assert called == 0
        (first, *_) = engine.seen
        passed = {name for name, _ in first.headers}
        assert not {n for n in passed if n.replace("_", "-").startswith(("x-headwater", "x-gateway", "x-prefiller"))}
        assert not passed & {"x-data-parallel-host-port", "x-encoder-hosts-ports", "proxy-authorization"}
        for tier in world.chain:
            admin = f"http://127.0.0.1:{tier.admin_port}"
            for path in ("/metrics", "/admin/v1/requests", "/admin/v1/pools"):
                assert b"CANARY" not in (await get(admin + path)).body, path
            for record in (await get(f"{admin}/admin/v1/requests")).json():
                assert b"CANARY" not in (await get(f"{admin}/admin/v1/traces/{record['trace_id']}")).body
        await metrics(world.admin_url)
    server.close()
    out, err = capfd.readouterr()
    assert "CANARY" not in out + err
    print(out)


async def test_a_route_that_no_peer_signed_is_a_clients_text(depth: int) -> None:
    async with tiers(FakeEngine("a"), depth=depth) as world:
        forged = "W10.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
        for tier in world.chain:
            async with await Raw.connect(tier.port) as raw:
                raw.send(post(PATH, BODY, f"x-headwater-route: {forged}"))
                assert (await raw.response()).status == 200
        assert [r["from_peer"] for r in (await get(f"{world.admin_url}/admin/v1/requests")).json()][-1:] == [False]
        assert seen(world) == len(world.chain)


async def test_keys_rotate_without_a_lost_request() -> None:
    async with tiers(FakeEngine("a"), depth=3) as world:
        old = world.top.signer.keys[0]
        new = b"another-key-of-some-length"
        for step in ((old, new), (new, old), (new,)):
            for tier in world.chain:  # one after the other, with requests in between
                tier.signer.keys = step
                assert (await world.chat()).status == 200
        for tier in world.chain[1:]:
            listed = (await get(f"http://127.0.0.1:{tier.admin_port}/admin/v1/requests")).json()
            assert all(r["from_peer"] for r in listed)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    authority(directory)
    return directory


def secured(directory: Path, **more: object) -> dict[str, object]:
    files = {"cert_file": "node.pem", "key_file": "node.key", "ca_file": "ca.pem"}
    return {"tls": {**{k: str(directory / v) for k, v in files.items()}, **more}}


def context(directory: Path, *, shown: bool = False) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    if shown:
        made.load_cert_chain(directory / "node.pem", directory / "node.key")
    return made


async def over_tls(world: Tiers, directory: Path, port: int | None = None, data: bytes = b"") -> tuple[bytes, bytes]:
    """What comes back for one request, and the certificate that was shown."""
    tls = context(directory)
    reader, writer = await asyncio.open_connection("127.0.0.1", port or world.top.port, ssl=tls)
    writer.write(data or post(PATH, chat(MODEL, stream=True), "connection: close"))
    received = await asyncio.wait_for(reader.read(), 20.0)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return received, shown


async def test_streams_pass_through_tls_and_so_do_breaks(depth: int, certificates: Path) -> None:
    engine = FakeEngine("a", Script.stream("a ", "b "))
    async with tiers(engine, depth=depth, **secured(certificates)) as world:
        received, _ = await over_tls(world, certificates)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        engine.script = Script.stream("a ", "b ", "c ", gap_s=0.02, cut="rst", cut_after=2)
        received, _ = await over_tls(world, certificates)
        assert b"stream_broken" in received
        assert not received.endswith(b"0\r\n\r\n")
        for tier in world.chain[1:]:
            listed = (await get(f"http://127.0.0.1:{tier.admin_port}/admin/v1/requests")).json()
            assert all(r["from_peer"] for r in listed)
        await eventually(world.idle, 5.0)


async def test_a_plain_client_and_a_wrong_one_disturb_nobody(certificates: Path) -> None:
    async with tiers(FakeEngine("a"), **secured(certificates)) as world:
        async with await Raw.connect(world.url) as raw:
            raw.send(post(PATH, BODY))
            await raw.to_end()
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", world.top.port, ssl=ssl.create_default_context())
        received, _ = await over_tls(world, certificates, data=post(PATH, BODY, "connection: close"))
        assert received.startswith(b"HTTP/1.1 200")


async def test_where_peers_have_to_show_a_certificate_a_signature_alone_is_a_clients_text(certificates: Path) -> None:
    settings = secured(certificates, peers_required=True)
    async with tiers(FakeEngine("a"), depth=3, **settings) as world:
        received, _ = await over_tls(world, certificates)
        assert received.startswith(b"HTTP/1.1 200")
        below = world.chain[1]
        listed = (await get(f"http://127.0.0.1:{below.admin_port}/admin/v1/requests")).json()
        assert [r["from_peer"] for r in listed] == [True]
        # The same tier, called with a header that is signed as a peer's, but without a peer's certificate.
        from common.route import Route
        from common.types import InferenceRequest

        signed = world.top.signer.sign(Route(InferenceRequest("x", "m"), ("r",))).decode()
        data = post(PATH, BODY, f"x-headwater-route: {signed}", "connection: close")
        received, _ = await over_tls(world, certificates, below.port, data)
        assert received.startswith(b"HTTP/1.1 200")
        listed = (await get(f"http://127.0.0.1:{below.admin_port}/admin/v1/requests")).json()
        assert sorted(r["from_peer"] for r in listed) == [False, True]


async def test_a_new_certificate_is_shown_without_a_restart_and_a_bad_one_is_not(tmp_path: Path) -> None:
    authority(tmp_path)
    async with tiers(FakeEngine("a"), **secured(tmp_path)) as world:
        data = post(PATH, BODY, "connection: close")
        _, before = await over_tls(world, tmp_path, data=data)
        key, certificate = (tmp_path / "node.key").read_text(), (tmp_path / "node.pem").read_text()
        (tmp_path / "node.pem").write_text("no certificate")
        await asyncio.sleep(2.5)
        (tmp_path / "node.pem").write_text(certificate)
        (tmp_path / "node.key").write_text(key)
        assert (await over_tls(world, tmp_path, data=data))[1] == before
        old = (tmp_path / "ca.pem").read_text()
        authority(tmp_path)  # another authority signs another certificate
        assert (tmp_path / "ca.pem").read_text() != old

        async def renewed() -> bool:
            try:
                return (await over_tls(world, tmp_path, data=data))[1] != before
            except ssl.SSLError:
                return False

        await eventually(renewed, 15.0)
        assert json.loads((await over_tls(world, tmp_path, data=data))[0].split(b"\r\n\r\n", 1)[1])["choices"]
