"""The command `headwater sim`: options in, tables and a picture out. `python -m services.sim` is the same."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common import clock
from common.policy.stages import POLICIES, PRICE_WEIGHT_S_PER_USD
from common.sim.checkers import CheckFailed
from common.sim.faults import Burst, Fault, parse
from common.sim.lengths import lengths_named
from common.sim.measures import WARM_UP
from common.sim.workload import Conversations, TraceRow, window
from common.sim.world import Network
from common.types import Slo
from services.sim import page, report
from services.sim.fleet_file import read_fleet
from services.sim.regions import RegionsStudy, compare
from services.sim.regions import render as render_regions
from services.sim.scaling import ScalingStudy, run_scaling
from services.sim.scaling import render as render_scaling
from services.sim.scaling import write_json as write_scaling
from services.sim.study import Case, Result, Study, at_rate, read_windows, run_study

_GENERATED = 5_000  # requests where no trace is given and no limit either
REGIONS_LOAD = 0.75  # of all capacity; each region's own goes from half of that to more than it has
_FILE_WIDTH = 150  # characters of a line where the report goes to a file or a pipe
_DEFAULT = "predicted_completion,predicted_completion+slo,weighted_least_connections,least_connections,round_robin"


def sim(
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV, CSV.gz or JSONL, or a tier's access log; without it traffic is generated."),
    ] = None,
    fleet: Annotated[str, typer.Option(help="YAML file, or mixed16, ha8, homog8, mixed64, homog64.")] = "mixed16",
    policy: Annotated[str, typer.Option(help=f"NAME or NAME+slo, by commas; names: {', '.join(POLICIES)}.")] = _DEFAULT,
    load: Annotated[float | None, typer.Option(help="Arrivals ÷ what the fleet can bear; default 0.85.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second instead; 0 keeps the trace's own.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with different draws.")] = 1,
    windows: Annotated[int, typer.Option(min=1, help="Cut the trace into so many parts, each a run.")] = 1,
    start: Annotated[float, typer.Option(min=0.0, help="Begin this many seconds into the trace.")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests of each part at most; default all.")] = None,
    copies: Annotated[int, typer.Option(min=1, help="Superpose so many shifted copies of the trace.")] = 1,
    spread: Annotated[float, typer.Option(min=0.0, help="Spread arrivals that are stamped no finer (s).")] = 0.0,
    max_input: Annotated[int, typer.Option(min=1, help="Leave out longer prompts (tokens).")] = 32_000,
    max_output: Annotated[int, typer.Option(min=1, help="Cut longer answers to this (tokens).")] = 4_000,
    replicas: Annotated[int, typer.Option(min=1, help="Balancers of the cluster, dealt requests in turn.")] = 1,
    exchange: Annotated[str, typer.Option(help="Replicas tell each other what they have this often (ms), or none.")] = (
        "none"
    ),
    reports: Annotated[str, typer.Option(help="Agents look at their server this often (ms), or none.")] = "1000",
    link: Annotated[float, typer.Option(min=0.0, help="Network delay between balancer and servers, one way (ms).")] = (
        0.0
    ),
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="Service level: seconds to the first token.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(min=0.0001, help="Service level: seconds per output token.")] = 0.1,
    lengths: Annotated[str, typer.Option(help="What the policy knows of lengths: learned, oracle, noise:SIGMA.")] = (
        "learned"
    ),
    tenants: Annotated[bool, typer.Option("--tenants", help="Learn lengths by the trace's client too.")] = False,
    prefix_cache: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of KV memory that servers keep prompts in.")
    ] = 0.0,
    speed_error: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Servers differ from their class by this (σ of the log).")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="KIND@SECONDS:TARGET[:VALUE]: die, return, slow, join, drain; burst@SECONDS:FACTOR:SECONDS."),
    ] = None,
    price_weight: Annotated[float, typer.Option(min=0.0, help="Seconds that a dollar weighs.")] = (
        PRICE_WEIGHT_S_PER_USD
    ),
    warm_up: Annotated[float, typer.Option(min=0.0, max=0.9, help="Share of requests not counted.")] = WARM_UP,
    baseline: Annotated[str, typer.Option(help="Policy that the others are compared with; default the last.")] = "",
    scale: Annotated[
        str, typer.Option(help="Compare how the fleet follows the traffic instead: predicted, fixed, threshold:N.")
    ] = "",
    season: Annotated[float, typer.Option(min=30.0, help="With --scale: a day of the traffic (s).")] = 600.0,
    days: Annotated[int, typer.Option(min=1, max=30, help="With --scale: so many such days.")] = 3,
    cold_start: Annotated[
        float, typer.Option(min=0.5, help="With --scale: from asking for a server to its serving (s).")
    ] = (20.0),
    regions: Annotated[
        bool, typer.Option("--regions", help="Compare ways to choose among three regions instead, each row one.")
    ] = False,
    outage: Annotated[bool, typer.Option("--outage", help="With --regions: one is lost for the middle third.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default one a core.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write one line a run here.")] = None,
    requests_file: Annotated[Path | None, typer.Option("--requests", help="Write one line a request here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Draw curves and load here, one file.")] = None,
) -> None:
    """Run policies against each other on a trace, in virtual time: the very objects that balance in production."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in locals().items()}
    try:
        study = Study(
            _cases(policy),
            read_fleet(fleet),
            _positive("--load", load) if load is not None else None if rate is not None else 0.85,
            _positive("--rate", rate) if rate else None,
            seeds,
            Slo(slo_ttft, slo_tpot),
            _lengths(lengths),
            tenants,
            replicas,
            _network(exchange, reports, link),
            *_faults(fault or []),
            prefix_fraction=prefix_cache,
            price_weight_s_per_usd=price_weight,
            speed_error=speed_error,
            warm_up=warm_up,
        )
        base = _baseline(baseline, study.cases)
        if load is not None and rate is not None:
            raise ValueError("give --load or --rate")
        if regions:
            parts = _traffic(trace, windows, start, limit, copies, spread, max_input, max_output)
            _regions(RegionsStudy(load=load if load is not None else REGIONS_LOAD, outage=outage), seeds, parts)
            return
        if scale:
            parts = _traffic(trace, 1, start, limit, copies, spread, max_input, max_output)
            _scale(
                ScalingStudy(
                    tuple(scale.split(",")),
                    study.fleet,
                    study.cases[0].policy,
                    study.slo,
                    season,
                    days,
                    cold_start,
                    bursts=study.bursts,
                ),
                study,
                parts[0],
                settings,
                json_file,
            )
            return
        parts = _traffic(trace, windows, start, limit, copies, spread, max_input, max_output)
        began = clock.now()
        with _bar() as on_done:
            results = run_study(study, parts, jobs=jobs, on_done=on_done, records=requests_file is not None)
        took_s = clock.now() - began
        _write(results, base, study, settings, json_file, csv_file, requests_file, html_file)
    except (ValueError, OSError, CheckFailed) as error:
        typer.echo(f"headwater sim: {error}", err=True)
        raise typer.Exit(1) from None
    console = _console()
    console.print(report.render(results, base, study.slo))
    _note_late(study, results, console)
    simulated = sum(run.measures.requests for run in results) / (1.0 - warm_up)
    console.print(f"{simulated:,.0f} requests simulated in {took_s:.1f} s, {60.0 * simulated / took_s:,.0f} a minute")


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def _scale(
    scaling: ScalingStudy, study: Study, rows: Sequence[TraceRow], settings: dict[str, Any], json_file: Path | None
) -> None:
    rows = at_rate(study, rows)
    found = run_scaling(scaling, rows)
    if json_file:
        write_scaling(json_file, found, settings)
    _console().print(render_scaling(found))


def _regions(study: RegionsStudy, seeds: int, parts: Sequence[Sequence[TraceRow]]) -> None:
    console = _console()
    for seed in range(seeds):
        for rows in parts:
            with _bar() as on_done:
                found = compare(replace(study, seed=seed), rows, on_done)
            console.print(render_regions(found))


def _note_late(study: Study, results: Sequence[Result], console: Console) -> None:
    """Faults that no request could see: how long a run is depends on the load, so it is easily misjudged."""
    end_s = min(run.measures.requests / (1.0 - study.warm_up) / run.rate for run in results)
    late = sorted({f"{fault.kind}@{fault.at_s:g}" for fault in study.faults if fault.at_s > end_s})
    late += sorted({f"burst@{burst.at_s:g}" for burst in study.bursts if burst.at_s > end_s})
    if late:
        console.print(f"note: the last request arrives at about {end_s:.0f} s, before {', '.join(late)}")


def _positive(option: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{option} {value}: must be more than 0")
    return value


def _cases(text: str) -> tuple[Case, ...]:
    cases = tuple(dict.fromkeys(Case.parse(part) for part in text.split(",") if part.strip()))
    if not cases:
        raise ValueError("--policy: none given")
    return cases


def _baseline(text: str, cases: Sequence[Case]) -> Case:
    """The named one, else weighted least connections if it is there, else the last."""
    if not text:
        usual = Case("weighted_least_connections")
        return usual if usual in cases else cases[-1]
    base = Case.parse(text)
    if base not in cases:
        raise ValueError(f"--baseline {text}: is not among the policies")
    return base


def _lengths(text: str) -> str:
    lengths_named(text)
    return text


def _network(exchange: str, reports: str, link_ms: float) -> Network:
    return replace(
        Network(),
        one_way_s=link_ms / 1e3,
        look_s=_interval("--reports", reports),
        exchange_s=_interval("--exchange", exchange),
    )


def _interval(option: str, text: str) -> float | None:
    """Milliseconds as seconds; `none` is None."""
    if text == "none":
        return None
    try:
        return _positive(option, float(text)) / 1e3
    except ValueError:
        raise ValueError(f"{option} {text}: neither milliseconds above 0 nor none") from None


def _faults(texts: Sequence[str]) -> tuple[tuple[Fault, ...], tuple[Burst, ...]]:
    parsed = [parse(text) for text in texts]
    return (
        tuple(one for one in parsed if isinstance(one, Fault)),
        tuple(one for one in parsed if isinstance(one, Burst)),
    )


def _traffic(
    trace: Path | None,
    windows: int,
    start_s: float,
    limit: int | None,
    copies: int,
    spread_s: float,
    max_input: int,
    max_output: int,
) -> list[list[TraceRow]]:
    if trace is None:
        count = (limit or _GENERATED) * windows
        rows = Conversations(Random(0)).rows(count)
        return [window(rows[i * count // windows : (i + 1) * count // windows]) for i in range(windows)]
    return read_windows(
        trace,
        windows=windows,
        start_s=start_s,
        limit=limit,
        copies=copies,
        spread_s=spread_s,
        max_input=max_input,
        max_output=max_output,
    )


def _write(
    results: Sequence[Result],
    base: Case,
    study: Study,
    settings: dict[str, Any],
    json_file: Path | None,
    csv_file: Path | None,
    requests_file: Path | None,
    html_file: Path | None,
) -> None:
    if json_file:
        report.write_json(json_file, results, base, settings)
    if csv_file:
        report.write_csv(csv_file, results)
    if requests_file:
        report.write_requests(requests_file, results)
    if html_file:
        html_file.write_text(page.render(results, base, study), encoding="utf-8")


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; yields what is to be called with (runs done, runs in all)."""
    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def on_done(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_done


def main() -> None:
    """Entry of `python -m services.sim`."""
    typer.run(sim)


if __name__ == "__main__":
    main()
