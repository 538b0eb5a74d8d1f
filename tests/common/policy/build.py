"""Endpoints, pools and requests in the words of the policy tests; numbers small enough to check by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from common.policy.balancer import Balancer, Policy
from common.policy.candidate import Limits
from common.policy.stages import predicted_completion
from common.types import Endpoint, InferenceRequest, Outcome, Path, Pick, Pool, ServerLoad, Speed, Tier

CLUSTER: Path = ("eu", "c1")
ROUND = Speed(
    alpha_s=0.01,
    beta_s=1e-4,
    gamma_s=1e-7,
    prefill_tokens_per_s=10_000.0,
    attention_tokens=30_000.0,
    chunk_tokens=1_000.0,
    slots=4.0,
    kv_tokens=20_000.0,
)
"""A server of round numbers: 10 ms a step, 10,000 prompt tokens a second, 4 slots, 20,000 tokens of KV memory."""


def instance(id_: str, gpu: str = "h100", **fields: Any) -> Endpoint:
    return Endpoint(id_, url=f"http://{id_}:8000", gpu=gpu, **fields)


def region(id_: str, *fleet: tuple[str, int], **fields: Any) -> Endpoint:
    """A region or a cluster: what has a fleet below it."""
    return Endpoint(id_, fleet=fleet or (("h100", 1),), **fields)


def ask(
    *, stream: bool = True, input_tokens: int = 400, output_tokens: float = 100.0, **fields: Any
) -> InferenceRequest:
    fields = {"id": "0" * 32, "model": "m"} | fields
    return InferenceRequest(stream=stream, input_tokens=input_tokens, output_tokens=output_tokens, **fields)


def balancer_of(
    *endpoints: Endpoint,
    parent: Path = CLUSTER,
    policy: Policy | None = None,
    limits: Limits | None = None,
    now: float = 0.0,
) -> Balancer:
    balancer = Balancer(parent, policy or predicted_completion(tier=Tier.of(parent)), limits)
    balancer.update(Pool(parent, endpoints, 1), now)
    return balancer


def picked(
    balancer: Balancer,
    request: InferenceRequest | None = None,
    now: float = 0.0,
    rng: Random | None = None,
    exclude: tuple[str, ...] = (),
) -> Pick:
    """A pick that has to succeed."""
    decision = balancer.pick(request or ask(), now, rng or Random(1), exclude)
    assert isinstance(decision, Pick), decision
    return decision


def done(balancer: Balancer, pick: Pick, now: float = 1.0, outcome: Outcome = Outcome.IGNORED, **said: Any) -> None:
    balancer.release(pick.reservation, outcome, now, **said)


def idle(gpu: str = "h100", speed: Speed = ROUND, **load: Any) -> ServerLoad:
    return ServerLoad(speed, gpu, **load)


def busy(requests: float, gpu: str = "h100", speed: Speed = ROUND, **load: Any) -> ServerLoad:
    """A server with so many requests decoding, each with 500 tokens of context and 100 to come."""
    return replace(
        idle(gpu, speed, **load), decoding=requests, context_tokens=requests * 500.0, remaining_tokens=requests * 100.0
    )
