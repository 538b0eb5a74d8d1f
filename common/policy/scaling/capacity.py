"""How many requests a second one server can take for good, so that each still gets its service level.

A server under a steady λ requests a second, each of p prompt tokens and o output tokens, is busy with what they cost
for u = λ·w of its time, w = p/r + o·(β + γ·context); the rest goes into the fixed part α of its steps. So a step takes
τ = α/(1 - u), and λ·o·τ sequences are under way at a time (Little). Three things bound λ: the time per output token,
the batch slots and KV memory that so many sequences take, and how long a prompt waits until it is read.
Exact where arrivals are steady; what bursts need on top is `desired`'s business.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from common.types import Slo, Speed

TAIL = 3.0  # the 95th percentile of an exponential waiting time over its mean
STEPS = 40  # of a bisection: far below any measurement's error


class Mix(NamedTuple):
    """What requests are like in the mean: tokens in and out."""

    input_tokens: float
    output_tokens: float


class Occupancy(NamedTuple):
    """A server under a steady load."""

    utilization: float  # u, fraction of its time
    step_s: float  # inf: it falls behind
    requests: float  # under way past their first token
    ttft_s: float  # 95th percentile of the time to the first token


def work_s(speed: Speed, mix: Mix) -> float:
    """GPU seconds that one request takes of a busy server (w)."""
    p, o = mix
    reading = p * (1.0 + 0.5 * p / speed.attention_tokens) / speed.prefill_tokens_per_s
    return reading + o * (speed.beta_s + speed.gamma_s * (p + 0.5 * o))


def occupancy(speed: Speed, mix: Mix, rate: float) -> Occupancy:
    """What a server is like under `rate` requests a second of this kind."""
    p, o = mix
    u = rate * work_s(speed, mix)
    if u >= 1.0:
        return Occupancy(u, inf, inf, inf)
    step = speed.alpha_s / (1.0 - u)
    requests = rate * o * step
    # Prompts are read first come first served, `room` tokens a step beside the sequences that decode.
    room = speed.chunk_tokens - requests
    if room < 1.0:
        return Occupancy(u, step, requests, inf)
    decoding = speed.alpha_s + (speed.beta_s + speed.gamma_s * (p + 0.5 * o)) * requests
    read = p * (1.0 + 0.5 * p / speed.attention_tokens) / speed.prefill_tokens_per_s + p / room * decoding
    busy = rate * read
    if busy >= 1.0:
        return Occupancy(u, step, requests, inf)
    wait = busy * read / (1.0 - busy)  # M/G/1 with prompts as unlike as an exponential distribution has them
    return Occupancy(u, step, requests, TAIL * wait + read + step)


def sustainable_rate(speed: Speed, mix: Mix, slo: Slo) -> float:
    """Requests a second at which the service level still holds; 0.0 if it holds for none, or none fits."""
    p, o = mix
    slots = min(speed.slots, speed.kv_tokens / max(p + o, 1.0))
    if slots < 1.0:
        return 0.0

    def holds(rate: float) -> bool:
        load = occupancy(speed, mix, rate)
        if load.utilization >= 1.0 or load.requests > slots:
            return False
        if o > 1.0 and load.step_s > (slo.tpot_s or inf):
            return False
        return load.ttft_s <= (slo.ttft_s or inf)

    low, high = 0.0, 1.0 / max(work_s(speed, mix), 1e-9)
    if not holds(1e-6 * high):
        return 0.0
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
