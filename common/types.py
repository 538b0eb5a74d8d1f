"""The values that cross between policy and the rest: plain, frozen, with units in their names.

Everything here is immutable; what changes lives in `policy.balancer`. Times are seconds, lengths are LLM tokens
unless a name says otherwise, prices are US dollars. `None` means unknown, which is never the same as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

Path = tuple[str, ...]
"""Where in the tree: () is everything, (region,) one region, (region, cluster) one cluster."""


class Tier(Enum):
    """The three levels. A stage of a level chooses among the children of one node of that level."""

    GLOBAL = "global"  # chooses a region
    REGION = "region"  # chooses a cluster
    INSTANCE = "instance"  # chooses an instance

    @staticmethod
    def of(path: Path) -> Tier:
        """The tier whose stage chooses among the children of `path`."""
        return _TIERS[len(path)]

    @property
    def child(self) -> str:
        """What the stage of this tier chooses: region, cluster or instance."""
        return {"global": "region", "region": "cluster", "instance": "instance"}[self.value]


_TIERS = (Tier.GLOBAL, Tier.REGION, Tier.INSTANCE)


class Phase(Enum):
    """Where an endpoint is in its life. Only SERVING takes new work."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Priority(IntEnum):
    """Priority class of a request; a lower number is served first."""

    CRITICAL = 0
    STANDARD = 1
    BATCH = 2


class Outcome(Enum):
    """What a finished request says of its endpoint."""

    SUCCESS = "success"
    FAILED = "failed"
    OVERLOADED = "overloaded"  # it refused: load, not failure
    IGNORED = "ignored"  # a client's cancel or mistake says nothing of the endpoint


@dataclass(frozen=True, slots=True)
class Peer:
    """A balancer (a live tier process), as its registration describes it."""

    id: str
    url: str  # where requests go: http://host:port
    load: str = ""  # where load reports come from (gRPC), host:port; "" if it offers none
    admin: str = ""  # its admin listener, http://host:port; "" if it tells nobody
    phase: Phase = Phase.SERVING


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a server is: the constants of one engine step (seconds) and its limits (tokens, sequences).

    step = α + β·(sequences decoding) + γ·(context tokens resident); a prompt of p tokens adds
    p·(1 + position/attention_tokens)/prefill_tokens_per_s, at most chunk_tokens of it in one step.
    """

    alpha_s: float
    beta_s: float
    gamma_s: float
    prefill_tokens_per_s: float
    attention_tokens: float = 30_500.0
    chunk_tokens: float = 1024.0
    slots: float = 64.0
    kv_tokens: float = 200_000.0


class Kind(NamedTuple):
    """What like instances below a region or cluster have in common, as far as placement asks for it."""

    gpu: str = ""
    memory_gb: float | None = None  # as its agent knows it; None: by its class
    labels: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()  # served or loadable; none: any


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a stage may pick: a region, a cluster or an instance."""

    id: str
    url: str = ""  # an instance's base URL; "" for a region or a cluster
    balancers: tuple[Peer, ...] = ()  # live balancers of a region or cluster, in id order
    agent: str = ""  # where an instance's load reports come from (gRPC), host:port
    models: frozenset[str] = frozenset()  # served here, or by anything below
    engine: str = ""
    gpu: str = ""  # class of accelerator: h100, a100, l4, t4, cpu, …; "" unknown
    weight: float = 1.0
    price_usd_per_hour: float = 0.0
    phase: Phase = Phase.SERVING
    boot: str = ""  # changes when the process behind the id is another one
    capacity: Speed | None = None  # what the agent knows of the server's limits; None: the class's prior
    fleet: tuple[tuple[str, int], ...] = ()  # of a region or cluster: (GPU class, number of instances) below it
    memory_gb: float | None = None  # of an instance's accelerators together; None: as its class has it
    labels: frozenset[str] = frozenset()  # of an instance, each "key=value"
    loadable: frozenset[str] = frozenset()  # LoRA adapters that it does not have and would load when asked for
    kinds: tuple[Kind, ...] = ()  # of a region or cluster: what there is below it, each kind once

    def serves(self, model: str) -> bool:
        """Whether `model` is served; an endpoint that lists none is taken to serve whatever it is asked for."""
        return not self.models or model in self.models or model in self.loadable

    @property
    def offers(self) -> frozenset[str]:
        """All models that may be asked for here; none: any."""
        return self.models | self.loadable if self.models and self.loadable else self.models


@dataclass(frozen=True, slots=True)
class Pool:
    """The endpoints under one parent, as membership knows them. `stale`: the store behind it is out of reach."""

    parent: Path
    endpoints: tuple[Endpoint, ...] = ()  # in id order
    revision: int = 0
    stale: bool = False


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What one server has under way, or the mean of `count` like servers: the unit of every quote."""

    speed: Speed
    gpu: str = ""
    count: int = 1
    decoding: float = 0.0  # requests past their first token (n)
    waiting: float = 0.0  # requests sent and before it (w)
    prompt_tokens: float = 0.0  # sent and not yet prefilled, uncached part (P)
    context_tokens: float = 0.0  # resident (K)
    remaining_tokens: float = 0.0  # predicted output still to come (R)
    prefill_share: float = 0.0  # fraction of time spent on prompts (φ), 0…0.9
    price_usd_per_hour: float = 0.0
    models: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an endpoint says of its load. A region or cluster quotes its servers; an instance gives its own counters.

    `age_s` is how old the figures were when they left; the receiver adds its own clock, never the sender's.
    """

    endpoint: str
    age_s: float = 0.0
    servers: tuple[ServerLoad, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_utilization: float | None = None  # fraction, 0…1
    gpu_utilization: float | None = None  # fraction, 0…1
    gpu_memory_free_bytes: int | None = None
    generated_tokens: float | None = None  # counter since the server began
    phase: Phase = Phase.SERVING
    progress: float | None = None  # moves whenever work gets done there; only its changes mean something


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level of a request, seconds; `None`: none asked for."""

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """All that policy sees of a request: no HTTP, no prompt, no key."""

    id: str  # the trace id, 32 hex digits
    model: str = ""  # "" when the API names none and the path decides
    api: str = "openai"
    stream: bool = False
    input_tokens: int = 1
    max_output_tokens: int | None = None
    output_tokens: float = 0.0  # predicted, at least 1 for what generates, 0 for what does not
    prefix_hashes: tuple[int, ...] = ()  # chained hashes of the prompt's leading blocks
    session: str = ""  # hashed session key; "" none
    warm: Path = ()  # region, cluster, instance that served this session last
    warm_tokens: int = 0  # tokens of it that may still be cached there
    sticky: bool = False  # it goes where it was served last as long as that takes work
    location: str = ""  # the region the client is in or near, as configured; "" unknown
    only: tuple[str, ...] = ()  # regions it may be served in; () any,
    never: tuple[str, ...] = ()  # but these
    owner: Path = ()  # the one instance that can serve it, for what it holds in memory; () any
    tenant: str = ""
    priority: Priority = Priority.STANDARD
    regions: tuple[str, ...] = ()  # that may serve it; none: all
    deadline_s: float | None = None  # seconds from when this tier got it
    slo: Slo = NO_SLO
    version: str = ""  # of the model, as in `policy.versions`; "": any
    fingerprint: int = 0  # of the model and the prompt; 0: unknown
    operation: str = ""  # chat, embeddings, image_generation, …: the class of its path
    shadow_of: str = ""  # the id of the request that this is a copy of, whose answer nobody gets; "": it is none


class Reservation(NamedTuple):
    """Capacity held by one pick; released exactly once, with an Outcome."""

    id: int
    endpoint: str
    parent: Path


class Score(NamedTuple):
    """One candidate's cost in a decision: the total and its terms, in seconds (or in the policy's own unit)."""

    endpoint: str
    total: float
    terms: tuple[float, ...]


class Removed(NamedTuple):
    """What one filter took out of a choice: how many candidates, and the first of them by id."""

    filter: str
    number: int
    endpoints: tuple[str, ...]


class Pick(NamedTuple):
    """Send it to `endpoint`. The columns have one cost for each of `candidates`, one column a term that differs."""

    endpoint: Endpoint
    reservation: Reservation
    policy: str
    candidates: tuple[str, ...]  # ids of those that qualified
    totals: Sequence[float]
    columns: tuple[tuple[str, Sequence[float]], ...]  # (term, one cost a candidate); what is zero for all is left out
    predicted_ttft_s: float | None = None
    predicted_total_s: float | None = None
    removed: tuple[Removed, ...] = ()  # by the filters, in order

    @property
    def scores(self) -> tuple[Score, ...]:
        """The same, candidate by candidate."""
        return tuple(
            Score(id_, self.totals[i], tuple(column[i] for _, column in self.columns))
            for i, id_ in enumerate(self.candidates)
        )

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(name for name, _ in self.columns)


class Shed(NamedTuple):
    """Refuse it: saturated, loading, no_endpoints, no_placement, model_not_found, too_large or deadline_exceeded; for
    what one server alone can serve, owner_gone or owner_unavailable; residency where rules leave no region.

    `removed`: by the filters, in order.
    """

    reason: str
    retry_after_s: float | None = None
    removed: tuple[Removed, ...] = ()


Decision = Pick | Shed
