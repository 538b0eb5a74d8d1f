"""How exactly a tenant's limits hold over several balancers, and what keeping them costs.

    python -m bench.tenants --balancers 4 --seconds 130 --requests-per-minute 6000

Starts a Redis, and balancers as processes that all admit requests of one tenant as fast as they can, in bursts. Says
how many were admitted in the fullest 60 seconds against the limit, how much of the limit was used, how many round trips
to Redis it took, and how long admitting took. Uses loopback alone and ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from random import Random
from time import perf_counter  # noqa: TID251 - of a benchmark

import uvloop
from rich.console import Console

from common import clock
from common.errors import QuotaExceeded
from common.policy.window import Span
from common.store.redis_quota import RedisQuotaStore
from common.tenancy.directory import Directory, TenantSpec
from common.tenancy.gate import Gate, Used, running
from common.tenancy.keys import make
from common.types import InferenceRequest
from tests.servers import RedisServer

TOKENS = 100  # of each request: it may use twice as many, and uses these


class _One:
    """A directory of one tenant, whose key goes by the name of the run."""

    def __init__(self, spec: TenantSpec) -> None:
        self.key, self._kept = make(datetime(2026, 1, 1, tzinfo=UTC))
        self._spec = spec

    async def watch(self) -> AsyncGenerator[Directory, None]:
        yield Directory.of({"acme": self._spec}, {"acme": (self._kept,)})
        await asyncio.Event().wait()


async def balancer(url: str, seconds: float, requests: int, tokens: int, seed: int) -> dict[str, list[float] | int]:
    """One balancer's share: when it admitted (monotonic seconds of this machine), and how long that took."""
    source = _One(TenantSpec(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=1000))
    headers = [(b"authorization", f"Bearer {source.key}".encode())]
    times: list[float] = []
    took: list[float] = []
    rng = Random(seed)
    async with running(Gate(source, shared=RedisQuotaStore(url, budget_ms=1000.0, span=Span()))) as gate:
        await gate.until(bool, 10.0)
        until = clock.now() + seconds

        async def client(pause_s: float) -> None:
            while clock.now() < until:
                began = perf_counter()
                try:
                    caller = gate.identify(headers)
                    request = InferenceRequest("0" * 32, "m", input_tokens=TOKENS // 2, output_tokens=1.5 * TOKENS)
                    admission = await gate.admit(caller, request)
                except QuotaExceeded:
                    await asyncio.sleep(0.02)
                    continue
                times.append(clock.now())
                took.append(perf_counter() - began)
                await asyncio.sleep(rng.expovariate(1.0 / pause_s))
                admission.end(Used(TOKENS // 2, 0, TOKENS - TOKENS // 2, 200))

        await asyncio.gather(*(client(pause_s) for pause_s in (0.005, 0.02, 0.1)))
        families = {family.name: family for family in gate.metrics.collect()}
        trips = int(sum(sample.value for sample in families["headwater_quota_calls"].samples))
    return {"times": times, "took": took, "trips": trips}


async def run(args: argparse.Namespace) -> None:
    """The whole of it."""
    async with RedisServer() as redis:
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.tenants", "--worker", redis.url, "--seed", str(n)),
                *("--seconds", str(args.seconds), "--requests-per-minute", str(args.requests_per_minute)),
                *("--tokens-per-minute", str(args.tokens_per_minute)),
                stdout=asyncio.subprocess.PIPE,
            )
            for n in range(args.balancers)
        ]
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
        told = await redis.cli("INFO", "commandstats")
    say = Console(highlight=False).print
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]  # before it may stand words of a log
    times = sorted(t for result in results for t in result["times"])
    took = sorted(t for result in results for t in result["took"])
    trips = sum(result["trips"] for result in results)
    full, end = 0, 0
    for begin, at in enumerate(times):
        while end < len(times) and times[end] < at + 60.0:
            end += 1
        full = max(full, end - begin)
    limit = min(args.requests_per_minute, args.tokens_per_minute // TOKENS)
    minutes = (times[-1] - times[0]) / 60.0
    say(f"{args.balancers} balancers, {len(times)} admitted in {times[-1] - times[0]:.0f} s, limit {limit} a minute")
    say(f"in the fullest 60 s: {full}, {100.0 * (full / limit - 1.0):+.2f} % of the limit")
    say(f"at the limit's own rate {limit * minutes + limit:.0f} would have been (a first minute at once)")
    say(f"round trips: {trips}, one for {len(times) / max(1, trips):.1f} admitted; ")
    say(f"Redis spent {told['cmdstat_eval']['usec_per_call']} us on each")
    p50, p99 = took[len(took) // 2], took[int(0.99 * len(took))]
    say(f"identify and admit: p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us, longest {took[-1] * 1e3:.1f} ms")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balancers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--requests-per-minute", type=int, default=6000)
    parser.add_argument("--tokens-per-minute", type=int, default=10**9)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = balancer(args.worker, args.seconds, args.requests_per_minute, args.tokens_per_minute, args.seed)
        sys.stdout.write(json.dumps(uvloop.run(result)))
    else:
        asyncio.run(run(args))


if __name__ == "__main__":
    main()
