from __future__ import annotations

import base64
import hmac
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.apis.bodies import MODEL_CHARS, PREFIX_BLOCKS
from common.route import MAX_HEADER_BYTES, MAX_HOPS, OtherVersion, Route, RouteSigner
from common.types import InferenceRequest, Priority, Slo

KEY = b"k" * 32
FULL = Route(
    InferenceRequest(
        id="0123456789abcdef" * 2,
        model="meta-llama/Llama-3.1-8B-Instruct",
        stream=True,
        input_tokens=1234,
        max_output_tokens=64,
        output_tokens=63.5,
        prefix_hashes=(1, 2**64 - 1),
        session="ab" * 16,
        warm=("eu", "c1", "i1"),
        warm_tokens=1000,
        tenant="t",
        priority=Priority.BATCH,
        deadline_s=2.5,
        slo=Slo(0.5, 0.02),
    ),
    ("eu", "c1"),
    attempts=2,
    visited=("global-1", "eu-1"),
)

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
floats = st.floats(0.0, 1e9)
requests = st.builds(
    InferenceRequest,
    id=names,
    model=names,
    api=names,
    stream=st.booleans(),
    input_tokens=st.integers(0, 10**9),
    max_output_tokens=st.none() | st.integers(1, 10**7),
    output_tokens=floats,
    prefix_hashes=st.lists(st.integers(0, 2**64 - 1), max_size=8).map(tuple),
    session=names,
    warm=st.lists(names, max_size=3).map(tuple),
    warm_tokens=st.integers(0, 10**9),
    tenant=names,
    priority=st.sampled_from(Priority),
    deadline_s=st.none() | floats,
    slo=st.builds(Slo, st.none() | floats, st.none() | floats),
)
routes = st.builds(
    Route,
    requests,
    st.lists(names, max_size=3).map(tuple),
    st.integers(0, 100),
    st.lists(names, max_size=MAX_HOPS).map(tuple),
)


@given(routes)
def test_what_is_signed_is_what_is_read(route: Route) -> None:
    signer = RouteSigner((KEY,))
    header = signer.sign(route)
    assert signer.verify(header) == route
    assert header.isascii()
    assert not set(header) & set(b'\r\n :,;"')  # it stands in a header line


def test_every_field_arrives() -> None:
    read = RouteSigner((KEY,)).verify(RouteSigner((KEY,)).sign(FULL))
    assert read == FULL
    assert read is not None
    assert read.request.priority is Priority.BATCH


@pytest.mark.parametrize("at", range(0, 600, 7))
def test_a_header_changed_anywhere_is_not_believed(at: int) -> None:
    signer = RouteSigner((KEY,))
    header = bytearray(signer.sign(FULL))
    at %= len(header)
    header[at] = ord("A") if header[at] != ord("A") else ord("B")
    assert signer.verify(bytes(header)) is None


@given(st.integers(0, 1000), st.integers(0, 255))
def test_no_single_byte_can_be_replaced(at: int, byte: int) -> None:
    signer = RouteSigner((KEY,))
    header = bytearray(signer.sign(FULL))
    at %= len(header)
    if header[at] != byte:
        header[at] = byte
        assert signer.verify(bytes(header)) is None


def test_a_header_that_is_cut_or_extended_is_not_believed() -> None:
    signer = RouteSigner((KEY,))
    header = signer.sign(FULL)
    assert all(signer.verify(header[:n]) is None for n in range(len(header)))
    assert signer.verify(header + b"A") is None
    assert signer.verify(b"A" + header) is None
    assert signer.verify(header + b"." + header) is None


def test_the_parts_of_two_headers_do_not_go_together() -> None:
    signer = RouteSigner((KEY,))
    text, _, _ = signer.sign(FULL).partition(b".")
    _, _, mac = signer.sign(Route(FULL.request, ("us",))).partition(b".")
    assert signer.verify(text + b"." + mac) is None


def test_another_key_is_not_believed() -> None:
    assert RouteSigner((b"other",)).verify(RouteSigner((KEY,)).sign(FULL)) is None


def test_keys_are_rotated_without_a_gap() -> None:
    old, new = b"old" * 10, b"new" * 10
    both, both_new_first = RouteSigner((old, new)), RouteSigner((new, old))
    assert RouteSigner((old,)).verify(both.sign(FULL)) == FULL  # the first one signs
    assert RouteSigner((new,)).verify(both.sign(FULL)) is None
    assert both.verify(both_new_first.sign(FULL)) == FULL
    assert both_new_first.verify(both.sign(FULL)) == FULL
    assert RouteSigner((new,)).verify(both_new_first.sign(FULL)) == FULL


@given(st.binary(max_size=300))
def test_garbage_is_not_believed(value: bytes) -> None:
    assert RouteSigner((KEY,)).verify(value) is None


def signed(text: bytes) -> bytes:
    """Anything with a good signature: a peer of another version, or one that is broken."""
    return text + b"." + base64.urlsafe_b64encode(hmac.new(KEY, text, sha256).digest()[:24])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'"route"',
        b"[1,2,3]",
        b'[{"id":"x"},"not a path"]',
        b'[{"id":7},["eu"]]',
        b'[{"id":"x"},["eu"],"many"]',
        b"\xff\xfe",
        b"[" * 5000,
    ],
)
def test_what_a_peer_of_another_version_signed_is_no_clients_request(content: bytes) -> None:
    """Taken for one it would be routed from the top again, and could circle between two versions."""
    with pytest.raises(OtherVersion):
        RouteSigner((KEY,)).verify(signed(base64.urlsafe_b64encode(content)))


@pytest.mark.parametrize("text", [b"A", b""])
def test_signed_text_that_is_no_base64_is_no_clients_request(text: bytes) -> None:
    with pytest.raises(OtherVersion):
        RouteSigner((KEY,)).verify(signed(text))


def test_fields_of_a_newer_peer_are_passed_over() -> None:
    content = b'[{"id":"x","model":"m","mood":"good"},["eu"],1,["g1"],{"more":1}]'
    route = RouteSigner((KEY,)).verify(signed(base64.urlsafe_b64encode(content)))
    assert route == Route(InferenceRequest("x", "m"), ("eu",), 1, ("g1",))


def test_a_header_beyond_the_bound_is_not_looked_at() -> None:
    signer = RouteSigner((KEY,))
    assert signer.verify(signer.sign(Route(InferenceRequest("x", "m" * 5_000), ()))) is not None
    long = signer.sign(Route(InferenceRequest("x", "m" * 7_000), ()))
    assert len(long) > MAX_HEADER_BYTES
    assert signer.verify(long) is None


def test_the_largest_request_that_is_let_in_fits_into_a_header() -> None:
    """Else the next tier would take it for a new one, from the top, for ever."""
    longest = "x" * 64  # of a region's, cluster's, instance's or balancer's name
    request = InferenceRequest(
        id="f" * 32,
        model="\x01" * MODEL_CHARS,  # six bytes each in JSON
        input_tokens=10**9,
        max_output_tokens=9_999_999,
        output_tokens=123456.789012345,
        prefix_hashes=(2**64 - 1,) * PREFIX_BLOCKS,
        session="f" * 32,
        warm=(longest,) * 3,
        warm_tokens=10**9,
    )
    signer = RouteSigner((KEY,))
    header = signer.sign(Route(request, (longest,) * 2, 10, (longest,) * MAX_HOPS))
    assert signer.verify(header) is not None


def test_a_signer_without_keys_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        RouteSigner(())
