"""Which prompt blocks a server still has in its KV memory: least recently used hashes, bounded.

A block is PREFIX_BLOCK_TOKENS of prompt, its hash covers all before it, so a block counts only if all before it are
there. A balancer keeps one such mirror an endpoint, of what it and the other balancers of its node sent there; the
simulated server keeps the real one.
Source: automatic prefix caching as in vLLM and SGLang's RadixAttention (arXiv 2312.07104).
"""

from __future__ import annotations

from collections import OrderedDict, deque

PREFIX_BLOCK_TOKENS = 512  # about 2,048 bytes of English; the unit of the public traces' `hash_ids_512`
CACHED_SHARE = 0.9  # of KV memory that finished prompts may linger in
SHRINK, GROW = 0.9, 1.01  # of a mirror's capacity, when a server had less than the mirror, or as much
TELL_S = 0.1  # between two times that balancers tell each other where prompts went
TOLD_S = 0.5  # a prompt is told to other balancers for so long: they listen more often, and may miss a few times
TOLD_BLOCKS = 8192  # of all prompts that are told at a time; of more the oldest are left out


class PrefixCache:
    """Least recently used block hashes. Of one prompt the tail is evicted first, as in vLLM."""

    __slots__ = ("_blocks", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def held(self, hashes: tuple[int, ...]) -> int:
        """Number of leading blocks held; changes nothing. O(blocks held)."""
        count = 0
        for block in hashes:
            if block not in self._blocks:
                break
            count += 1
        return count

    def match(self, hashes: tuple[int, ...]) -> int:
        """The same, and they become the most recently used."""
        count = self.held(hashes)
        for block in reversed(hashes[:count]):
            self._blocks.move_to_end(block)
        return count

    def insert(self, hashes: tuple[int, ...]) -> None:
        """Take in a prompt that was read; evicts what was used longest ago. O(blocks)."""
        blocks = self._blocks
        for block in reversed(hashes[: self.capacity]):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)


class Mirror(PrefixCache):
    """What a server is believed to have cached, corrected by what it says it had."""

    __slots__ = ("_largest",)

    def __init__(self, kv_tokens: float) -> None:
        super().__init__(max(1, int(kv_tokens * CACHED_SHARE) // PREFIX_BLOCK_TOKENS))
        self._largest = self.capacity

    def corrected(self, believed_tokens: float, cached_tokens: float) -> None:
        """A server had `cached_tokens` of a prompt where `believed_tokens` were expected.

        Having less means that it evicts earlier than believed (others use it too, or its memory is smaller), so the
        mirror forgets earlier as well; having as much lets it grow back.
        """
        if cached_tokens + PREFIX_BLOCK_TOKENS <= believed_tokens:
            self.capacity = max(1, int(self.capacity * SHRINK))
        elif believed_tokens > 0.0:
            self.capacity = min(self._largest, int(self.capacity * GROW) + 1)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


Prompts = tuple[int, list[tuple[str, tuple[int, ...]]]]
"""Prompts that one balancer sent of late: number of the first among all that it sent; (endpoint, block hashes) each."""


class SentPrompts:
    """What one balancer tells others of the prompts it sent, and how far it has heard each of them. Bounded."""

    __slots__ = ("_blocks", "_heard", "_next", "_sent")

    def __init__(self) -> None:
        self._sent: deque[tuple[float, str, tuple[int, ...]]] = deque()
        self._blocks = 0  # in `_sent`
        self._next = 0  # number of the next prompt
        self._heard: dict[str, int] = {}  # balancer -> number of its next prompt

    def add(self, endpoint: str, hashes: tuple[int, ...], now: float) -> None:
        """One was sent; `hashes` are its blocks'."""
        self._sent.append((now, endpoint, hashes))
        self._blocks += len(hashes)
        self._next += 1
        while self._blocks > TOLD_BLOCKS:
            self._drop()

    def _drop(self) -> None:
        self._blocks -= len(self._sent.popleft()[2])

    def tell(self, now: float) -> Prompts:
        """Those of the last TOLD_S, the oldest first."""
        while self._sent and self._sent[0][0] < now - TOLD_S:
            self._drop()
        return self._next - len(self._sent), [(endpoint, hashes) for _, endpoint, hashes in self._sent]

    def news(self, balancer: str, told: Prompts) -> list[tuple[str, tuple[int, ...]]]:
        """What another one tells for the first time. One whose numbers went back has begun anew."""
        first, sent = told
        known, self._heard[balancer] = self._heard.get(balancer, 0), first + len(sent)
        return sent[max(0, known - first) if known <= first + len(sent) else 0 :]

    def keep(self, balancers: frozenset[str]) -> None:
        """Forget what was heard of all others."""
        for gone in self._heard.keys() - balancers:
            del self._heard[gone]
