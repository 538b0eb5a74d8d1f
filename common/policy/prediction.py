"""How long a request will take on a server, and how much longer it makes everybody else's: seconds, in closed form.

The unit is a server's engine loop (continuous batching, chunked prefill): one step takes α + β·n + γ·K seconds for n
sequences with K tokens of context, and prompts are read at r tokens a second in between. From five sums over what is
under way (n, w, P, K, R: see `Server`) `marginal_cost` says what one more request costs itself and the others.
Why marginal: in a batching server a request's own time hardly depends on the load, so sending each where *it* ends
first piles everything on the fastest GPU; what grows is the step time of those already there.

Left to others: which candidates qualify (`filters`), what else counts (`scorers`: round trip, price).
Source: the batching model of Orca (OSDI '22) and Sarathi-Serve (arXiv 2403.02310); charging each request the delay it
imposes is Pigou's externality; output length by prompt bucket is S3 (arXiv 2306.06000) reduced to running means.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp, log, log2
from typing import NamedTuple

from common.types import ServerLoad, Speed

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


class Server:
    """What is under way on one server (or on the mean one of `count` like servers), kept by dead reckoning.

    n decoding, w waiting or prefilling, P prompt tokens sent and not yet prefilled, K context tokens resident,
    R predicted output tokens still to come. Each event is O(1); no engine is polled.
    """

    __slots__ = ("count", "gpu", "k", "models", "n", "p", "price_usd_per_hour", "r", "share_", "share_at", "speed", "w")

    def __init__(self, speed: Speed, gpu: str = "", count: int = 1, price_usd_per_hour: float = 0.0) -> None:
        self.speed = speed
        self.gpu = gpu
        self.count = count
        self.price_usd_per_hour = price_usd_per_hour
        self.models: frozenset[str] = frozenset()
        self.n = self.w = self.p = self.k = self.r = 0.0
        self.share_ = 0.0
        self.share_at = 0.0

    @classmethod
    def of(cls, load: ServerLoad, now: float) -> Server:
        """A server as a quote describes it, as of `now`."""
        s = cls(load.speed, load.gpu, load.count, load.price_usd_per_hour)
        s.models = load.models
        s.n, s.w, s.p = load.decoding, load.waiting, load.prompt_tokens
        s.k, s.r = load.context_tokens, load.remaining_tokens
        s.share_, s.share_at = load.prefill_share, now
        return s

    def load(self, now: float) -> ServerLoad:
        """The same as a value, to be quoted."""
        return ServerLoad(
            self.speed,
            self.gpu,
            self.count,
            self.n,
            self.w,
            self.p,
            self.k,
            self.r,
            self.prefill_share(now),
            self.price_usd_per_hour,
            self.models,
        )

    def prefill_share(self, now: float) -> float:
        """Fraction of time spent on prompts of late (φ), at most 0.9: faded sum of p/r over SHARE_S."""
        if self.share_ == 0.0:
            return 0.0
        return min(0.9, self.share_ * exp(-max(0.0, now - self.share_at) / SHARE_S))

    def dispatched(self, prompt: float, output: float, now: float) -> None:
        """A request with `prompt` uncached tokens and `output` predicted ones was sent."""
        per = 1.0 / self.count
        self.w += per
        self.p += prompt * per
        self.r += output * per
        self.share_ = self.prefill_share(now) + prompt * per / (self.speed.prefill_tokens_per_s * SHARE_S)
        self.share_at = now

    def first_token(self, prompt: float, context: float) -> None:
        """Its first token came: its prompt is read and `context` tokens are resident."""
        per = 1.0 / self.count
        self.w -= per
        self.n += per
        self.p -= prompt * per
        self.k += context * per

    def ended(self, prompt: float, output: float, context: float, *, decoding: bool) -> None:
        """It is over, whether it had begun to decode or not."""
        per = 1.0 / self.count
        if decoding:
            self.n -= per
            self.k -= context * per
        else:
            self.w -= per
            self.p -= prompt * per
        self.r -= output * per

    def emptied(self) -> None:
        """Nothing is under way: the sums are exactly zero again, whatever rounding left in them."""
        self.n = self.w = self.p = self.k = self.r = 0.0


SHARE_S = 10.0  # φ looks back ten seconds: several prompts of a busy server, and short against a load change


def marginal_cost(s: Server, uncached: float, length: float, output: float, round_trip_s: float = 0.0) -> Terms:
    """What one more request costs on `s`, in seconds, split in three.

    `uncached` prompt tokens have to be read of `length` in all; `output` tokens are expected back (0: it does not
    generate). Cost is O(1). The waiting time for a batch slot or for KV space is the time until enough of those
    running leave; a request that can never fit costs infinity.
    """
    v = s.speed
    n, k = s.n, s.k
    total = n + s.w
    step = v.alpha_s + v.beta_s * n + v.gamma_s * k
    prompts = s.p + uncached
    room = v.chunk_tokens - n
    steps = ceil(prompts / room) if room > 1.0 else prompts
    ttft = (
        round_trip_s
        + prompts / v.prefill_tokens_per_s * (1.0 + 0.5 * length / v.attention_tokens)
        + (steps + 0.5) * step
    )
    if length + output > v.kv_tokens:
        return Terms(float("inf"), 0.0, 0.0)
    mean_rest = s.r / total if total >= 1.0 and s.r > total else 1.0
    over = total + 1.0 - v.slots
    resident = k + s.p + s.r + length + output - v.kv_tokens
    if over > 0.0 or resident > 0.0:
        leave = max(over, resident * total / max(k + s.p + s.r, 1.0), 1.0)
        ttft += max(mean_rest * step * leave / max(total, 1.0), 0.0)
    if output <= 0.0:
        return Terms(ttft, 0.0, total * uncached / v.prefill_tokens_per_s)
    shared = total * mean_rest * (1.0 - exp(-output / mean_rest)) if total > 0.0 else 0.0
    mean_context = k / total if total > 0.0 else 0.0
    own_context = length + 0.5 * output
    decode = (
        output * v.alpha_s + v.beta_s * (output + shared) + v.gamma_s * (shared * mean_context + output * own_context)
    )
    others = total * uncached / v.prefill_tokens_per_s + shared * (v.beta_s + v.gamma_s * own_context)
    return Terms(ttft, decode, others)


class SpeedEstimate:
    """How much slower or faster a server is than its class's prior, learned from what it did, with forgetting.

    Two factors in the log domain: one for reading prompts (from TTFT against its prediction) and one for decoding
    (from time per token against its prediction). Each sample moves a factor by `RATE` of its error; factors stay
    within [1/4, 4] of the prior, so that one absurd sample cannot cut a server off.
    """

    __slots__ = ("_decode", "_prefill", "prior", "samples", "speed")

    RATE = 0.05  # forgets over about twenty requests: seconds on a busy server
    LIMIT = 1.3862943611198906  # log 4

    def __init__(self, prior: Speed) -> None:
        self.prior = prior
        self.speed = prior
        self._prefill = 0.0
        self._decode = 0.0
        self.samples = 0

    def learn(self, ttft_ratio: float | None, decode_ratio: float | None) -> None:
        """Take in seen ÷ predicted of one request; None where it had no such part."""
        if ttft_ratio is not None and ttft_ratio > 0.0:
            self._prefill = self._moved(self._prefill, ttft_ratio)
        if decode_ratio is not None and decode_ratio > 0.0:
            self._decode = self._moved(self._decode, decode_ratio)
        self.samples += 1
        slower, p = exp(self._decode), self.prior
        self.speed = replace(
            p,
            alpha_s=p.alpha_s * slower,
            beta_s=p.beta_s * slower,
            gamma_s=p.gamma_s * slower,
            prefill_tokens_per_s=p.prefill_tokens_per_s / exp(self._prefill),
        )

    def _moved(self, at: float, ratio: float) -> float:
        # The prediction already used the factor, so the error is what is left of it.
        error = max(-1.0, min(1.0, log(ratio)))
        return max(-self.LIMIT, min(self.LIMIT, at + self.RATE * error))


class OutputLength:
    """Expected output tokens by (model, tenant, prompt bucket), backing off to coarser keys; O(1), bounded.

    A key's mean forgets over about `MEMORY` samples. Keys beyond `max_keys` share the coarser means there are.
    """

    MEMORY = 500
    ENOUGH = 20  # samples before a finer key is believed over the coarser one
    FIRST_GUESS = 128.0  # tokens; the median of public conversation traffic

    __slots__ = ("_means", "max_keys")

    def __init__(self, max_keys: int = 4096) -> None:
        self.max_keys = max_keys
        self._means: dict[tuple[str, ...], list[float]] = {}

    @staticmethod
    def _keys(model: str, tenant: str, input_tokens: int) -> tuple[tuple[str, ...], ...]:
        bucket = str(int(log2(input_tokens + 1)))
        coarser: tuple[tuple[str, ...], ...] = ((model, "", bucket), (model,), ())
        return ((model, tenant, bucket), *coarser) if tenant else coarser  # a key that stood twice would learn twice

    def expect(self, model: str, tenant: str, input_tokens: int, cap: int | None) -> float:
        """Expected output tokens, at least 1 and at most `cap` (the request's max_tokens)."""
        guess = self.FIRST_GUESS
        for key in self._keys(model, tenant, input_tokens):
            mean = self._means.get(key)
            if mean is not None and (mean[0] >= self.ENOUGH or len(key) < 2):
                guess = mean[1]
                break
        return max(1.0, min(guess, cap) if cap is not None else guess)

    def learn(self, model: str, tenant: str, input_tokens: int, output_tokens: float) -> None:
        """Take one finished answer in."""
        for key in self._keys(model, tenant, input_tokens):
            mean = self._means.get(key)
            if mean is None:
                if key and len(self._means) >= self.max_keys:
                    continue
                mean = self._means[key] = [0.0, 0.0]
            mean[0] = min(mean[0] + 1.0, self.MEMORY)
            mean[1] += (output_tokens - mean[1]) / mean[0]
