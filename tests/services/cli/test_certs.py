"""`headwater certs`: what it makes is what tiers need to know each other by."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from common.config import TlsSection
from common.errors import ConfigError
from common.relay.tls import Certificates
from common.route import HEADER, Route
from common.types import InferenceRequest
from services.cli.__main__ import app
from services.cli.certs import certs
from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import chat
from tests.integration.system import CLUSTER, headwater, run_command, tiers
from tests.servers import eventually
from tests.tools import ROOT

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module", autouse=True)
def command() -> None:
    if "certs" not in {c.name for c in app.registered_commands}:
        app.command("certs")(certs)


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def settings(folder: Path, name: str) -> dict[str, object]:
    files = {"cert_file": f"{folder}/{name}.pem", "key_file": f"{folder}/{name}-key.pem"}
    return {**files, "ca_file": f"{folder}/ca.pem", "peers_required": True}


def test_what_is_good_is_kept_and_what_is_asked_for_is_renewed(tmp_path: Path) -> None:
    assert "peers_required: true" in run(tmp_path, "eu-1=10.0.0.1,eu-1.example", "us-1")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(before) == ["ca-key.pem", "ca.pem", "eu-1-key.pem", "eu-1.pem", "us-1-key.pem", "us-1.pem"]
    assert {f.name: f.stat().st_mode & 0o777 for f in tmp_path.glob("*key*")} == {
        n: 0o600 for n in before if "key" in n
    }
    Certificates(TlsSection(**settings(tmp_path, "eu-1")))  # type: ignore[arg-type]
    assert run(tmp_path, "eu-1=10.0.0.1,eu-1.example", "us-1").count("still good") == 2
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    run(tmp_path, "eu-1=10.0.0.2", "us-1")  # another address
    changed = {file.name for file in tmp_path.iterdir() if file.read_bytes() != before[file.name]}
    assert changed == {"eu-1.pem", "eu-1-key.pem"}
    run(tmp_path, "us-1", "--renew")
    assert (tmp_path / "us-1.pem").read_bytes() != before["us-1.pem"]
    assert (tmp_path / "ca.pem").read_bytes() == before["ca.pem"]


@pytest.mark.parametrize("name", ["ca", "../x", "a b", "a=", "a=b c", ""])
def test_names_that_cannot_be(name: str, tmp_path: Path) -> None:
    run(tmp_path, name, code=2)
    assert not list(tmp_path.iterdir())


def test_half_an_authority_is_not_replaced(tmp_path: Path) -> None:
    run(tmp_path, "a")
    (tmp_path / "ca-key.pem").unlink()
    assert "only one is there" in run(tmp_path, "a", code=1)


async def test_three_tiers_with_them_serve_and_believe_nobody_else(tmp_path: Path) -> None:
    """A route header that is signed with the right key, from somebody without a certificate, is a client's word."""
    await asyncio.to_thread(run, tmp_path, "tier=127.0.0.1,localhost")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    engine = FakeEngine("one")
    async with (
        httpx.AsyncClient(verify=trusted, trust_env=False) as client,
        tiers(engine, depth=3, tls=settings(tmp_path, "tier")) as world,
    ):
        url = world.url.replace("http:", "https:")
        reply = await client.post(url + PATH, content=chat(MODEL))
        assert (reply.status_code, reply.headers["x-headwater-served-by"]) == (200, "r/c/one")
        told = Route(InferenceRequest("0" * 32, "another-model"), CLUSTER)
        forged = {HEADER.decode(): world.bottom.signer.sign(told).decode()}
        bottom = f"https://127.0.0.1:{world.bottom.port}"
        assert (await client.post(bottom + PATH, content=chat("nobody"), headers=forged)).status_code == 404
        trusted.load_cert_chain(tmp_path / "tier.pem", tmp_path / "tier-key.pem")
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as peer:
            told = Route(InferenceRequest("0" * 32, MODEL), CLUSTER)
            forged = {HEADER.decode(): world.bottom.signer.sign(told).decode()}
            believed = await peer.post(bottom + PATH, content=chat("nobody"), headers=forged)
            assert believed.status_code == 200  # its word counts, and not the body's


async def test_the_admin_listener_speaks_tls_to_operators_and_to_other_tiers(tmp_path: Path) -> None:
    await asyncio.to_thread(run, tmp_path, "tier=127.0.0.1,localhost")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    tls, token = {**settings(tmp_path, "tier"), "admin": True}, "an-operator's-token"
    async with (
        httpx.AsyncClient(verify=trusted, trust_env=False, headers={"authorization": f"Bearer {token}"}) as client,
        tiers(FakeEngine("one"), depth=3, tls=tls, auth={"admin_tokens": [token]}) as world,
    ):
        reply = await client.post(world.url.replace("http:", "https:") + PATH, content=chat(MODEL))
        decision, url = reply.headers["x-headwater-decision"], f"https://127.0.0.1:{world.top.admin_port}"
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{world.admin_url}/livez")  # in plain HTTP

        async def all_three() -> bool:
            spans = (await client.get(f"{url}/admin/v1/traces/{decision}?everywhere=true")).json()
            return len({span["process"] for span in spans}) == 3

        await eventually(all_three, 20.0)
        shown = {"HEADWATER_ADMIN_TOKEN": token, "HEADWATER_ADMIN_URL": url}
        env = {**os.environ, **shown, "HEADWATER_ADMIN_CA_FILE": str(tmp_path / "ca.pem")}
        out, _ = await run_command(headwater("trace", decision), env=env)
        assert out.count("choose ") == 3
        await run_command(headwater("trace", decision), env={**os.environ, **shown}, code=1)  # of nobody it knows
        check = [sys.executable, "-IS", str(ROOT / "deploy" / "compose" / "healthcheck.py")]
        address = {"HEADWATER_ADMIN": f"127.0.0.1:{world.top.admin_port}"}
        await run_command(check, env={**os.environ, **address, "HEADWATER_TLS__ADMIN": "true"})
        await run_command(check, env={**os.environ, **address}, code=1)


def test_an_admin_listener_with_tls_needs_a_certificate() -> None:
    with pytest.raises(ConfigError, match=r"tls\.admin"):
        Certificates(TlsSection(admin=True))
