"""Properties that hold for whatever is sent: framing by any cuts, bodies of any kind, events in any pieces."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common import apis
from common.errors import BadRequest
from common.relay.body import SSE_ENDS, EventHold, Observer
from common.relay.coding import DECODERS, decoded
from tests.fuzz.harness import Connection, Listener, feed

LIMIT = Listener.limits.max_body_bytes
NAMES = st.from_regex(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,12}", fullmatch=True).filter(
    lambda n: (
        n.lower()
        not in (
            b"host",
            b"content-length",
            b"transfer-encoding",
            b"expect",
            b"upgrade",
            b"connection",
            b"te",
            b"trailer",
        )
    )
)
VALUES = st.binary(max_size=20).map(lambda v: bytes(c for c in v if c >= 0x20 and c != 0x7F).strip())
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
BODIES = st.binary(max_size=300)
CUTS = st.lists(st.integers(0, 3000), max_size=6)
JUNK = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            (
                b"POST / HTTP/1.1\r\n",
                b"GET /v1/models HTTP/1.1\r\n",
                b"host: a\r\n",
                b"content-length: 5\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: close, x-a\r\n",
                b"expect: 100-continue\r\n",
                b"upgrade: h2c\r\n",
                b"x_headwater_route: a.b\r\n",
                b"\r\n",
                b"\n",
                b" ",
                b"\t",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b"hello",
            )
        ),
    ),
    max_size=25,
).map(b"".join)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = sorted({min(a, len(data)) for a in at})
    return [data[i:j] for i, j in zip([0, *points], [*points, len(data)], strict=True)]


@st.composite
def requests(draw: Any) -> tuple[bytes, bytes]:
    """A request that is legal, and its body."""
    fields, body = draw(FIELDS), draw(BODIES)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"".join(b"%b: %b\r\n" % f for f in fields)
    if draw(st.booleans()):
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, body
    pieces = [p for p in cut(body, draw(CUTS)) if p]
    extension = draw(st.sampled_from((b"", b";a", b";a=b", b';a="b"')))
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n", body


@given(st.lists(requests(), min_size=1, max_size=4), CUTS)
@settings(max_examples=300)
def test_legal_requests_are_read_as_they_are_however_they_are_cut(
    sent: list[tuple[bytes, bytes]], at: list[int]
) -> None:
    connection = feed(cut(b"".join(data for data, _ in sent), at))
    assert [body for _, _, body in connection.requests] == [body for _, body in sent]
    assert connection.transport.written.count(b"HTTP/1.1 204") == len(sent)  # type: ignore[attr-defined]


@given(JUNK, CUTS)
@settings(max_examples=500)
def test_whatever_is_sent_nothing_breaks_and_cuts_change_nothing(data: bytes, at: list[int]) -> None:
    whole, parts = feed([data]), feed(cut(data, at))
    shorter, longer = sorted((whole.requests, parts.requests), key=len)
    assert longer[: len(shorter)] == shorter
    for connection in (whole, parts):
        assert statuses(connection) <= {100, 204, 400, 408, 413, 414, 417, 431, 501, 505}


OFFER = b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"


@pytest.mark.parametrize("after", [b"GET /httx\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"PUT x HTTP/9.9\r\n\r\n", b"\0"])
def test_what_is_wrong_after_an_offer_of_another_protocol_is_refused(after: bytes) -> None:
    connection = feed([OFFER + after])
    assert len(connection.requests) == 1
    assert statuses(connection) - {204} <= {400, 505}
    assert len(statuses(connection)) == 2


def test_as_many_offers_as_one_read_holds() -> None:
    assert len(feed([OFFER * 1500]).requests) == 1500


def statuses(connection: Connection) -> set[int]:
    written = connection.transport.written  # type: ignore[attr-defined]
    return {int(part[:3]) for part in written.split(b"HTTP/1.1 ")[1:]}


# -- bodies ------------------------------------------------------------------------------------------------------------

MATCHED = [
    m
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/api/chat", "/v1/audio/transcriptions")
    if (m := apis.match("POST", path)) is not None
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)
ROUTED = st.sampled_from(
    ("model", "stream", "messages", "prompt", "input", "max_tokens", "user", "options", "metadata", "conversation")
)


@given(
    st.one_of(st.binary(max_size=200), st.dictionaries(ROUTED, JSON, max_size=8).map(lambda v: json.dumps(v).encode()))
)
@settings(max_examples=500)
def test_a_body_is_understood_or_refused_as_the_clients(body: bytes) -> None:
    def header(name: bytes) -> str | None:
        return "multipart/form-data; boundary=x" if name == b"content-type" else None

    for matched in MATCHED:
        try:
            ask = apis.understand(matched, header, body)
        except BadRequest as error:
            assert 400 <= error.status < 500  # noqa: PT017 - either may come of it
        else:
            assert ask.model
            assert ask.size >= 0
            assert len(ask.session) <= 64


@given(st.sampled_from(sorted(DECODERS)), st.binary(max_size=300))
@settings(max_examples=300)
def test_a_coded_body_is_decoded_or_refused(coding: str, body: bytes) -> None:
    try:
        assert len(decoded(body, coding, LIMIT)) <= LIMIT
    except BadRequest as error:
        assert error.status in (400, 413)  # noqa: PT017


@given(BODIES)
@pytest.mark.parametrize(
    ("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress)]
)
def test_what_was_coded_comes_back(coding: str, encode: Any, body: bytes) -> None:
    assert decoded(encode(body), coding, LIMIT) == body
    assert decoded(encode(encode(body)), f"{coding}, {coding}", LIMIT) == body


# -- events ------------------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            (b"data: {}", b"data: [DONE]", b": ping", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b"\r", b"event: x")
        ),
    ),
    max_size=30,
).map(b"".join)


@given(EVENTS, CUTS)
@settings(max_examples=500)
def test_events_pass_whole_and_nothing_is_lost_or_added(data: bytes, at: list[int]) -> None:
    hold, out = EventHold(SSE_ENDS), b""
    for piece in cut(data, at):
        passed = hold.whole(piece)
        assert not passed or passed.endswith(SSE_ENDS)
        out += passed
    assert out + hold.rest() == data


@given(EVENTS, CUTS)
def test_an_observer_never_stumbles(data: bytes, at: list[int]) -> None:
    observer = Observer("text/event-stream")
    for piece in cut(data, at):
        observer.saw(piece)
    observer.suspect()
    assert observer.bytes == len(data)
    assert (observer.output_tokens() or 0.0) >= 0.0
