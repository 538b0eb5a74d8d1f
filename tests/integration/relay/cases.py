"""What the cases of the relay share: requests, and what is asked of tiers afterwards."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any, Self

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, Response, chat, get, metrics, post, total
from tests.integration.system import Tiers

PATH = "/v1/chat/completions"
GONE_S = 2.0  # within which a server sees that the client left; CASES: 1 s for one tier, 2 s for three


def streamed(*headers: str, **fields: Any) -> bytes:
    """A streamed chat, as its client sends it."""
    return post(PATH, chat(MODEL, stream=True, **fields), *headers)


def seen(world: Tiers) -> int:
    """Requests that reached an engine."""
    return sum(len(engine.seen) for engine in world.engines)


async def records(world: Tiers) -> list[dict[str, Any]]:
    """The finished requests of the top tier, newest first."""
    return list((await get(f"{world.admin_url}/admin/v1/requests?limit=1000")).json())


async def failures(world: Tiers) -> float:
    """Attempts at instances that failed, by the bottom tier's counter."""
    samples = await metrics(f"http://127.0.0.1:{world.bottom.admin_port}")
    return total(samples, "headwater_attempts_total", to="instance") - total(
        samples, "headwater_attempts_total", to="instance", error=""
    )


def is_error(response: Response, status: int) -> bool:
    """Whether it is an error in the OpenAI shape."""
    error = response.json()["error"]
    return response.status == status and {"message", "type", "param", "code"} <= error.keys()


async def exchange(url: str, data: bytes, timeout_s: float = 5.0) -> bytes:
    """Everything that comes back for some bytes until the other side closes, which it must in time."""
    async with await Raw.connect(url) as raw:
        raw.send(data)
        return await raw.to_end(timeout_s)


def statuses(received: bytes) -> list[int]:
    """Of all answers in what was received."""
    return [int(s) for s in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def resident_kb(pid: int | None = None) -> int:
    """Resident memory of a process, ours by default."""
    with open(f"/proc/{pid or os.getpid()}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


class LaxEngine(FakeEngine):
    """A server that takes whatever looks like a request line for one, wherever it stands, and answers each."""

    LINE = re.compile(rb"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|FOO|PRI) \S+ HTTP/\d")

    def __init__(self, name: str = "lax") -> None:
        super().__init__(name, Script.whole())
        self.received: list[bytes] = []  # by connection
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def lines(self) -> list[bytes]:
        """All request lines that were found."""
        return [line for data in self.received for line in self.LINE.findall(data)]

    async def start(self) -> Self:
        self._lax = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._lax.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at, answered = len(self.received), 0
        self.received.append(b"")
        self._writers.append(writer)
        while data := await reader.read(65536):
            self.received[at] += data
            while answered < len(self.LINE.findall(self.received[at])):
                answered += 1
                body = b'{"answer": %d}' % answered
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    def kill(self) -> None:
        self._lax.close()
        for writer in self._writers:
            writer.transport.abort()
