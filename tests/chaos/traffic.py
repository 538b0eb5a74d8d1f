"""Clients of all kinds, each request checked for whose answer it got and how it ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.chaos.world import MODELS, TENANTS, ChaosSystem
from tests.integration.clients import Raw, body_of, chat, events, post
from tests.integration.system import GLOBALS

TIMEOUT_S = 60.0  # of one request: whatever holds it up is over by then
PATH = "/v1/chat/completions"
KINDS = {"whole": 50, "stream": 35, "leaves": 5, "leaves the stream": 10}
SESSIONS = 40
ENDINGS = ("ok", "left", "limited", "failed", "cut", "wrong")


@dataclass
class Asked:
    """One request and what became of it."""

    number: int
    kind: str
    tenant: str
    model: str
    session: str
    tokens: int
    nonce: str  # which the server puts into the answer's id
    trace: str
    at: float  # monotonic seconds
    entry: str = ""  # the balancer that took the connection
    ending: str = ""
    detail: str = ""
    status: int = 0
    took_s: float = 0.0
    first_s: float | None = None
    served_by: str = ""

    @property
    def streams(self) -> bool:
        """Whether it asks for a stream."""
        return "stream" in self.kind


class WrongError(Exception):
    """An answer that no fault excuses."""


@dataclass
class Traffic:
    """Sends requests at a steady rate, answered or not."""

    system: ChaosSystem
    rng: Random
    rate: float
    asked: list[Asked] = field(default_factory=list)
    under_way: int = 0

    async def run(self, until: float) -> None:
        """Send until then, and wait for the last answer."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while due < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += self.rng.expovariate(self.rate)
            task = asyncio.create_task(self._one(self._draw()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    def _draw(self) -> Asked:
        rng, number = self.rng, len(self.asked)
        session = f"s{rng.randrange(SESSIONS)}" if rng.random() < 0.5 else ""
        asked = Asked(
            number=number,
            kind=rng.choices(list(KINDS), list(KINDS.values()))[0],
            tenant=rng.choices(list(TENANTS), [10, 10, 10, 1])[0],
            model=rng.choices(MODELS, [3, 3, 2])[0],
            session=session,
            tokens=rng.choice([2, 4, 8, 16, 32, 100]),
            nonce=f"{session or 'none'}-{number}-{rng.getrandbits(40):010x}",
            trace=f"{rng.getrandbits(128):032x}",
            at=0.0,
        )
        self.asked.append(asked)
        return asked

    async def _one(self, a: Asked) -> None:
        a.at = time.monotonic()
        self.under_way += 1
        try:
            async with asyncio.timeout(TIMEOUT_S), await self._connect(a) as raw:
                raw.send(self._bytes(a))
                await (self._stream(a, raw) if a.streams else self._whole(a, raw))
        except TimeoutError:
            a.ending, a.detail = "failed", f"not over after {TIMEOUT_S:.0f} s"
        except WrongError as error:
            a.ending, a.detail = "wrong", str(error)
        except (OSError, AssertionError) as error:
            a.ending, a.detail = "failed", str(error)[:300] or type(error).__name__
        finally:
            self.under_way -= 1
            a.took_s = time.monotonic() - a.at

    async def _connect(self, a: Asked) -> Raw:
        """To one of the global balancers; where nobody listens, to the other, as a client of two addresses does."""
        first = a.number % len(GLOBALS)
        names = [*GLOBALS[first:], *GLOBALS[:first]]
        for name in names:
            a.entry = name
            try:
                return await Raw.connect(self.system.tiers[name].url)
            except ConnectionRefusedError:
                continue
        raise ConnectionRefusedError("no global balancer listens")

    def _bytes(self, a: Asked) -> bytes:
        fields: dict[str, Any] = {"max_tokens": a.tokens, "ignore_eos": True}
        if a.streams:
            fields["stream"] = True
        headers = [
            f"authorization: Bearer {self.system.keys[a.tenant]}",
            f"x-request-id: {a.nonce}",
            f"traceparent: 00-{a.trace}-00000000000000a1-01",
            "connection: close",
        ]
        if a.session:
            headers.append(f"x-session-id: {a.session}")
        text = f"In session {a.session}: " * 20 + f"number {a.number}"
        return post(PATH, chat(a.model, text=text, **fields), *headers)

    # -- what came -----------------------------------------------------------------------------------------------------

    async def _whole(self, a: Asked, raw: Raw) -> None:
        if a.kind == "leaves":
            await asyncio.sleep(self.rng.uniform(0.005, 0.2))
            raw.rst() if self.rng.random() < 0.5 else raw.fin()
            a.ending = "left"
            return
        response = await raw.response(TIMEOUT_S)
        a.status, a.served_by = response.status, response.header("x-headwater-served-by") or ""
        await raw.to_end(TIMEOUT_S)
        if raw.rest:
            raise WrongError(f"more than one answer: {raw.rest[:200]!r}")
        if response.status != 200:
            self._refused(a, response.body)
            return
        body = response.json()
        _same(a, body)
        (choice,) = body["choices"]
        if len(choice["message"]["content"].split()) != a.tokens:
            raise WrongError(f"{len(choice['message']['content'].split())} words of {a.tokens}")
        a.ending = "ok"

    async def _stream(self, a: Asked, raw: Raw) -> None:
        try:
            await raw.until(b"\n\n" if a.kind == "stream" else b"data:", 1, TIMEOUT_S)
        except AssertionError:
            if not raw.received:
                raise
        a.first_s = time.monotonic() - a.at
        if a.kind != "stream" and b" 200 " in raw.received[:20]:
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
            raw.rst() if self.rng.random() < 0.5 else raw.fin()
            a.ending = "left"
            return
        received = await raw.to_end(TIMEOUT_S)
        head, _, rest = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        a.status = int(lines[0].split(" ")[1])
        a.served_by = next((x.partition(": ")[2] for x in lines if x.startswith("x-headwater-served-by")), "")
        if a.status != 200:
            self._refused(a, rest)
            return
        self._events(a, received)

    def _events(self, a: Asked, received: bytes) -> None:
        clean = received.endswith(b"0\r\n\r\n")
        values = events(body_of(received))
        words, finished, done = 0, False, False
        for value in values:
            if done:
                raise WrongError(f"something after the end: {value!r}")
            if value == b"[DONE]":
                done = True
            elif isinstance(value, bytes):
                if clean:
                    raise WrongError(f"no event: {value[:200]!r}")
            elif "error" in value:
                a.ending, a.detail = "cut", str(value["error"].get("code"))
                return
            else:
                _same(a, value)
                for choice in value["choices"]:
                    words += len((choice["delta"].get("content") or "").split())
                    finished = finished or choice.get("finish_reason") is not None
        if words > a.tokens:
            raise WrongError(f"{words} words of {a.tokens}")
        if done and finished and words == a.tokens and clean:
            a.ending = "ok"
        elif clean:
            raise WrongError(f"looks whole with {words} words of {a.tokens}, done: {done}, finished: {finished}")
        else:
            a.ending, a.detail = "cut", "connection"

    def _refused(self, a: Asked, body: bytes) -> None:
        text = body.decode(errors="replace")[:400]
        a.ending, a.detail = "failed", f"{a.status} {text}"
        if a.status == 508:
            raise WrongError(f"a loop: {text}")
        if a.status == 429 and a.tenant == "small":
            a.ending = "limited"


def _same(a: Asked, body: dict[str, Any]) -> None:
    """Whether it is an answer to this request."""
    if not str(body["id"]).endswith(a.nonce) or body["model"] != a.model:
        raise WrongError(f"an answer of {body['model']} to {body['id']}, for one of {a.model} to {a.nonce}")
