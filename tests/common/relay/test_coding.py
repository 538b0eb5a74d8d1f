from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BadRequest
from common.relay.coding import decoded

LIMIT = 1_000_000
CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


@given(st.binary(max_size=5_000), st.sampled_from(sorted(CODERS)))
def test_what_was_coded_is_decoded(body: bytes, coding: str) -> None:
    assert decoded(CODERS[coding](body), coding, LIMIT) == body


def test_codings_are_undone_in_reverse_and_names_are_not_case_sensitive() -> None:
    assert decoded(zstandard.compress(gzip.compress(b"x")), "GZip , identity, ZSTD", LIMIT) == b"x"


def test_deflate_without_its_wrapper_and_gzip_in_pieces_are_read() -> None:
    assert decoded(zlib.compress(b"abc")[2:-4], "deflate", LIMIT) == b"abc"
    assert decoded(gzip.compress(b"abc") + gzip.compress(b"def"), "gzip", LIMIT) == b"abcdef"


@pytest.mark.parametrize("coding", ["br", "compress", "x", "gzip, br"])
def test_an_unknown_coding_is_415(coding: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decoded(b"x", coding, LIMIT)
    assert caught.value.status == 415


def test_codings_without_end_are_415() -> None:
    with pytest.raises(BadRequest) as caught:
        decoded(b"x", ", ".join(["gzip"] * 50), LIMIT)
    assert caught.value.status == 415


@pytest.mark.parametrize("coding", sorted(CODERS))
def test_a_truncated_or_broken_body_is_400(coding: str) -> None:
    whole = CODERS[coding](b"some text that is long enough" * 20)
    for broken in (whole[:-6], b"\x00\x01garbage", whole[:3]):
        with pytest.raises(BadRequest) as caught:
            decoded(broken, coding, LIMIT)
        assert caught.value.status == 400


@pytest.mark.parametrize("coding", sorted(CODERS))
def test_a_bomb_is_413_before_it_has_gone_off(coding: str) -> None:
    bomb = CODERS[coding](bytes(50 * LIMIT))
    assert len(bomb) < LIMIT
    with pytest.raises(BadRequest) as caught:
        decoded(bomb, coding, LIMIT)
    assert caught.value.status == 413


def test_a_body_of_exactly_the_limit_passes() -> None:
    assert len(decoded(gzip.compress(bytes(LIMIT)), "gzip", LIMIT)) == LIMIT
