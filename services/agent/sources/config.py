"""Settings of the sources; an agent may have several of each."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from common.config import Count, HostPort, Seconds, Section, Url
from services.agent.engines import adapter_for

Port = Annotated[int, Field(ge=1, le=65_535)]

DOCKER_SOCKET: Final = "unix:///var/run/docker.sock"


def _engine(value: str) -> str:
    if value and adapter_for(value) is None:
        raise ValueError(f"engine '{value}' is not known")
    return value


def _docker_url(value: str) -> str:
    parts = urlsplit(value)
    if not (parts.scheme == "unix" and parts.path) and not (parts.scheme in ("http", "https") and parts.netloc):
        raise ValueError(f"must be a URL, as in {DOCKER_SOCKET} or http://127.0.0.1:2375")
    return value.rstrip("/")


class Served(Section):
    """What is known of all servers of one source; see `instances[]` for what each means."""

    scheme: Literal["http", "https"] = "http"
    """How they are spoken to."""
    models: tuple[str, ...] = ()
    """What they serve; empty: as each says itself."""
    engine: Annotated[str, AfterValidator(_engine)] = ""
    """Which adapter to use; empty: found out by asking."""
    gpu: str = ""
    """Class of their accelerators."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """Share of a weighted policy, relative to others."""
    price_usd_per_hour: Annotated[float, Field(ge=0.0, le=100_000.0)] = 0.0
    """What an hour of one costs."""
    version: str = ""
    """Of what they serve."""


class DnsSource(Served):
    """Servers that a DNS name stands for; asks the resolvers of /etc/resolv.conf. Needs the extra `discovery`."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name to look up."""
    type: Literal["address", "srv"] = "address"
    """`address`: A and AAAA records; `srv`: host and port of each SRV record."""
    port: Port | None = None
    """Their port; needed with `address`."""
    nameservers: tuple[HostPort, ...] = ()
    """Other resolvers to ask, as in 10.0.0.2:53."""
    refresh_s: Annotated[float, Field(ge=0.2, le=3600.0)] = 5.0
    """The name is looked up this often."""
    forget_after_s: Seconds = 30.0
    """An address that no answer has had for this long is dropped: answers may be a part of what there is."""

    @model_validator(mode="after")
    def _has_port(self) -> Self:
        if self.type == "address" and self.port is None:
            raise ValueError("port is needed: an address record has none")
        return self


class DockerSource(Served):
    """Containers of a Docker engine that have the label `headwater.port`, or the one named here."""

    url: Annotated[str, AfterValidator(_docker_url)] = DOCKER_SOCKET
    """The engine's API: its socket, or the URL of a proxy that lets only reading through."""
    label: Annotated[str, Field(min_length=1)] = "headwater"
    """Prefix of the labels: `<label>.port`, `.id`, `.models`, `.engine`, `.gpu`, `.devices`, `.weight`,
    `.price_usd_per_hour`, `.version`."""
    network: str = ""
    """Network whose address is used; empty: the container's only one, or the host's for `network_mode: host`."""
    refresh_s: Annotated[float, Field(ge=0.2, le=3600.0)] = 2.0
    """The engine is asked this often."""


class KubernetesSource(Served):
    """Endpoints of a Kubernetes Service, as its EndpointSlices have them."""

    service: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the Service."""
    namespace: str = ""
    """Its namespace; empty: that of the agent's own pod."""
    port: str = ""
    """Name or number of the port in the EndpointSlices; empty: the only one."""
    not_ready: bool = False
    """Whether endpoints count that Kubernetes calls not ready, so that a server is known while it loads."""
    api_url: Url | None = None
    """The API server; empty: that of the cluster the agent runs in."""
    token_file: str = ""
    """Bearer token, read anew for each request; empty: that of the pod's service account, if there is one."""
    ca_file: str = ""
    """Certificate authority of the API server; empty: that of the pod's service account, if there is one."""
    watch_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 60.0
    """A watch is renewed after this, so that a connection that died unnoticed costs no more than that."""


class Discovery(Section):
    """Servers that are found rather than listed."""

    dns: tuple[DnsSource, ...] = ()
    """By DNS."""
    docker: tuple[DockerSource, ...] = ()
    """By the labels of containers."""
    kubernetes: tuple[KubernetesSource, ...] = ()
    """By EndpointSlices."""
    node: str = ""
    """Only endpoints on this Kubernetes node count, so that there can be one agent on each; empty: all."""
    max_instances: Count = 1000
    """More servers than this are not taken, all sources together."""
