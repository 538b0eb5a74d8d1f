"""`headwater demo`: three regions on this machine, traffic, two failures under load, and what became of it."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.errors import ConfigError
from common.sim.traces import read_trace
from common.sim.workload import Conversations, TraceRow, scaled, window
from common.spans import read_spans, render
from services.bench import report
from services.bench.prompts import Template
from services.bench.replay import Progress as Counts
from services.bench.replay import Replay, Sample
from services.demo.layout import KILLED_INSTANCE, KILLED_REGION, MODEL, REGIONS, SPEED
from services.demo.traffic import RATE, STREAM_SHARE, TIMEOUT_S, fitting, takeovers
from services.demo.world import World, scratch

REQUESTS = 300
KILL_AT, REVIVE_AT = 0.35, 0.65  # shares of the requests sent
ADMIN_S = 10.0  # for a tier to say what it counted; it has just been at work on a machine it shares with twenty others
CUT_SEEN_S = 2.0  # a stream through a killed process ends within this, or it was not for the kill


def demo(
    trace: Annotated[
        Path | None, typer.Option(help="CSV, CSV.gz or JSONL to replay; default: generated traffic.")
    ] = None,
    requests: Annotated[int, typer.Option(min=20, help="How many to send.")] = REQUESTS,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = RATE,
    speed: Annotated[float, typer.Option(min=0.1, help="Of the simulated servers, times life.")] = SPEED,
    listen: Annotated[int, typer.Option(help="Port of the global tier; 0: any free one.")] = 0,
    admin: Annotated[int, typer.Option(help="Admin port of the global tier; 0: any free one.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it running afterwards, until Ctrl-C.")] = False,
    seed: Annotated[int, typer.Option(help="Of the generated traffic.")] = 1,
) -> None:
    """Three regions, six clusters and eighteen simulated servers on this machine, with traffic and two failures."""
    console = Console()
    try:
        rows = _traffic(trace, requests, rate, seed)
        failed = uvloop.run(_run(console, rows, speed, listen, admin, keep))
    except (ConfigError, ValueError, OSError) as error:
        typer.echo(f"headwater: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(1 if failed else 0)


def _traffic(trace: Path | None, requests: int, rate: float, seed: int) -> list[TraceRow]:
    if trace is None:
        rows = Conversations(Random(seed), rate=rate).rows(requests)
    else:
        rows = scaled(window(read_trace(trace), 0.0, requests), rate=rate)
    return list(fitting(rows))


async def _run(console: Console, rows: Sequence[TraceRow], speed: float, listen: int, admin: int, keep: bool) -> int:
    """Play the demo; how many requests failed."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    with scratch() as directory:
        world = World(Path(directory), speed, listen, admin)
        work = asyncio.ensure_future(_play(console, world, rows))
        stop = asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                console.print("interrupted: taking everything down")
                return 0
            failed = work.result()
            if keep and not failed:
                _say_urls(console, world)
                await stop
            return failed
        finally:
            work.cancel()
            stop.cancel()
            with suppress(asyncio.CancelledError, ConfigError):
                await asyncio.gather(work, return_exceptions=True)
            await world.stop()


async def _play(console: Console, world: World, rows: Sequence[TraceRow]) -> int:
    with console.status("starting three regions, six clusters, eighteen servers …"):
        await world.start()
        await _models_visible(world)
    console.print(f"[bold]Up:[/] {len(world.processes)} processes, {world.stores}; clients call {world.global_.url}")
    faults = Faults()
    samples = await _traffic_with_faults(console, world, rows, faults)
    for line in faults.events:
        console.print(line)
    await _tables(console, world, samples, faults)
    return sum(1 for s in samples if not s.ok and not faults.cut(s))


async def _models_visible(world: World) -> None:
    """Wait until the global tier knows all servers, so that the first requests have the whole choice."""
    seen = 0
    async with httpx.AsyncClient(timeout=ADMIN_S, trust_env=False) as client:
        for _ in range(200):
            with suppress(httpx.HTTPError):  # a busy machine
                pools = (await client.get(f"{world.global_.admin_url}/admin/v1/pools")).json()["pools"]
                seen = sum(len(p["endpoints"]) for path, p in pools.items() if path.count("/") == 1)
            if seen == len(world.instances):
                return
            await asyncio.sleep(0.1)
    raise ConfigError(f"the global tier sees {seen} of {len(world.instances)} servers after 20 s")


@dataclass(slots=True)
class Faults:
    """What was done to the processes, and when (seconds into the replay)."""

    events: list[str] = field(default_factory=list)
    killed_s: float | None = None
    revived: bool = False

    def cut(self, sample: Sample) -> bool:
        """Whether this was a stream through a killed process at that moment, which nobody can complete."""
        if self.killed_s is None or not sample.stream or sample.ok:
            return False
        began = sample.due_s + sample.late_s
        return began <= self.killed_s <= began + sample.e2e_s <= self.killed_s + CUT_SEEN_S


async def _traffic_with_faults(
    console: Console, world: World, rows: Sequence[TraceRow], faults: Faults
) -> list[Sample]:
    replay = Replay(Template(model=MODEL, sim=True), stream_share=STREAM_SHARE)
    region, instance = f"region-{KILLED_REGION}", KILLED_INSTANCE[2]
    reviving: list[asyncio.Task[None]] = []

    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("replaying", total=len(rows))

        def on_progress(counts: Counts) -> None:
            if counts.sent >= KILL_AT * len(rows) and faults.killed_s is None:
                faults.killed_s = counts.elapsed_s
                world.kill(region)
                world.kill(instance)
                faults.events.append(
                    f"[red]killed[/] the balancer of {KILLED_REGION} and the server {instance}"
                    f" with {counts.in_flight} requests in flight"
                )
            if counts.sent >= REVIVE_AT * len(rows) and not faults.revived:
                faults.revived = True
                reviving.extend(asyncio.ensure_future(world.revive(name)) for name in (region, instance))
                faults.events.append(f"[green]brought back[/] both after {counts.sent} requests")
            down = faults.killed_s is not None and not faults.revived
            bar.update(task, completed=counts.ended, description="two are dead" if down else "replaying")

        urls = [ports.url for ports in world.globals.values()]  # clients use the global balancer of their region
        samples = await replay.run(rows, urls, on_progress=on_progress, timeout_s=TIMEOUT_S)
    await asyncio.gather(*reviving)
    return samples


# -- what became of it -------------------------------------------------------------------------------------------------


async def _tables(console: Console, world: World, samples: list[Sample], faults: Faults) -> None:
    cut = [s for s in samples if faults.cut(s)]
    failed = [s for s in samples if not s.ok and not faults.cut(s)]
    console.print(f"[bold]{len(samples)} requests, {len(failed)} failed[/]")
    if failed:
        console.print(f"  {Counter(s.error for s in failed).most_common(3)}")
    if cut:
        console.print(
            f"  {len(cut)} streams ran through a killed process at that moment: they ended at once with an error event"
        )
    for by in ("region", "cluster", "instance"):
        console.print(_share_table(by, samples))
    console.print(await _takeovers(world))
    await _one_trace(console, world, samples)


def _share_table(by: str, samples: Sequence[Sample]) -> Table:
    table = Table(title=f"By {by}", title_justify="left")
    for name in (by, "requests", "share", "TTFT p50", "p99", "ms/token p50", "p99"):
        table.add_column(name, justify="left" if name == by else "right", no_wrap=True)
    for name, summary in sorted(report.grouped(samples, by).items()):
        table.add_row(
            name.rsplit("/", 1)[-1],
            str(summary.requests),
            f"{summary.requests / len(samples):.0%}",
            *(_ms(x) for x in (summary.ttft_s.p50, summary.ttft_s.p99, summary.tpot_s.p50, summary.tpot_s.p99)),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.0f} ms"


async def _takeovers(world: World) -> Table:
    """Stages that a tier ran for another one, from the tiers' own counters."""
    table = Table(title="Takeovers (stages run for a tier that was gone)", title_justify="left")
    for name in ("process", "stage", "requests"):
        table.add_column(name, justify="right" if name == "requests" else "left")
    tiers = (("global", world.globals), ("region", world.regions), ("instance", world.clusters))
    admins = {f"{tier}-{name}": ports for tier, nodes in tiers for name, ports in nodes.items()}
    async with httpx.AsyncClient(timeout=ADMIN_S, trust_env=False) as client:
        for name, ports in admins.items():
            for stage, count in (await takeovers(client, ports.admin_url)).items():
                table.add_row(name, stage, str(count))
    return table


async def _one_trace(console: Console, world: World, samples: Sequence[Sample]) -> None:
    """The tree of one ordinary request that passed all three tiers."""
    wanted = [s for s in samples if s.ok and s.stream and s.served_by.startswith(REGIONS[0].name)]
    if not wanted:
        return
    decision = wanted[len(wanted) // 4].decision
    console.print(f"\n[bold]One request[/] (headwater trace {decision} --admin {world.global_.admin_url})")
    async with httpx.AsyncClient(timeout=ADMIN_S, trust_env=False) as client:
        reply = await client.get(f"{world.global_.admin_url}/admin/v1/traces/{decision}", params={"everywhere": True})
    for line in render(read_spans(reply.content)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_urls(console: Console, world: World) -> None:
    console.print("\n[bold]Still running[/], until Ctrl-C:")
    for tier, nodes in (("global", world.globals), ("region", world.regions), ("cluster", world.clusters)):
        for name, ports in nodes.items():
            console.print(f"  {tier:<8} {name:<12}  {ports.url}   admin {ports.admin_url}")
    console.print(f"  [bold]in a browser[/]           {world.global_.admin_url}/console")
    console.print(f"  logs                   {world.directory}")
