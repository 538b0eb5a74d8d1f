"""A workload of Kubernetes whose number of replicas is set through its scale subresource.

Needs the verbs `get` and `patch` on it (`deployments/scale` and the like).
"""

from __future__ import annotations

from typing import Final

import httpx

from common.errors import ConfigError
from common.kubernetes_api import ApiServer
from common.scaling.config import KubernetesTarget
from common.scaling.telling import Telling

ATTEMPTS: Final = 4
RETRY_S: Final = 1.0
PATCH: Final = {"content-type": "application/merge-patch+json"}


class Scale:
    """One workload."""

    def __init__(self, config: KubernetesTarget, server: ApiServer) -> None:
        namespace = server.own_namespace
        self.name = f"{config.kind} {namespace}/{config.name}"
        self._server = server
        self._path = f"/{config.api}/namespaces/{namespace}/{config.kind}/{config.name}/scale"

    async def tell(self, client: httpx.AsyncClient, replicas: int, reason: str, *, at_least: bool) -> None:
        """See Target. What is there already is left alone, so that a repetition makes no new revision."""
        try:
            headers = self._server.headers()
        except ConfigError as error:  # it may come back, as one that is renewed does
            raise OSError(str(error)) from None
        found = (await client.get(self._path, headers=headers)).raise_for_status().json()
        spec = found.get("spec") if isinstance(found, dict) else None
        there = spec.get("replicas", 0) if isinstance(spec, dict) else 0
        if there == replicas or (at_least and there > replicas):
            return
        body = {"spec": {"replicas": replicas}}
        (await client.patch(self._path, json=body, headers=headers | PATCH)).raise_for_status()


def kubernetes(config: KubernetesTarget) -> Telling:
    """The provider. Raises ConfigError where there is no API server to ask."""
    server = ApiServer(config.api_url, config.token_file, config.ca_file, config.namespace)
    try:
        client = server.client()
    except ConfigError as error:
        raise ConfigError(f"scaling: {config.name}: {error}") from None
    return Telling(Scale(config, server), client, attempts=ATTEMPTS, retry_s=RETRY_S, repeat_s=config.repeat_s)
