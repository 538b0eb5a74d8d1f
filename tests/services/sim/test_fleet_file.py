from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.policy.prediction import class_speed
from common.sim.fleet import FLEETS, Machine
from common.sim.instance import as_fast_as
from services.sim.fleet_file import read_fleet


def fleet_of(tmp_path: Path, text: str) -> tuple[Machine, ...]:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    return read_fleet(str(path))


def test_a_name_is_a_built_in_fleet() -> None:
    assert read_fleet("mixed16") is FLEETS["mixed16"]


def test_a_file_lists_servers_by_class(tmp_path: Path) -> None:
    made = fleet_of(
        tmp_path,
        """
        - {gpu: h100, count: 2, price_usd_per_hour: 4.0}
        - {gpu: a100, speed: 0.5}
        - {gpu: l4, slots: 16, kv_tokens: 80000, models: [m], weight: 2}
        - {gpu: mine, alpha_s: 0.02, beta_s: 2e-4, gamma_s: 1e-7, prefill_tokens_per_s: 6000}
        """,
    )
    l4 = replace(class_speed("l4"), slots=16.0, kv_tokens=80_000.0)
    assert made[0] == Machine("h100", class_speed("h100"), 2, None, 4.0)
    # Nobody tells the balancers that it is slow; the limits an agent would tell them.
    assert made[1] == Machine("a100", as_fast_as(class_speed("a100"), 0.5), 1)
    assert made[2] == Machine("l4", l4, 1, 2.0, 0.0, l4, frozenset({"m"}))
    assert (made[3].speed.alpha_s, made[3].speed.prefill_tokens_per_s, made[3].known) == (0.02, 6000.0, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a list"),
        ("gpu: h100", "expected a list"),
        ("- h100", "entry 1: not a mapping"),
        ("- {gpu: h100}\n- {gpu: a100, colour: red}", "entry 2: unknown key colour"),
        ("- {gpu: h100, count: 0}", "entry 1: count: 0"),
        ("- {gpu: h100, count: true}", "entry 1: count: True"),
        ("- {gpu: h100, speed: fast}", "entry 1: speed: 'fast'"),
        ("- {gpu: h100, speed: -1}", "entry 1: speed: -1"),
        ("- {gpu: h100, price_usd_per_hour: -1}", "entry 1: price_usd_per_hour: -1"),
        ("- {gpu: h100, models: m}", "entry 1: models: 'm'"),
        ("- {gpu: tpu}", "entry 1: gpu 'tpu' is none of .*, so it also needs alpha_s"),
        ("- {gpu: [h100]}", "entry 1: gpu: "),
        ("- {gpu: h100, count: 20000}", "more than 10000 servers"),
        ("- {gpu: h100", "while parsing"),
    ],
)
def test_a_bad_file_is_named_with_its_entry(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"fleet\.yaml.*(?s:.*){said}"):
        fleet_of(tmp_path, text)


def test_what_is_neither_a_name_nor_a_file_is_said_to_be_so() -> None:
    with pytest.raises(ValueError, match="neither a file nor one of mixed16"):
        read_fleet("mixed17")
