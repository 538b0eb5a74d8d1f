"""How many tokens a prompt has: from its bytes, calibrated per model by what servers count.

Bytes a token differ by language and tokenizer (English 4, Chinese in UTF-8 2 to 3), so each model's ratio is learned
from the `usage` of its answers, and beside it what one image or clip is worth. O(1) a request, no tokenizer.
"""

from __future__ import annotations

from collections import OrderedDict

BYTES_PER_TOKEN = 4.0  # of English text and JSON under common tokenizers
TOKENS_PER_ITEM = 600.0  # of an image, before any was seen
LEAST, MOST = 0.5, 16.0  # bytes a token, whatever a server says
MOST_PER_ITEM = 100_000.0
MEMORY_TOKENS = 200_000.0  # a ratio forgets over so many tokens
MEMORY_ITEMS = 100.0


class _Ratio:
    __slots__ = ("item_tokens", "items", "text_bytes", "text_tokens")

    def __init__(self) -> None:
        self.text_bytes = 1000.0 * BYTES_PER_TOKEN  # the prior weighs a thousand tokens
        self.text_tokens = 1000.0
        self.item_tokens = TOKENS_PER_ITEM
        self.items = 1.0

    @property
    def bytes_per_token(self) -> float:
        return max(LEAST, min(MOST, self.text_bytes / self.text_tokens))


class InputLength:
    """Expected prompt tokens by model; bounded: the model used longest ago gives way."""

    __slots__ = ("_ratios", "max_models")

    def __init__(self, max_models: int = 1024) -> None:
        self.max_models = max_models
        self._ratios: OrderedDict[str, _Ratio] = OrderedDict()

    def expect(self, model: str, text_bytes: int, items: int = 0) -> int:
        """Tokens of so many bytes of text and so many images, clips or other `items`; at least 1."""
        ratio = self._ratios.get(model)
        if ratio is None:
            return max(1, round(text_bytes / BYTES_PER_TOKEN + items * TOKENS_PER_ITEM))
        return max(1, round(text_bytes / ratio.bytes_per_token + items * ratio.item_tokens))

    def learn(self, model: str, text_bytes: int, items: int, tokens: float) -> None:
        """A server counted `tokens` in such a prompt."""
        if tokens <= 0.0 or text_bytes <= 0:
            return
        ratio = self._ratios.get(model)
        if ratio is None:
            if len(self._ratios) >= self.max_models:
                self._ratios.popitem(last=False)
            ratio = self._ratios[model] = _Ratio()
        self._ratios.move_to_end(model)
        if items:
            each = (tokens - text_bytes / ratio.bytes_per_token) / items
            ratio.items = min(ratio.items + items, MEMORY_ITEMS)
            weight = min(1.0, items / ratio.items)
            ratio.item_tokens += weight * (max(0.0, min(each, MOST_PER_ITEM)) - ratio.item_tokens)
            return
        ratio.text_bytes += text_bytes
        ratio.text_tokens += tokens
        if ratio.text_tokens > MEMORY_TOKENS:
            keep = MEMORY_TOKENS / ratio.text_tokens
            ratio.text_bytes *= keep
            ratio.text_tokens *= keep
