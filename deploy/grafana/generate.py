"""Writes the Grafana dashboard: `make dashboards`. A test fails while the two differ, and runs every query.

A panel is one line here: its title, the unit, and its queries with their legends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("headwater.json")
WINDOW = "[1m]"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Queries = tuple[tuple[str, str], ...]


def quantiles(metric: str, by: str = "", where: str = "") -> Queries:
    """Median, 95th and 99th percentile of a histogram."""
    grouped = ", ".join(filter(None, (by, "le")))
    inner = f"sum by ({grouped}) (rate({metric}_bucket{where}{WINDOW}))"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple((f"histogram_quantile({q}, {inner})", f"p{100 * q:g}{legend}") for q in (0.5, 0.95, 0.99))


def rates(metric: str, *by: str) -> Queries:
    """Events a second, by labels."""
    return ((f"sum by ({', '.join(by)}) (rate({metric}{WINDOW}))", " ".join(f"{{{{{label}}}}}" for label in by)),)


FIRST = 'headwater_requests_total{instance=~"$tier"}'
ROWS: tuple[tuple[str, tuple[tuple[str, str, Queries], ...]], ...] = (
    (
        "Requests",
        (
            ("Requests a second, by status", "reqps", rates(FIRST, "status")),
            ("By how they ended", "reqps", rates(FIRST, "ending")),
            ("Under way", "short", (("sum by (instance) (headwater_in_flight_requests)", "{{instance}}"),)),
            ("Waiting for a place", "short", (("sum by (instance) (headwater_queued_requests)", "{{instance}}"),)),
        ),
    ),
    (
        "Latency",
        (
            (
                "Time to first token",
                "s",
                quantiles("headwater_time_to_first_token_seconds", where='{instance=~"$tier"}'),
            ),
            (
                "Time per output token",
                "s",
                quantiles("headwater_time_per_output_token_seconds", where='{instance=~"$tier"}'),
            ),
            ("Whole answer", "s", quantiles("headwater_request_duration_seconds", where='{instance=~"$tier"}')),
            ("Tokens a second", "short", rates("gen_ai_client_token_usage_sum", "gen_ai_token_type")),
        ),
    ),
    (
        "Predictions: seen over predicted, 1 is right",
        (
            (
                "First token, by the instance stage",
                "short",
                quantiles("headwater_prediction_ratio", where='{stage="instance", quantity="ttft"}'),
            ),
            (
                "Whole answer, by the instance stage",
                "short",
                quantiles("headwater_prediction_ratio", where='{stage="instance", quantity="total"}'),
            ),
            (
                "Length of answers",
                "short",
                quantiles("headwater_prediction_ratio", where='{stage="request", quantity="output_tokens"}'),
            ),
        ),
    ),
    (
        "Decisions",
        (
            ("By reason", "reqps", rates("headwater_decisions_total", "stage", "reason")),
            ("Chosen", "reqps", rates("headwater_picks_total", "node", "endpoint")),
            ("Stages run for a tier that is gone", "reqps", rates("headwater_takeovers_total", "stage")),
            ("Tries, by what went wrong", "reqps", rates("headwater_attempts_total", "to", "error")),
            ("Refused: no place", "reqps", rates("headwater_sheds_total", "reason")),
            ("Repeated", "reqps", rates("headwater_retries_total", "after")),
            ("Sessions", "reqps", rates("headwater_affinity_total", "result")),
        ),
    ),
    (
        "Servers",
        (
            (
                "U: batch places taken",
                "percentunit",
                (("avg by (node) (headwater_pool_utilization)", "{{node}}"),),
            ),
            ("L: imbalance", "percentunit", (("avg by (node) (headwater_pool_imbalance)", "{{node}}"),)),
            (
                "Seconds a token at rest, as learned",
                "s",
                (("avg by (node, endpoint) (headwater_endpoint_seconds_per_token)", "{{node}}/{{endpoint}}"),),
            ),
            (
                "Left alone for failures",
                "short",
                (("max by (node, endpoint) (headwater_endpoint_ejected)", "{{node}}/{{endpoint}}"),),
            ),
            ("Set aside", "reqps", rates("headwater_ejections_total", "node")),
            (
                "Age of load reports",
                "s",
                (("max by (node) (headwater_endpoint_report_age_seconds)", "{{node}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    return {
        "uid": "headwater",
        "title": "Headwater",
        "tags": ["headwater", "inference"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "tier",
                    "label": "first tier",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(headwater_in_flight_requests, instance)", "refId": "tier"},
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        y += 1
        width = 6 if len(panels) % 4 == 0 else 8
        for index, (name, unit, queries) in enumerate(panels):
            number += 1
            per_row = 24 // width
            yield {
                "id": number,
                "type": "timeseries",
                "title": name,
                "datasource": SOURCE,
                "gridPos": {"x": index % per_row * width, "y": y + index // per_row * 7, "w": width, "h": 7},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
                "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
                "targets": [
                    {"refId": chr(65 + i), "expr": expr, "legendFormat": legend, "datasource": SOURCE}
                    for i, (expr, legend) in enumerate(queries)
                ],
            }
        y += -(-len(panels) // per_row) * 7


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
