from __future__ import annotations

from collections.abc import Callable

import pytest

from common.apis import Hints, read_hints
from common.errors import BadRequest
from common.types import Priority, Slo


def headers(**given: str) -> Callable[[bytes], str | None]:
    named = {name.replace("_", "-").encode(): value for name, value in given.items()}
    return named.get


def test_who_says_nothing_asks_for_nothing() -> None:
    assert read_hints(headers()) == Hints(Slo())


def test_each_header_is_read_in_its_unit() -> None:
    said = headers(
        x_slo_ttft_ms="500",
        x_slo_tpot_ms="12.5",
        x_priority="Batch",
        x_deadline_ms="30000",
        x_expected_output_tokens="800",
    )
    assert read_hints(said) == Hints(Slo(0.5, 0.0125), Priority.BATCH, 30.0, 800.0)


def test_a_service_level_may_be_of_the_first_token_alone() -> None:
    assert read_hints(headers(x_slo_ttft_ms="500")).slo == Slo(0.5, None)


@pytest.mark.parametrize("name", ["x_slo_ttft_ms", "x_slo_tpot_ms", "x_deadline_ms", "x_expected_output_tokens"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e3", "0x10", "1,5", "half", "99999999999", "1_000"])
def test_what_is_no_such_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadRequest, match=name.replace("_", "-")):
        read_hints(headers(**{name: value}))


def test_a_priority_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadRequest, match="critical, standard, batch"):
        read_hints(headers(x_priority="urgent"))
