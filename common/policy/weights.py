"""How capable an instance is, as one number: what the weighted policies share traffic by.

A weighted sum of what it is (GPU class, memory), what it does now (requests, KV and GPU use) and what it has done (time
per request), each in [0, 1]. Weights follow it by a damped step, so that one odd second moves no traffic; when arrivals
jump the damping drops, so that a burst is spread within seconds, and comes back with the calm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from common.policy.ewma import DecayingSum
from common.policy.prediction import CLASS_SPEED, class_speed

if TYPE_CHECKING:
    from common.policy.candidate import Candidate

STEP_S = 0.5  # weights move this often
DAMPING = 0.9  # of a step in calm traffic: a change is in after some five seconds
BURST_DAMPING = 0.2  # and in a burst within one
BURST_RATIO = 2.0  # arrivals of the last second over those of the last fifteen that are a burst
BURST_LEAST = 5.0  # requests a second below which no jump is one
RECENT_S, LONG_S = 1.0, 15.0
LEAST_WEIGHT = 0.02  # of the most capable one: nobody starves who could show that it got better


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What counts for how much; any scale, only the ratios matter."""

    gpu: float = 3.0  # static: prompt rate of its class, relative to the fastest class
    memory: float = 1.0  # static: KV memory, relative to the largest class
    slots_free: float = 2.0  # dynamic: batch slots free
    kv_free: float = 1.0  # dynamic: KV memory free, by its report
    gpu_free: float = 0.0  # dynamic: GPU idle, by its report; a busy GPU is what one wants, so it counts for nothing
    response_time: float = 2.0  # historic: the fastest's mean time per request over its own


FASTEST = max(v.prefill_tokens_per_s for v in CLASS_SPEED.values())
LARGEST = max(v.kv_tokens for v in CLASS_SPEED.values())


class Weights:
    """The weights of one pool, moved in `step` and read by scorers as `Candidate.weight`."""

    __slots__ = ("_at", "_long", "_recent", "coefficients")

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        self.coefficients = coefficients or Coefficients()
        self._at = -STEP_S
        self._recent = DecayingSum(RECENT_S)
        self._long = DecayingSum(LONG_S)

    def arrived(self, now: float) -> None:
        """A request came in."""
        self._recent.add(1.0, now)
        self._long.add(1.0, now)

    def burst(self, now: float) -> bool:
        """Whether arrivals have jumped of late."""
        recent, long = self._recent.value_at(now) / RECENT_S, self._long.value_at(now) / LONG_S
        return recent > BURST_LEAST and recent > BURST_RATIO * long

    def step(self, candidates: Iterable[Candidate], now: float) -> None:
        """Move every weight towards its capability, if it is time."""
        if now - self._at < STEP_S:
            return
        steps = 1.0 if self._at < 0.0 else min((now - self._at) / STEP_S, 20.0)
        self._at = now
        damping = (BURST_DAMPING if self.burst(now) else DAMPING) ** steps
        candidates = list(candidates)
        times = [t for c in candidates if (t := c.response_s.value) is not None and t > 0.0]
        best = min(times, default=None)
        for c in candidates:
            target = max(capability(c, self.coefficients, best), LEAST_WEIGHT)
            c.weight = target if c.weight is None else damping * c.weight + (1.0 - damping) * target


def capability(c: Candidate, k: Coefficients, best_s: float | None) -> float:
    """How capable an instance is, in [0, 1]; a term that is unknown counts as middling, never as zero."""
    prior = c.endpoint.capacity or class_speed(c.endpoint.gpu)
    report = c.report
    server = c.server
    kv = None if report is None else report.kv_utilization
    gpu = None if report is None else report.gpu_utilization
    response = c.response_s.value
    terms = (
        (k.gpu, min(1.0, prior.prefill_tokens_per_s / FASTEST)),
        (k.memory, min(1.0, prior.kv_tokens / LARGEST)),
        (k.slots_free, exp(-(server.n + server.w) / max(prior.slots, 1.0))),
        (k.kv_free, UNKNOWN if kv is None else 1.0 - kv),
        (k.gpu_free, UNKNOWN if gpu is None else 1.0 - gpu),
        (k.response_time, UNKNOWN if response is None or best_s is None else min(1.0, best_s / response)),
    )
    weight = sum(w for w, _ in terms)
    return sum(w * x for w, x in terms) / weight if weight > 0.0 else UNKNOWN


UNKNOWN = 0.5
