"""A workload of Kubernetes whose number of replicas is set through its scale subresource.

Needs the verbs `get` and `patch` on it (`deployments/scale` and the like). The token is read each time, as Kubernetes
renews it within the hour.
"""

from __future__ import annotations

import ssl
from os import environ
from pathlib import Path as File
from typing import Final

import httpx

from common.errors import ConfigError
from common.scaling.config import KubernetesTarget
from common.scaling.telling import Telling

SERVICE_ACCOUNT: Final = File("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0
ATTEMPTS: Final = 4
RETRY_S: Final = 1.0
PATCH: Final = {"content-type": "application/merge-patch+json"}


class Scale:
    """One workload."""

    def __init__(self, config: KubernetesTarget) -> None:
        namespace = config.namespace or _text(SERVICE_ACCOUNT / "namespace") or "default"
        self.name = f"{config.kind} {namespace}/{config.name}"
        self._token_file = File(config.token_file) if config.token_file else SERVICE_ACCOUNT / "token"
        self._path = f"/{config.api}/namespaces/{namespace}/{config.kind}/{config.name}/scale"

    async def tell(self, client: httpx.AsyncClient, replicas: int, reason: str, *, at_least: bool) -> None:
        """See Target. What is there already is left alone, so that a repetition makes no new revision."""
        token = _text(self._token_file)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        found = (await client.get(self._path, headers=headers)).raise_for_status().json()
        spec = found.get("spec") if isinstance(found, dict) else None
        there = spec.get("replicas", 0) if isinstance(spec, dict) else 0
        if there == replicas or (at_least and there > replicas):
            return
        body = {"spec": {"replicas": replicas}}
        (await client.patch(self._path, json=body, headers=headers | PATCH)).raise_for_status()


def kubernetes(config: KubernetesTarget) -> Telling:
    """The provider. Raises ConfigError where there is no API server to ask."""
    url = config.api_url
    if not url:
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(f"scaling: {config.name}: this process is not in a Kubernetes cluster; set api_url")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    client = httpx.AsyncClient(base_url=url, verify=_tls(config, url), timeout=TIMEOUT_S, trust_env=False)
    return Telling(Scale(config), client, attempts=ATTEMPTS, retry_s=RETRY_S, repeat_s=config.repeat_s)


def _tls(config: KubernetesTarget, url: str) -> ssl.SSLContext | bool:
    if not url.startswith("https:"):
        return True
    file = File(config.ca_file) if config.ca_file else SERVICE_ACCOUNT / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(file) if config.ca_file or file.exists() else None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"scaling: {config.name}: {file}: {error}") from None


def _text(file: File) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
