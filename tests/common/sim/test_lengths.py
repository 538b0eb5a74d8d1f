from __future__ import annotations

from math import log
from random import Random
from statistics import fmean, pstdev

import pytest

from common.policy.output_length import OutputLength
from common.sim.lengths import Known, Learned, lengths_named
from common.sim.traces import TraceRow

ROW = TraceRow(0.0, 500, 200, client="t")


def test_what_is_learned_is_the_production_estimate_and_knows_no_length_beforehand() -> None:
    learned, production = Learned(), OutputLength()
    assert learned.expect(ROW) == OutputLength.FIRST_GUESS
    rng = Random(1)
    for _ in range(300):
        row = TraceRow(0.0, rng.randint(1, 4_000), rng.randint(1, 900))
        assert learned.expect(row) == production.expect("", "", row.input_tokens, None)
        learned.learn(row)
        production.learn("", "", row.input_tokens, float(row.output_tokens))


def test_tenants_are_told_apart_where_asked() -> None:
    plain, apart = Learned(), Learned(tenants=True)
    for lengths in (plain, apart):
        for _ in range(50):
            lengths.learn(TraceRow(0.0, 500, 10, client="short"))
            lengths.learn(TraceRow(0.0, 500, 800, client="long"))
    short = TraceRow(0.0, 500, 0 + 1, client="short")
    assert apart.expect(short) < 100.0  # drawn a little to the mean of all until there is more of its own
    assert plain.expect(short) > 300.0


def test_an_embedding_generates_nothing_whoever_is_asked() -> None:
    row = TraceRow(0.0, 500, 0)
    for name in ("learned", "oracle", "noise:1"):
        assert lengths_named(name)(Random(1)).expect(row) == 0.0


def test_an_oracle_knows_and_a_noisy_one_is_off_by_as_much_as_it_says() -> None:
    assert lengths_named("oracle")(Random(1)).expect(ROW) == 200.0
    noisy = lengths_named("noise:0.6")(Random(1))
    errors = [log(noisy.expect(ROW) / 200.0) for _ in range(2_000)]
    assert fmean(errors) == pytest.approx(0.0, abs=0.05)
    assert pstdev(errors) == pytest.approx(0.6, rel=0.05)
    assert Known(3.0, Random(1)).expect(TraceRow(0.0, 5, 1)) >= 1.0


@pytest.mark.parametrize("name", ["", "guess", "noise", "noise:", "noise:x", "noise:-1", "noise:99", "oracle:1"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not learned, oracle or noise"):
        lengths_named(name)
