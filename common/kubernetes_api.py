"""Where Kubernetes' API server is and how one shows it who one is: as configured, or as every pod finds it.

Source: Kubernetes' documentation, "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any, Final

import httpx

from common.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ApiServer:
    """What is empty is that of the cluster this process is in."""

    api_url: str = ""
    token_file: str = ""
    ca_file: str = ""
    namespace: str = ""

    @property
    def own_namespace(self) -> str:
        """The one that is meant where none is named."""
        return self.namespace or _text(SERVICE_ACCOUNT / "namespace") or "default"

    def client(self, **settings: Any) -> httpx.AsyncClient:
        """A client; to be closed. Raises ConfigError where there is no API server, or no reading its authority."""
        url = self.api_url
        if not url:
            host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise ConfigError("this process is not in a Kubernetes cluster; set api_url")
            url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        tls = self._tls() if url.startswith("https:") else True
        return httpx.AsyncClient(base_url=url, verify=tls, timeout=TIMEOUT_S, trust_env=False, **settings)

    def _tls(self) -> ssl.SSLContext:
        file = Path(self.ca_file) if self.ca_file else SERVICE_ACCOUNT / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(file) if self.ca_file or file.exists() else None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{file}: {error}") from None

    def headers(self) -> dict[str, str]:
        """Read the token, each time, as Kubernetes renews it within the hour. Raises ConfigError."""
        file = Path(self.token_file) if self.token_file else SERVICE_ACCOUNT / "token"
        token = _text(file)
        if self.token_file and not token:
            raise ConfigError(f"{file}: no token there")
        return {"authorization": f"Bearer {token}"} if token else {}


def _text(file: Path) -> str:
    """What a small file says, "" if there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
