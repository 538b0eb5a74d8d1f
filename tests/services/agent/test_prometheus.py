from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.agent.engines.prometheus import MAX_SERIES, Page


def samples(text: str, name: str = "a") -> list[tuple[dict[str, str], float]]:
    return [(dict(s.labels), s.value) for s in Page(text.encode()).samples(name)]


def test_names_are_whole_names() -> None:
    page = 'a_by_reason{x="1"} 5\naa 6\n# a 7\n#a 8\na{} 1\na 2\na\t3\na_total 9'
    assert [v for _, v in samples(page)] == [1.0, 2.0, 3.0]
    assert Page(b"x 1\nvllm:y 2").has("vllm:")
    assert not Page(b"x 1\n# vllm:y 2").has("vllm:")


def test_labels() -> None:
    page = (
        r'a{m="a\"b,c}d\\n\n",e="",} 1' + "\n" + 'a{ m = "x" , e="y" } 2 1700000000000\r\n' + 'a{m="z"} 3 # {t="1"} 4'
    )
    assert samples(page) == [
        ({"m": 'a"b,c}d\\n\n', "e": ""}, 1.0),
        ({"m": "x", "e": "y"}, 2.0),
        ({"m": "z"}, 3.0),
    ]


@pytest.mark.parametrize(
    ("written", "read"),
    [("1", 1.0), ("1.5e+09", 1.5e9), ("-3", -3.0), ("+Inf", math.inf), ("-inf", -math.inf), (".5", 0.5), ("1.", 1.0)],
)
def test_numbers(written: str, read: float) -> None:
    assert samples(f"a {written}") == [({}, read)]


@pytest.mark.parametrize(
    "line", ["a", "a ", "a x", "a 1_000", "a 0x10", "a 1.2.3", 'a{b="c" 1', "a{b=c} 1", "a}1", "a 1x"]
)
def test_what_is_no_sample_is_skipped(line: str) -> None:
    assert samples(f"{line}\na 7") == [({}, 7.0)]


def test_nan_is_a_value_and_no_sum() -> None:
    page = Page(b'a{e="0"} NaN\na{e="1"} 1\nb 2\nb 4')
    assert page.total(["a"]) is None
    assert page.mean(["a"]) is None
    assert page.total(["b"]) == 6.0
    assert page.mean(["b"]) == 3.0


def test_aliases_are_tried_in_order() -> None:
    assert Page(b"new 1\nold 2").total(["new", "old"]) == 1.0
    assert Page(b"old 2").total(["new", "old"]) == 2.0
    assert Page(b"other 2").total(["new", "old"]) is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_no_bytes_break_it(before: bytes, after: bytes) -> None:
    page = Page(before + b"\na" + after)
    list(page.samples("a"))
    page.total(["a"])


def test_a_big_page_is_quick_and_a_huge_one_bounded() -> None:
    line = b'vllm:other_bucket{engine="0",model_name="m",le="0.5"} 12345.0\n'
    big = Page(line * 60_000 + b"a 1\n")  # 4 MB
    began = time.perf_counter()
    assert big.total(["a", "b"]) == 1.0
    assert time.perf_counter() - began < 0.1
    assert len(samples("a 1\n" * (MAX_SERIES + 10))) == MAX_SERIES
    began = time.perf_counter()
    assert samples('a{x="' + "\\" * 1_000_000) == []
    assert samples("a{" + 'x="1",' * 100_000) == []
    assert time.perf_counter() - began < 2.0
