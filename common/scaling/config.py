"""Settings of scaling; see docs/scaling.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from common.config import HostPort, Label, ModelName, Name, Seconds, Section
from common.policy.scaling.forecast import Forecast

Replicas = Annotated[int, Field(ge=0, le=10_000)]


class WebhookTarget(Section):
    """Whoever makes a group's replicas more or fewer is told by a POST."""

    url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    """Takes a JSON object (model, group, node, replicas, at_least, reason), and answers 2xx; empty: nobody is told."""
    token_file: str = ""
    """File whose content is sent as bearer token, read each time."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 4
    """Tries for one message; each waits twice as long as the one before."""
    retry_s: Annotated[float, Field(ge=0.05, le=60.0)] = 1.0
    """Before the second try."""
    timeout_s: Seconds = 5.0
    """For one try."""
    repeat_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 60.0
    """The present number is told again after so long, for those that forget."""


class KubernetesTarget(Section):
    """A workload whose scale subresource is set."""

    name: Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")] = ""
    """Of the workload; empty: none."""
    kind: Annotated[str, Field(pattern=r"^[a-z0-9.]{1,100}$")] = "deployments"
    """Resource, in the plural: deployments, statefulsets, leaderworkersets, …"""
    api: Annotated[str, Field(pattern=r"^[a-z0-9./-]{1,200}$")] = "apis/apps/v1"
    """Group and version it belongs to."""
    namespace: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9-]{0,62})?$")] = ""
    """Default: this process's own."""
    api_url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    """The API server, if not that of the cluster this process is in."""
    token_file: str = ""
    """Default: the pod's service account."""
    ca_file: str = ""
    """Default: the pod's service account."""
    repeat_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 30.0
    """The present number is set again after so long, in case somebody else changed it."""


class ProcessTarget(Section):
    """Server processes of this machine (`headwater up` only)."""

    command: tuple[str, ...] = ()
    """Program and arguments; `{port}` stands for the port it is to listen on. Empty: none."""
    first_port: Annotated[int, Field(ge=1, le=65_535)] = 18_000
    """The first replica listens here; each further one on the next free port."""
    log_dir: str = ""
    """Where each writes its output, as PORT.log; empty: to that of this process."""
    drain_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 60.0
    """One that is given up has so long to end what is under way on it."""
    stop_s: Annotated[float, Field(ge=0.1, le=600.0)] = 10.0
    """Then it is told to end (SIGTERM), and after so long it is killed."""


class ScaledGroup(Section):
    """Like replicas of a model, made more or fewer by one of `webhook`, `kubernetes` and `process`, or by KEDA."""

    gpu: str = ""
    """Class of accelerator (h100, l4, …): instances of this class are of this group; empty: of any."""
    labels: Annotated[Mapping[Annotated[Label, Field(min_length=1)], Label], Field(max_length=64)] = {}
    """Labels that instances of this group have."""
    min_replicas: Replicas = 0
    """Never fewer."""
    max_replicas: Replicas = 10
    """Never more."""
    price_usd_per_hour: Annotated[float, Field(ge=0.0, le=100_000.0)] = 0.0
    """Of one replica; the groups that bear most for their price are taken."""
    cold_start_s: Annotated[float, Field(ge=0.5, le=7200.0)] = 60.0
    """From asking for a replica to its serving, at first; learned from then on."""
    webhook: WebhookTarget = WebhookTarget()
    kubernetes: KubernetesTarget = KubernetesTarget()
    process: ProcessTarget = ProcessTarget()

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        if sum(map(bool, (self.webhook.url, self.kubernetes.name, self.process.command))) > 1:
            raise ValueError("give one of webhook, kubernetes and process")
        return self


class ScaledModel(Section):
    """How many replicas of a model there are."""

    groups: Annotated[Mapping[Name, ScaledGroup], Field(min_length=1, max_length=8)]
    """Where replicas can be had, by name."""
    min_replicas: Replicas = 0
    """Over all groups."""
    max_replicas: Replicas = 100
    """Over all groups."""
    slo_ttft_s: Seconds = 2.0
    """Service level that replicas are to keep: seconds to the first token,"""
    slo_tpot_s: Seconds = 0.1
    """and per output token."""
    utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Of what a replica bears within the service level, so much is used."""
    drain_s: Seconds = 30.0
    """A backlog is to be gone so long after replicas have come for it."""
    panic_window_s: Annotated[float, Field(ge=1.0, le=600.0)] = 6.0
    """More than all replicas bear coming within this is a burst, which counts as it is,"""
    panic_s: Seconds = 60.0
    """for so long after it was last seen."""
    cooldown_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 300.0
    """Replicas are given up when fewer have been enough for so long, and will be."""
    idle_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 300.0
    """After so long without any request only `min_replicas` are left."""
    seasons_s: Annotated[tuple[Annotated[float, Field(ge=60.0, le=604_800.0)], ...], Field(max_length=4)] = (86_400.0,)
    """Periods after which traffic repeats, as the day does, for the forecast."""
    bucket_s: Annotated[float, Field(ge=1.0, le=3600.0)] = 10.0
    """Arrivals are counted for the forecast in pieces of this length; a season is a whole number of them."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        Forecast(self.bucket_s, self.bucket_s, self.seasons_s)
        return self


class KedaServer(Section):
    """KEDA asks here (external scaler, gRPC), naming `model` and `group` in its trigger's metadata."""

    listen: HostPort | None = None
    """As in 0.0.0.0:9003; none: it does not."""


class Scaling(Section):
    """How many replicas of models there are, by forecast and load; see docs/scaling.md."""

    models: Annotated[Mapping[ModelName, ScaledModel], Field(max_length=256)] = {}
    """Those that are scaled, by name; each is waited for while none of its replicas serves."""
    interval_s: Annotated[float, Field(ge=0.25, le=60.0)] = 1.0
    """It is decided this often."""
    keda: KedaServer = KedaServer()

    @field_validator("models")
    @classmethod
    def _wanted(cls, value: Mapping[str, ScaledModel]) -> Mapping[str, ScaledModel]:
        for name, model in value.items():
            if sum(g.max_replicas for g in model.groups.values()) < model.min_replicas:
                raise ValueError(f"{name}: its groups may have fewer replicas than min_replicas")
        return value
