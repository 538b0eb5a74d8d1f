from __future__ import annotations

from math import e

import pytest

from common.sim.measures import Measures, Spread, is_good, mean_of, measure
from common.sim.records import Ending, LoadSeries, Record, RunRecord
from common.types import Slo

SLO = Slo(2.0, 0.1)


def record(index: int, ttft: float | None = 0.5, e2e: float = 1.5, tokens: int = 11, **fields: object) -> Record:
    made = Record(index, float(index), 100, tokens, ttft_s=ttft, e2e_s=e2e, ending=Ending.COMPLETE)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(records: list[Record], load: LoadSeries | None = None) -> RunRecord:
    return RunRecord(0, records, load or LoadSeries(), [1e-5, 3e-5], [2e-6])


def test_latencies_are_of_what_ended_well_and_goodput_of_all() -> None:
    records = [
        record(0, e2e=1.45),
        record(1, e2e=1.6),
        record(2, ending=Ending.REJECTED),
        record(3, ending=Ending.BROKEN),
    ]
    m = measure(run_of(records), SLO, warm_up=0.0)
    assert (m.requests, m.complete, m.rejected, m.broken) == (4, 2, 1, 1)
    assert m.e2e_s.mean == pytest.approx(1.525)
    assert m.tpot_s.p50 == pytest.approx(0.1025)
    assert m.s_per_token.mean == pytest.approx(1.525 / 11)
    assert m.goodput == 0.25
    assert m.decision_s.mean == pytest.approx(2e-5)


@pytest.mark.parametrize(
    ("ttft", "e2e", "tokens", "good"),
    [
        (1.9, 2.89, 11, True),
        (2.0, 2.1, 11, False),
        (0.5, 1.51, 11, False),
        (0.5, 9.0, 1, True),  # a single token has no time per token
        (None, 1.9, 0, True),  # what does not generate is judged by when it ended
        (None, 2.1, 0, False),
    ],
)
def test_a_request_is_good_within_both_levels(ttft: float | None, e2e: float, tokens: int, good: bool) -> None:
    assert is_good(record(0, ttft, e2e, tokens), SLO) is good
    assert is_good(record(0, ttft, e2e, tokens), Slo())


def test_the_first_requests_warm_up_and_do_not_count() -> None:
    records = [record(i, e2e=100.0 if i < 5 else 1.0) for i in range(100)]
    assert measure(run_of(records), SLO).e2e_s == Spread(1.0, 1.0, 1.0, 1.0)


def test_balance_and_use_are_time_averages_since_the_warm_up() -> None:
    load = LoadSeries(
        ["a", "b"],
        [0.0, 1.0, 2.0],
        [[9, 0], [2, 4], [4, None]],
        [[9.0, 0.0], [0.2, 0.4], [1.5, None]],
        [[9.0, 0.0], [1.0, 3.0], [2.0, None]],
        [0.5, 1.0, 1.0],
    )
    m = measure(run_of([record(1)], load), SLO, warm_up=0.0)
    assert m.occupancy_l == pytest.approx((0.1 + 0.0) / 2)
    assert m.work_l_s == pytest.approx((1.0 + 0.0) / 2)
    assert m.utilization == pytest.approx((0.3 + 1.0) / 2)  # what waits for a slot uses none
    assert m.busy == 1.0


def test_predictions_are_off_by_a_factor_either_way() -> None:
    records = [record(0, predicted_ttft_s=0.5 * e), record(1, predicted_ttft_s=0.5 / e), record(2)]
    m = measure(run_of(records), SLO, warm_up=0.0)
    assert m.ttft_error == pytest.approx(1.0)
    assert m.e2e_error is None


def test_of_nothing_there_is_nothing() -> None:
    m = measure(run_of([]), SLO)
    assert (m.requests, m.goodput, m.e2e_s) == (0, 0.0, Spread())


def test_the_mean_of_runs_leaves_out_what_one_has_not() -> None:
    mean = mean_of([Measures(goodput=0.5, e2e_s=Spread(1.0, 2.0, 3.0, 4.0)), Measures(goodput=1.0, ttft_error=0.2)])
    assert mean.goodput == 0.75
    assert mean.e2e_s == Spread(1.0, 2.0, 3.0, 4.0)
    assert mean.ttft_error == 0.2
