"""Against a stub of the API server's scale subresource (autoscaling/v1 Scale)."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.scaling.config import KubernetesTarget
from common.scaling.kubernetes import kubernetes
from tests.common.scaling.stub import Seen, Stub
from tests.servers import eventually

PATH = "/apis/apps/v1/namespaces/llm/deployments/llama/scale"


class Workload:
    """Its replicas; answers as the API server does."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def __call__(self, seen: Seen) -> tuple[int, Any]:
        if seen.path != PATH:
            return 404, {"kind": "Status", "code": 404, "reason": "NotFound"}
        if seen.headers.get("authorization") != "Bearer secret":
            return 401, {"kind": "Status", "code": 401}
        if seen.method == "PATCH":
            if seen.headers["content-type"] != "application/merge-patch+json":
                return 415, {"kind": "Status", "code": 415}
            self.replicas = seen.body["spec"]["replicas"]
        spec = {"replicas": self.replicas} if self.replicas else {}  # zero is left out, as its type has it
        return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec}


def target(tmp_path: Path, url: str, **more: Any) -> KubernetesTarget:
    token = tmp_path / "token"
    token.write_text("secret")
    return KubernetesTarget(name="llama", namespace="llm", api_url=url, token_file=str(token), **more)


async def test_the_scale_is_set_where_it_is_another(tmp_path: Path) -> None:
    workload = Workload(1)
    with Stub(workload) as stub:
        provider = kubernetes(target(tmp_path, stub.url))
        provider.want(4, "forecast", at_least=False)
        await eventually(lambda: workload.replicas == 4, 10.0)
        provider.want(0, "idle", at_least=False)
        await eventually(lambda: workload.replicas == 0, 10.0)
        provider.want(0, "idle", at_least=False)
        await provider.close()
    assert [seen.method for seen in stub.seen] == ["GET", "PATCH"] * 2
    assert provider.failures == 0


async def test_what_somebody_else_changed_is_set_again(tmp_path: Path) -> None:
    workload = Workload(1)
    with Stub(workload) as stub:
        provider = kubernetes(target(tmp_path, stub.url, repeat_s=1.0))

        def wanted() -> bool:
            provider.want(3, "forecast", at_least=False)
            return workload.replicas == 3

        await eventually(wanted, 10.0)
        workload.replicas = 9
        await eventually(wanted, 10.0)
        await provider.close()


async def test_a_young_balancer_takes_nothing_away(tmp_path: Path) -> None:
    workload = Workload(5)
    with Stub(workload) as stub:
        provider = kubernetes(target(tmp_path, stub.url))
        provider.want(0, "idle", at_least=True)
        await eventually(lambda: len(stub.seen) == 1, 10.0)
        provider.want(6, "panic", at_least=True)
        await eventually(lambda: workload.replicas == 6, 10.0)
        provider.want(2, "forecast", at_least=False)
        await eventually(lambda: workload.replicas == 2, 10.0)
        await provider.close()
    assert [seen.body["spec"]["replicas"] for seen in stub.seen if seen.method == "PATCH"] == [6, 2]


def test_outside_a_cluster_the_api_server_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="set api_url"):
        kubernetes(KubernetesTarget(name="llama"))
