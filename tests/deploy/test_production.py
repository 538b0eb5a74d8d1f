"""The production-like compose file: two of everything, TLS everywhere; with Docker, it comes up and survives losses.

The test that needs Docker runs with HEADWATER_TEST_DOCKER=1 only, as that of the demo.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from common.config import TierConfig, load
from services.agent.config import AgentConfig
from services.global_lb.config import GlobalConfig
from services.instance_lb.config import InstanceConfig
from services.region_lb.config import RegionConfig
from tests import tools
from tests.deploy.stack import Stack
from tests.deploy.test_compose import WANTED, free_port
from tests.servers import eventually

HERE = tools.ROOT / "deploy" / "compose" / "production"
CONFIGS: dict[str, type[Any]] = {
    "global": GlobalConfig,
    "region": RegionConfig,
    "instance": InstanceConfig,
    "agent": AgentConfig,
}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]
    return found


@pytest.fixture(scope="module")
def secrets() -> Path:
    """What the script makes, in a copy of its folder; it is run twice, as the second run has to change nothing."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    folder = Path(tempfile.mkdtemp(prefix="headwater-test-"))
    shutil.copy(HERE / "certificates.sh", folder)
    run = ["sh", str(folder / "certificates.sh")]
    subprocess.run(run, check=True)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    subprocess.run(run, check=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    return folder / "secrets"


def ours(services: dict[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Services of our own with their commands."""
    commands = {name: (service.get("command") or [""])[0] for name, service in services.items()}
    return {name: (commands[name], services[name]) for name in services if commands[name] in CONFIGS}


def test_there_are_two_of_each_tier_three_of_etcd_and_three_sentinels(services: dict[str, dict[str, Any]]) -> None:
    counts = Counter(command for command, _ in ours(services).values())
    assert (counts["global"], counts["region"], counts["instance"], counts["agent"]) == (2, 2, 2, 1)
    kinds = Counter(re.sub(r"-\d$", "", name) for name in services)
    assert (kinds["etcd"], kinds["redis"], kinds["sentinel"]) == (3, 2, 3)


def test_every_process_has_a_valid_configuration_with_tls(
    services: dict[str, dict[str, Any]], secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (command, service) in ours(services).items():
        for key in [key for key in os.environ if key.startswith("HEADWATER_")]:
            monkeypatch.delenv(key)
        environment = dict(service["environment"])
        for file in service.get("env_file", []):
            lines = (secrets / Path(file).name).read_text().splitlines()
            environment |= dict(line.split("=", 1) for line in lines if line.startswith("HEADWATER_"))
        for key, value in environment.items():
            monkeypatch.setenv(key, str(value))
        if command != "agent":
            monkeypatch.setenv("HEADWATER_AUTH__ADMIN_TOKENS_FILE", str(secrets / name / "admin.token"))
        config = load(CONFIGS[command])
        assert config.id == config.advertise == name
        assert all(url.startswith("https://") for url in config.etcd.urls)
        assert {config.etcd.ca_file, config.tls.ca_file} == {"/tls/ca.pem"}
        assert {config.etcd.cert_file, config.tls.cert_file} == {"/tls/cert.pem"}
        assert service["volumes"] == [f"./secrets/{name}:/tls:ro"]
        if isinstance(config, TierConfig):
            assert config.tls.peers_required
            assert config.tls.admin
            assert len(config.auth.admin_tokens[0]) > 40
            assert config.tenants.stored
            assert not config.tenants.anonymous
            assert config.redis.url.startswith("rediss+sentinel://")
            grace = float(service["stop_grace_period"].removesuffix("s"))
            assert grace >= config.drain.grace_s + 5


def test_each_service_has_a_certificate_of_the_authority_and_its_name(
    services: dict[str, dict[str, Any]], secrets: Path
) -> None:
    named = [name for name, service in services.items() if any("/tls:ro" in v for v in service.get("volumes", []))]
    assert sorted(named) == sorted(d.name for d in secrets.iterdir() if d.is_dir())
    assert oct(secrets.stat().st_mode & 0o777) == "0o700"
    for name in named:
        check = ["openssl", "verify", "-CAfile", "ca.pem", "-verify_hostname", name, f"{name}/cert.pem"]
        done = subprocess.run(check, cwd=secrets, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        token = {"admin.token"} if name.partition("-")[0] in ("global", "region", "instance") else set()
        assert {f.name for f in (secrets / name).iterdir()} == {"ca.pem", "cert.pem", "key.pem", *token}


def test_every_tier_is_scraped(services: dict[str, dict[str, Any]]) -> None:
    content = yaml.safe_load((HERE / "compose.yaml").read_text())["configs"]["prometheus"]["content"]
    (job,) = yaml.safe_load(content)["scrape_configs"]
    tiers = [name for name, (command, _) in ours(services).items() if command != "agent"]
    assert job["static_configs"][0]["targets"] == [f"{name}:9080" for name in tiers]


def test_only_the_global_tier_and_the_dashboards_are_published_and_on_loopback(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published.keys() == {"global-1", "global-2", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


# -- with Docker -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[Stack, list[str], str]]:
    """What the first page's commands bring up, but for Grafana, whose image not everybody has; URLs, and a key."""
    if not WANTED:
        pytest.skip("set HEADWATER_TEST_DOCKER=1 to bring the containers up")
    ports = [free_port(), free_port()]
    (script,) = re.findall(r"```bash\n(.*?)```", (tools.ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    commands = re.sub(r"\\\n\s*", "", script).strip().splitlines()
    assert len(commands) <= 10
    for old, new in {":8443": f":{ports[0]}", "COMPOSE_PROFILES=observability": "COMPOSE_PROFILES="}.items():
        assert old in script
        script = script.replace(old, new)
    stack = Stack(HERE / "compose.yaml", *ports, variables=("HTTPS_PORT_1", "HTTPS_PORT_2"))
    try:
        said = stack.follow(script, timeout_s=480)
        assert '"llama-8b"' in said
        key = (HERE / "secrets" / "acme.key").read_text().strip()
        yield stack, [f"https://localhost:{port}" for port in ports], key
    finally:
        stack.down()
    assert stack.left_behind() == []


@pytest.mark.docker
async def test_with_one_of_everything_lost_clients_are_served(stack: tuple[Stack, list[str], str]) -> None:
    containers, urls, key = stack
    trust = ssl.create_default_context(cafile=str(HERE / "secrets" / "ca.pem"))
    ask = {"model": "llama-8b", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(verify=trust, timeout=30, headers={"authorization": f"Bearer {key}"}) as client:
        for url in urls:
            answer = await client.post(f"{url}/v1/chat/completions", json=ask)
            assert answer.status_code == 200, answer.text
            stranger = await client.post(f"{url}/v1/chat/completions", json=ask, headers={"authorization": "Bearer x"})
            assert stranger.status_code == 401
        containers.run("kill", "global-1", "region-1", "instance-1", "etcd-1", "redis-1")
        for _ in range(20):
            answer = await client.post(f"{urls[1]}/v1/chat/completions", json=ask, headers={"x-session-id": "s"})
            assert answer.status_code == 200, answer.text

        def new_master() -> bool:
            look = "REDISCLI_AUTH=$REDIS_PASSWORD redis-cli -p 26379 --tls --cacert /tls/ca.pem --cert /tls/cert.pem "
            look += "--key /tls/key.pem sentinel get-master-addr-by-name sessions"
            return "redis-2" in containers.run("exec", "-T", "sentinel-1", "sh", "-c", look)

        await eventually(new_master, timeout_s=90.0, step_s=1.0)
        containers.run("up", "--detach", "--wait", "--no-build", timeout_s=240)
        answer = await client.post(f"{urls[0]}/v1/chat/completions", json=ask)
        assert answer.status_code == 200, answer.text


@pytest.mark.docker
async def test_prometheus_reads_every_tier_over_tls(stack: tuple[Stack, list[str], str]) -> None:
    containers, _, _ = stack
    containers.run("--profile", "observability", "up", "--detach", "--wait", "--no-build", "prometheus", timeout_s=240)
    look = (
        "import urllib.request as u; print(u.urlopen('http://prometheus:9090/api/v1/query?query=up').read().decode())"
    )

    def all_up() -> bool:
        found = json.loads(containers.run("exec", "-T", "global-1", "python", "-c", look))["data"]["result"]
        return [sample["value"][1] for sample in found] == ["1"] * 6

    await eventually(all_up, timeout_s=60.0, step_s=1.0)
