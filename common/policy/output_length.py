"""How many tokens an answer will have: running means, by what is known of the request.

Source: output length by prompt bucket after S3 (arXiv 2306.06000), reduced to means with forgetting. Errors of a factor
of two cost the marginal cost rule some 5 % of the mean latency, so no heavier predictor is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from math import log2
from typing import ClassVar


class OutputLength:
    """Expected output tokens by (model, tenant, prompt bucket), backing off to coarser keys; O(1), bounded.

    Each key's mean counts as so many samples as it has, against PRIOR samples of the next coarser key's. A mean forgets
    over about MEMORY samples. Beyond `max_keys` the key that was taught longest ago gives way.
    """

    MEMORY: ClassVar = 500
    PRIOR: ClassVar = 10.0
    FIRST_GUESS: ClassVar = 128.0  # tokens; the median of public conversation traffic
    FINE: ClassVar = 4  # buckets an octave of prompt: what asks with its own length of prompt has its own of answer

    __slots__ = ("_means", "max_keys")

    def __init__(self, max_keys: int = 16_384) -> None:
        self.max_keys = max_keys
        self._means: OrderedDict[tuple[str, ...], list[float]] = OrderedDict()

    @classmethod
    def _keys(cls, model: str, tenant: str, input_tokens: int) -> tuple[tuple[str, ...], ...]:
        """From the coarsest to the finest."""
        octaves = log2(input_tokens + 1)
        fine, coarse = str(int(cls.FINE * octaves)), f"octave {int(octaves)}"
        keys: tuple[tuple[str, ...], ...] = ((), (model,), (model, "", coarse), (model, "", fine))
        return (*keys, (model, tenant, fine)) if tenant else keys  # a key that stood twice would learn twice

    def expect(self, model: str, tenant: str, input_tokens: int, cap: int | None) -> float:
        """Expected output tokens, at least 1 and at most `cap` (the request's max_tokens)."""
        guess = self.FIRST_GUESS
        for key in self._keys(model, tenant, input_tokens):
            mean = self._means.get(key)
            if mean is not None:
                # Of one model, or of all, the first answer says more than the guess.
                prior = self.PRIOR if len(key) > 1 else 0.0
                guess = (mean[0] * mean[1] + prior * guess) / (mean[0] + prior)
        return max(1.0, min(guess, cap) if cap is not None else guess)

    def learn(self, model: str, tenant: str, input_tokens: int, output_tokens: float) -> None:
        """Take one finished answer in."""
        for key in self._keys(model, tenant, input_tokens):
            mean = self._means.get(key)
            if mean is None:
                if len(self._means) >= self.max_keys:
                    self._means.popitem(last=False)
                mean = self._means[key] = [0.0, 0.0]
            else:
                self._means.move_to_end(key)
            mean[0] = min(mean[0] + 1.0, self.MEMORY)
            mean[1] += (output_tokens - mean[1]) / mean[0]
