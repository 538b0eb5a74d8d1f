"""Clients for tests: a raw one that sends and keeps exact bytes, and small ways to ask an admin listener."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

WAIT_S = 20.0  # for bytes that must come, on a busy machine
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")


def chat(model: str = "llama-8b", *, text: str = "Hello.", **fields: Any) -> bytes:
    """A chat request's body. Spaces and the order of keys are odd on purpose: bytes must arrive as they were sent."""
    message = json.dumps([{"role": "user", "content": text}])
    more = "".join(f" , {json.dumps(key)}:{json.dumps(value)}" for key, value in fields.items())
    return f'{{ "messages":{message} ,"model": {json.dumps(model)}{more} }}'.encode()


def post(path: str, body: bytes, *headers: str, framing: str = "") -> bytes:
    """A whole POST; `headers` are further lines, `framing` replaces the Content-Length line."""
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers]
    lines.append(framing or f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


@dataclass(frozen=True)
class Response:
    """One answer, read to its end."""

    status: int
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes

    def header(self, name: str) -> str | None:
        """The first value of a header, None without one."""
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Raw:
    """One connection. `received` has every byte that came, `how` says how it ended: "", "fin" or "rst"."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received = b""
        self.how = ""
        self._reader = reader
        self._writer = writer
        self._read = 0  # of `received`, by `response`

    @classmethod
    async def connect(cls, url: str | int) -> Self:
        """To a URL or a port on the loopback."""
        port = url if isinstance(url, int) else urlsplit(url).port
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rst()

    def send(self, data: bytes) -> None:
        """Write it."""
        self._writer.write(data)

    def fin(self) -> None:
        """Close in order."""
        self._writer.close()

    def half_close(self) -> None:
        """Close the sending side alone."""
        self._writer.write_eof()

    def rst(self) -> None:
        """Close with a reset."""
        sock = self._writer.get_extra_info("socket")
        with suppress(OSError, ValueError, AttributeError):  # it is closed already, or there is none any more
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def until(self, mark: bytes, count: int = 1, timeout_s: float = WAIT_S) -> bytes:
        """All that came, as soon as `mark` is in it so many times. Fails if the connection ends before."""
        async with asyncio.timeout(timeout_s):
            while self.received.count(mark) < count:
                assert await self._more(), f"ended ({self.how}) without {count} x {mark!r}: {self.received[-2000:]!r}"
        return self.received

    async def to_end(self, timeout_s: float = WAIT_S) -> bytes:
        """All that came, when the other side has ended the connection."""
        async with asyncio.timeout(timeout_s):
            while await self._more():
                pass
        return self.received

    async def response(self, timeout_s: float = WAIT_S) -> Response:
        """The next answer, read by its framing; fails when the connection ends within it."""
        async with asyncio.timeout(timeout_s):
            head = (await self._upto(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
            headers = [(k.lower(), v.strip()) for k, _, v in (x.partition(":") for x in lines)]
            status = int(line.split(" ")[1])
            if ("transfer-encoding", "chunked") in headers:
                body = b""
                while size := int(await self._upto(b"\r\n"), 16):
                    body += (await self._exactly(size + 2))[:-2]
                assert await self._exactly(2) == b"\r\n"
            else:
                body = await self._exactly(int(dict(headers).get("content-length", "0")))
        return Response(status, headers, body)

    @property
    def rest(self) -> bytes:
        """What came after the last answer."""
        return self.received[self._read :]

    async def _upto(self, mark: bytes) -> bytes:
        while (at := self.received.find(mark, self._read)) < 0:
            assert await self._more(), f"ended ({self.how}) after {self.received!r}"
        return self._taken(at + len(mark))

    async def _exactly(self, count: int) -> bytes:
        while len(self.received) < self._read + count:
            assert await self._more(), f"ended ({self.how}) after {self.received!r}"
        return self._taken(self._read + count)

    def _taken(self, end: int) -> bytes:
        begin, self._read = self._read, end
        return self.received[begin:end]

    async def _more(self) -> bool:
        if self.how:
            return False
        try:
            data = await self._reader.read(65536)
        except ConnectionError:
            self.how = "rst"
            return False
        if not data:
            self.how = "fin"
        self.received += data
        return bool(data)


async def ask(url: str, path: str, body: bytes, *headers: str) -> Response:
    """One POST on a connection of its own."""
    async with await Raw.connect(url) as raw:
        raw.send(post(path, body, *headers))
        return await raw.response()


def body_of(raw: bytes) -> bytes:
    """The payload of a chunked answer, as far as it came; fails on a malformed chunk that is whole."""
    rest, body = raw.split(b"\r\n\r\n", 1)[1], b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def events(payload: bytes) -> list[Any]:
    """The JSON of each server-sent event; what is none, as [DONE] or half an event, as its bytes."""

    def value(text: bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return [value(e.removeprefix(b"data:").strip()) for e in payload.split(b"\n\n") if e.startswith(b"data:")]


# -- a process's admin listener ----------------------------------------------------------------------------------------


async def get(url: str, timeout_s: float = 10.0, *, method: str = "GET", body: bytes = b"") -> Response:
    """One request on a connection of its own. Raises OSError when nobody answers (httpx would cost 20 ms a client)."""
    parts = urlsplit(url)
    head = f"{method} {parts.path}{'?' if parts.query else ''}{parts.query} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
    async with await Raw.connect(url) as raw:
        raw.send(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        try:
            return await raw.response(timeout_s)
        except AssertionError:
            raise ConnectionResetError(f"no answer from {url}") from None


async def metrics(admin: str) -> dict[str, float]:
    """Samples by name and labels, as in `headwater_takeovers_total{stage="region"}`."""
    found = {}
    for line in (await get(f"{admin}/metrics")).body.decode().splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line)
        if match:
            found[f"{match[1]}{{{match[2]}}}" if match[2] else match[1]] = float(match[3])
    return found


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """The sum of the samples of a metric that have these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(v for k, v in samples.items() if k.partition("{")[0] == name and all(w in k for w in wanted))
