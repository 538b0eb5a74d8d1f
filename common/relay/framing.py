"""What is refused by its head alone, before any of the body is taken.

The parser (llhttp in its strict mode) has refused what is malformed or has two meanings; here is what is well-formed
and still not for us: another version, a coding that is not spoken, a body that is too large, an upgrade.
Source: RFC 9112 sections 3.2 (Host, forms of a target), 6.1 (transfer codings), RFC 9110 sections 7.8 (Upgrade) and
10.1.1 (Expect).
"""

from __future__ import annotations

from common.relay.exchange import ClientLimits, Exchange

MAX_HEADERS = 256  # fields in one head; browsers and SDKs send about twenty
JUDGED = frozenset((b"host", b"transfer-encoding", b"content-length", b"expect"))
UNUSUAL = JUDGED - {b"host", b"content-length"}
TRANSFER_CODINGS = frozenset((b"chunked", b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress"))
SCHEMES = (b"http://", b"https://")

Refused = tuple[int, str]
"""Status and message."""


def judge(exchange: Exchange, version: str, limits: ClientLimits) -> Refused | None:
    """Whether a head is refused; notes on the way whether its client waits to be invited to send the body."""
    fields = exchange.fields
    if version == "1.1" and len(fields) == len(exchange.headers) and UNUSUAL.isdisjoint(fields) and b"host" in fields:
        # As nearly all are: no field twice, and nothing but a length that says where the body ends.
        return _judge_length(fields.get(b"content-length"), limits)
    hosts = 0
    refused: Refused | None = None
    for key, value in exchange.headers:
        if key not in JUDGED:
            continue
        if key == b"host":
            hosts += 1
        elif key == b"content-length":
            refused = _judge_length(value, limits) or refused
        elif key == b"transfer-encoding":
            if exchange.old:
                refused = 400, "HTTP/1.0 has no transfer-encoding"
            elif value.strip().lower() != b"chunked":
                refused = _unspoken(value)
        elif value.lower() != b"100-continue":
            refused = refused or (417, "only 100-continue can be expected")
        else:
            exchange.expects_continue = not exchange.old
    if version not in ("1.1", "1.0"):
        return 505, f"HTTP/{version} is not spoken here"
    if hosts > 1 or (hosts == 0 and not exchange.old):
        return 400, "exactly one Host header is required"
    return refused


def _judge_length(value: bytes | None, limits: ClientLimits) -> Refused | None:
    if value is not None and int(value) > limits.max_body_bytes:  # digits alone, or the parser had refused it
        return 413, f"the body is larger than {limits.max_body_bytes} bytes"
    return None


def _unspoken(codings: bytes) -> Refused:
    """Real transfer codings are not implemented; what only looks like one is a way to have two readers disagree."""
    if all(name.strip().lower() in TRANSFER_CODINGS for name in codings.split(b",")):
        return 501, "only chunked transfer-encoding is supported"
    return 400, "not a transfer-encoding"


def head_bytes(exchange: Exchange) -> int:
    """The size of a head, or of what is there of it."""
    return len(exchange.target) + sum(len(k) + len(v) + 4 for k, v in exchange.headers)


def too_long(exchange: Exchange, limits: ClientLimits) -> Refused:
    """How a head that is too long is refused: by its target, or by its fields."""
    long_target = len(exchange.target) > limits.max_header_bytes // 2
    return 414 if long_target else 431, f"the request head is larger than {limits.max_header_bytes} bytes"


def upgrade_refused(exchange: Exchange) -> Refused | None:
    """Why a request to change the protocol cannot be served; None: it is served in the protocol that is spoken.

    A server may ignore an upgrade (RFC 9110 section 7.8), and Java's HttpClient offers h2c with its first request. A
    client that asks for a WebSocket or a tunnel has no use for anything else.
    """
    if exchange.method == b"CONNECT":
        return 501, "this is no proxy: tunnels are not opened here"
    asked = b",".join(value for key, value in exchange.headers if key == b"upgrade").lower()
    if b"websocket" in asked:
        return 501, "WebSocket is not supported here; use the HTTP API"
    return None


def without_upgrade(exchange: Exchange) -> bytes:
    """The head again, as it would be had the client not offered another protocol.

    Every field has passed the parser once, so it is written as it was read and cannot mean anything else.
    """
    version = b"1.0" if exchange.old else b"1.1"
    lines = [b"%b %b HTTP/%b\r\n" % (exchange.method, exchange.target, version)]
    for key, value in exchange.headers:
        if key == b"connection":
            left = [t for t in value.split(b",") if t.strip().lower() not in (b"upgrade", b"http2-settings")]
            value = b",".join(left)  # noqa: PLW2901
            if not value.strip():
                continue
        elif key in (b"upgrade", b"http2-settings"):
            continue
        lines.append(b"%b: %b\r\n" % (key, value))
    return b"".join((*lines, b"\r\n"))


def origin_form(target: bytes) -> bytes:
    """A target as a server has it: without the scheme and host that a client of proxies writes before the path."""
    for scheme in SCHEMES:
        if target[: len(scheme)].lower() == scheme:
            _, slash, rest = target[len(scheme) :].partition(b"/")
            return b"/" + rest if slash else b"/"
    return target
