"""The demo's traffic, and a process that sends it without end: `python -m services.demo.traffic --target URL …`.

Every few seconds it prints a line: what was sent and how that ended, which regions served it, how long first tokens
took, how often a tier stood in for another, and a request to look at with `headwater trace`.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import msgspec
import typer
import uvloop

from common import clock
from common.errors import ConfigError
from common.sim.workload import Conversations, TraceRow
from services.bench.prompts import Template
from services.bench.replay import Progress, Replay, Sample
from services.bench.report import quantile
from services.demo.layout import MODEL

RATE = 12.0  # requests a second: all eighteen servers busy, two shared cores not full
STREAM_SHARE = 0.8
LONGEST_OUTPUT = 300  # tokens
LONGEST = 8000  # tokens of prompt and answer: what every server's context holds
TIMEOUT_S = 120.0  # of one request
LOOK_S = 2.0  # for one look at a tier


def fitting(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    """The rows that every server can take, their answers bounded, so that a demo does not wait long for the last."""
    for row in rows:
        if row.input_tokens + row.output_tokens < LONGEST:
            yield replace(row, output_tokens=min(row.output_tokens, LONGEST_OUTPUT))


async def takeovers(client: httpx.AsyncClient, admin_url: str) -> Counter[str]:
    """Stages (region, cluster, …) that a tier ran for one that was gone, as it counts. Raises httpx.HTTPError."""
    found: Counter[str] = Counter()
    for line in (await client.get(f"{admin_url}/metrics")).text.splitlines():
        if line.startswith("headwater_takeovers_total{"):
            found[line.split('stage="', 1)[1].split('"', 1)[0]] += round(float(line.rsplit(" ", 1)[1]))
    return found


class State(msgspec.Struct):
    """What was sent so far and what became of it; a program reads it with --state."""

    elapsed_s: float = 0.0
    sent: int = 0
    ok: int = 0
    rejected: int = 0  # refused for load
    failed: int = 0  # not answered, or with an error
    cut: int = 0  # answers that had begun and were broken off, as by a process that was killed
    errors: dict[str, int] = {}
    regions: dict[str, int] = {}  # by whom what was ok was served
    takeovers: dict[str, int] = {}  # stage -> times that it was run for a tier that was gone
    trace: str = ""  # of the last request that was ok

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return self.sent - self.ok - self.rejected - self.failed - self.cut


@dataclass(slots=True)
class Watcher:
    """Adds up what a replay tells, for all time and since the last line."""

    state: State = field(default_factory=State)
    _counted: dict[str, Counter[str]] = field(default_factory=dict)  # tier -> its takeovers when last asked
    _regions: Counter[str] = field(default_factory=Counter)
    _ttft_s: list[float] = field(default_factory=list)

    def saw(self, progress: Progress) -> None:
        """One more request has ended."""
        state, sample = self.state, progress.last
        assert sample is not None
        state.elapsed_s, state.sent, state.ok, state.rejected = (
            progress.elapsed_s,
            progress.sent,
            progress.ok,
            progress.rejected,
        )
        state.cut += _cut(sample)
        state.failed = progress.failed - state.cut
        if not sample.ok:
            state.errors[sample.error] = state.errors.get(sample.error, 0) + 1
            return
        region = sample.served_by.partition("/")[0] or "?"
        state.regions[region] = state.regions.get(region, 0) + 1
        state.trace = sample.decision
        self._regions[region] += 1
        if sample.ttft_s is not None:
            self._ttft_s.append(sample.ttft_s)

    def counted(self, tier: str, takeovers: Counter[str]) -> None:
        """What a tier has counted; one that was started anew counts from 0 again."""
        before, total = self._counted.get(tier, Counter()), self.state.takeovers
        for stage, count in takeovers.items():
            more = count - before[stage]
            total[stage] = total.get(stage, 0) + (more if more >= 0 else count)
        self._counted[tier] = takeovers

    def line(self) -> str:
        """What there is to say now; what is said of the last seconds starts over."""
        s = self.state
        minutes, seconds = divmod(round(s.elapsed_s), 60)
        counts = f"sent {s.sent}  ok {s.ok}  in flight {s.in_flight}  rejected {s.rejected}"
        counts += f"  failed {s.failed}  cut {s.cut}"
        if s.errors:
            counts += f" ({_listed(s.errors)})"
        parts = [counts, f"now {_listed(self._regions) or 'nobody serves'}"]
        if self._ttft_s:
            ordered = sorted(self._ttft_s)
            p50_ms, p99_ms = (1000.0 * quantile(ordered, share) for share in (0.5, 0.99))
            parts.append(f"TTFT p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms")
        parts.append(f"takeovers {_listed(s.takeovers) or '0'}")
        if s.trace:
            parts.append(f"trace {s.trace}")
        self._regions.clear()
        self._ttft_s.clear()
        return f"{minutes:02}:{seconds:02}  " + " | ".join(parts)


def _cut(sample: Sample) -> bool:
    """Whether an answer had begun and was broken off: nobody can complete it elsewhere."""
    return sample.failed and sample.stream and sample.status == 200


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)


def traffic(
    target: Annotated[list[str], typer.Option(help="Base URL of a balancer; several are taken in turn.")],
    admin: Annotated[list[str] | None, typer.Option(help="Admin URL of a tier whose takeovers are counted.")] = None,
    requests: Annotated[int, typer.Option(min=0, help="End after so many; 0: go on until stopped.")] = 0,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = RATE,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two lines.")] = 5.0,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds for the targets to serve the model.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 1,
    state: Annotated[Path | None, typer.Option(help="Keep the counts in this file, as JSON.")] = None,
) -> None:
    """Send the demo's traffic; ends with 1 when a request failed."""
    rows = fitting(Conversations(Random(seed), rate=rate))
    watcher = Watcher()
    try:
        uvloop.run(_run(watcher, islice(rows, requests or None), target, admin or [], every, wait, state))
    except (ConfigError, ValueError, OSError) as error:
        typer.echo(f"traffic: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(1 if watcher.state.failed else 0)


async def _run(
    watcher: Watcher,
    rows: Iterator[TraceRow],
    targets: Sequence[str],
    admins: Sequence[str],
    every_s: float,
    wait_s: float,
    file: Path | None,
) -> None:
    replay = Replay(Template(model=MODEL, sim=True), STREAM_SHARE)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with httpx.AsyncClient(timeout=LOOK_S, trust_env=False) as client:
        if not await _served(client, targets, wait_s, stopped):
            return
        sending = asyncio.ensure_future(replay.run(rows, targets, on_progress=watcher.saw, timeout_s=TIMEOUT_S, keep=1))
        stop = asyncio.ensure_future(stopped.wait())
        while not (sending.done() or stop.done()):
            await asyncio.wait({sending, stop}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            await _tell(watcher, client, admins, file)
        stop.cancel()
        replay.stop()
        await sending


async def _served(client: httpx.AsyncClient, targets: Sequence[str], wait_s: float, stopped: asyncio.Event) -> bool:
    """Wait until every target serves the model; False when told to stop. Raises ConfigError when one does not."""
    deadline = clock.now() + wait_s
    for url in targets:
        while not stopped.is_set():
            with suppress(httpx.HTTPError):
                if f'"{MODEL}"' in (await client.get(f"{url}/v1/models")).text:
                    break
            if clock.now() >= deadline:
                raise ConfigError(f"{url} does not serve {MODEL} within {wait_s:g} s")
            await asyncio.sleep(0.2)
    return not stopped.is_set()


async def _tell(watcher: Watcher, client: httpx.AsyncClient, admins: Sequence[str], file: Path | None) -> None:
    async def look(url: str) -> None:
        with suppress(httpx.HTTPError):  # it may be gone
            watcher.counted(url, await takeovers(client, url))

    await asyncio.gather(*(look(url) for url in admins))
    typer.echo(watcher.line())
    if file is not None:
        new = file.with_suffix(".new")  # and then renamed: a reader finds the old one or the new one whole
        new.write_bytes(msgspec.json.encode(watcher.state))
        new.replace(file)


if __name__ == "__main__":
    typer.run(traffic)
