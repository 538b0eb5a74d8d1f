"""What the pools look like, as metrics: one row an endpoint, and how evenly the load lies on a pool.

Read when somebody scrapes. Labels are names of membership; an endpoint that is gone takes its rows with it, so that
servers that come and go under ever new names leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, pstdev

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common import clock
from common.balancing import Balancing
from common.policy.balancer import Balancer
from common.policy.candidate import Candidate
from common.policy.health import State
from common.types import Path, Phase

MOST_ENDPOINTS = 500  # of one pool; what is more has no rows of its own, and counts in the figures of the pool
ENDPOINT = ("node", "endpoint")

Family = GaugeMetricFamily | CounterMetricFamily


class PoolMetrics(Collector):
    """`picks` has how often each endpoint was chosen, by (pool, id); it is pruned here."""

    def __init__(self, balancing: Balancing, picks: dict[tuple[Path, str], float]) -> None:
        self._balancing = balancing
        self._picks = picks

    def describe(self) -> Iterable[Metric]:
        """Names and meanings, without values."""
        return self._families()

    def _families(self) -> list[Family]:
        return [
            GaugeMetricFamily(
                "headwater_endpoint_in_flight_requests", "Requests under way there, sent from here", labels=ENDPOINT
            ),
            GaugeMetricFamily(
                "headwater_endpoint_serving", "1 when it takes requests, 0 when loading or draining", labels=ENDPOINT
            ),
            GaugeMetricFamily(
                "headwater_endpoint_ejected", "1 when it is left alone for its failures", labels=ENDPOINT
            ),
            GaugeMetricFamily("headwater_endpoint_weight", "What weighted policies share traffic by", labels=ENDPOINT),
            GaugeMetricFamily(
                "headwater_endpoint_seconds_per_token",
                "Of an instance at rest, as learned from its answers",
                labels=ENDPOINT,
            ),
            GaugeMetricFamily("headwater_endpoint_report_age_seconds", "Age of its last load report", labels=ENDPOINT),
            CounterMetricFamily("headwater_picks", "How often it was chosen here", labels=ENDPOINT),
            GaugeMetricFamily(
                "headwater_pool_utilization",
                "U: share of the batch places of a cluster's instances that are taken, mean",
                labels=("node",),
            ),
            GaugeMetricFamily(
                "headwater_pool_imbalance",
                "L: standard deviation over a cluster's instances of the share of places taken",
                labels=("node",),
            ),
            GaugeMetricFamily("headwater_pool_stale", "1 when the membership store is out of reach", labels=("node",)),
            CounterMetricFamily("headwater_ejections", "Times an endpoint was set aside", labels=("node",)),
        ]

    def collect(self) -> Iterable[Metric]:
        """The present values. O(endpoints)."""
        families = self._families()
        by_name = {family.name: family for family in families}
        now = clock.now()
        balancers = list(self._balancing.balancers.items())
        known = {(path, id_) for path, b in balancers for id_ in list(b.candidates)}
        for gone in [key for key in list(self._picks) if key not in known]:
            self._picks.pop(gone, None)
        for path, balancer in balancers:
            self._pool(by_name, path, balancer)
            for id_, c in list(balancer.candidates.items())[:MOST_ENDPOINTS]:
                self._endpoint(by_name, ("/".join(path), id_), path, c, now)
        return families

    def _pool(self, families: Mapping[str, Family], path: Path, balancer: Balancer) -> None:
        node = ("/".join(path),)
        families["headwater_pool_stale"].add_metric(node, float(balancer.stale))
        families["headwater_ejections"].add_metric(node, float(balancer.ejections))
        taken = [
            (c.server.n + c.server.w) / max(1.0, c.server.speed.slots)
            for c in list(balancer.candidates.values())
            if c.phase is Phase.SERVING
        ]
        if len(path) == 2 and taken:
            families["headwater_pool_utilization"].add_metric(node, fmean(taken))
            families["headwater_pool_imbalance"].add_metric(node, pstdev(taken))

    def _endpoint(
        self, families: Mapping[str, Family], labels: tuple[str, str], path: Path, c: Candidate, now: float
    ) -> None:
        values = {
            "headwater_endpoint_in_flight_requests": float(c.in_flight),
            "headwater_endpoint_serving": float(c.phase is Phase.SERVING),
            "headwater_endpoint_ejected": float(c.breaker.state is not State.CLOSED),
            "headwater_endpoint_weight": c.share,
            "headwater_picks": self._picks.get((path, labels[1]), 0.0),
        }
        if c.report is not None:
            values["headwater_endpoint_report_age_seconds"] = now - c.report_at
        if len(path) == 2 and c.estimates[0].samples:
            speed = c.estimates[0].speed
            values["headwater_endpoint_seconds_per_token"] = speed.alpha_s + speed.beta_s
        for name, value in values.items():
            families[name].add_metric(labels, value)
