"""Heads of requests and responses: what is dropped, what is passed on, how they are written.

Header names are lower-case bytes throughout, values are passed on as they came. Exactly one framing header leaves here.
Source: RFC 9110 section 7.6.1 (hop-by-hop fields), RFC 9112 section 6.3 (message body length).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

INTERNAL_PREFIX = b"x-headwater-"
"""Headers with this prefix are ours: taken from peers that signed, stripped from everybody else."""
PROXY_PREFIX = b"proxy-"  # between a client and the next proxy alone, all of them

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"expect",
    )
)
NOT_RELAYED = HOP_BY_HOP | {b"content-length"}  # of a response: its framing is written anew
XP = b"xp"  # first letters of those that are stripped by their prefix
# Rewritten by us for the next hop.
OURS = HOP_BY_HOP | {b"content-length", b"host", b"traceparent", b"tracestate"}

REASONS = {s.value: s.phrase.encode() for s in HTTPStatus}


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are written."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def named_in_connection(headers: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that `Connection` declares to be for this hop alone."""
    named: set[bytes] = set()
    for key, value in headers:
        if key == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return frozenset(named - {b"close", b"keep-alive", b""})


def internal(name: bytes) -> bool:
    """Whether a header is one of ours, also when spelt with underscores as CGI-like servers fold them."""
    return name.replace(b"_", b"-").startswith(INTERNAL_PREFIX)


def not_ours_to_pass(name: bytes) -> bool:
    """Whether a header is one of ours or one of a proxy's, and so goes no further."""
    return internal(name) or name.startswith(PROXY_PREFIX)


def passed_on(headers: Headers, dropped: frozenset[bytes] = frozenset()) -> bytes:
    """The client's headers as they go to the next hop, without what is ours, this hop's alone, or to be dropped.

    `dropped`: names beginning with x, as configured (`forward.drop_headers`).
    """
    drop = named_in_connection(headers) if find(headers, b"connection") else None
    lines = []
    for key, value in headers:
        if key in OURS or (key[0] in XP and (not_ours_to_pass(key) or key.replace(b"_", b"-") in dropped)):
            continue
        if drop and key in drop:
            continue
        lines.append(b"%b: %b\r\n" % (key, value))
    return b"".join(lines)


def request_head(method: bytes, target: bytes, host: bytes, kept: bytes, added: bytes, length: int | None) -> bytes:
    """A request head for the next hop; `length` None: no body and no framing header."""
    framing = b"" if length is None else b"content-length: %d\r\n" % length
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%b\r\n" % (method, target, host, kept, added, framing)


def response_head(
    status: int, headers: Sequence[tuple[bytes, bytes]], added: bytes, replaced: tuple[bytes, ...] = ()
) -> bytes:
    """A response head for the client; `added` are header lines of ours, its framing and its connection's among them.

    Fields whose names begin with one of `replaced` are left out: `added` has others in their stead, or nobody asked.
    """
    drop = named_in_connection(headers) if find(headers, b"connection") else None
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, REASONS.get(status, b"-"))]
    for key, value in headers:
        if key in NOT_RELAYED or (key[0] in XP and not_ours_to_pass(key)) or (drop and key in drop):
            continue
        if not replaced or not key.startswith(replaced):
            lines.append(b"%b: %b\r\n" % (key, value))
    lines += (added, b"\r\n")
    return b"".join(lines)


def has_body(method: bytes, status: int) -> bool:
    """Whether a response to `method` with `status` carries a body (RFC 9112 section 6.3)."""
    return method != b"HEAD" and status >= 200 and status not in (204, 304)
