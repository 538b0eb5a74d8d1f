"""The reference of metrics, out of the code: `make docs` writes docs/metrics.md with it."""

from __future__ import annotations

from random import Random

from prometheus_client import Metric

from common.balancing import Balancing
from common.policy.candidate import Limits
from common.policy.stages import policy_named
from common.pool_metrics import PoolMetrics
from common.scaling.shown import ScalingMetrics
from common.telemetry import Telemetry

HEAD = """# Metrics

What a tier offers Prometheus at `/metrics` of its admin listener. Labels are bounded: models are those that somebody
serves (at most 200, the rest is `other`), nodes and endpoints those of membership; nothing is a client's text. Counters
end in `_total`; histograms have `_bucket`, `_sum` and `_count`. Where OpenTelemetry's conventions for generative AI
have a name, the same figures stand under it too. This page is written by `make docs`.
"""


def page() -> str:
    """The whole page, Markdown."""
    telemetry = Telemetry(recent=0, known_model=lambda model: True, access_log=False)
    balancing = Balancing("", lambda path: True, lambda path: policy_named("round_robin"), Limits(), Random(0))
    telemetry.registry.register(PoolMetrics(balancing, {}))
    telemetry.registry.register(ScalingMetrics(None))
    families = sorted(telemetry.registry.collect(), key=lambda f: (not f.name.startswith("headwater"), f.name))
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|", *map(_row, families)]
    return "\n".join([HEAD, *rows]) + "\n"


def _row(family: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))  # there is no public way to them
    name = family.name + ("_total" if family.type == "counter" else "")
    return f"| `{name}` | {family.type} | {labels or '–'} | {family.documentation} |"


if __name__ == "__main__":
    print(page(), end="")
