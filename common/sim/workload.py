"""Traffic: public traces read, stretched, cut and superposed; or drawn from the statistics published of one.

Pure: the random generator comes in, and the same one gives the same traffic on every host. What the requests then
meet (servers in virtual time, or a live URL) is another module's business.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import accumulate, islice
from random import Random

from common.sim.traces import BLOCK_TOKENS, TraceRow, read_trace
from common.types import Priority

__all__ = [
    "BLOCK_TOKENS",
    "Conversations",
    "Quantiles",
    "TraceRow",
    "mean_rate",
    "read_trace",
    "scaled",
    "spread",
    "superposed",
    "window",
]


def mean_rate(rows: Sequence[TraceRow]) -> float:
    """Mean arrivals per second from the first row to the last; 0.0 where both arrive at once."""
    span_s = rows[-1].arrival_s - rows[0].arrival_s if rows else 0.0
    return (len(rows) - 1) / span_s if span_s > 0.0 else 0.0


def scaled(rows: Sequence[TraceRow], *, rate: float | None = None, factor: float | None = None) -> list[TraceRow]:
    """The same requests at `rate` per second on average, or `factor` times as fast; exactly one of the two.

    Bursts are compressed with everything else, so a very bursty trace is better superposed (`superposed`).
    Raises ValueError where rate or factor is not positive, or the rows have no rate to scale.
    """
    if (rate is None) == (factor is None):
        raise ValueError("give a rate or a factor")
    if factor is None:
        assert rate is not None
        now = mean_rate(rows)
        if now == 0.0:
            raise ValueError("rows that all arrive at once have no rate to scale")
        factor = rate / now
    if not (math.isfinite(factor) and factor > 0.0):
        raise ValueError("rate and factor must be more than 0")
    return [replace(row, arrival_s=row.arrival_s / factor) for row in rows]


def window(rows: Sequence[TraceRow], start_s: float = 0.0, count: int | None = None) -> list[TraceRow]:
    """The first `count` rows (None: all) arriving at `start_s` seconds or later; the first of them arrives at 0."""
    first = next((index for index, row in enumerate(rows) if row.arrival_s >= start_s), len(rows))
    cut = rows[first : None if count is None else first + count]
    return [replace(row, arrival_s=row.arrival_s - cut[0].arrival_s) for row in cut]


def spread(rows: Sequence[TraceRow], stamp_s: float, rng: Random) -> list[TraceRow]:
    """The same requests, each up to `stamp_s` later: for traces whose clock is that coarse, such as Mooncake's 3 s."""
    moved = [replace(row, arrival_s=row.arrival_s + rng.uniform(0.0, stamp_s)) for row in rows]
    return sorted(moved, key=lambda row: row.arrival_s)


def superposed(rows: Sequence[TraceRow], copies: int, shift_s: float) -> list[TraceRow]:
    """`copies` of the trace at once, each `shift_s` later than the one before, wrapped round the trace's span.

    Multiplies the rate and keeps each copy's own bursts. Copies are other people: their sessions and prefix hashes
    differ, so no copy finds another's text in a cache; their clients are the same tenants.
    """
    if copies < 1 or not rows:
        raise ValueError("superposing needs at least one copy and one row")
    start_s = rows[0].arrival_s
    span_s = rows[-1].arrival_s - start_s + 1.0 / (mean_rate(rows) or 1.0)  # one mean gap before it starts over
    stride = 1 + max((max(row.prefix_hashes, default=0) for row in rows), default=0)
    merged = [
        replace(
            row,
            arrival_s=start_s + (row.arrival_s - start_s + copy * shift_s) % span_s,
            prefix_hashes=tuple(block + copy * stride for block in row.prefix_hashes),
            session=f"{row.session}+{copy}" if row.session and copy else row.session,
        )
        for copy in range(copies)
        for row in rows
    ]
    return sorted(merged, key=lambda row: row.arrival_s)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution given by its quantiles: a share `shares[i]` (0…1) lies below `values[i]`; log-linear between."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, share: float) -> float:
        """The value below which `share` (0…1) lies."""
        right = min(max(bisect_right(self.shares, share), 1), len(self.shares) - 1)
        low, high = self.values[right - 1], self.values[right]
        part = (share - self.shares[right - 1]) / (self.shares[right] - self.shares[right - 1])
        return float(low * (high / low) ** part)


# Azure LLM inference trace 2023, conversation (github Azure/AzurePublicDataset b469a11, CC-BY 4.0; Splitwise, ISCA'24):
# 19,366 requests; input mean 1155, output mean 211, inter-arrival CV 1.09. The 50, 90, 95 and 99 % points are the ones
# published; the others are the trace's own and pin the mean, which four quantiles leave open. The last point stands for
# the longest 0.1 %: of inputs it is the value that gives their mean, while the single longest was 14,050.
_SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
INPUT_TOKENS = Quantiles(_SHARES, (8, 29, 181, 396, 1020, 1189, 2734, 4083, 4142, 6212, 8000))
OUTPUT_TOKENS = Quantiles(_SHARES, (7, 16, 41, 85, 129, 395, 424, 451, 601, 954, 1000))
ARRIVAL_CV = 1.09

_BLOCKS = 1 << 12  # block ids set aside for one conversation: 2 M tokens
_READY = 1024  # conversations that wait for a request long enough to be their next turn; the oldest gives up
_NEW_TOKENS = 16  # the least a new turn adds to what was said before
_ANSWER_S_PER_TOKEN = 0.03  # how long an answer is taken to last before it can be followed up
_PATIENCE = 30.0  # times `think_s` after which a conversation that nothing fitted has ended


@dataclass(frozen=True, slots=True, order=True)
class _Talk:
    """A conversation that will have another turn: from when, and the tokens of prompt and answer it then holds."""

    ready_s: float
    number: int
    tenant: int
    tokens: int


class Conversations(Iterator[TraceRow]):
    """Endless conversation traffic with the published lengths and burstiness: iterate, or take `rows`.

    Lengths of input and output are drawn independently (the trace's correlation is 0.09). A `follow_up_share` (0…1)
    of requests, somewhat less in the first minute, continues a conversation: its prompt is the last prompt, the answer
    and something new. The default of a half means two turns a conversation, the mean of LMSYS-Chat-1M (Zheng et al.,
    2023). Between an answer and the next turn lies an exponential time of mean `think_s`; people take longer than the
    default, which keeps conversations inside a run of minutes. `tenants` have traffic in shares of 1, 1/2, 1/3, …, and
    `priorities` go round them.
    """

    def __init__(
        self,
        rng: Random,
        *,
        rate: float = 10.0,
        follow_up_share: float = 0.5,
        think_s: float = 10.0,
        tenants: int = 8,
        priorities: Sequence[Priority] = (Priority.STANDARD,),
    ) -> None:
        """`rate` is in requests per second. Raises ValueError for what cannot be."""
        if not (rate > 0.0 and 0.0 <= follow_up_share < 1.0 and think_s >= 0.0 and tenants > 0 and priorities):
            raise ValueError("traffic needs a rate above 0, a follow-up share of 0 to 1, tenants and priorities")
        self._rng = rng
        self._rate = rate
        self._share = follow_up_share
        self._think_s = think_s
        self._tenants = list(accumulate(1.0 / rank for rank in range(1, tenants + 1)))
        self._priorities = tuple(priorities)
        self._coming: list[_Talk] = []  # a heap by ready_s
        self._ready: list[_Talk] = []
        self._base = rng.getrandbits(20)  # so that two generators hold different conversations
        self._started = 0
        self._now = 0.0

    def rows(self, count: int) -> list[TraceRow]:
        """The next `count` requests."""
        return list(islice(self, count))

    def __next__(self) -> TraceRow:
        now = self._now
        shape = 1.0 / (ARRIVAL_CV * ARRIVAL_CV)  # a Gamma distribution with this shape has that CV
        self._now += self._rng.gammavariate(shape, 1.0 / (shape * self._rate))
        input_tokens = round(INPUT_TOKENS.at(self._rng.random()))
        output_tokens = round(OUTPUT_TOKENS.at(self._rng.random()))
        number, tenant = self._talk(input_tokens, now)
        if self._rng.random() < self._share:
            ready_s = now + output_tokens * _ANSWER_S_PER_TOKEN + self._rng.expovariate(1.0) * self._think_s
            heappush(self._coming, _Talk(ready_s, number, tenant, input_tokens + output_tokens))
        first_block = (self._base << 40) + number * _BLOCKS
        return TraceRow(
            arrival_s=now,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            prefix_hashes=tuple(range(first_block, first_block + math.ceil(input_tokens / BLOCK_TOKENS))),
            client=f"tenant-{tenant}",
            priority=self._priorities[tenant % len(self._priorities)],
            session=f"{self._base:x}-{number}",
        )

    def _talk(self, input_tokens: int, now: float) -> tuple[int, int]:
        """Number and tenant of the conversation a prompt of this length belongs to: the longest it can continue."""
        while self._coming and self._coming[0].ready_s <= now:
            self._ready.append(heappop(self._coming))
        given_up_s = now - _PATIENCE * self._think_s
        self._ready = [talk for talk in self._ready[-_READY:] if talk.ready_s >= given_up_s]
        fitting = [talk for talk in self._ready if talk.tokens + _NEW_TOKENS <= input_tokens]
        if fitting:
            longest = max(fitting, key=lambda talk: talk.tokens)
            self._ready.remove(longest)
            return longest.number, longest.tenant
        self._started += 1
        tenant = bisect_right(self._tenants, self._rng.random() * self._tenants[-1])
        return self._started, min(tenant, len(self._tenants) - 1)
