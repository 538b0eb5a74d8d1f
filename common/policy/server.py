"""What is under way on one server, kept by dead reckoning: six sums, each event O(1), no engine polled.

n decoding, w waiting or prefilling, P prompt tokens sent and not yet prefilled, K context tokens resident, R predicted
output tokens still to come, φ the share of time spent on prompts. Integrals of n and K over time and the prompt tokens
read are kept beside them, from which `speed` learns how fast the server is.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from common.types import ServerLoad, Speed

SHARE_S = 10.0  # φ looks back ten seconds: several prompts of a busy server, and short against a load change
MAX_SHARE = 0.9
BACKLOG_WEIGHT = 10.0  # of the work already there, among like servers


Sums = tuple[float, float, float, float, float]
"""n, w, P, K, R of what one balancer has under way on a server."""

Told = tuple[float, float, float, float, float, float]
"""What balancers of one cluster tell each other of an instance: its sums, and prompt tokens read so far, which grow."""


class Costs(NamedTuple):
    """A server's sums turned into what a cost needs of them; valid until the next event on it.

    Seconds, tokens and counts. A decision reads these for every candidate, so whatever does not depend on the request
    is computed once here.
    """

    prompt_tokens: float  # P
    seconds_per_prompt_token: float  # 1/r
    seconds_per_position: float  # 1/(2·A·r): what a prompt's length adds to each of its tokens
    room: float  # prompt tokens that fit into one step beside the decoding sequences
    step_s: float
    requests: float  # N = n + w
    rest_tokens: float  # m: mean output still to come of those on it, at least 1
    shared_tokens: float  # N·m
    mean_context: float  # K/N
    alpha_s: float
    beta_s: float
    gamma_s: float
    kv_tokens: float
    kv_spare: float  # tokens of KV memory that nobody on it will need
    slot_wait_s: float  # until one of those on it leaves its slot; 0 while one is free
    leave_s: float  # seconds a KV token takes to come free
    backlog_s: float  # GPU time of all that was sent there and is still to come
    backlog_per_token_s: float  # the same for one more output token


Plain = tuple[float, float, float, float, float, float, float, float, float, float, float, float]
"""Coefficients of the marginal cost of a request that has to wait for nothing, for `scorers`' inner loop:

spare tokens (-1: whatever it is, it has to wait), P, 1/room, step, and c0 … c7 in
c0 + L·(c1 + L·c2) + ceil((P + L)/room)·step + o·(c3 + c4·x) + c5·(1 - exp(-o·c6))·(c7 + c4·x)
for a prompt of L tokens that all have to be read, an output of o, and x = L + o/2.
"""


class Server:
    """The sums of one server, or of the mean one of `count` like servers."""

    __slots__ = (
        "_alike",
        "_at",
        "_costs",
        "_plain",
        "_share",
        "_share_at",
        "context_s",
        "copies",
        "count",
        "decoding_s",
        "gpu",
        "k",
        "models",
        "n",
        "p",
        "price_usd_per_hour",
        "r",
        "read_tokens",
        "speed",
        "w",
    )

    def __init__(self, speed: Speed, gpu: str = "", count: int = 1, price_usd_per_hour: float = 0.0) -> None:
        self.speed = speed
        self.gpu = gpu
        self.count = count
        self.price_usd_per_hour = price_usd_per_hour
        self.models: frozenset[str] = frozenset()
        self.copies = 1.0  # balancers that send here as much as this one does and tell nothing
        self.n = self.w = self.p = self.k = self.r = 0.0
        self.decoding_s = 0.0  # ∫ n dt
        self.context_s = 0.0  # ∫ K dt
        self.read_tokens = 0.0  # prompt tokens read so far, each counted as long as it took
        self._at = 0.0
        self._share = 0.0
        self._share_at = 0.0
        self._costs: Costs | None = None
        self._plain: Plain | None = None
        self._alike: Plain | None = None

    @classmethod
    def of(cls, load: ServerLoad, now: float) -> Server:
        """A server as a quote describes it, as of `now`."""
        s = cls(load.speed, load.gpu, load.count, load.price_usd_per_hour)
        s.models = load.models
        s.n, s.w, s.p = load.decoding, load.waiting, load.prompt_tokens
        s.k, s.r = load.context_tokens, load.remaining_tokens
        s._share, s._share_at = load.prefill_share, now
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

    def runs_at(self, speed: Speed) -> None:
        """What is known of its speed changed."""
        self.speed = speed
        self._costs = self._plain = self._alike = None

    def counts(self, count: int) -> None:
        """There are more or fewer such servers now: what is under way spreads over them."""
        if count != self.count:
            scale = self.count / count
            self.count = count
            self.n, self.w, self.p = self.n * scale, self.w * scale, self.p * scale
            self.k, self.r = self.k * scale, self.r * scale
            self._costs = self._plain = self._alike = None

    def prefill_share(self, now: float) -> float:
        """Fraction of time spent on prompts of late (φ), at most MAX_SHARE: faded sum of p/r over SHARE_S."""
        if self._share == 0.0:
            return 0.0
        return min(MAX_SHARE, self._share * exp(-max(0.0, now - self._share_at) / SHARE_S))

    # -- events ------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Carry the integrals on to `now`."""
        passed = now - self._at
        if passed > 0.0:
            self.decoding_s += self.n * passed
            self.context_s += self.k * passed
            self._at = now

    def dispatched(self, prompt: float, output: float, now: float, times: float = 1.0) -> None:
        """A request with `prompt` uncached tokens and `output` predicted ones was sent, or so many like it."""
        per = times / self.count
        self.w += per
        self.p += prompt * per
        self.r += output * per
        self._reads(prompt * per, now)
        self._costs = self._plain = self._alike = None

    def _reads(self, prompt: float, now: float) -> None:
        """So many prompt tokens are to be read: φ grows by the time that takes."""
        self._share = self.prefill_share(now) + prompt / (self.speed.prefill_tokens_per_s * SHARE_S)
        self._share_at = now

    def first_token(self, prompt: float, context: float, read: float, now: float) -> None:
        """Its first token came: `context` tokens are resident, and its prompt took as long as `read` short ones."""
        self.advance(now)
        per = 1.0 / self.count
        self.w -= per
        self.n += per
        self.p -= prompt * per
        self.k += context * per
        self.read_tokens += read * per
        self._costs = self._plain = self._alike = None

    def ended(self, prompt: float, output: float, context: float, now: float, *, decoding: bool) -> None:
        """It is over, whether it had begun to decode or not."""
        self.advance(now)
        per = 1.0 / self.count
        if decoding:
            self.n -= per
            self.k -= context * per
        else:
            self.w -= per
            self.p -= prompt * per
        self.r -= output * per
        self._costs = self._plain = self._alike = None

    def others(self, sums: Sums, now: float) -> None:
        """So much more (or less) is under way there that somebody else sent."""
        self.advance(now)
        n, w, p, k, r = sums
        self.n, self.w, self.p = self.n + n, self.w + w, self.p + p
        self.k, self.r = self.k + k, self.r + r
        self._costs = self._plain = self._alike = None

    def others_read(self, sent: float, read: float, now: float) -> None:
        """So many more prompt tokens were sent there by others, and so many read, each counted as long as it took.

        Both slow down what decodes there, which says nothing of how fast it decodes.
        """
        self._reads(sent, now)
        self.read_tokens += read

    def copied(self, copies: float) -> None:
        """So many balancers send here, this one among them, and none tells: each counts its own so many times."""
        if copies != self.copies:
            self.copies = copies
            self._costs = self._plain = self._alike = None

    @property
    def sums(self) -> Sums:
        """n, w, P, K and R."""
        return self.n, self.w, self.p, self.k, self.r

    def emptied(self, now: float) -> None:
        """Nothing is under way: the sums are exactly zero again, whatever rounding left in them."""
        self.advance(now)
        self.n = self.w = self.p = self.k = self.r = 0.0
        self._costs = self._plain = self._alike = None

    # -- what a cost needs -------------------------------------------------------------------------------------------

    def costs(self) -> Costs:
        """The sums as of the last event, ready for `prediction`."""
        return self._costs or self._computed()

    def plain(self) -> Plain:
        """The same as coefficients, for a request that finds a slot and memory free."""
        return self._plain or self._reduced()

    def plain_alike(self) -> Plain:
        """The same among like servers, where the backlog counts as well (`prediction.backlog_cost`)."""
        return self._alike or self._reduced_alike()

    def _computed(self) -> Costs:
        v, copies = self.speed, self.copies
        n, w, p = self.n * copies, self.w * copies, self.p * copies
        k, r = self.k * copies, self.r * copies
        requests = n + w
        busy = requests > 1e-9
        step = v.alpha_s + v.beta_s * n + v.gamma_s * k
        rest = max(r / requests, 1.0) if busy else 1.0
        context = k / requests if busy else 0.0
        resident = k + p + r
        full = requests + 1.0 - v.slots
        inv_r = 1.0 / v.prefill_tokens_per_s
        per_token = v.beta_s + 2.0 * v.alpha_s / v.slots + v.gamma_s * context
        self._costs = made = Costs(
            p,
            inv_r,
            0.5 * inv_r / v.attention_tokens,
            max(v.chunk_tokens - n, 1.0),
            step,
            requests,
            rest,
            requests * rest,
            context,
            v.alpha_s,
            v.beta_s,
            v.gamma_s,
            v.kv_tokens,
            v.kv_tokens - resident,
            rest * step * max(full, 1.0) / requests if full > 0.0 and busy else 0.0,
            rest * step / resident if resident > 0.0 else 0.0,
            p * inv_r + r * per_token,
            per_token,
        )
        return made

    def _reduced(self) -> Plain:
        c = self.costs()
        self._plain = made = (
            -1.0 if c.slot_wait_s else c.kv_spare,
            c.prompt_tokens,
            1.0 / c.room,
            c.step_s,
            c.prompt_tokens * c.seconds_per_prompt_token + 0.5 * c.step_s,
            c.seconds_per_prompt_token * (1.0 + c.requests) + c.prompt_tokens * c.seconds_per_position,
            c.seconds_per_position,
            c.alpha_s + c.beta_s,
            c.gamma_s,
            c.shared_tokens,
            1.0 / c.rest_tokens,
            2.0 * c.beta_s + c.gamma_s * c.mean_context,
        )
        return made

    def _reduced_alike(self) -> Plain:
        c, plain = self.costs(), self.plain()
        spare, p, inv_room, step, c0, c1, c2, c3, c4, c5, c6, c7 = plain
        c0 += BACKLOG_WEIGHT * c.backlog_s
        c1 += BACKLOG_WEIGHT * c.seconds_per_prompt_token
        c3 += BACKLOG_WEIGHT * c.backlog_per_token_s
        self._alike = made = (spare, p, inv_room, step, c0, c1, c2, c3, c4, c5, c6, c7)
        return made
