"""Counters and distributions as plain numbers, turned into Prometheus' families when somebody scrapes.

Counting happens on the path of every request and scraping every few seconds, so the work is done there: an increment
is a dictionary and an addition, an observation a bisection. Scrapes run on a thread of their own, and read copies.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Counts:
    """One counter with labels."""

    def __init__(self, name: str, doc: str, labels: Sequence[str]) -> None:
        self.name = name
        self.doc = doc
        self.labels = labels
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        """Count."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def families(self) -> list[Metric]:
        """As Prometheus has it."""
        family = CounterMetricFamily(self.name, self.doc, labels=self.labels)
        for labels, value in list(self.values.items()):
            family.add_metric(labels, value)
        return [family]


class Spread:
    """One distribution with labels, over fixed upper bounds."""

    def __init__(
        self,
        name: str,
        doc: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        also: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        self.name = name
        self.doc = doc
        self.labels = labels
        self.bounds = bounds
        self.also = also  # a second name, with its names of the labels, under which the same figures are offered
        self.values: dict[Labels, list[float]] = {}  # one count a bound and one above, then the sum

    def see(self, labels: Labels, value: float) -> None:
        """Take one observation in."""
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1.0
        row[-1] += value

    def families(self) -> list[Metric]:
        """As Prometheus has it: cumulative buckets."""
        found: list[Metric] = [self._family(self.name, self.labels)]
        if self.also is not None:
            found.append(self._family(*self.also))
        return found

    def _family(self, name: str, label_names: Sequence[str]) -> Metric:
        family = HistogramMetricFamily(name, self.doc, labels=label_names)
        for labels, row in list(self.values.items()):
            so_far, buckets = 0.0, []
            for bound, count in zip((*map(_shown, self.bounds), "+Inf"), row[:-1], strict=True):
                so_far += count
                buckets.append((bound, so_far))
            family.add_metric(labels, buckets, row[-1])
        return family


class Level:
    """One gauge without labels, that goes up and down."""

    def __init__(self, name: str, doc: str) -> None:
        self.name = name
        self.doc = doc
        self.value = 0.0

    def families(self) -> list[Metric]:
        """As Prometheus has it."""
        return [GaugeMetricFamily(self.name, self.doc, value=self.value)]


class Scrape(Collector):
    """Hands all of them to a registry."""

    def __init__(self, *metrics: Counts | Spread | Level) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """The present values."""
        return [family for metric in self._metrics for family in metric.families()]


def _shown(bound: float) -> str:
    return str(float(bound))
