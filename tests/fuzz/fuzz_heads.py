"""Atheris on the head parser's glue: whatever bytes come, nothing crashes and what passes has one meaning.

    make fuzz            45 seconds (ARGS=-max_total_time=N for longer), needs CPython 3.11 to 3.13 on Linux

What it finds is written to `crash-…`; run this file with that as its argument to see it again.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["common.relay", "common.apis", "tests.fuzz.harness"]):
    from tests.fuzz.harness import feed

SEEDS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nt: 1\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\nconnection: keep-alive, x-a\r\nx-a: 1\r\n\r\nGET / HTTP/1.1\r\nhost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\nhello",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def one(data: bytes) -> None:
    """The first byte says where it is cut in two; the same requests have to come of it however it is cut."""
    if not data:
        return
    text = data[1:]
    cut = data[0] * len(text) // 256
    whole, parts = feed([text]), feed([text[:cut], text[cut:]])
    shorter, longer = sorted((whole.requests, parts.requests), key=len)
    assert longer[: len(shorter)] == shorter, (cut, text)


WORDS = (
    *(b"content-length: ", b"transfer-encoding: ", b"chunked", b"connection: ", b"close", b"expect: 100-continue"),
    *(
        b"upgrade: ",
        b"websocket",
        b"h2c",
        b"host: ",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b"\r\n",
        b"\r\n\r\n",
        b"0\r\n\r\n",
    ),
    *(b"POST ", b"GET ", b"CONNECT ", b"http://", b"x-headwater-route: ", b"x_headwater-route: ", b"; ", b"\n", b"\t"),
)


def main() -> None:
    """Start from seeds and a dictionary of HTTP's own words, kept in the working directory."""
    corpus, words = Path("corpus"), Path("words")
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(SEEDS):
        (corpus / f"seed-{number}").write_bytes(bytes((40 * number,)) + seed)
    words.write_text("".join('"' + "".join(f"\\x{c:02x}" for c in word) + '"\n' for word in WORDS))
    atheris.Setup([sys.argv[0], str(corpus), f"-dict={words}", *sys.argv[1:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
