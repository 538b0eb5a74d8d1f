"""Does anything stay behind? Memory and open files of one `headwater up` process before and after many faults.

    python -m tests.soak --requests 10000 --soak-s 1200

Each fault of the table is sent `--requests` times, thirty at once; then the soak: half of what the process was seen to
take, of all kinds mixed, for `--soak-s` seconds. After each the process is left to rest, and its memory and files are
printed. The first thousandth of each fault and one round of all kinds go before the first reading, since what is needed
once is not given back: buffers, connections, the memory of the last requests. Ends with 1 when memory has grown by more
than `--grown-kb` over all, or a file is open that was not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable

import uvloop

from tests.fake_engine import BEFORE_HEAD, MODEL, FakeEngine, Script, Seen
from tests.integration.clients import Raw, chat, post
from tests.integration.relay.cases import PATH, streamed
from tests.integration.relay.process import Alone, alone
from tests.servers import eventually

AT_ONCE = 30
REST_S = 6.0  # idle connections to servers are closed after four
STREAM = Script.stream("one ", "two ", "three ")
SCRIPTS = {
    "whole": Script.whole(),
    "stream": STREAM,
    "error": Script.error(500),
    "client's mistake": Script.error(400),
    "overload": Script.error(429, headers=(("retry-after", "0"),)),
    "reset before the head": Script.whole(cut="rst", cut_after=BEFORE_HEAD),
    "cut within the stream": STREAM.but(cut="rst", cut_after=2),
    "closed within the stream": STREAM.but(cut="fin", cut_after=1),
    "short of its length": Script.whole().but(declared=10_000, cut="fin"),
    "silent": Script.whole(cut="stall", cut_after=BEFORE_HEAD),
    "left before the head": Script.whole(delay_s=30.0),
    "left within the stream": STREAM.but(gap_s=30.0),
    "closes used connections": Script.whole(close="silent"),
}
LEAVES = {"left before the head": 0.02, "left within the stream": 0.02, "silent": 0.02}
RAW = {
    "no request": b"GET\r\n\r\n",
    "two lengths": post(PATH, b"{}", "content-length: 3"),
    "no JSON": post(PATH, b"{", "connection: close"),
    "no such model": post(PATH, b'{"model":"x"}', "connection: close"),
    "half a request": post(PATH, b"", framing="content-length: 100"),
}


async def ask(world: Alone, kind: str) -> None:
    """One request of a kind, on a connection of its own, whatever becomes of it."""
    async with await Raw.connect(world.url) as raw:
        if kind in RAW:
            raw.send(RAW[kind])
            if kind == "half a request":
                return
        else:
            body = streamed if "stream" in kind else lambda *headers: post(PATH, chat(MODEL), *headers)
            raw.send(body(f"x-kind: {kind}", "connection: close"))
        try:
            await raw.to_end(LEAVES.get(kind, 20.0))
        except TimeoutError:
            assert kind in LEAVES, kind


async def many(world: Alone, kinds: list[str], count: int, until: Callable[[], bool] = lambda: False) -> float:
    """So many requests, in turn of these kinds, some at once; how many a second."""
    numbers = itertools.count()
    began = time.monotonic()

    async def some() -> None:
        while (number := next(numbers)) < count and not until():
            await ask(world, kinds[number % len(kinds)])

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return next(numbers) / (time.monotonic() - began)


async def at_rate(world: Alone, kinds: list[str], rate: float, seconds: float) -> int:
    """Requests at a steady rate; how many there were."""
    began, number, running = time.monotonic(), 0, set[asyncio.Task[None]]()
    while (now := time.monotonic()) < began + seconds:
        if now < began + number / rate or len(running) > 10 * AT_ONCE:
            await asyncio.sleep(0.005)
            continue
        task = asyncio.create_task(ask(world, kinds[number % len(kinds)]))
        running.add(task)
        task.add_done_callback(running.discard)
        number += 1
    await asyncio.gather(*running)
    return number


async def rested(world: Alone) -> tuple[int, int]:
    """Memory (KB) and open files once nothing is under way any more."""
    await eventually(world.idle, 60.0, step_s=0.2)
    await asyncio.sleep(REST_S)
    return world.resident_kb, world.open_files


async def run(requests: int, soak_s: float, grown_kb: int, faults: list[str]) -> int:
    """The whole of it; the exit status."""

    def choose(seen: Seen) -> Script:
        return SCRIPTS[seen.header("x-kind") or "whole"]

    engines = FakeEngine("a"), FakeEngine("b")
    for engine in engines:
        engine.choose = choose
    settings = {
        "health": {"eject_after": 1_000_000},
        "queue": {"max_requests": 0},
        "tracing": {"recent": 100},
        "limits": {"body_timeout_s": 2.0},
        "retry": {"budget_ratio": 1.0},
    }
    async with alone(*engines, **settings) as world:

        def forget() -> None:
            for engine in engines:  # what the fake servers remember is of no interest here
                engine.seen.clear()

        await many(world, faults, max(len(faults) * 10, requests // 1000 * len(faults)))
        kb, files = begin = await rested(world)
        forget()
        print(f"{'':32}{'req/s':>8}{'KB':>9}{'grown':>8}{'files':>7}")
        print(f"{'at the begin':32}{'':8}{kb:9}{'':8}{files:7}", flush=True)
        rates = []
        for kind in faults:
            before = kb
            rates.append(await many(world, [kind], requests))
            forget()
            kb, files = await rested(world)
            print(f"{kind:32}{rates[-1]:8.0f}{kb:9}{kb - before:8}{files:7}", flush=True)
        if soak_s:
            before, rate = kb, len(rates) / sum(1.0 / r for r in rates) / 2.0
            count = await at_rate(world, faults, rate, soak_s)
            kb, files = await rested(world)
            print(f"{f'soak of {soak_s:.0f} s, {count} requests':32}{rate:8.0f}{kb:9}{kb - before:8}{files:7}")
        grown, opened = kb - begin[0], files - begin[1]
        print(f"grown by {grown} KB and {opened} files in all")
        return int(grown > grown_kb or opened > 0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="memory and open files after faults by the thousand")
    parser.add_argument("--requests", type=int, default=1000, help="of each fault")
    parser.add_argument("--soak-s", type=float, default=0.0, help="seconds at half load afterwards")
    parser.add_argument(  # looks at servers leave some 8 MB before the collector comes by
        "--grown-kb", type=int, default=16_384, help="growth that is still none"
    )
    parser.add_argument("--fault", action="append", choices=[*SCRIPTS, *RAW], help="only these")
    given = parser.parse_args()
    faults = given.fault or [*SCRIPTS, *RAW]
    work: Awaitable[int] = run(given.requests, given.soak_s, given.grown_kb, faults)
    sys.exit(uvloop.run(work))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
