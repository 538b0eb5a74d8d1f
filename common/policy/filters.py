"""Who qualifies: each filter drops candidates that must not get this request, whatever they would cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

from common.policy.placement import kinds_of
from common.policy.versions import matches
from common.types import InferenceRequest, Phase

if TYPE_CHECKING:
    from common.policy.candidate import Candidate

Filter = Callable[[InferenceRequest, "Sequence[Candidate]", float], "list[Candidate]"]
"""(request, candidates, now) -> those that stay, in the same order."""


def serves_model(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Serves the request's model, as far as it says; one without a model goes to whoever speaks its API."""
    if not request.model:
        speaks = ENGINES_OF.get(request.api)
        return [c for c in candidates if speaks is None or c.depth < 2 or c.endpoint.engine in speaks]
    serving = [c for c in candidates if c.endpoint.serves(request.model)]
    if not request.version:
        return serving
    return [
        c
        for c in serving
        if any(
            (not kind.models or request.model in kind.models) and matches(request.version, kind.labels)
            for kind in kinds_of(c.endpoint)
        )
    ]


def not_draining(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Is not about to leave."""
    return [c for c in candidates if c.phase is not Phase.DRAINING]


def not_loading(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Has its model in memory."""
    return [c for c in candidates if c.phase is not Phase.LOADING]


def not_ejected(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Its breaker lets a request through."""
    return [c for c in candidates if c.breaker.ready(now)]


def has_capacity(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Has room for one more, as far as is known here."""
    return [c for c in candidates if c.has_room(request, now)]


def in_time(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Is predicted to be done before the deadline, if there is one; the network's way included."""
    limit = request.deadline_s
    if limit is None:
        return list(candidates)
    kept = []
    for c in candidates:
        terms = c.cheapest(request, now, blind=not c.fresh(now))[2]
        # What fits nowhere is no matter of time.
        if c.round_trip_s + terms.ttft + terms.decode <= limit or terms.ttft == inf:
            kept.append(c)
    return kept


def residency(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Its data may go there."""
    only, never = request.only, request.never
    if not only and not never:
        return list(candidates)
    return [c for c in candidates if (not only or c.endpoint.id in only) and c.endpoint.id not in never]


def fits_memory(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
    """Is not known to run out of memory over requests of this size, as long as there is another."""
    tokens = request.input_tokens + request.output_tokens
    return [c for c in candidates if tokens < c.safe_tokens(now)] or list(candidates)


ENGINES_OF = {"ollama": ("ollama",), "kserve": ("triton",), "torchserve": ("torchserve",)}
