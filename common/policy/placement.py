"""What requests of some kind need of a server, by rule: what it must have, and what is merely better, in seconds.

A need that has to be met (memory, GPU class, labels) is a filter; a preference is so many seconds on the cost of
whoever does not meet it, or, for policies that do not count in seconds, a choice among those that do while one of them
is free. A region or cluster meets a need if some kind of instance below it does. Several rules may speak of one
request: all that they ask for holds. Servers that no rule names are anybody's; those of an exclusive rule are for its
requests only.

Left to others: which rules there are (configuration), whom the rest of the cost favours (`scorers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from common.policy.prediction import marginal_cost
from common.types import Endpoint, InferenceRequest, Kind, Priority

if TYPE_CHECKING:
    from common.policy.balancer import Policy
    from common.policy.candidate import Candidate

PREFER_S = 1.0  # what it costs not to be preferred: what a typical request is made to wait before it goes elsewhere
ADAPTER_LOAD_S = 1.0  # until a server has a LoRA adapter of some 100 MB in memory
FASTEST_RATIO = 1.1  # as fast as the fastest, but for so much
NEEDS_CACHED = 4096  # (model, API, operation, priority, tenant) whose need is remembered

# Data sheets, one GPU each; of a product that is sold with several sizes the smallest, so that nothing is promised.
CLASS_MEMORY_GB: dict[str, float] = {
    "b200": 180.0,
    "gb200": 186.0,
    "h200": 141.0,
    "gh200": 96.0,
    "h100": 80.0,
    "h20": 96.0,
    "a100": 40.0,
    "a40": 48.0,
    "a6000": 48.0,
    "a30": 24.0,
    "a10": 24.0,
    "a10g": 24.0,
    "l40": 48.0,
    "l40s": 48.0,
    "l4": 24.0,
    "v100": 16.0,
    "t4": 16.0,
    "p100": 16.0,
    "rtx4090": 24.0,
    "rtx5090": 32.0,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Of which requests it speaks (empty: of all in that respect), and what it asks for them."""

    models: tuple[str, ...] = ()  # globs
    apis: tuple[str, ...] = ()  # families: openai, anthropic, kserve, …
    operations: tuple[str, ...] = ()  # globs: chat, embeddings, image_*, …
    priorities: frozenset[Priority] = frozenset()
    tenants: tuple[str, ...] = ()  # globs
    min_memory_gb: float = 0.0
    gpus: frozenset[str] = frozenset()  # one of these classes
    labels: frozenset[str] = frozenset()  # all of these, each "key=value"
    exclusive: bool = False  # servers with these labels serve nobody else
    prefer_gpus: frozenset[str] = frozenset()
    prefer_labels: frozenset[str] = frozenset()
    avoid_gpus: frozenset[str] = frozenset()  # unless idle
    fastest: bool = False  # where it is done first, whatever that costs others
    prefer_s: float = PREFER_S

    def speaks_of(self, request: InferenceRequest) -> bool:
        """Whether this rule is for this request."""
        return (
            _among(request.model, self.models)
            and (not self.apis or request.api in self.apis)
            and _among(request.operation, self.operations)
            and (not self.priorities or request.priority in self.priorities)
            and _among(request.tenant, self.tenants)
        )


def _among(name: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


class Preference(NamedTuple):
    """One rule's wish: what is preferred, and how many seconds are spent for it."""

    gpus: frozenset[str]
    labels: frozenset[str]
    avoided: frozenset[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Need:
    """What all rules together ask for one kind of request."""

    id: int
    min_memory_gb: float = 0.0
    gpus: frozenset[str] | None = None  # None: any
    labels: frozenset[str] = frozenset()
    forbidden: tuple[frozenset[str], ...] = ()  # labels of servers that are for others only
    preferences: tuple[Preference, ...] = ()
    fastest: bool = False

    @property
    def hard(self) -> bool:
        """Whether it rules anybody out."""
        return self.min_memory_gb > 0.0 or self.gpus is not None or bool(self.labels) or bool(self.forbidden)

    @property
    def soft(self) -> bool:
        """Whether it prefers anybody."""
        return bool(self.preferences) or self.fastest

    def takes(self, kind: Kind) -> bool:
        """Whether servers of this kind have what has to be there; memory that is not known is not counted on."""
        if not self.takes_class(kind.gpu) or not self.labels <= kind.labels:
            return False
        if any(labels <= kind.labels for labels in self.forbidden):
            return False
        return not self.min_memory_gb or memory_gb(kind) >= self.min_memory_gb

    def takes_class(self, gpu: str) -> bool:
        """Whether a server of this GPU class may serve it."""
        return self.gpus is None or gpu in self.gpus


def memory_gb(kind: Kind) -> float:
    """Memory of a server in GB (10^9 bytes): as known, else of one GPU of its class; 0 where nothing is known."""
    return kind.memory_gb if kind.memory_gb is not None else CLASS_MEMORY_GB.get(kind.gpu, 0.0)


def kinds_of(endpoint: Endpoint) -> tuple[Kind, ...]:
    """What there is at an endpoint: below a region or cluster, or the instance itself."""
    if endpoint.kinds:
        return endpoint.kinds
    if endpoint.fleet:
        return tuple(Kind(gpu) for gpu, _ in endpoint.fleet)
    return (Kind(endpoint.gpu, endpoint.memory_gb, endpoint.labels, endpoint.offers),)


class Needs:
    """All rules, and what they amount to for each kind of request."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.hard = any(r.min_memory_gb > 0.0 or r.gpus or r.labels for r in self.rules)  # some rule rules somebody out
        # The only classes that any rule speaks of, so that the others need not be looked up; None: all.
        each = [rule.priorities for rule in self.rules]
        self._priorities = frozenset[Priority]().union(*each) if all(each) else None
        self._known: dict[tuple[str, str, str, int, str], Need] = {}
        self._combined: dict[tuple[int, ...], Need] = {}

    def of(self, request: InferenceRequest) -> Need:
        """What this request needs; the same object for all that need the same."""
        key = (request.model, request.api, request.operation, request.priority, request.tenant)
        need = self._known.get(key)
        if need is None:
            if len(self._known) >= NEEDS_CACHED:
                self._known.clear()
            need = self._known[key] = self._combine(request)
        return need

    def _combine(self, request: InferenceRequest) -> Need:
        which = tuple(i for i, rule in enumerate(self.rules) if rule.speaks_of(request))
        need = self._combined.get(which)
        if need is None:
            need = self._combined[which] = _together(
                len(self._combined),
                [self.rules[i] for i in which],
                [rule for i, rule in enumerate(self.rules) if rule.exclusive and i not in which],
            )
        return need

    def key(self, request: InferenceRequest) -> str | tuple[str, int]:
        """What its list of qualified endpoints depends on."""
        need, name = self.of(request), request.model or request.api
        return (name, need.id) if need.hard else name

    def meets_need(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Has what requests of this kind must have. A filter, as `filters` defines it."""
        need = self.of(request)
        if not need.hard:
            return list(candidates)
        model = request.model
        return [
            c for c in candidates if any(need.takes(kind) and _serves(kind, model) for kind in kinds_of(c.endpoint))
        ]

    def cost(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        """Seconds that each candidate costs more for what it is not. A scorer, as `scorers` defines it.

        Where a request may go first whatever that costs others, what it costs them is taken off again: below 0.
        """
        if self._priorities is not None and request.priority not in self._priorities:
            return None
        need = self.of(request)
        if not need.soft or len(candidates) == 1:
            return None
        costs = [sum(p.seconds for p in need.preferences if _misses(p, c)) for c in candidates]
        if need.fastest:
            costs = [cost - _others(request, c, now) for cost, c in zip(costs, candidates, strict=True)]
        return costs

    def narrowed(self, request: InferenceRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those that are preferred and free, for policies that do not count in seconds; all of them if none is."""
        need = self.of(request)
        for preference in need.preferences:
            candidates = [c for c in candidates if _free(c) and not _misses(preference, c)] or candidates
        if need.fastest:
            speeds = {c.endpoint.id: _speed(c) for c in candidates if _free(c)}
            least = max(speeds.values(), default=inf) / FASTEST_RATIO
            candidates = [c for c in candidates if speeds.get(c.endpoint.id, 0.0) >= least] or candidates
        return candidates


def _together(id_: int, rules: Sequence[Rule], others: Sequence[Rule]) -> Need:
    gpus: frozenset[str] | None = None
    for rule in rules:
        if rule.gpus:
            gpus = rule.gpus if gpus is None else gpus & rule.gpus
    labels = frozenset[str]().union(*(rule.labels for rule in rules))
    return Need(
        id_,
        max((rule.min_memory_gb for rule in rules), default=0.0),
        gpus,
        labels,
        # What a request is itself pinned to is not forbidden to it by a rule that names the same servers.
        tuple(rule.labels for rule in others if rule.labels and not rule.labels <= labels),
        tuple(
            Preference(rule.prefer_gpus, rule.prefer_labels, rule.avoid_gpus, rule.prefer_s)
            for rule in rules
            if rule.prefer_gpus or rule.prefer_labels or rule.avoid_gpus
        ),
        any(rule.fastest for rule in rules),
    )


def _serves(kind: Kind, model: str) -> bool:
    return not kind.models or not model or model in kind.models


def _misses(p: Preference, c: Candidate) -> bool:
    """Whether a candidate is not what is preferred, or is what is avoided and busy."""
    kinds = kinds_of(c.endpoint)
    if p.gpus and not any(kind.gpu in p.gpus for kind in kinds):
        return True
    if p.labels and not any(p.labels <= kind.labels for kind in kinds):
        return True
    return bool(p.avoided) and all(kind.gpu in p.avoided for kind in kinds) and not _has_idle(c)


def _has_idle(c: Candidate) -> bool:
    """Whether a server there has nothing to do."""
    if c.depth == 2:
        return not c.in_flight and c.server.n + c.server.w < 1.0
    return any(s.n + s.w < 1.0 for s in c.quoted or c.own)


def _free(c: Candidate) -> bool:
    """Whether a batch slot is free there."""
    return any(s.n + s.w < s.speed.slots for s in c.quoted or c.own)


def _speed(c: Candidate) -> float:
    """Prompt tokens a second of the fastest server there, by its class or as learned."""
    return max(s.speed.prefill_tokens_per_s for s in c.quoted or c.own)


def _others(request: InferenceRequest, c: Candidate, now: float) -> float:
    """Seconds by which a request delays those already there."""
    if c.depth == 2:
        uncached = c.uncached_tokens(request)
        return marginal_cost(c.server, uncached, request.input_tokens, request.output_tokens).others
    return c.cheapest(request, now)[2].others


def adapters(load_s: float) -> Callable[[InferenceRequest, Sequence[Candidate], float], list[float] | None]:
    """A scorer: seconds until whoever has not loaded the request's LoRA adapter has it."""

    def adapter(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        model = request.model
        return [load_s if model in c.endpoint.loadable and model not in c.endpoint.models else 0.0 for c in candidates]

    return adapter


def having_loaded(request: InferenceRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that have the request's adapter and are free, where a policy does not count in seconds; all if none is."""
    return [c for c in candidates if request.model in c.endpoint.models and _free(c)] or candidates


def placed(policy: Policy, needs: Needs | None, adapter_load_s: float = ADAPTER_LOAD_S) -> Policy:
    """A policy that honours needs. Without rules it is as it was, and decides as fast."""
    policy = replace(policy, adapter_load_s=adapter_load_s)
    if needs is None or not needs.rules:
        return policy
    serves = policy.filters[0]

    def serves_and_fits(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        return needs.meets_need(request, serves(request, candidates, now), now)

    scorers = (*policy.scorers, ("placement_s", 1.0, needs.cost)) if policy.in_seconds else policy.scorers
    return replace(policy, filters=(serves_and_fits, *policy.filters[1:]), scorers=scorers, needs=needs)
