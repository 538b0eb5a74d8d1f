"""How long a request will take on a server, and how much longer it makes everybody else's: seconds, in closed form.

The unit is a server's engine loop (continuous batching, chunked prefill): one step takes α + β·n + γ·K seconds for n
sequences with K tokens of context, and prompts are read at r tokens a second in between. From the sums over what is
under way (`server`) the functions here say what one more request costs itself and the others.
Why marginal: in a batching server a request's own time hardly depends on the load, so sending each where *it* ends
first piles everything on the fastest GPU; what grows is the step time of those already there.

Left to others: which candidates qualify (`filters`), what else counts (`scorers`: round trip, price), how fast a server
is (`speed`), how long an answer will be (`output_length`).
Source: the batching model of Orca (OSDI '22) and Sarathi-Serve (arXiv 2403.02310); charging each request the delay it
imposes is Pigou's externality.
"""

from __future__ import annotations

from math import ceil, exp, inf, log1p
from typing import NamedTuple

from common.policy.server import BACKLOG_WEIGHT, MAX_SHARE, SHARE_S, Costs, Server
from common.types import Slo, Speed

# Priors of an 8B model: α = weight bytes and γ = KV bytes of a token over 0.7 of the data sheet's memory bandwidth,
# r = 0.4-0.5 of peak FLOPS over the FLOPs of a token, β = 1/r (a decoded token costs the arithmetic of a read one).
# Only the ratios between classes matter before anything is learned.
CLASS_SPEED: dict[str, Speed] = {
    "h200": Speed(0.0048, 4.0e-5, 3.9e-8, 25_000, chunk_tokens=2048, slots=128, kv_tokens=800_000),
    "h100": Speed(0.0070, 4.0e-5, 5.6e-8, 25_000, chunk_tokens=2048, slots=128, kv_tokens=420_000),
    "a100": Speed(0.0112, 1.0e-4, 9.2e-8, 10_000, chunk_tokens=1024, slots=96, kv_tokens=420_000),
    "l4": Speed(0.0380, 2.5e-4, 6.2e-7, 4_000, chunk_tokens=512, slots=32, kv_tokens=104_000),
    "t4": Speed(0.0360, 6.7e-4, 5.9e-7, 1_500, chunk_tokens=256, slots=24, kv_tokens=48_000),
    "cpu": Speed(0.0800, 5.0e-3, 2.6e-6, 200, chunk_tokens=512, slots=16, kv_tokens=32_000),
}
UNKNOWN_CLASS = "a100"  # a middling one: neither starved nor flooded before it is measured


def class_speed(gpu: str) -> Speed:
    """The prior of a GPU class; an unknown class is taken for a middling one."""
    return CLASS_SPEED.get(gpu) or CLASS_SPEED[UNKNOWN_CLASS]


class Terms(NamedTuple):
    """The parts of one request's marginal cost on one server, seconds."""

    ttft: float  # until its first token, waiting and prefill included
    decode: float  # its output after that
    others: float  # the delay it adds to those already there

    @property
    def total(self) -> float:
        """Seconds by which everybody's completion together comes later."""
        return self.ttft + self.decode + self.others


UNFIT = Terms(inf, 0.0, 0.0)


def marginal_cost(server: Server, uncached: float, length: float, output: float) -> Terms:
    """What one more request costs on `server`, in seconds, split in three; O(1).

    `uncached` prompt tokens have to be read of `length` in all; `output` tokens are expected back (0: it does not
    generate, and keeps nothing in KV memory). A request that can never fit into KV memory costs infinity.
    """
    c = server.costs()
    wait = slot_wait_s(c, length + output) if output > 0.0 else c.slot_wait_s
    if wait == inf:
        return UNFIT
    prompts = c.prompt_tokens + uncached
    reading = prompts * (c.seconds_per_prompt_token + length * c.seconds_per_position)
    ttft = reading + prefill_steps(c, uncached) * c.step_s + wait
    stall = c.requests * uncached * c.seconds_per_prompt_token
    if output <= 0.0:
        return Terms(ttft, 0.0, stall)
    shared = shared_steps(c, output)
    context = length + 0.5 * output
    own = output * (c.alpha_s + c.beta_s + c.gamma_s * context)
    return Terms(
        ttft,
        own + shared * (c.beta_s + c.gamma_s * c.mean_context),
        stall + shared * (c.beta_s + c.gamma_s * context),
    )


def prefill_steps(c: Costs, uncached: float) -> float:
    """Engine steps until so many more prompt tokens are read, after those there, and the first token is out."""
    return ceil((c.prompt_tokens + uncached) / c.room) + 0.5


def shared_steps(c: Costs, output: float) -> float:
    """Sequence-steps that a request of `output` tokens shares with those already there.

    N·m·(1 - exp(-output/m)): each of the others has m tokens to go in the mean, exponentially distributed.
    """
    return c.shared_tokens * (1.0 - exp(-output / c.rest_tokens))


def slot_wait_s(c: Costs, tokens: float) -> float:
    """Seconds until a batch slot and `tokens` of KV memory are free: until enough of those running leave."""
    if tokens > c.kv_tokens:
        return inf
    short = tokens - c.kv_spare
    if short <= 0.0:
        return c.slot_wait_s
    # At least one of them has to leave, whatever little is missing.
    one = c.rest_tokens * c.step_s / max(c.requests, 1.0)
    return max(c.slot_wait_s, short * c.leave_s, one)


# -- service levels ----------------------------------------------------------------------------------------------------

SLO_TTFT_COST_S = 30.0  # a predicted miss of the first token costs this much, and one of the time per token this:
SLO_TPOT_COST_S = 15.0  # the knee between latency and goodput on conversation traffic
SLO_SHARPNESS = 10.0  # how steep the step of a miss is
SLO_SLOPE = 0.15  # of what a miss costs, per once more the level: steeper, and hopeless requests push out others


def miss(ratio: float) -> float:
    """How bad predicted ÷ allowed is: a step at 1 (a miss is a miss) plus a slope (a big miss is a little worse)."""
    z = SLO_SHARPNESS * (ratio - 1.0)
    if z > 40.0:
        return 1.0 + SLO_SLOPE * (ratio - 1.0)
    e = exp(z)
    return e / (1.0 + e) + SLO_SLOPE * log1p(e) / SLO_SHARPNESS


def slo_cost(terms: Terms, server: Server, uncached: float, length: float, slo: Slo, now: float) -> float:
    """The marginal cost with predicted misses of service levels, its own and those it causes, in seconds."""
    c, share = server.costs(), server.prefill_share(now)
    cost = terms.ttft + terms.decode / (1.0 - share) + terms.others
    if slo.ttft_s is not None:
        cost += SLO_TTFT_COST_S * miss(terms.ttft / slo.ttft_s)
    if slo.tpot_s is not None:
        more = min(share + uncached * c.seconds_per_prompt_token / SHARE_S, MAX_SHARE)
        base = c.alpha_s + c.beta_s * c.requests + c.gamma_s * server.k
        before = miss(base / (1.0 - share) / slo.tpot_s)
        after = miss((base + c.beta_s + c.gamma_s * length) / (1.0 - more) / slo.tpot_s)
        cost += SLO_TPOT_COST_S * (after + c.requests * (after - before))
    return cost


# -- pools of like servers ---------------------------------------------------------------------------------------------

ALIKE_RATIO = 1.5  # fastest ÷ slowest up to which servers count as alike


def alike(speeds: list[Speed]) -> bool:
    """Whether the servers of a pool are so much alike that balancing their backlogs beats minimising a sum.

    Minimising the sum of completions tolerates unequal queues; among equals that only lengthens the tail.
    """
    rates = [v.prefill_tokens_per_s for v in speeds]
    steps = [v.alpha_s for v in speeds]
    return max(rates) <= ALIKE_RATIO * min(rates) and max(steps) <= ALIKE_RATIO * min(steps)


def backlog_cost(c: Costs, uncached: float, output: float) -> float:
    """GPU seconds of all that is under way on a server and of this request, weighted as among like servers."""
    return BACKLOG_WEIGHT * (c.backlog_s + uncached * c.seconds_per_prompt_token + output * c.backlog_per_token_s)
