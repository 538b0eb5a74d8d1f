"""The Helm charts: rendered by Helm, checked against Kubernetes' schemas, and read by our own configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from common.config import load
from services.agent.config import AgentConfig
from services.global_lb.config import GlobalConfig
from services.instance_lb.config import InstanceConfig
from services.region_lb.config import RegionConfig
from tests import tools

HERE = tools.ROOT / "deploy" / "kubernetes"
CONFIGS: dict[str, type[Any]] = {
    "global": GlobalConfig,
    "region": RegionConfig,
    "instance": InstanceConfig,
    "agent": AgentConfig,
}
VALUES: dict[str, dict[str, Any]] = {
    "global": {},
    "region": {"region": "eu"},
    "instance": {"region": "eu", "cluster": "eu-a"},
    "agent": {
        "region": "eu",
        "cluster": "eu-a",
        "servers": [{"service": "vllm", "port": "http", "gpu": "h100"}, {"service": "tgi", "namespace": "ai"}],
    },
}
ETCD = {"config": {"etcd": {"urls": ["http://etcd.headwater:2379"]}}}
TIERS = ("global", "region", "instance")
EVERYTHING: dict[str, Any] = {
    "secretEnvironment": {"HEADWATER_REDIS__URL": {"name": "redis", "key": "url"}},
    "secretFiles": {"etcd-tls": "etcd-client"},
    "extraEnvironment": [{"name": "HEADWATER_LOG__LEVEL", "value": "debug"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "imagePullSecrets": [{"name": "registry"}],
    "labels": {"team": "inference"},
    "podAnnotations": {"a/b": "c"},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "advertise": "10.0.0.1",
    "networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
}
SCALED: dict[str, Any] = {
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}, "externalTrafficPolicy": "Local"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "endpoint": {"scheme": "http"}},
    "autoscaling": {"hpa": {"enabled": True, "inFlightRequests": "500"}},
}

PICKER = {"picker": {"enabled": True}}

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Renders a chart with values; the charts are a copy, whose dependency on the common one is built."""
    binary = tools.program("helm")
    folder = tmp_path_factory.mktemp("charts")
    shutil.copytree(HERE, folder / "k", ignore=shutil.ignore_patterns("charts", "Chart.lock"))
    env = {**os.environ, "HELM_CACHE_HOME": str(folder), "HELM_CONFIG_HOME": str(folder), "HELM_DATA_HOME": str(folder)}

    def run(*arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [binary, *arguments], cwd=folder / "k", env=env, input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(done.stderr)
        return done.stdout

    for chart, values in VALUES.items():
        run("dependency", "build", f"headwater-{chart}")
        assert "0 chart(s) failed" in run(
            "lint", "--strict", f"headwater-{chart}", "-f", "-", stdin=yaml.dump(ETCD | values)
        )

    def render(chart: str, *values: dict[str, Any], release: str = "eu") -> list[dict[str, Any]]:
        given: dict[str, Any] = {}
        for some in values:
            _merge(given, some)
        text = run("template", release, f"headwater-{chart}", "-n", "inference", "-f", "-", stdin=yaml.dump(given))
        return [resource for resource in yaml.safe_load_all(text) if resource]

    return render


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value if not isinstance(value, dict) else {**value}


def of_kind(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [r for r in resources if r["kind"] == kind]
    return found


def pod(resources: list[dict[str, Any]]) -> dict[str, Any]:
    [workload] = [r for r in resources if r["kind"] in ("Deployment", "DaemonSet")]
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def configured(resources: list[dict[str, Any]], chart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the process in this pod would read, with a name and an address as Kubernetes would give them."""
    for name in [name for name in os.environ if name.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    fields = {"metadata.name": "pod-1", "status.podIP": "10.1.0.7", "spec.nodeName": "gpu1"}
    [container] = pod(resources)["containers"]
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        value = variable.get("value") or fields.get(source.get("fieldRef", {}).get("fieldPath"), "redis://secret:6379")
        monkeypatch.setenv(variable["name"], value)
    file = tmp_path / "config.yaml"
    file.write_text(of_kind(resources, "ConfigMap")["data"]["config.yaml"])
    return load(CONFIGS[chart], file)


def checked(resources: list[dict[str, Any]], *versions: str) -> tuple[int, str]:
    """What the check of `kubernetes_schemas` says of resources, for these versions of Kubernetes."""
    check = [tools.python(), str(tools.ROOT / "tests" / "deploy" / "kubernetes_schemas.py"), *versions]
    done = subprocess.run(check, input=yaml.dump_all(resources), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("chart", list(CONFIGS))
def test_helm_refuses_values_that_a_chart_has_not(chart: str) -> None:
    schemas = run_path(str(HERE / "schemas.py"))
    file = HERE / f"headwater-{chart}" / "values.schema.json"
    assert file.read_text() == schemas["schema"](f"headwater-{chart}"), "run `make charts`"


def test_all_that_is_rendered_is_what_kubernetes_takes(helm: Render) -> None:
    keda = {"autoscaling": {"keda": {"enabled": True, "prometheus": "http://prometheus:9090"}}}
    rendered = []
    for chart, values in VALUES.items():
        rendered += helm(chart, ETCD, values) + helm(chart, ETCD, values, EVERYTHING)
        if chart in TIERS:
            rendered += helm(chart, ETCD, values, EVERYTHING, SCALED) + helm(chart, ETCD, values, keda)
    rendered += helm("agent", ETCD, VALUES["agent"], {"kind": "Deployment"})
    rendered += helm("instance", ETCD, VALUES["instance"], PICKER)
    kinds = {resource["kind"] for resource in rendered}
    assert kinds >= {
        "HorizontalPodAutoscaler",
        "ScaledObject",
        "ServiceMonitor",
        "NetworkPolicy",
        "PodDisruptionBudget",
    }
    code, said = checked(rendered, "1.30", "1.37")
    assert (said, code) == (f"{len(rendered)} checked\n", 0), said


def test_the_check_finds_mistakes(helm: Render) -> None:
    """Else the one before would say nothing."""
    resources = helm("instance", ETCD, VALUES["instance"], SCALED)
    pod(resources)["containers"][0]["livenessProbe"]["periodSecond"] = 1
    of_kind(resources, "PodDisruptionBudget")["spec"]["maxUnavailable"] = [1]
    of_kind(resources, "ServiceMonitor")["spec"]["endpoint"] = []
    code, said = checked(resources, "1.37")
    assert code == 1
    for word in ("periodSecond", "maxUnavailable", "endpoint: unknown"):
        assert word in said


@pytest.mark.parametrize("chart", list(CONFIGS))
def test_the_process_takes_its_configuration(
    helm: Render, chart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = helm(chart, ETCD, VALUES[chart], {"config": {"log": {"level": "warning"}}})
    config = configured(resources, chart, tmp_path, monkeypatch)
    assert (config.id, config.advertise) == ("pod-1", "10.1.0.7")
    assert config.etcd.urls == ("http://etcd.headwater:2379",)
    assert (config.log.format, config.log.level) == ("json", "warning")
    [container] = pod(resources)["containers"]
    assert container["args"] == [chart, "--config", "/etc/headwater/config.yaml"]
    ports = {p["name"]: str(p["containerPort"]) for p in container["ports"]}
    if chart == "agent":
        assert config.listen.endswith(ports["reports"])
        assert config.discovery.node == "gpu1"
        vllm, tgi = config.discovery.kubernetes
        assert (vllm.service, vllm.port, vllm.gpu, tgi.namespace) == ("vllm", "http", "h100", "ai")
    else:
        assert config.node == tuple(v for k, v in VALUES[chart].items())
        heard = (config.listen, config.admin, config.reports.listen)
        assert heard == tuple(f"0.0.0.0:{ports[name]}" for name in ("http", "admin", "reports"))


def test_gateways_reach_the_picker_where_it_is_wanted(
    helm: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        configured(helm("instance", ETCD, VALUES["instance"]), "instance", tmp_path, monkeypatch).picker.listen is None
    )
    resources = helm("instance", ETCD, VALUES["instance"], PICKER)
    listen = configured(resources, "instance", tmp_path, monkeypatch).picker.listen
    [service] = [r for r in resources if r["kind"] == "Service" and r["spec"].get("clusterIP") != "None"]
    ports = {p["name"]: p["port"] for p in service["spec"]["ports"]}
    assert (ports.keys(), listen) == ({"http", "picker"}, f"0.0.0.0:{ports['picker']}")


@pytest.mark.parametrize("chart", TIERS)
def test_a_pod_has_the_time_to_end_that_its_drain_takes(
    helm: Render, chart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = helm(chart, ETCD, VALUES[chart], {"drain": {"graceSeconds": 600, "preStopSeconds": 15}})
    config = configured(resources, chart, tmp_path, monkeypatch)
    spec = pod(resources)
    sleeps = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= sleeps + config.drain.grace_s + 5
    with pytest.raises(ValueError, match=r"set drain\.graceSeconds instead"):
        helm(chart, ETCD, VALUES[chart], {"config": {"drain": {"grace_s": 1}}})


@pytest.mark.parametrize("chart", list(CONFIGS))
def test_a_pod_may_do_no_more_than_it_needs(helm: Render, chart: str) -> None:
    resources = helm(chart, ETCD, VALUES[chart])
    spec = pod(resources)
    assert spec["enableServiceLinks"] is False  # HEADWATER_…_SERVICE_HOST would be an unknown key
    assert spec["securityContext"]["runAsNonRoot"]
    [container] = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert spec["automountServiceAccountToken"] is (chart == "agent")
    roles = {(r["metadata"]["namespace"], str(r["rules"])) for r in resources if r["kind"] == "Role"}
    rule = "[{'apiGroups': ['discovery.k8s.io'], 'resources': ['endpointslices'], 'verbs': ['get', 'list', 'watch']}]"
    assert roles == ({("inference", rule), ("ai", rule)} if chart == "agent" else set())


@pytest.mark.parametrize("chart", TIERS)
def test_the_admin_port_is_not_with_the_clients(helm: Render, chart: str) -> None:
    resources = helm(chart, ETCD, VALUES[chart])
    services = {s["metadata"]["name"]: s["spec"] for s in resources if s["kind"] == "Service"}
    name = f"eu-headwater-{chart}"
    assert [p["name"] for p in services[name]["ports"]] == ["http"]
    assert [p["name"] for p in services[f"{name}-admin"]["ports"]] == ["admin"]
    assert services[f"{name}-admin"]["clusterIP"] == "None"
    for rule in of_kind(resources, "NetworkPolicy")["spec"]["ingress"]:
        if "from" not in rule:
            assert [p["port"] for p in rule["ports"]] == ["http"]


@pytest.mark.parametrize("chart", TIERS)
@pytest.mark.parametrize("tls", [True, False])
def test_the_admin_port_is_asked_as_it_speaks(helm: Render, chart: str, *, tls: bool) -> None:
    monitored = {"serviceMonitor": {"enabled": True}, "config": {"tls": {"admin": tls}}}
    resources = helm(chart, ETCD, VALUES[chart], monitored)
    [container] = pod(resources)["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")]
    [endpoint] = of_kind(resources, "ServiceMonitor")["spec"]["endpoints"]
    assert [*probes, endpoint["scheme"]] == (["HTTPS"] * 3 + ["https"] if tls else ["HTTP"] * 3 + ["http"])


def test_what_is_missing_or_wrong_is_named(helm: Render) -> None:
    for chart, values, why in (
        ("global", {}, "config.etcd.urls is needed"),
        ("region", ETCD, "region is needed"),
        ("instance", {**ETCD, "region": "eu"}, "cluster is needed"),
        ("agent", {**ETCD, "region": "eu", "cluster": "c"}, "servers is needed"),
        ("agent", {**ETCD, **VALUES["agent"], "kind": "Job"}, "kind must be DaemonSet or Deployment"),
        ("global", {**ETCD, "replica": 3}, "replica"),
        ("global", {**ETCD, "drain": {"seconds": 3}}, "seconds"),
    ):
        with pytest.raises(ValueError, match=why):
            helm(chart, values)


def test_names_fit_whatever_the_release_is_called(helm: Render) -> None:
    resources = helm("instance", ETCD, VALUES["instance"], release="a-release-with-a-rather-long-name-of-50-characters")
    name = of_kind(resources, "Deployment")["metadata"]["name"]
    assert len(f"{name}-5d4f8c7b9f-x2x4z") <= 64  # a pod's name, which is the balancer's id
    assert of_kind(helm("region", ETCD, VALUES["region"], release="headwater-region"), "Deployment")["metadata"][
        "name"
    ] == ("headwater-region")
