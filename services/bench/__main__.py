"""The command `headwater bench`: options in, table out. `python -m services.bench` is the same."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import resource
import signal
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common import clock
from common.sim.workload import Conversations, TraceRow, read_trace, scaled, superposed, window
from common.types import Slo
from services.bench import report
from services.bench.client import Target
from services.bench.prompts import Template
from services.bench.replay import Replay
from services.bench.samples import Progress as Counts
from services.bench.samples import Sample

_DEFAULT_RATE = 10.0  # requests per second of generated traffic
_DEFAULT_LIMIT = 300  # generated requests, which would otherwise have no end
_PROBE_S = 10.0  # how long the first look at a target may take
_REDRAW_S = 0.2
_FILE_WIDTH = 120  # characters of a line where the report goes to a file or a pipe


def bench(
    target: Annotated[list[str], typer.Option(help="Base URL of an OpenAI-compatible API; several are taken in turn.")],
    trace: Annotated[Path | None, typer.Option(help="CSV, CSV.gz or JSONL; without it traffic is generated.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second; default the trace's own, or 10.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests to send; default all, or 300.")] = None,
    start: Annotated[float, typer.Option(min=0.0, help="Begin this many seconds into the trace.")] = 0.0,
    copies: Annotated[int, typer.Option(min=1, help="Superpose so many shifted copies of the trace.")] = 1,
    speedup: Annotated[float, typer.Option(help="Replay so many times as fast.")] = 1.0,
    model: Annotated[str, typer.Option(help="Model to ask for; default the first that the target lists.")] = "",
    api_key: Annotated[str, typer.Option(envvar="HEADWATER_BENCH_API_KEY", help="Sent as a bearer token.")] = "",
    sim: Annotated[bool, typer.Option("--sim", help="Tell simulated servers how long to answer.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Make real servers answer at full length.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Ask for this; default the trace's length.")] = None,
    stream_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests that stream.")] = 1.0,
    completions: Annotated[bool, typer.Option("--completions", help="Use /v1/completions, not chat.")] = False,
    seed: Annotated[
        int, typer.Option(help="Of the text and the generated traffic; another one meets cold caches.")
    ] = 0,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests at once; the next ones leave late.")] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    slo_ttft: Annotated[float, typer.Option(help="Service level: seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Service level: seconds per output token.")] = 0.1,
    by: Annotated[str, typer.Option(help=f"Group by {', '.join(report.GROUPINGS)}, or none.")] = "instance",
    ca_file: Annotated[Path | None, typer.Option(help="Trust the certificates signed by this.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write one line a request here.")] = None,
) -> None:
    """Replay a trace against OpenAI-compatible URLs, open loop, and report TTFT, time per token and goodput."""
    slo = Slo(slo_ttft, slo_tpot)
    settings: dict[str, Any] = {"target": target, "trace": trace and str(trace), "rate": rate, "limit": limit}
    settings |= {"start": start, "copies": copies, "speedup": speedup, "seed": seed, "stream_share": stream_share}
    try:
        if by not in {*report.GROUPINGS, "none"}:
            raise ValueError(f"--by {by}: not one of {', '.join(report.GROUPINGS)}, none")
        tls = ssl.create_default_context(cafile=ca_file)
        rows = _rows(trace, rate, limit, start, copies, seed)
        model = _look(target, model, api_key.strip(), tls)
        template = Template(
            model=model,
            sim=sim,
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
            api_key=api_key.strip(),
            seed=seed,
            path="/v1/completions" if completions else "/v1/chat/completions",
        )
        _allow_sockets(max_in_flight)
        replay = Replay(template, stream_share, tls)
        samples = uvloop.run(_replay(replay, rows, target, speedup, max_in_flight, timeout))
        summary = report.summarize(samples, slo)
        groups = report.grouped(samples, by, slo) if by != "none" else {}
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, _FILE_WIDTH)
        console.print(report.render(summary, slo, groups, by))
        if json_file:
            report.write_json(json_file, summary, groups, slo, settings | {"model": model})
        if csv_file:
            report.write_csv(csv_file, samples)
    except (ValueError, OSError) as error:
        typer.echo(f"headwater bench: {error}", err=True)
        raise typer.Exit(1) from None
    if len(samples) < len(rows):
        raise typer.Exit(130)  # what shells say of a command that Ctrl-C ended


def _rows(
    trace: Path | None, rate: float | None, limit: int | None, start_s: float, copies: int, seed: int
) -> list[TraceRow]:
    """The traffic asked for. Raises ValueError or OSError where it cannot be had."""
    if rate is not None and not (math.isfinite(rate) and rate > 0.0):
        raise ValueError(f"--rate {rate}: must be more than 0")
    if trace is None:
        return Conversations(Random(seed), rate=rate or _DEFAULT_RATE).rows(limit or _DEFAULT_LIMIT)
    rows = read_trace(trace)
    if copies > 1:
        rows = superposed(rows, copies, shift_s=(rows[-1].arrival_s - rows[0].arrival_s) / copies)
    rows = window(rows, start_s, limit)
    if not rows:
        raise ValueError(f"{trace}: nothing arrives after {start_s} s")
    return scaled(rows, rate=rate) if rate and len(rows) > 1 else rows


def _look(targets: Sequence[str], model: str, api_key: str, tls: ssl.SSLContext) -> str:
    """Whether every target answers at all, before minutes are spent on it; and which model to ask for."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(timeout=_PROBE_S, verify=tls, headers=headers, trust_env=False) as client:
        for url in targets:
            to = Target.of(url)
            base = f"{'https' if to.tls else 'http'}://{to.authority}{to.prefix}"
            try:
                answer = client.get(f"{base}/v1/models")
            except httpx.HTTPError as error:
                raise ValueError(f"{url} does not answer: {error or type(error).__name__}") from error
            if not model:
                with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                    model = str(answer.json()["data"][0]["id"])
    if not model:
        raise ValueError(f"{targets[0]} lists no model (GET /v1/models: {answer.status_code}); name one with --model")
    return model


def _allow_sockets(count: int) -> None:
    """Raise this process's own limit of open files where `count` connections and some need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _replay(
    replay: Replay, rows: Sequence[TraceRow], targets: Sequence[str], speedup: float, max_in_flight: int, timeout: float
) -> list[Sample]:
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, replay.stop)
    gc.collect()
    gc.freeze()  # tens of thousands of rows need not be walked by each collection, which would show as late tokens
    with _bar(len(rows)) as on_progress:
        return await replay.run(
            rows,
            targets,
            on_progress=on_progress,
            speedup=speedup,
            max_in_flight=max_in_flight,
            timeout_s=timeout,
        )


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[Counts], None]]:
    """A progress bar on stderr; yields what is to be called with the counts, which it passes on now and then."""
    text = TextColumn("{task.fields[sent]} sent, {task.fields[rejected]} rejected, {task.fields[failed]} failed")
    columns = (BarColumn(), MofNCompleteColumn(), text, TimeElapsedColumn())
    drawn_s = -math.inf
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, refresh_per_second=4, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total, sent=0, rejected=0, failed=0)

        def on_progress(counts: Counts) -> None:
            nonlocal drawn_s
            now = clock.now()
            if now - drawn_s >= _REDRAW_S:
                drawn_s = now
                progress.update(
                    task, completed=counts.ended, sent=counts.sent, rejected=counts.rejected, failed=counts.failed
                )

        yield on_progress


def main() -> None:
    """Entry of `python -m services.bench`."""
    typer.run(bench)


if __name__ == "__main__":
    main()
