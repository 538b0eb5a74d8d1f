"""Decisions for the tests of explanations: real picks of real balancers, and what came of them."""

from __future__ import annotations

from random import Random
from typing import Any

from common.explain.notes import Notes
from common.policy.balancer import Balancer
from common.policy.stages import Hop
from common.records import RequestRecord, StageRecord
from common.types import InferenceRequest, Pick
from tests.common.build import BEGAN, attempt, record
from tests.common.policy.build import ask, balancer_of, instance

AT = BEGAN + 0.01


def pool(*ids: str, **fields: Any) -> Balancer:
    """A cluster's balancer over h100s."""
    return balancer_of(*(instance(id_, models=frozenset({"m"}), **fields) for id_ in ids), now=BEGAN - 100.0)


def decided(balancer: Balancer, request: InferenceRequest | None = None, number: int = 0) -> StageRecord:
    """One pick of a balancer and its record."""
    pick = balancer.pick(request or ask(), AT, Random(1))
    assert isinstance(pick, Pick), pick
    return Notes().stage(Hop(balancer.parent, pick, takeover=False), balancer, number, AT, "b" * 16)


def answered(balancer: Balancer, request: InferenceRequest | None = None, **fields: Any) -> RequestRecord:
    """A request that went by one decision to an instance and was answered as `tests.common.build.record` has it."""
    request = request or ask()
    stage = decided(balancer, request)
    path = (*balancer.parent, stage.chosen)
    values = {
        "node": balancer.parent,
        "request": request,
        "input_tokens": request.input_tokens,
        "predicted_output_tokens": request.output_tokens,
        "served_by": "/".join(path),
        "stages": [stage],
        "attempts": [attempt(path)],
    }
    return record(**(values | fields))


def learn(balancer: Balancer, id_: str, times: float, samples: int = 50) -> None:
    """Let a server be known as so many times slower than it was thought to be."""
    estimate = balancer.candidates[id_].estimates[0]
    v = estimate.prior
    for _ in range(samples):
        estimate.learn(times * 100.0 * (v.alpha_s + v.beta_s + 500.0 * v.gamma_s), 100.0, 1.0, 500.0, 0.0)
    balancer.candidates[id_].server.runs_at(estimate.speed)
