"""A scaler over a balancer's pool of one cluster, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from common.balancing import Balancing
from common.policy.candidate import Limits
from common.policy.stages import policy_named
from common.scaling.config import Scaling
from common.scaling.scaler import Provider, Scaler
from common.store.base import AffinityStore
from common.store.memory import MemoryAffinityStore
from common.types import Endpoint, InferenceRequest, Path, Phase, Pool

CLUSTER: Path = ("eu", "eu-a")
MODEL = "llama"


class Noted:
    """A provider that does nothing."""

    def __init__(self) -> None:
        self.failures = 0
        self.wanted: list[tuple[int, bool]] = []

    def want(self, replicas: int, reason: str, *, at_least: bool) -> None:
        self.wanted.append((replicas, at_least))

    async def close(self) -> None: ...


def config(**model: Any) -> Scaling:
    groups = model.pop("groups", {"l4": {"gpu": "l4"}})
    return Scaling.model_validate({"models": {MODEL: {"groups": groups, **model}}, "interval_s": 0.25})


def scaler(
    id_: str = "b1",
    scaling: Scaling | None = None,
    *,
    store: AffinityStore | None = None,
    others: Callable[[], frozenset[str]] = frozenset,
    providers: Mapping[tuple[str, str], Provider] | None = None,
    waiting: int = 0,
) -> Scaler:
    balancing = Balancing(
        id_, lambda path: path == CLUSTER, lambda path: policy_named("predicted_completion"), Limits(), Random(0)
    )
    return Scaler(
        scaling or config(),
        CLUSTER,
        balancing,
        store or MemoryAffinityStore(),
        others,
        lambda model: waiting,
        providers or {},
    )


def pool(balancing: Balancing, count: int, gpu: str = "l4", phase: Phase = Phase.SERVING, model: str = MODEL) -> None:
    endpoints = tuple(
        Endpoint(f"{gpu}-{i}", url=f"http://10.0.0.{i}:8000", models=frozenset({model}), gpu=gpu, phase=phase)
        for i in range(count)
    )
    balancing.update({CLUSTER: Pool(CLUSTER, endpoints)})


def request(number: int, model: str = MODEL) -> InferenceRequest:
    return InferenceRequest(f"{number:032x}", model, input_tokens=1000, output_tokens=200.0)
