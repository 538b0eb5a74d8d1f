"""`headwater check` says what a start would say, and starts nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.cli.__main__ import ELSEWHERE
from services.cli.check import check
from tests.servers import EtcdServer, RedisServer, free_port

app = typer.Typer()
app.command("check")(check)

GOOD = {
    "global": "etcd: {urls: [http://10.0.0.2:2379]}",
    "region": "region: eu",
    "instance": "region: eu\ncluster: eu-a",
    "agent": "region: eu\ncluster: eu-a\ninstances: [{url: http://10.0.0.9:8000}]",
    "up": "instances: [{url: http://127.0.0.1:8000}]",
}


def run(file: Path, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(file), *arguments])
    return done.exit_code, done.stdout, done.stderr


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "headwater.yaml"
    file.write_text(text)
    return file


def test_it_is_a_command() -> None:
    assert ELSEWHERE["check"] == ("services.cli.check", "check")


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_file_is_known_by_its_keys(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, GOOD[kind])
    assert run(file) == (0, f"{file}: good, for headwater {kind}\n", "")
    assert run(file, "--as", kind)[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limits: {max_body_bytes: 5}", ":1: limits.max_body_bytes: "),
        ("region: eu\nlimit: {}", ":2: unknown key 'limit'"),
        ("listen: [", ":1: not valid YAML"),
        ("policy: {name: luck}", "unknown policy 'luck'"),
        ("redis: {url: redsi://127.0.0.1}", "redis: no usable URL"),
        ("etcd: {ca_file: /nowhere/ca.pem}", "etcd.ca_file: /nowhere/ca.pem cannot be read"),
        ("tls: {cert_file: /nowhere/a.pem, key_file: /nowhere/b.pem}", "tls: "),
        ("region: eu\ncluster: e u", ":2: cluster: "),
        ("instances: []", "no instances"),
    ],
)
def test_the_first_thing_wrong_is_told_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    code, out, err = run(written(tmp_path, text))
    assert (code, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there_and_a_kind_that_is_none(tmp_path: Path) -> None:
    assert "cannot be read" in run(tmp_path / "none.yaml")[2]
    assert "expected one of global" in run(written(tmp_path, ""), "--as", "lb")[2]


async def test_stores_are_asked_when_told_to(tmp_path: Path) -> None:
    async with EtcdServer() as etcd, RedisServer() as redis:
        text = f"etcd: {{urls: ['{etcd.url}']}}\nredis: {{url: '{redis.url}', budget_ms: 500}}"
        file = written(tmp_path, text)
        code, _, err = await asyncio.to_thread(run, file, "--connect")
        assert (code, err) == (0, ""), err
        dead = written(tmp_path, text.replace(str(redis.port), str(free_port())))
        assert "redis.url: " in (await asyncio.to_thread(run, dead, "--connect"))[2]
        assert (await asyncio.to_thread(run, dead))[0] == 0
