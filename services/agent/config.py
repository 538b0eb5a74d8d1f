"""Settings of one agent process: where it registers, and the servers beside it."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from common.config import NAME, Etcd, HostPort, Log, Name, Section, Url
from services.agent.engines import ADAPTERS, adapter_for
from services.agent.sources.config import Discovery

WILDCARDS: Final = frozenset({"0.0.0.0", "::", "[::]", ""})
LOOPBACKS: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def _label_part(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._/-]{0,64}", value):
        raise ValueError("at most 64 of letters, digits, '.', '_', '/' and '-'")
    return value


LabelValue = Annotated[str, AfterValidator(_label_part)]
LabelKey = Annotated[LabelValue, Field(min_length=1)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]


def _host_name() -> str:
    return socket.gethostname().split(".")[0][:64] or "agent"


class InstanceConfig(Section):
    """One server. Only `url` is needed: the rest is found out, or stays unknown."""

    url: Url
    """Its base URL, as in http://10.0.0.9:8000."""
    id: Name | None = None
    """Default: the URL's host and port, with the agent's id for a loopback host."""
    models: tuple[str, ...] = ()
    """What it serves; empty: as it says itself."""
    engine: str = ""
    """Which adapter to use; empty: found out by asking."""
    metrics_url: Url | None = None
    """Its metrics page, if not where its engine has it (Triton and TorchServe: two ports above `url`)."""
    management_url: Url | None = None
    """Base URL of its management API, if not one port above `url` (TorchServe)."""
    gpu: str = ""
    """Class of accelerator (h100, l4, cpu, …); empty: of its devices, as NVML names them."""
    devices: tuple[int | str, ...] = ()
    """Its GPUs by NVML index or UUID; empty: all, if it is the only instance here."""
    weight: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """Share of a weighted policy, relative to the others."""
    price_usd_per_hour: Annotated[float, Field(ge=0.0, le=100_000.0)] = 0.0
    """What an hour of it costs."""
    version: LabelValue = ""
    """Of what it serves: shares of traffic and rollouts go by it, and another one starts the learned speed over."""
    memory_gb: Annotated[float, Field(gt=0.0, le=100_000.0)] | None = None
    """Memory of its accelerators together, 10^9 bytes; empty: as NVML says, else as its class of GPU has it."""
    labels: Annotated[Mapping[LabelKey, LabelValue], Field(max_length=64)] = {}
    """What rules of placement ask for, as in `{site: edge}`."""
    adapters: Annotated[Mapping[ModelName, str], Field(max_length=1024)] = {}
    """LoRA adapters that it is to have: names, and where the server finds them. The agent has missing ones loaded."""
    warm_up: bool = False
    """Whether it has to answer one token of a chat before it is presented as serving, after each start of its."""
    probe_idle_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """Seconds after which a server that says it has nothing to do is asked for one token, and again after as many;
    while that fails it is presented as loading. 0: it is not asked."""
    loadable: Annotated[tuple[ModelName, ...], Field(max_length=1024)] = ()
    """LoRA adapters that the server loads by itself when a request names one (a resolver is configured there)."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if any("@" in url for url in (self.url, self.metrics_url, self.management_url) if url):
            raise ValueError("a URL with credentials is not supported: everybody who reads etcd would have them")
        if self.engine and adapter_for(self.engine) is None:
            known = ", ".join(sorted({a.engine for a in ADAPTERS} | {"sim"}))
            raise ValueError(f"engine '{self.engine}' is not known; there are {known}")
        return self

    @property
    def host(self) -> str:
        """Host part of its URL."""
        return urlsplit(self.url).hostname or ""


class ReportsTls(Section):
    """TLS of the load reports offered here; balancers with a certificate of their own ask for it."""

    cert_file: str = ""
    """Certificate chain of this process (PEM), read when it starts."""
    key_file: str = ""
    """Its key."""
    ca_file: str = ""
    """Authority that signs balancers' certificates: whoever has none of it gets no report."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.cert_file) != bool(self.key_file) or (self.ca_file and not self.cert_file):
            raise ValueError("cert_file and key_file go together, and ca_file with them")
        return self


class AgentConfig(Section):
    """All settings of one agent process."""

    region: Name
    """Region the servers are in."""
    cluster: Name
    """Cluster they belong to."""
    id: Name = Field(default_factory=_host_name)
    """Name of this agent."""
    listen: HostPort = "127.0.0.1:0"
    """Where load reports are offered (gRPC); port 0: any free one."""
    advertise: str = ""
    """Host under which balancers reach this process; default: the host of `listen`."""
    log: Log = Log()
    etcd: Etcd = Etcd(urls=("http://127.0.0.1:2379",))
    tls: ReportsTls = ReportsTls()
    instances: tuple[InstanceConfig, ...] = ()
    """The servers beside it."""
    discovery: Discovery = Discovery()
    scrape_interval_s: Annotated[float, Field(ge=0.2, le=60.0)] = 1.0
    """A server is looked at this often."""
    scrape_timeout_s: Annotated[float, Field(ge=0.05, le=60.0)] = 2.0
    """It must answer a look within this."""
    fail_after: Annotated[int, Field(ge=1, le=100)] = 3
    """Looks in a row that found nobody listening."""
    hang_after_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 30.0
    """Connections are taken, and nothing answers."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.advertise and self.listen.rpartition(":")[0] in WILDCARDS:
            raise ValueError("advertise is needed when listening on all addresses: a host that balancers can reach")
        ids = [self.instance_id(i) for i in self.instances]
        for id_, instance in zip(ids, self.instances, strict=True):
            if not NAME.fullmatch(id_):
                raise ValueError(f"{instance.url} needs an id: '{id_}' cannot be one")
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"two instances are called {twice[0]}")
        return self

    @property
    def advertised_host(self) -> str:
        """The host that balancers are told, an IPv6 address in its brackets."""
        return self.advertise or self.listen.rpartition(":")[0]

    def instance_id(self, instance: InstanceConfig) -> str:
        """An instance's name within its cluster. Loopback URLs are alike on every host, so they are told apart."""
        return instance.id or default_id(instance.url, self.id)


def default_id(url: str, agent: str) -> str:
    """`10.0.0.5-8000`, or `gpu7-8000` for a loopback URL on the host called gpu7."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    return f"{agent if host in LOOPBACKS else host.replace(':', '.')}-{port}"
