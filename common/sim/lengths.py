"""What a balancer expects of an answer's length before it has begun: learned as in production, or known, to compare."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random
from typing import Protocol

from common.policy.output_length import OutputLength
from common.sim.traces import TraceRow


class Lengths(Protocol):
    """The length predictor of one balancer."""

    def expect(self, row: TraceRow) -> float:
        """Expected output tokens of a request, at least 1; 0 for one that does not generate."""

    def learn(self, row: TraceRow) -> None:
        """A request ended with its true length."""


class Learned:
    """The production estimate: by model, prompt bucket and, where `tenants` says so, tenant; it never sees a length."""

    __slots__ = ("_lengths", "_tenants")

    def __init__(self, *, tenants: bool = False) -> None:
        self._lengths = OutputLength()
        self._tenants = tenants

    def expect(self, row: TraceRow) -> float:
        """By what has ended so far."""
        if row.output_tokens == 0:
            return 0.0  # an embedding: its API says so
        return self._lengths.expect(row.model, row.client if self._tenants else "", row.input_tokens, None)

    def learn(self, row: TraceRow) -> None:
        """Take one finished answer in."""
        if row.output_tokens:
            client = row.client if self._tenants else ""
            self._lengths.learn(row.model, client, row.input_tokens, float(row.output_tokens))


class Known:
    """The true length, off by a factor drawn from a lognormal distribution of standard deviation `sigma`."""

    __slots__ = ("_rng", "_sigma")

    def __init__(self, sigma: float, rng: Random) -> None:
        self._sigma = sigma
        self._rng = rng

    def expect(self, row: TraceRow) -> float:
        """True length times the error of this request."""
        if not self._sigma or row.output_tokens == 0:
            return float(row.output_tokens)
        return max(1.0, row.output_tokens * exp(self._sigma * self._rng.gauss(0.0, 1.0)))

    def learn(self, row: TraceRow) -> None:
        """There is nothing to learn."""


LengthsOf = Callable[[Random], Lengths]
"""Makes the predictor of one balancer, with a random generator of its own."""


def lengths_named(name: str, *, tenants: bool = False) -> LengthsOf:
    """`learned`, `oracle`, or `noise:S`: true lengths off by exp(S·z), z normal. Raises ValueError for another name."""
    if name == "learned":
        return lambda rng: Learned(tenants=tenants)
    if name == "oracle":
        return lambda rng: Known(0.0, rng)
    kind, _, value = name.partition(":")
    try:
        sigma = float(value) if kind == "noise" else -1.0
    except ValueError:
        sigma = -1.0
    if not 0.0 <= sigma <= 10.0:
        raise ValueError(f"lengths {name!r}: not learned, oracle or noise:S with S from 0 to 10")
    return lambda rng: Known(sigma, rng)
