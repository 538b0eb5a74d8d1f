"""Compressed request bodies, decoded once where a request enters, so that servers that cannot decode them are reached.

What comes out is bounded by the body limit while it comes out, so that a small body that inflates without end costs no
more than a large one. Source: RFC 9110 section 8.4 (content codings), RFC 8878 (zstd).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import zstandard

from common.errors import BadRequest

MOST_CODINGS = 3  # applied one over the other; nobody honest applies two


def decoded(body: bytes, codings: str, limit: int) -> bytes:
    """The body without its content codings. Raises BadRequest: 415 unknown, 400 broken, 413 larger than `limit`."""
    names = [name.strip().lower() for name in codings.split(",") if name.strip()]
    if len(names) > MOST_CODINGS:
        raise BadRequest(f"more than {MOST_CODINGS} content codings", status=415, code="unsupported_encoding")
    for name in reversed(names):
        if name == "identity":
            continue
        decode = DECODERS.get(name)
        if decode is None:
            raise BadRequest(
                f"content-encoding '{name[:50]}' is not supported; there are {', '.join(sorted(DECODERS))}",
                status=415,
                code="unsupported_encoding",
            )
        try:
            body = decode(body, limit)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise BadRequest(f"the request body is not valid {name}: {error}", code="invalid_encoding") from None
    return body


def _too_large(limit: int) -> BadRequest:
    return BadRequest(f"the body is larger than {limit} bytes when decoded", status=413, code="body_too_large")


def _inflate(body: bytes, limit: int, window: int) -> bytes:
    parts: list[bytes] = []
    left, rest = limit, body
    while rest:  # gzip files may be several, one after the other
        stream = zlib.decompressobj(window)
        part = stream.decompress(rest, left + 1)
        left -= len(part)
        if left < 0:
            raise _too_large(limit)
        if not stream.eof:
            raise EOFError("it is cut short")
        parts.append(part)
        rest = stream.unused_data
        if window < 0 or window == zlib.MAX_WBITS:
            break
    return b"".join(parts)


def _gzip(body: bytes, limit: int) -> bytes:
    return _inflate(body, limit, 16 + zlib.MAX_WBITS)


def _deflate(body: bytes, limit: int) -> bytes:
    try:
        return _inflate(body, limit, zlib.MAX_WBITS)
    except zlib.error:
        return _inflate(body, limit, -zlib.MAX_WBITS)  # without the zlib wrapper, as some clients send it


def _zstd(body: bytes, limit: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
        out = reader.read(limit + 1)
        if len(out) > limit:
            raise _too_large(limit)
    if not _zstd_complete(body):
        raise EOFError("it is cut short")
    return out


def _zstd_complete(body: bytes) -> bool:
    stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    stream.decompress(body)
    return bool(stream.eof)


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
