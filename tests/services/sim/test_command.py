"""`headwater sim` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.sim.__main__ import sim

app = typer.Typer()
app.command()(sim)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in (*arguments, "--jobs", 1)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def trace_in(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rows = "\n".join(f"{i / 10},{100 + 37 * (i % 20)},{20 + 13 * (i % 11)}" for i in range(120))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    return path


def test_a_trace_a_fleet_and_two_policies_give_a_table_and_files(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("- {gpu: h100}\n- {gpu: l4, count: 2}\n")
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "html", "requests")}
    code, output = run(
        *("--trace", trace_in(tmp_path), "--fleet", fleet, "--policy", "predicted_completion,round_robin"),
        *("--load", 0.5, "--replicas", 2, "--exchange", 50, "--lengths", "noise:0.5", "--windows", 2),
        *("--fault", "slow@0.5:h100-0:0.5", "--fault", "burst@0.2:2:1", "--link", 1, "--reports", "none"),
        *(part for name, file in files.items() for part in (f"--{name}", file)),
    )
    assert code == 0, output
    assert "predicted_completion" in output
    assert "round_robin ÷" in output
    assert "a minute" in output
    told = json.loads(files["json"].read_text())
    assert told["settings"]["exchange"] == "50"
    assert {run["window"] for run in told["runs"]} == {0, 1}
    assert all(file.stat().st_size > 500 for file in files.values())
    assert "slow h100-0" in files["html"].read_text()  # where it happened is marked
    assert "note" not in output


def test_a_fault_after_the_last_request_is_noted(tmp_path: Path) -> None:
    policy = ("--policy", "least_connections")
    code, output = run("--trace", trace_in(tmp_path), "--rate", 0, *policy, "--fault", "die@90:h100-0")
    assert code == 0, output
    assert "before die@90" in output


def test_ways_to_choose_a_region_are_compared_while_one_is_lost(tmp_path: Path) -> None:
    code, output = run("--trace", trace_in(tmp_path), "--regions", "--outage", "--load", 0.5)
    assert code == 0, output
    for name in ("nearest", "cheapest", "round robin", "weighted by capacity", "latency feedback", "predicted"):
        assert name in output
    assert "cost-aware saves" in output
    assert "goodput after" in output


def test_without_a_trace_traffic_is_generated() -> None:
    code, output = run("--limit", 60, "--fleet", "ha8", "--policy", "least_work_left")
    assert code == 0, output
    assert "57 requests counted a run" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "no.csv"), "no.csv"),
        (("--policy", "best"), "policy 'best'"),
        (("--policy", ","), "--policy: none given"),
        (("--fleet", "none"), "--fleet none: neither"),
        (("--lengths", "guess"), "lengths 'guess'"),
        (("--load", "-1"), "--load -1.0: must be more than 0"),
        (("--load", "1", "--rate", "2"), "give --load or --rate"),
        (("--exchange", "soon"), "--exchange soon: neither"),
        (("--fault", "die"), "'die': no @SECONDS"),
        (("--fault", "die@1:x-9"), "no instance x-9"),
        (("--baseline", "round_robin", "--policy", "least_connections"), "--baseline round_robin: is not among"),
    ],
)
def test_a_slip_is_one_line_that_names_it(arguments: tuple[str, ...], said: str) -> None:
    code, output = run("--limit", 40, *arguments)
    assert code == 1
    assert said in output
    assert "Traceback" not in output


def test_fleets_that_follow_the_traffic_are_compared_day_by_day(tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    options = ("--limit", 200, "--rate", 0, "--fleet", "homog8", "--season", 40, "--days", 2, "--cold-start", 5)
    code, output = run("--scale", "predicted,fixed,threshold:8", *options, "--json", file)
    assert code == 0, output
    assert "GPU" in output  # a narrow terminal wraps what comes after it
    told = json.loads(file.read_text())["days"]
    assert [len(told[name]) for name in ("predicted", "fixed", "threshold:8")] == [2, 2, 2]
    assert told["fixed"][0]["most"] == 8
    assert told["fixed"][1]["gpu_hours"] == pytest.approx(8 * 40.0 / 3600.0)
    assert told["predicted"][1]["gpu_hours"] > 0.0


@pytest.mark.parametrize("scale", ["best", "threshold:0", "threshold:x", "fixed:3"])
def test_a_scaler_there_is_not_is_refused(scale: str) -> None:
    code, output = run("--limit", 100, "--scale", scale)
    assert code == 1
    assert f"scaler '{scale}'" in output
