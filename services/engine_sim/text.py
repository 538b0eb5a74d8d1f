"""Prompts and answers: how long they are, what of them repeats, and words to fill them with.

A token is four bytes of UTF-8, about what tokenizers reach on English prose. Nothing here reads what a prompt says.
"""

from __future__ import annotations

from array import array
from math import exp, log
from statistics import NormalDist

import xxhash

TOKEN_BYTES = 4
BLOCK_BYTES = 2048  # of a prefix block: 512 tokens, the unit of the public traces
OUTPUT_SIGMA = 0.8  # of the log of answer lengths: p99/median is 6.4, public traces have 4 (Azure conv) to 9 (R1)
BURST_TOKENS = 256  # most tokens of one write

_PROSE = """ A server that answers many people at once gathers what they ask into a batch and moves all of them on by
 one word at a time. Each step reads the weights once, so a larger batch costs little more than a small one until its
 memory is full. Long questions are read in pieces between the steps, which keeps the answers under way from waiting.
 When one server is busy another may be idle, and what was asked before may still be remembered there. Sending each
 question where everybody together waits the least needs a guess of how long its answer will be. The guess is wrong
 for one person and right for a thousand, and the queue does not know the difference. So we measure, learn and choose
 again."""
_WORDS = tuple(b" " + word.encode() for word in _PROSE.split())
# Repeated, so that every slice of at most BURST_TOKENS that begins in the first copy is whole.
RING = _WORDS * (2 + BURST_TOKENS // len(_WORDS))
RING_TOKENS = len(_WORDS)


def count_tokens(text: bytes) -> int:
    """Tokens of a prompt, at least 1."""
    return max(1, (len(text) + TOKEN_BYTES - 1) // TOKEN_BYTES)


def bytes_of_tokens(ids: list[int]) -> bytes:
    """A prompt given as token ids, as bytes of the same length in tokens. Raises OverflowError for what is no id."""
    return array("I", ids).tobytes()


def prefix_hashes(text: bytes) -> tuple[int, ...]:
    """Chained hashes of the full leading blocks: equal where two prompts agree from the start."""
    hashes, chain = [], 0
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = xxhash.xxh64_intdigest(text[start : start + BLOCK_BYTES], chain)
        hashes.append(chain)
    return tuple(hashes)


def drawn_output_tokens(body: bytes, index: int, mean: float, seed: int) -> int:
    """Length of an answer that nobody gave: lognormal, and the same for the same request wherever it is answered."""
    draw = xxhash.xxh64_intdigest(body, (seed + index) & (2**64 - 1))
    quantile = ((draw >> 11) + 0.5) / 2**53
    normal = NormalDist().inv_cdf(quantile)
    return max(1, round(exp(log(mean) - 0.5 * OUTPUT_SIGMA**2 + OUTPUT_SIGMA * normal)))


def words(offset: int, start: int, count: int) -> tuple[bytes, ...]:
    """Tokens number `start` to `start + count` of the answer that begins at `offset`; at most BURST_TOKENS."""
    at = (offset + start) % RING_TOKENS
    return RING[at : at + count]


def answer(offset: int, count: int) -> str:
    """The whole answer of `count` tokens."""
    at = offset % RING_TOKENS
    whole = RING[at : at + RING_TOKENS] * (1 + count // RING_TOKENS)
    return b"".join(whole[:count]).decode()


def embedding(text: bytes, dimensions: int) -> list[float]:
    """A unit vector that depends on the text alone."""
    digest = xxhash.xxh64_digest(text)
    values = [xxhash.xxh32_intdigest(digest, i) / 2**31 - 1.0 for i in range(dimensions)]
    norm = sum(v * v for v in values) ** 0.5 or 1.0
    return [v / norm for v in values]
