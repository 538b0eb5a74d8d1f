"""Comparisons: the same traffic for every policy, measured capacity, and results that are what the runs were."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from common.sim.fleet import machine
from common.sim.scenarios.traffic import drawn
from services.sim import page, report
from services.sim.study import Case, Result, Study, by_case, means, read_windows, run_study

OURS, SLO, WLC = (
    Case("predicted_completion"),
    Case("predicted_completion", slo=True),
    Case("weighted_least_connections"),
)
STUDY = Study((OURS, SLO, WLC), (machine("h100"), machine("a100", 2), machine("l4")), load=0.8)
ROWS = list(drawn(4, 400))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return run_study(replace(STUDY, seeds=2), [ROWS[:200], ROWS[200:]], jobs=1)


def test_cases_are_read_as_they_are_written() -> None:
    assert [Case.parse(case.label) for case in (OURS, SLO, WLC)] == [OURS, SLO, WLC]
    for bad in ("best", "round_robin+fast", "", "+slo"):
        with pytest.raises(ValueError, match="policy"):
            Case.parse(bad)


def test_every_case_runs_on_every_window_and_seed_at_the_load_asked_for(results: list[Result]) -> None:
    assert [(r.case, r.window, r.seed) for r in results] == [
        (case, window, seed) for case in (OURS, SLO, WLC) for window in (0, 1) for seed in (0, 1)
    ]
    assert all(r.rate / r.capacity == pytest.approx(0.8, rel=0.01) for r in results)
    assert len({r.capacity for r in results}) == 2  # measured on each window
    assert all(r.measures.requests == 190 for r in results)
    assert all(sum(r.shares.values()) == pytest.approx(1.0) for r in results)
    assert [r.curves is not None for r in results] == [r.window == 0 and r.seed == 0 for r in results]


def test_processes_change_nothing() -> None:
    study = replace(STUDY, cases=(OURS, WLC))
    alone, together = (run_study(study, [ROWS[:150]], jobs=jobs) for jobs in (1, 2))
    assert [r.measures.e2e_s for r in alone] == [r.measures.e2e_s for r in together]
    assert [r.shares for r in alone] == [r.shares for r in together]


def test_what_a_run_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no server of this fleet"):
        run_study(STUDY, [[replace(row, input_tokens=10**9) for row in ROWS[:5]]], jobs=2)


def test_a_rate_may_be_given_or_the_traffics_own_kept() -> None:
    (fixed,) = run_study(replace(STUDY, cases=(WLC,), load=None, rate=3.0), [ROWS[:100]], jobs=1)
    (kept,) = run_study(replace(STUDY, cases=(WLC,), load=None), [ROWS[:100]], jobs=1)
    assert fixed.rate == pytest.approx(3.0)
    assert kept.rate == pytest.approx(10.0, rel=0.3)


def test_means_are_over_windows_and_seeds(results: list[Result]) -> None:
    runs = by_case(results)[WLC]
    assert means(results)[WLC].e2e_s.mean == pytest.approx(sum(r.measures.e2e_s.mean or 0.0 for r in runs) / 4)


def test_windows_are_equal_parts_that_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"{i},{40_000 if i == 3 else 100},{9_000 if i == 4 else 10}" for i in range(21)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(lines))
    windows = read_windows(path, windows=2)
    assert [len(rows) for rows in windows] == [10, 10]
    assert [rows[0].arrival_s for rows in windows] == [0.0, 0.0]
    assert max(row.input_tokens for row in windows[0]) == 100
    assert max(row.output_tokens for row in windows[0]) == 4_000
    assert [len(rows) for rows in read_windows(path, windows=2, limit=4)] == [4, 4]
    assert len(read_windows(path, copies=3)[0]) == 60
    assert len(read_windows(path, start_s=10.0)[0]) == 11
    for bad in ({"start_s": 99.0}, {"max_input": 50}, {"windows": 50}):
        with pytest.raises(ValueError, match=r"t\.csv"):
            read_windows(path, **bad)  # type: ignore[arg-type]


# -- what is shown -----------------------------------------------------------------------------------------------------


def printed(results: list[Result]) -> str:
    console = Console(width=160, file=StringIO())
    console.print(report.render(results, WLC if WLC in by_case(results) else results[0].case, STUDY.slo))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_has_all_policies_and_the_ratios(results: list[Result]) -> None:
    text = printed(results)
    assert text.count("predicted_completion+slo") == 3
    assert "weighted_least_connections ÷" in text
    assert "2 windows x 2 seeds" in text
    assert "0.80" in text
    ours = report.ratios(results, WLC)[OURS]
    assert len(ours["e2e_mean"]) == 4
    assert report.ratios(results, WLC)[WLC]["e2e_mean"] == [1.0] * 4
    assert report.ratios(results, WLC)[WLC]["goodput_points"] == [0.0] * 4


def test_files_hold_every_run_and_every_request(results: list[Result], tmp_path: Path) -> None:
    report.write_json(tmp_path / "r.json", results, WLC, {"trace": "t"})
    report.write_csv(tmp_path / "r.csv", results)
    told = json.loads((tmp_path / "r.json").read_text())
    assert told["baseline"] == WLC.label
    assert len(told["runs"]) == len(results)
    assert told["means"][OURS.label]["ttft_s"]["p99"] > 0.0
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(results)
    assert float(lines[0]["e2e_s.mean"]) == results[0].measures.e2e_s.mean
    kept = run_study(replace(STUDY, cases=(WLC,)), [ROWS[:50]], jobs=1, records=True)
    report.write_requests(tmp_path / "q.csv", kept)
    with (tmp_path / "q.csv").open() as file:
        requests = list(csv.DictReader(file))
    assert [row["index"] for row in requests] == [str(i) for i in range(50)]
    assert {row["ending"] for row in requests} == {"complete"}


def test_the_page_stands_alone_and_draws_every_policy(results: list[Result]) -> None:
    made = page.render(results, WLC, STUDY)
    assert made.count("class='line") == 2 * 3
    assert made.count("<figure>") == 2 + 3
    assert made.count("class=thin") >= 4 * 3
    assert "prefers-color-scheme: dark" in made
    assert not any(word in made for word in ("http://", "https://", "<script", "@import", "nan"))


def test_a_page_of_nothing_but_failures_is_a_page_too() -> None:
    study = replace(STUDY, cases=(WLC,), fleet=(replace(machine("a100"), models=frozenset({"x"})),))
    results = run_study(study, [[replace(row, model="y") for row in ROWS[:20]]], jobs=1)
    assert results[0].measures.complete == 0
    assert "<main>" in page.render(results, WLC, study)
    assert "-" in printed(results)
