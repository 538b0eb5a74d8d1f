"""The rules and the dashboard hold what a real Prometheus finds at real tiers: every query gives data.

Needs Debian's package `prometheus`, which has promtool too; skipped where they are not.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

from tests.fake_engine import FakeEngine, Script
from tests.integration.clients import get
from tests.integration.system import PORTS, Process, tiers
from tests.servers import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
NEEDED = pytest.mark.skipif(not shutil.which("promtool") or not shutil.which("prometheus"), reason="no prometheus here")


def test_the_dashboard_is_what_its_source_gives():
    generate = run_path(str(DEPLOY / "grafana" / "generate.py"))
    assert (DEPLOY / "grafana" / "headwater.json").read_text() == generate["text"](), "run `make dashboards`"


@NEEDED
def test_promtool_takes_the_rules():
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inner = ", ".join(f'{k}="{v}"' for k, v in labels.items())
    return {"series": f"{name}{{{inner}}}", "values": values}


@NEEDED
def test_alerts_come_when_they_should_and_not_before(tmp_path: Path):
    """One server at half speed, one that is set aside, and a stage that is run for a tier that is gone."""
    speed = "headwater_endpoint_seconds_per_token"
    given = [
        *(series(speed, "0.007x30", node="r/c", endpoint=e, instance="t") for e in ("i1", "i2", "i4")),
        series(speed, "0.014x30", node="r/c", endpoint="i3", instance="t"),
        series("headwater_endpoint_ejected", "0x30", node="r/c", endpoint="i1", instance="t"),
        series("headwater_endpoint_ejected", "1x30", node="r/c", endpoint="i2", instance="t"),
        series("headwater_takeovers_total", "0+5x30", stage="region", instance="t"),
    ]

    def alert(name: str, at: str, *found: dict[str, str]) -> dict[str, Any]:
        expected = [{"exp_labels": {"severity": "warning", **labels}} for labels in found]
        return {"eval_time": at, "alertname": name, "exp_alerts": expected}

    slow = {"node": "r/c", "endpoint": "i3", "instance": "t"}
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "1m",
                "input_series": given,
                "alert_rule_test": [
                    alert("HeadwaterSlowServer", "4m"),
                    alert("HeadwaterSlowServer", "10m", slow),
                    alert("HeadwaterEjected", "10m", {"node": "r/c", "endpoint": "i2", "instance": "t"}),
                    alert("HeadwaterTakeover", "10m", {"stage": "region"}),
                    alert("HeadwaterErrors", "10m"),
                ],
            }
        ],
    }
    # Annotations are for people; what is held here is who fires, so they are left out of the copy.
    rules = yaml.safe_load(RULES.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests["rule_files"] = [str(tmp_path / "rules.yaml")]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "headwater.json").read_text())
    found = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return [q.replace("$tier", ".*").replace("[1m]", "[30s]") for q in found] + [
        r["expr"].replace("5m]", "30s]") for r in rules if "record" in r
    ]


@NEEDED
async def test_a_real_prometheus_finds_data_for_every_query(tmp_path: Path):
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        targets = [f"127.0.0.1:{tier.admin_port}" for tier in world.chain]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "headwater", "static_configs": [{"targets": targets}]}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = PORTS.take()
        argv = [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        process = Process("prometheus", argv, f"http://127.0.0.1:{port}/-/ready")
        await process.start()
        try:
            # A failure, a retry, a takeover, a refusal and a session, so that there is something to see of each.
            world.chain[1].balancing.peer_lost("tier-r-c")
            left = set(queries())

            async def all_answered() -> bool:
                world.engines[0].then(Script.error(503))
                for n in range(4):
                    await world.chat(f"x-session-id: s{n}", stream=True, max_tokens=20)
                await world.chat(stream=False)
                if all("sheds" in query for query in left):
                    for engine in world.engines:
                        engine.kill()
                    await world.chat()
                for query in sorted(left):
                    if await has_data(port, query):
                        left.discard(query)
                return not left

            try:
                await eventually(all_answered, 60.0, step_s=0.5)
            except AssertionError:
                raise AssertionError(f"no data: {sorted(left)}") from None
        finally:
            await asyncio.to_thread(process.discard)


async def has_data(port: int, query: str) -> bool:
    from urllib.parse import quote

    reply = (await get(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}")).json()
    assert reply["status"] == "success", (query, reply)
    return any(r["value"][1] != "NaN" for r in reply["data"]["result"])
