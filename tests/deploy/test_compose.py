"""compose.yaml is what the layout says and what our own configuration takes; with Docker, it comes up and holds.

The test that needs Docker runs with HEADWATER_TEST_DOCKER=1 only: it builds an image and takes some two minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import httpx
import openai
import pytest
import typer
import yaml
from typer.main import get_command

from common.config import TierConfig, load
from services.agent.config import AgentConfig
from services.demo import layout
from services.demo.traffic import traffic
from services.engine_sim.__main__ import command as engine
from services.engine_sim.config import EngineConfig, engine_from
from services.global_lb.config import GlobalConfig
from services.instance_lb.config import InstanceConfig
from services.region_lb.config import RegionConfig
from tests.deploy.stack import Stack

# Taken out of the environment, where every other name of this kind is a setting and an unknown one ends start-up.
WANTED = os.environ.pop("HEADWATER_TEST_DOCKER", "") == "1"

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "compose"
TIERS: dict[str, type[TierConfig]] = {"global": GlobalConfig, "region": RegionConfig, "instance": InstanceConfig}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((HERE / "compose.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services.items() if service["image"] == "headwater:local"}


def configured(service: dict[str, Any], model: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the process in this container would read."""
    for name in [name for name in os.environ if name.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value))  # as compose does, with nothing set
    return load(model)


def test_it_is_what_the_layout_gives():
    generate = run_path(str(HERE / "generate.py"))
    assert (HERE / "compose.yaml").read_text() == generate["text"](), "run `make compose`"


def test_images_are_the_official_ones_and_one_of_ours(services):
    images = {service["image"] for service in services.values()}
    official = {"prom/prometheus:v2.53.3", "grafana/grafana:12.1.0", "jaegertracing/all-in-one:1.62.0"}
    assert images == {"redis:8", "quay.io/coreos/etcd:v3.5.16", "headwater:local"} | official
    assert {s["image"] for s in services.values() if s.get("profiles") == ["observability"]} == official
    assert [name for name, service in services.items() if "build" in service] == ["traffic"]


def test_every_service_says_whether_it_is_well_and_what_it_waits_for(services):
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL"), name
        waits = service.get("depends_on", {})
        assert all(services[other] and wait == {"condition": "service_healthy"} for other, wait in waits.items()), name


def test_our_containers_can_do_no_more_than_they_need(services):
    for name, service in ours(services).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_prometheus_scrapes_every_tier(compose, services):
    config = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    tiers = [name for name, service in services.items() if (service.get("command") or [""])[0] in TIERS]
    assert sorted(config["scrape_configs"][0]["static_configs"][0]["targets"]) == sorted(f"{t}:9080" for t in tiers)


def test_only_the_global_tier_is_published_and_on_loopback(services):
    assert all(port.startswith("127.0.0.1:") for s in services.values() for port in s.get("ports", ()))
    published = {n: s["ports"] for n, s in services.items() if "ports" in s and "profiles" not in s}
    assert published == {"global-us-east": ["127.0.0.1:${HTTP_PORT:-8080}:8080", "127.0.0.1:${ADMIN_PORT:-9080}:9080"]}


def test_every_tier_of_the_layout_is_there_with_a_valid_configuration(services, monkeypatch):
    nodes = {}
    for name, service in services.items():
        command = (service.get("command") or [""])[0]
        if command in TIERS:
            config = configured(service, TIERS[command], monkeypatch)
            assert config.id == config.advertise == name  # the name that Docker's DNS knows
            assert {config.listen, config.admin} == {"0.0.0.0:8080", "0.0.0.0:9080"}
            assert config.reports.listen == "0.0.0.0:9090"
            assert config.etcd.urls == ("http://etcd:2379",)
            assert config.redis.url == "redis://redis:6379/0"
            nodes[name] = (config.node, dict(config.network.emulated_rtt_s))
    expected = {}
    for region in layout.REGIONS:
        away = {other: rtt for other, rtt in layout.RTT_S[region.name].items() if other != region.name}
        expected[f"global-{region.name}"] = ((), away)
        expected[f"region-{region.name}"] = ((region.name,), away)
        for cluster in region.clusters:
            expected[f"instance-{cluster.name}"] = ((region.name, cluster.name), away)
    assert nodes == expected


def test_agents_watch_the_servers_that_run(services, monkeypatch):
    running = {}
    for name, service in services.items():
        if service.get("command", [""])[0] == "engine":
            for port, server in simulated(service):
                running[f"http://{name}:{port}"] = (server.name, server.profile)
    watched, prices = {}, {}
    for name, service in services.items():
        if service.get("command") == ["agent"]:
            config = configured(service, AgentConfig, monkeypatch)
            assert (config.id, config.advertise, config.listen) == (name, name, "0.0.0.0:9090")
            assert config.etcd.urls == ("http://etcd:2379",)
            for instance in config.instances:
                watched[instance.url] = (instance.id, instance.gpu)
                prices[config.region, config.cluster, instance.id] = instance.price_usd_per_hour
    assert watched == running
    assert prices == {
        (r.name, c.name, layout.instance_name(c, i)): pytest.approx(layout.PRICE_USD_PER_HOUR[gpu] * r.price_factor)
        for r in layout.REGIONS
        for c in r.clusters
        for i, gpu in enumerate(c.gpus)
    }
    alone = services[f"engine-{layout.KILLED_INSTANCE[2]}"]
    assert [server.name for _, server in simulated(alone)] == [layout.KILLED_INSTANCE[2]]


def simulated(service: dict[str, Any]) -> list[tuple[int, EngineConfig]]:
    """Ports and settings of the servers in a container, as its command line gives them."""
    given = options(engine, service["command"][1:])
    assert given["host"] == "0.0.0.0"
    assert given["grace"] < float(service["stop_grace_period"].removesuffix("s"))
    base = EngineConfig(model=given["model"], speed=given["speed"])
    assert (base.model, base.speed) == (layout.MODEL, layout.SPEED)
    return [(server.port, server) for server in (engine_from(text, base) for text in given["engine"])]


def options(function: Any, arguments: list[str]) -> dict[str, Any]:
    """What a command line gives a command; fails where it is not understood."""
    app = typer.Typer()
    app.command()(function)
    return get_command(app).make_context("command", list(arguments)).params


def test_traffic_goes_to_every_global_balancer_and_counts_every_tier(services):
    service = services["traffic"]
    given = options(traffic, service["command"])
    tiers = [name for name, other in services.items() if (other.get("command") or [""])[0] in TIERS]
    assert given["target"] == [f"http://global-{region.name}:8080" for region in layout.REGIONS]
    assert sorted(given["admin"]) == sorted(f"http://{name}:9080" for name in tiers)
    assert given["requests"] == 0  # without end
    assert set(tiers) < set(service["depends_on"])
    assert str(given["state"]) in service["healthcheck"]["test"][1]


def test_tiers_get_more_time_to_stop_than_they_take(services):
    for name, service in ours(services).items():
        assert float(service["stop_grace_period"].removesuffix("s")) > TierConfig().drain.grace_s, name


# -- image -------------------------------------------------------------------------------------------------------------


def test_the_image_is_built_in_two_stages_and_runs_as_nobody():
    lines = (HERE / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert stages == ["FROM python:3.13-slim AS build", "FROM python:3.13-slim"]
    last = lines[lines.index(stages[1]) :]
    [user] = [line for line in last if line.startswith("USER ")]
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)  # by number: Kubernetes sees that it is not root
    assert any(line.startswith("HEALTHCHECK ") for line in last)
    assert not any("root" in line for line in last)


def test_the_image_has_what_was_tested_and_no_more():
    full, run = pins("requirements.lock"), pins("requirements-run.lock")
    assert run.items() <= full.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {normal(requirement) for requirement in project["dependencies"]}
    assert needed <= run.keys()
    extras = project["optional-dependencies"]
    others = {normal(requirement) for extra in ("test", "demo") for requirement in extras[extra]}
    assert not (others & run.keys()) - needed


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE))


def normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name
    return name[0].lower().replace("_", "-").replace(".", "-")


# -- with Docker -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    if not WANTED:
        pytest.skip("set HEADWATER_TEST_DOCKER=1 to bring the containers up")
    asked = subprocess.run(["docker", "info"], capture_output=True, check=False) if shutil.which("docker") else None
    assert asked, "HEADWATER_TEST_DOCKER=1 is set, and there is no docker command"
    assert asked.returncode == 0, "HEADWATER_TEST_DOCKER=1 is set, and no Docker engine answers"
    stack = Stack(HERE / "compose.yaml", free_port(), free_port())
    try:
        stack.run("up", "--build", "--detach", "--wait", timeout_s=300)
        yield stack
    finally:
        stack.down()
    assert stack.left_behind() == []


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.docker
def test_clients_are_served_through_all_three_tiers(stack):
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == [layout.MODEL]
    with client.chat.completions.with_streaming_response.create(
        model=layout.MODEL, messages=[{"role": "user", "content": "hello"}], stream=True, max_tokens=12
    ) as answer:
        decision = answer.headers["x-headwater-decision"]
        text = "".join(answer.iter_lines())
    assert text.endswith("data: [DONE]")
    spans = httpx.get(f"{stack.admin_url}/admin/v1/traces/{decision}", params={"everywhere": True}).json()
    assert len({span["process"] for span in spans}) == 3


@pytest.mark.docker
def test_a_region_that_is_stopped_is_stood_in_for_and_takes_over_again(stack):
    stack.wait_for(lambda s: s["regions"].get("eu-west", 0) > 0)
    before = stack.state()
    stack.run("stop", "region-eu-west")
    after = stack.wait_for(
        lambda s: (
            s["takeovers"].get("region", 0) >= before["takeovers"].get("region", 0) + 20
            and s["regions"]["eu-west"] >= before["regions"]["eu-west"] + 20
        )
    )
    assert (after["rejected"], after["failed"], after["cut"]) == (0, 0, 0), after
    stack.run("up", "--detach", "--wait", "region-eu-west")
    stack.wait_for(lambda s: s["ok"] >= after["ok"] + 100)
    later = stack.wait_for(lambda s: stack.metric("region-eu-west", "headwater_requests_total") >= 20)  # since it began
    assert (later["rejected"], later["failed"], later["cut"]) == (0, 0, 0), later


@pytest.mark.docker
def test_kills_cost_no_more_than_the_streams_on_them(stack):
    before = stack.state()
    stack.run("kill", "region-eu-west", f"engine-{layout.KILLED_INSTANCE[2]}")
    killed = stack.wait_for(lambda s: s["takeovers"]["region"] >= before["takeovers"]["region"] + 20)
    stack.run("kill", "etcd", "redis")
    stack.wait_for(lambda s: s["ok"] >= killed["ok"] + 60)
    stack.run("up", "--detach", "--wait")
    after = stack.wait_for(lambda s: s["ok"] >= killed["ok"] + 180)
    assert (after["rejected"], after["failed"]) == (0, 0), after
    assert after["cut"] <= 60, after  # those that ran through a killed process


@pytest.mark.docker
def test_traffic_ends_in_good_order(stack):
    stack.run("stop", "traffic")
    assert stack.exit_code("traffic") == 0
