"""What scaling has decided, for people and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.scaling.scaler import Scaler

GROUP = ("model", "group")


def scaling_router(scaler: Scaler) -> APIRouter:
    """The routes of the admin API."""
    router = APIRouter(prefix="/admin/v1/scaling", tags=["scaling"])

    @router.get("")
    async def scaling() -> dict[str, Any]:
        """Each model's replicas as desired and as they are, and why. Rates are requests a second."""
        return {"acts": scaler.acts, "models": {name: _shown(scaler, name) for name in scaler.models}}

    return router


def _shown(scaler: Scaler, name: str) -> dict[str, Any]:
    model = scaler.models[name]
    decision = model.decision
    if decision is None:
        return {}
    groups = {
        id_: {
            "desired": decision.desired[id_],
            "serving": model.seen[id_].serving,
            "loading": model.seen[id_].loading,
            "overdue": decision.overdue[id_],
            "requests_per_s_each": decision.capacity[id_],
            "cold_start_s": decision.cold_start_s[id_],
        }
        for id_ in model.config.groups
    }
    return {
        "reason": decision.reason,
        "panic": decision.panic,
        "needed_per_s": decision.needed_rate,
        "held_per_s": decision.held_rate,
        "arrivals_per_s": decision.arrival_rate,
        "forecast_per_s": decision.forecast_rate,
        "supplied_per_s": decision.supplied_rate,
        "excess_requests": decision.excess_requests,
        "groups": groups,
    }


class ScalingMetrics(Collector):
    """Read when somebody scrapes. Labels are names of the configuration. None: names and meanings alone."""

    def __init__(self, scaler: Scaler | None) -> None:
        self._scaler = scaler

    def describe(self) -> Iterable[Metric]:
        """Names and meanings, without values."""
        return self._families()

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily, Metric]:
        return (
            GaugeMetricFamily("headwater_scaling_desired_replicas", "Replicas there should be", labels=GROUP),
            GaugeMetricFamily("headwater_scaling_serving_replicas", "Replicas that take requests", labels=GROUP),
            GaugeMetricFamily(
                "headwater_scaling_requests_per_second",
                "Of a model: arrivals of late, forecast, needed and supplied",
                labels=("model", "rate"),
            ),
            GaugeMetricFamily("headwater_scaling_panic", "1 while a burst counts as it is", labels=("model",)),
            CounterMetricFamily(
                "headwater_scaling_provider_failures", "Tries to have replicas made that failed", labels=GROUP
            ),
        )

    def collect(self) -> Iterable[Metric]:
        """The present values."""
        desired, serving, rates, panic, failures = families = self._families()
        for name, model in self._scaler.models.items() if self._scaler is not None else ():
            decision = model.decision
            if decision is None:
                continue
            for id_ in model.config.groups:
                desired.add_metric((name, id_), decision.desired[id_])
                serving.add_metric((name, id_), model.seen[id_].serving)
            for rate, value in (
                ("arrivals", decision.arrival_rate),
                ("forecast", decision.forecast_rate),
                ("needed", decision.needed_rate),
                ("supplied", decision.supplied_rate),
            ):
                rates.add_metric((name, rate), value)
            panic.add_metric((name,), float(decision.panic))
        if self._scaler is not None:
            for (name, id_), provider in self._scaler.providers.items():
                failures.add_metric((name, id_), provider.failures)  # type: ignore[attr-defined]
        return families
