"""What strangers can make a process remember: random models, paths, keys and sessions, each never seen before.

    python -m bench.cardinality --count 50000

Starts `headwater up` with tenants before a server of this process, fills what is bounded (recent requests, sessions,
prompts), and then sends COUNT requests of each kind. Says how many series /metrics has and how much memory the process
holds, before and after. Uses loopback alone, some minutes, and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path as FilePath
from random import Random
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console
from rich.table import Table

from common import clock
from common.tenancy.keys import make
from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import Raw, chat, get, post
from tests.integration.system import PORTS, Process, headwater

CONNECTIONS = 16
TURNS = 200  # requests on one connection; then it is made anew, so that what a client keeps of it stays small
AT_ONCE = 2000  # requests after which the server forgets what it has seen
KINDS: dict[str, tuple[int, ...]] = {"models": (404,), "paths": (404, 405), "keys": (401,), "sessions": (200,)}
"""What is random, and how that is answered."""
MIB = 2**20


def tenants_file(directory: FilePath) -> tuple[FilePath, str]:
    """A file with one tenant, and a key of its own."""
    key, kept = make(datetime(2026, 1, 1, tzinfo=UTC))
    file = directory / "tenants.yaml"
    file.write_text(json.dumps({"tenants": {"acme": {"keys": [{"id": kept.id, "sha256": kept.sha256}]}}}))
    return file, key


def stranger(kind: str, key: str, rng: Random) -> bytes:
    """A request that is like no other in what `kind` says, and in its trace, its agent and its prompt besides."""
    name = f"{rng.getrandbits(64):016x}"
    path, model, headers = "/v1/chat/completions", MODEL, [f"authorization: Bearer {key}"]
    if kind == "models":
        model = name
    elif kind == "paths":
        path = rng.choice(("/{}", "/v1/{}", "/v1/models/{}", "/v2/models/{}/infer", "/predictions/{}", "/api/{}"))
        path = path.format(name)
    elif kind == "keys":
        headers = [f"authorization: Bearer {name}"]
    else:
        headers.append(f"x-session-id: {name}")
    trace = f"{rng.getrandbits(128) | 1:032x}"
    headers += [f"traceparent: 00-{trace}-{name}-01", f"user-agent: {name}", f"x-request-id: {name}"]
    body = chat(model, text=f"{name} " * rng.randrange(1, 400), max_tokens=1, user=name)
    return post(path, body, *headers)


async def send(url: str, kind: str, key: str, count: int, rng: Random) -> Counter[int]:
    """`count` such requests; how many were answered with which status."""
    found: Counter[int] = Counter()
    left = iter(range(count))

    async def client() -> None:
        while True:
            async with await Raw.connect(url) as raw:
                for _ in range(TURNS):
                    if next(left, None) is None:
                        return
                    raw.send(stranger(kind, key, rng))
                    found[(await raw.response(60.0)).status] += 1

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return found


def series(exposition: str) -> int:
    """How many series a scrape has."""
    return sum(1 for line in exposition.splitlines() if line and not line.startswith("#"))


def resident(pid: int) -> float:
    """Bytes of memory that a process holds."""
    status = FilePath(f"/proc/{pid}/status").read_text()
    return 1024.0 * int(status.partition("VmRSS:")[2].split()[0])


async def run(count: int, warm_up: int, say: Callable[[object], None]) -> None:
    """The whole of it."""
    with TemporaryDirectory(prefix="headwater-") as directory:
        file, key = tenants_file(FilePath(directory))
        config, data, admin = FilePath(directory) / "up.yaml", PORTS.take(), PORTS.take()
        async with FakeEngine("one") as engine:
            server = {"id": "one", "url": engine.url, "engine": "openai", "models": [MODEL]}
            settings = {"affinity": {"max_sessions": 1000}, "tenants": {"file": str(file)}, "instances": [server]}
            listeners = {"listen": f"127.0.0.1:{data}", "admin": f"127.0.0.1:{admin}"}
            config.write_text(json.dumps({**settings, **listeners}))
            url, admin_url = f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}"
            process = Process("up", headwater("up", "--config", str(config)), f"{admin_url}/readyz")
            try:
                await process.start()
                rng = Random(1)

                async def now() -> tuple[int, float]:
                    return series((await get(f"{admin_url}/metrics")).body.decode()), resident(process.pid)

                table = Table("random", "requests", "answered", "series before", "after", "MiB before", "after")
                for kind in KINDS:
                    for _ in range(0, warm_up, AT_ONCE):
                        await send(url, kind, key, AT_ONCE, rng)
                        engine.seen.clear()
                for kind in KINDS:
                    before, began = await now(), clock.now()
                    answered: Counter[int] = Counter()
                    for at in range(0, count, AT_ONCE):
                        answered += await send(url, kind, key, min(AT_ONCE, count - at), rng)
                        engine.seen.clear()
                    after, took = await now(), clock.now() - began
                    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(answered.items()))
                    sizes = (f"{before[1] / MIB:.1f}", f"{after[1] / MIB:.1f}")
                    table.add_row(kind, f"{count} in {took:.0f} s", statuses, str(before[0]), str(after[0]), *sizes)
                say(table)
            finally:
                process.discard()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000, help="requests of each kind")
    parser.add_argument("--warm-up", type=int, default=10_000, help="of each kind before, that fill what is bounded")
    args = parser.parse_args()
    uvloop.run(run(args.count, args.warm_up, Console(file=sys.stdout).print))


if __name__ == "__main__":
    main()
