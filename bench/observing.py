"""What being seen costs: CPU a request of `headwater up` with all of it on, and with all of it off.

    python -m bench.observing --rounds 12 --requests 1500

All processes stand before the same server and get their shares of the load in turn, many times over, so that whatever
else the machine does falls on all alike; what is compared is the CPU that each has used, by its own clock. Metrics are
always on. Uses loopback alone, a minute or two, and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from pathlib import Path as FilePath
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console
from rich.table import Table

from tests.fake_engine import MODEL, FakeEngine, Script
from tests.integration.clients import Raw, chat, post
from tests.integration.system import PORTS, Process, headwater
from tests.servers import eventually

CONNECTIONS, SERVERS = 32, 16
OFF = {"log": {"access": False}, "tracing": {"sample_ratio": 0.0, "recent": 0}}
COLLECTOR = "http://127.0.0.1:9"  # nobody: what is sent is made and offered, and thrown away
WAYS: dict[str, dict[str, object]] = {
    "off": OFF,
    "access log": OFF | {"log": {"access": True}},
    "decision records": OFF | {"tracing": {"sample_ratio": 0.0, "recent": 2000}},
    "all, as shipped": {},
    "all, and 1 % of traces to a collector": {"tracing": {"otlp_endpoint": COLLECTOR}},
    "all, and 100 % of traces": {"tracing": {"otlp_endpoint": COLLECTOR, "sample_ratio": 1.0}},
    "all, and records to a file": {"tracing": {"decisions_file": "/dev/null"}},
}
TICKS = os.sysconf("SC_CLK_TCK")


class Contestant:
    """One process, and the CPU it took a request in each round, seconds: in user space, and all of it."""

    def __init__(self, name: str, settings: dict[str, object], engine: FakeEngine, directory: FilePath) -> None:
        self.name, self.took = name, list[tuple[float, float]]()
        data, admin = PORTS.take(), PORTS.take()
        servers = [
            {"id": f"s{n}", "url": f"http://127.0.0.{n + 1}:{engine.port}", "engine": "openai", "models": [MODEL]}
            for n in range(SERVERS)
        ]
        listeners = {"listen": f"127.0.0.1:{data}", "admin": f"127.0.0.1:{admin}"}
        file = directory / f"{data}.yaml"
        file.write_text(json.dumps({"instances": servers, "scrape_interval_s": 10.0, **listeners, **settings}))
        self.url = f"http://127.0.0.1:{data}"
        self.process = Process("up", headwater("up", "--config", str(file)), f"http://127.0.0.1:{admin}/readyz")

    def used_s(self) -> tuple[float, float]:
        """CPU that it has used, seconds: in user space, and all of it."""
        stat = FilePath(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[11]) / TICKS, (int(stat[11]) + int(stat[12])) / TICKS

    async def serve(self, requests: int) -> None:
        """One round."""
        before = self.used_s()
        left = iter(range(requests))

        async def client() -> None:
            async with await Raw.connect(self.url) as raw:
                while next(left, None) is not None:
                    raw.send(post("/v1/chat/completions", chat(MODEL, max_tokens=8, stream=True)))
                    reply = await raw.response(60.0)
                    assert reply.status == 200, reply

        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
        after = self.used_s()
        self.took.append(((after[0] - before[0]) / requests, (after[1] - before[1]) / requests))

    async def answers(self) -> bool:
        """Whether it knows the server by now."""
        async with await Raw.connect(self.url) as raw:
            raw.send(post("/v1/chat/completions", chat(MODEL, max_tokens=8)))
            return (await raw.response()).status == 200


async def run(ways: Collection[str], rounds: int, requests: int, say: Callable[[object], None]) -> None:
    """The whole of it."""
    async with AsyncExitStack() as stack:
        directory = FilePath(stack.enter_context(TemporaryDirectory(prefix="headwater-")))
        engine = FakeEngine("one", script=Script.stream(*"abcdefgh"), host="0.0.0.0")
        await stack.enter_async_context(engine)
        contestants = [Contestant(name, WAYS[name], engine, directory) for name in ways]
        for one in contestants:
            stack.callback(one.process.discard)
            await one.process.start()
            await eventually(one.answers, 30.0)
            await one.serve(requests)
            one.took.clear()
        rng = Random(1)
        for _ in range(rounds):
            for one in rng.sample(contestants, len(contestants)):
                await one.serve(requests)
                engine.seen.clear()
        table = Table(
            "", "user CPU a request, us", "÷ off", "all CPU, us", "÷ off", "quartiles", "requests/s, one core"
        )
        off = contestants[0].took
        for one in contestants:
            user, whole = ([a[i] / b[i] for a, b in zip(one.took, off, strict=True)] for i in (0, 1))
            low, _, high = quantiles(whole, n=4)
            table.add_row(
                *(one.name, f"{median(t[0] for t in one.took) * 1e6:.0f}", f"{median(user):.3f}"),
                *(f"{median(t[1] for t in one.took) * 1e6:.0f}", f"{median(whole):.3f}", f"{low:.3f}-{high:.3f}"),
                f"{100.0 * (1.0 / median(whole) - 1.0):+.1f} %",
            )
        say(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=1500, help="of each process in a round")
    parser.add_argument("--only", action="append", choices=[*WAYS][1:], help="one of them; several times for several")
    args = parser.parse_args()
    ways = ["off", *(args.only or [*WAYS][1:])]
    uvloop.run(run(ways, args.rounds, args.requests, Console(file=sys.stdout, width=120).print))


if __name__ == "__main__":
    main()
