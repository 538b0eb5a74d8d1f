"""An inference server on a raw socket that does exactly as it is told, and remembers every byte it was sent.

A `Script` says what becomes of one request: when the answer begins, what it is made of, in which framing, and where and
how it is cut off. A `Seen` is what is remembered of one. What balancers ask by themselves (models, health, metrics) is
answered as a server of `model` would, is counted in `looks`, and is not in `seen`.

    async with FakeEngine("one") as engine:
        engine.script = Script.stream("a", "b", "c", cut="rst", cut_after=2)
        ...
        assert [s.sha256 for s in engine.seen] == [sha256(body)]

It runs on the test's own event loop; `kill` resets everything at once, as the end of a process does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, Self, cast

MODEL = "fake-model"
FLUSH_S = 0.01  # left to bytes already written before a connection is broken on purpose
ALL = 1 << 30  # `cut_after`: when everything but the proper end of the body was sent
BEFORE_HEAD = -1  # `cut_after`: instead of an answer
LOOKS = ("/v1/models", "/health", "/metrics", "/version", "/props", "/info", "/", "/v2", "/api-description", "/ping")


def event(value: object) -> bytes:
    """One server-sent event with JSON, or with the text it is given."""
    return b"data: %b\n\n" % (value if isinstance(value, str) else json.dumps(value)).encode()


def token(text: str, **choice: Any) -> bytes:
    """One event of a streamed chat."""
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL, "choices": choices})


@dataclass(frozen=True)
class Script:
    """What becomes of one request. `chunks` are the pieces of the body, each written (and framed) by itself."""

    status: int = 200
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    chunks: tuple[bytes, ...] = ()
    framing: Literal["length", "chunked", "close", "raw"] = "length"  # raw: the pieces are all there is, head included
    declared: int | None = None  # Content-Length where it is not to be the truth
    delay_s: float = 0.0  # from the request's last byte to the answer's first
    gap_s: float = 0.0  # before each chunk but the first
    cut: Literal["", "fin", "rst", "stall"] = ""
    cut_after: int = ALL  # chunks, BEFORE_HEAD or ALL
    last_bytes: bytes = b""  # raw, before the cut: half of a chunk's head, say
    close: Literal["", "announced", "silent"] = ""  # after a whole answer: with or without saying so in its head

    @staticmethod
    def whole(text: str = "Hello.", **fields: Any) -> Script:
        """A chat completion in one piece."""
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = {"id": "chatcmpl-1", "object": "chat.completion", "model": MODEL, "choices": choices, "usage": usage}
        return Script(chunks=(json.dumps(body).encode(),), **fields)

    @staticmethod
    def stream(*words: str, **fields: Any) -> Script:
        """A streamed chat of one event a word, and its proper end."""
        last = token("", delta={}, finish_reason="stop")
        chunks = (*(token(word) for word in words), last + event("[DONE]"))
        return Script(content_type="text/event-stream", framing="chunked", chunks=chunks, **fields)

    @staticmethod
    def error(status: int, message: str = "refused on command", **fields: Any) -> Script:
        """An error in vLLM's shape."""
        body = {"error": {"message": message, "type": "SimulatedError", "param": None, "code": status}}
        return Script(status=status, chunks=(json.dumps(body).encode(),), **fields)

    def but(self, **fields: Any) -> Script:
        """The same with some fields changed."""
        return replace(self, **fields)


@dataclass
class Seen:
    """One request as it arrived, and how its answer went; times are the event loop's."""

    raw: bytes  # head and body, as they came
    method: str
    target: str
    headers: list[tuple[str, str]]  # names in lower case
    body: bytes  # without the framing of chunks
    connection: int  # number of its connection
    turn: int  # how many requests came on that connection before
    at: float
    answered: bool = False  # a byte of an answer was written
    chunks: int = 0  # written
    written: int = 0  # bytes of the answer that the client's side has taken
    ended: Literal["", "complete", "cut", "aborted"] = ""  # "": under way; aborted: the client left before the end
    ended_at: float = 0.0

    @property
    def sha256(self) -> str:
        """Of the body."""
        return sha256(self.body).hexdigest()

    def header(self, name: str) -> str | None:
        """The first value of a header, None without one."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(eq=False)
class FakeEngine:
    """One server. `script` is for all requests, `next_scripts` go first, `choose` (if set) decides before both."""

    name: str = "fake"
    script: Script = field(default_factory=Script.whole)
    model: str = MODEL
    engine: str = ""  # its kind, where it is registered
    version: str = ""  # of its model, where it is registered
    models_script: Script | None = None  # instead of a list of models
    next_scripts: deque[Script] = field(default_factory=deque)
    choose: Callable[[Seen], Script] | None = None
    host: str = "127.0.0.1"  # ::1 for an address of IPv6
    idle_close_s: float | None = None  # close a connection that was idle for so long after an answer
    slams: bool = False  # connections are taken and reset at once
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    looks: int = 0
    accepted: int = 0  # connections so far
    most: int = 0  # requests under way at once, at most
    _open: set[_Connection] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT, or with the address of IPv6 in brackets."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def open(self) -> int:
        """Connections open now."""
        return len(self._open)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(1 for s in self.seen if not s.ended)

    def ended(self, how: str) -> list[Seen]:
        """The requests that ended so."""
        return [s for s in self.seen if s.ended == how]

    def then(self, *scripts: Script) -> None:
        """What becomes of the next requests, one each."""
        self.next_scripts.extend(scripts)

    async def start(self) -> Self:
        """Listen; again on the same port after `refuse` or `kill`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self.host, self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def refuse(self) -> None:
        """Take no more connections; those that are open live on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def kill(self) -> None:
        """Stop listening and reset every connection."""
        self.refuse()
        for connection in list(self._open):
            connection.reset()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        while self._open:
            await asyncio.sleep(0.005)

    def script_for(self, seen: Seen) -> Script:
        """What is to become of a request."""
        if self.choose is not None:
            return self.choose(seen)
        return self.next_scripts.popleft() if self.next_scripts else self.script

    def look(self, path: str) -> Script:
        """The answer to a question that balancers ask by themselves."""
        self.looks += 1
        if path == "/v1/models":
            listed = {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": self.name}]}
            return self.models_script or Script(chunks=(json.dumps(listed).encode(),))
        return Script(chunks=(b"",)) if path == "/health" else Script.error(404)


class _Connection(asyncio.Protocol):
    """One client: its requests in their order, one at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.number = engine.accepted
        self._bytes = bytearray()
        self._arrived = asyncio.Event()
        self._gone = asyncio.Event()
        self._turn = 0
        self._full = False  # the client does not take what is written
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.engine.accepted += 1
        self.engine._open.add(self)
        if self.engine.slams:
            self.reset()
            return
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine._open.discard(self)
        self._gone.set()
        self._arrived.set()

    def reset(self) -> None:
        """RST, and nothing that was not sent yet."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    async def _serve(self) -> None:
        while (seen := await self._request()) is not None:
            if seen.method == "GET" and seen.target in LOOKS:
                going_on = await self._answer(seen, self.engine.look(seen.target))
            else:
                seen.turn, self._turn = self._turn, self._turn + 1
                self.engine.seen.append(seen)
                self.engine.most = max(self.engine.most, self.engine.in_flight)
                going_on = await self._answer(seen, self.engine.script_for(seen))
            if not seen.ended:
                seen.ended = "aborted"
            seen.ended_at = asyncio.get_running_loop().time()
            if not going_on:
                return

    # -- in ----------------------------------------------------------------------------------------------------------

    async def _request(self) -> Seen | None:
        """The next request; None when the client is gone, or idle for too long."""
        raw_head = await self._until(b"\r\n\r\n", self.engine.idle_close_s if self._turn else None)
        if raw_head is None:
            self.transport.close()
            return None
        line, *lines = raw_head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, _ = line.split(" ", 2)
        headers = [(k.strip().lower(), v.strip()) for k, _, v in (x.partition(":") for x in lines)]
        length = next((v for k, v in headers if k == "content-length"), "0")
        chunked = any(k == "transfer-encoding" and "chunked" in v.lower() for k, v in headers)
        body = await (self._chunked_body() if chunked else self._sized_body(int(length)))
        if body is None:
            return None
        at = asyncio.get_running_loop().time()
        return Seen(raw_head + body[0], method, target, headers, body[1], self.number, 0, at)

    async def _until(self, mark: bytes, timeout_s: float | None = None) -> bytes | None:
        while (at := self._bytes.find(mark)) < 0:
            if not await self._more(timeout_s):
                return None
        return self._take(at + len(mark))

    async def _sized_body(self, length: int) -> tuple[bytes, bytes] | None:
        while len(self._bytes) < length:
            if not await self._more(None):
                return None
        body = self._take(length)
        return body, body

    async def _chunked_body(self) -> tuple[bytes, bytes] | None:
        raw = body = b""
        while True:
            line = await self._until(b"\r\n")
            if line is None:
                return None
            size = int(line.split(b";")[0], 16)
            piece = await self._sized_body(size + 2)
            if piece is None:
                return None
            raw, body = raw + line + piece[0], body + piece[0][:size]
            if size == 0:
                return raw, body

    async def _more(self, timeout_s: float | None) -> bool:
        if self._gone.is_set():
            return False
        self._arrived.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return not self._gone.is_set()

    def _take(self, count: int) -> bytes:
        piece = bytes(self._bytes[:count])
        del self._bytes[:count]
        return piece

    # -- out ---------------------------------------------------------------------------------------------------------

    async def _answer(self, seen: Seen, script: Script) -> bool:
        """Answer as told; whether the connection goes on. Leaves `seen.ended` empty when the client left."""
        if await self._left_within(script.delay_s):
            return False
        if script.cut_after != BEFORE_HEAD:
            self._write(seen, b"" if script.framing == "raw" else self._head(script))
            seen.answered = True
            for at, chunk in enumerate(script.chunks[: script.cut_after] if script.cut else script.chunks):
                if await self._left_within(script.gap_s if at else 0.0) or await self._blocked():
                    return False
                framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
                self._write(seen, framed if script.framing == "chunked" else chunk)
                seen.chunks += 1
        if script.cut:
            return await self._cut(seen, script)
        if script.framing == "chunked":
            self.transport.write(b"0\r\n\r\n")
        seen.ended = "complete"
        if script.close or script.framing == "close":
            self.transport.close()
            return False
        return True

    def _write(self, seen: Seen, data: bytes) -> None:
        self.transport.write(data)
        seen.written += len(data)

    async def _blocked(self) -> bool:
        """Wait until what was written is taken; whether the client left meanwhile."""
        while self._full and not self._gone.is_set():
            self._arrived.clear()
            await self._arrived.wait()
        return self._gone.is_set()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._arrived.set()

    def _head(self, script: Script) -> bytes:
        length = script.declared if script.declared is not None else sum(len(c) for c in script.chunks)
        framing = {"length": f"content-length: {length}\r\n", "chunked": "transfer-encoding: chunked\r\n"}
        lines = [f"HTTP/1.1 {script.status} Scripted\r\ncontent-type: {script.content_type}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in script.headers]
        lines += [framing.get(script.framing, ""), f"x-engine-id: {self.engine.name}\r\n"]
        if script.close == "announced" or script.framing == "close":
            lines.append("connection: close\r\n")
        return ("".join(lines) + "\r\n").encode("latin-1")

    async def _cut(self, seen: Seen, script: Script) -> bool:
        if script.last_bytes:
            self.transport.write(script.last_bytes)
        if script.cut == "stall":
            await self._gone.wait()
            return False
        await asyncio.sleep(FLUSH_S)
        if self._gone.is_set():
            return False
        seen.ended = "cut"
        if script.cut == "fin":
            self.transport.close()
        else:
            self.reset()
        return False

    async def _left_within(self, seconds: float) -> bool:
        """Wait; whether the client left meanwhile."""
        if seconds > 0.0 and not self._gone.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._gone.wait()
            except TimeoutError:
                pass
        return self._gone.is_set()
