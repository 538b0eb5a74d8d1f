"""How fast a server is, learned from the requests it answers: α, β, γ and r of `types.Speed`, with forgetting.

A request's decode time is linear in them. While it got its tokens, one a step, the server decoded n sequences with K
tokens of context in the mean and read some prompt tokens in between:

    seconds = tokens·α + tokens·n·β + tokens·K·γ + prompt_tokens_read/r

So each finished stream is one equation for four unknowns, solved by recursive least squares from the prior of the
server's class. What is learned are factors on the prior, one common (the model may be nine times larger than that of
the prior) and one each, so a class's ratios hold until the data say otherwise. Samples are bounded in their pull, a
run of large errors (another model, a throttled GPU) raises the step at once, and slow drift is forgotten over some
hundreds of samples. O(1) a sample.

Source: recursive least squares with exponential forgetting (Ljung, *System Identification*, chapter 11); the cumulative
sum for change detection is Page's (Biometrika, 1954).
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

from common.types import Speed

FORGET = 0.998  # a sample counts half after some 350 more
SPREAD = 0.5  # prior standard deviation of a factor
COMMON = 0.6  # correlation of the factors: what is slow at one thing is slow at the others
NOISE = 0.15  # standard deviation of one sample, relative
FACTOR = 4.0  # each factor stays within [1/4, 4] of the common one
SCALE = 1e5  # the common factor stays within [1/SCALE, SCALE]: what reads images is far from the priors
FIRST = 3  # samples that may say that all constants are off alike: the least far of them is believed
FIRST_SCALE = 2.0  # if they are off by more than this; a cold first request is slow for reasons of its own
PULL = 3.0  # standard deviations: no sample pulls harder
DRIFT_SLACK = 0.5  # standard deviations a sample may be off without counting for drift
DRIFT_LIMIT = 8.0  # accumulated standard deviations that are a change: some four bad samples in a row


class SpeedEstimate:
    """The estimate of one server. `speed` is the present one, `samples` how many it comes from."""

    __slots__ = (
        "_covariance",
        "_drift",
        "_factors",
        "_first",
        "_ratio",
        "_scale",
        "prior",
        "refits",
        "samples",
        "speed",
    )

    def __init__(self, prior: Speed) -> None:
        self.prior = prior
        self.speed = prior
        self.samples = 0
        self.refits = 0  # how often a change was found
        self._first: list[float] = []  # logs of what the first samples were off by
        self._scale = 1.0
        self._factors = [1.0, 1.0, 1.0, 1.0]
        self._covariance = _start()
        self._drift = [0.0, 0.0]  # accumulated errors above and below
        self._ratio = 0.0  # log of seen over expected, averaged over the latest few samples

    def begin_from(self, prior: Speed) -> None:
        """There is a better prior, which has in it what the few samples so far said."""
        shift = log(prior.alpha_s / self.prior.alpha_s)
        self._first = [off - shift for off in self._first]
        self._scale, self._factors, self._covariance = 1.0, [1.0, 1.0, 1.0, 1.0], _start()
        self.prior = self.speed = prior

    def learn(self, seconds: float, tokens: float, n: float, k: float, prompt: float, noise: float = NOISE) -> None:
        """Take one span of a request in: `tokens` decoded in `seconds` beside n sequences with K tokens of context.

        `prompt` tokens were read on the server meanwhile. `noise` is the sample's relative standard deviation.
        """
        parts = [part * self._scale for part in _parts(self.prior, tokens, n, k, prompt)]
        expected = sum(parts)
        if expected <= 0.0 or seconds <= 0.0:
            return
        ratio = seconds / expected
        self.samples += 1
        if self.samples <= FIRST and not 1.0 / FIRST_SCALE <= ratio <= FIRST_SCALE:
            self._first.append(log(ratio))
            if len(self._first) == FIRST:
                self._rescale(exp(min(self._first, key=abs)))
                self._publish()
            return
        self._update([part / expected for part in parts], ratio, noise)
        self._publish()

    def _update(self, h: list[float], seen: float, noise: float) -> None:
        x, p = self._factors, self._covariance
        guess = h[0] * x[0] + h[1] * x[1] + h[2] * x[2] + h[3] * x[3]
        ph = [row[0] * h[0] + row[1] * h[1] + row[2] * h[2] + row[3] * h[3] for row in p]
        variance = h[0] * ph[0] + h[1] * ph[1] + h[2] * ph[2] + h[3] * ph[3] + (noise * guess) ** 2
        deviation = sqrt(variance)
        error = max(-PULL, min(PULL, (seen - guess) / deviation)) * deviation
        self._ratio += 0.25 * (log(seen / guess) - self._ratio)
        if self._drifted(error / deviation):
            self._refit()
            return
        for i in range(4):
            gain = ph[i] / variance
            x[i] = max(1.0 / FACTOR, min(FACTOR, x[i] + gain * error))
            row = p[i]
            for j in range(4):
                row[j] = (row[j] - gain * ph[j]) / FORGET
        widest = max(p[0][0], p[1][1], p[2][2], p[3][3])
        if widest > SPREAD * SPREAD:  # what no sample speaks of must not grow without bound by forgetting
            shrink = SPREAD * SPREAD / widest
            for row in p:
                for j in range(4):
                    row[j] *= shrink

    def _drifted(self, error: float) -> bool:
        above, below = self._drift
        self._drift = [max(0.0, above + error - DRIFT_SLACK), max(0.0, below - error - DRIFT_SLACK)]
        return max(self._drift) > DRIFT_LIMIT

    def _refit(self) -> None:
        """The server is another one than it was: take the latest ratio over, and believe new samples again."""
        self.refits += 1
        self._rescale(exp(self._ratio))

    def _rescale(self, ratio: float) -> None:
        self._scale = max(1.0 / SCALE, min(SCALE, self._scale * ratio))
        self._covariance = _start()
        self._drift = [0.0, 0.0]
        self._ratio = 0.0

    def _publish(self) -> None:
        q, s, x = self.prior, self._scale, self._factors
        self.speed = replace(
            q,
            alpha_s=q.alpha_s * s * x[0],
            beta_s=q.beta_s * s * x[1],
            gamma_s=q.gamma_s * s * x[2],
            prefill_tokens_per_s=q.prefill_tokens_per_s / (s * x[3]),
        )


def off_by(v: Speed, seconds: float, tokens: float, n: float, k: float, prompt: float) -> float:
    """Seconds a span of a request took over those it should take at this speed (see `learn`); 0 if it says nothing."""
    expected = sum(_parts(v, tokens, n, k, prompt))
    return seconds / expected if expected > 0.0 and seconds > 0.0 else 0.0


def _parts(v: Speed, tokens: float, n: float, k: float, prompt: float) -> tuple[float, float, float, float]:
    return tokens * v.alpha_s, tokens * n * v.beta_s, tokens * k * v.gamma_s, prompt / v.prefill_tokens_per_s


def _start() -> list[list[float]]:
    v = SPREAD * SPREAD
    return [[v if i == j else v * COMMON for j in range(4)] for i in range(4)]
