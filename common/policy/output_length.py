"""How many tokens an answer will have: running means, by what is known of the request.

Source: output length by prompt bucket after S3 (arXiv 2306.06000), reduced to means with forgetting. Errors of a factor
of two cost the marginal cost rule some 5 % of the mean latency, so no heavier predictor is needed.
"""

from __future__ import annotations

from math import log2
from typing import ClassVar


class OutputLength:
    """Expected output tokens by (model, tenant, prompt bucket), backing off to coarser keys; O(1), bounded.

    A key's mean forgets over about `MEMORY` samples. Beyond `max_keys` the key that was made first gives way.
    """

    MEMORY: ClassVar = 500
    ENOUGH: ClassVar = 20  # samples before a finer key is believed over the coarser one
    FIRST_GUESS: ClassVar = 128.0  # tokens; the median of public conversation traffic

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
                if len(self._means) >= self.max_keys:
                    del self._means[next(iter(self._means))]
                mean = self._means[key] = [0.0, 0.0]
            mean[0] = min(mean[0] + 1.0, self.MEMORY)
            mean[1] += (output_tokens - mean[1]) / mean[0]
