from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sim.faults import Burst, Fault, compressed, parse
from common.sim.traces import TraceRow

ROWS = [TraceRow(float(second), 10, 1) for second in range(31)]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("die@60:h100-0", Fault("die", 60.0, "h100-0")),
        ("return@90.5:h100-0:30", Fault("return", 90.5, "h100-0", 30.0)),
        ("slow@60:a100-1:0.5", Fault("slow", 60.0, "a100-1", 0.5)),
        ("slow@60:a100-1", Fault("slow", 60.0, "a100-1", 1.0)),
        ("join@1:a100", Fault("join", 1.0, "a100")),
        ("drain@1:l4-0", Fault("drain", 1.0, "l4-0")),
        ("burst@60:5:10", Burst(60.0, 5.0, 10.0)),
    ],
)
def test_faults_are_read(text: str, meant: Fault | Burst) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "die",
        "die@",
        "die@60",
        "die@x:a",
        "die@-1:a",
        "die@1:a:3",
        "eat@1:a",
        "slow@1:a:0",
        "burst@1:2",
        "burst@1:0:3",
    ],
)
def test_a_bad_one_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"fault|burst|SECONDS|float|time"):
        parse(text)


def test_a_burst_brings_what_comes_after_it_nearer() -> None:
    made = [row.arrival_s for row in compressed(ROWS, [Burst(10.0, 5.0, 2.0)])]
    assert made[:11] == [float(second) for second in range(11)]
    assert made[10:21] == pytest.approx([10.0 + 0.2 * i for i in range(11)])
    assert made[21:] == pytest.approx([13.0 + i for i in range(10)])


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0.1, 20), st.floats(0.1, 20)), max_size=3))
def test_bursts_lose_nothing_and_keep_the_order(bursts: list[tuple[float, float, float]]) -> None:
    made = compressed(ROWS, [Burst(*burst) for burst in bursts])
    arrivals = [row.arrival_s for row in made]
    assert len(made) == len(ROWS)
    assert arrivals == sorted(arrivals)
