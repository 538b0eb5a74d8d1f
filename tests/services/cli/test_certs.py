"""`headwater certs`: what it makes is what tiers need to know each other by."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from common.config import TlsSection
from common.relay.tls import Certificates
from common.route import HEADER, Route
from common.types import InferenceRequest
from services.cli.__main__ import app
from services.cli.certs import certs
from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import chat
from tests.integration.system import CLUSTER, tiers

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
