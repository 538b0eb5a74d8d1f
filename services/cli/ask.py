"""Questions to a running system, by its admin API: `headwater explain`, `route --dry-run`, `whatif`, `log-level`."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.explain.causes import SHED, seconds
from common.explain.decisions import Decision, StageView
from common.explain.whatif import Counterfactual, DryRun, PolicyResult, together
from common.explain.words import explain as in_words
from common.explain.words import stage_lines
from services.cli.admin_api import ADMIN_URL, Admin, request

TIMEOUT_S = 30.0  # a replay under a dozen policies takes some seconds

Json = Annotated[bool, typer.Option("--json", help="as the admin API gives it")]


def asked(method: str, admin: str, path: str, kind: Any, **options: Any) -> tuple[Any, bytes]:
    """A tier's answer, decoded and as it came. Ends the command with one line when there is none."""
    try:
        reply = request(method, admin.rstrip("/") + path, timeout_s=TIMEOUT_S, **options)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise failed(f"no answer from {admin}: {error}") from None
    try:
        if reply.status_code == 200:
            return msgspec.json.decode(reply.content, type=kind), reply.content
        detail = msgspec.json.decode(reply.content)["detail"]
    except (msgspec.DecodeError, LookupError, TypeError):
        raise failed(f"{admin} answers {reply.status_code}, and not as an admin listener does") from None
    if isinstance(detail, list):  # of a value that is not allowed
        detail = "; ".join(f"{'.'.join(str(x) for x in e.get('loc', ())[1:])}: {e.get('msg')}" for e in detail)
    raise failed(str(detail))


def failed(message: str) -> typer.Exit:
    """Say what is wrong in one line and end with status 1."""
    typer.echo(f"headwater: {message}", err=True)
    return typer.Exit(1)


def explain(
    trace_id: Annotated[str, typer.Argument(metavar="ID", help="of a request: its x-headwater-decision header")],
    admin: Admin = ADMIN_URL,
    as_json: Json = False,
) -> None:
    """Say in words where a request went and why, at every tier, and what made it slow."""
    params = {"everywhere": True}
    decisions, content = asked("GET", admin, f"/admin/v1/decisions/{trace_id}", list[Decision], params=params)
    for line in [content.decode()] if as_json else in_words(decisions):
        typer.echo(line)


def route(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="ask only: nothing is sent, reserved or counted")] = False,
    model: Annotated[str, typer.Option(help="name of the model")] = "",
    input_tokens: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 500,
    output_tokens: Annotated[float, typer.Option(min=0.0, help="tokens expected back")] = 200.0,
    warm: Annotated[str, typer.Option(help="region/cluster/instance that served its session last")] = "",
    warm_tokens: Annotated[int, typer.Option(min=0, help="tokens of the session cached there")] = 0,
    priority: Annotated[str, typer.Option(help="critical, standard or batch")] = "standard",
    admin: Admin = ADMIN_URL,
    as_json: Json = False,
) -> None:
    """Where a request would go now, and why."""
    if not dry_run:
        raise failed("route only answers questions: add --dry-run")
    question = {
        "model": model,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "warm": warm,
        "warm_tokens": warm_tokens,
        "priority": priority,
    }
    answer, content = asked("POST", admin, "/admin/v1/route/dry-run", DryRun, json=question)
    for line in [content.decode()] if as_json else _dry_run_lines(answer):
        typer.echo(line)


def _dry_run_lines(answer: DryRun) -> list[str]:
    lines: list[str] = []
    for number, stage in enumerate(answer.stages, 1):
        lines += [*stage_lines(number, "It would go to", stage), ""]
    if answer.shed:
        return [*lines, f"Nobody would take it: {SHED.get(answer.shed, answer.shed)}."]
    return [*lines, f"It would be sent to {answer.target}{_foreseen(answer.stages)}."]


def _foreseen(stages: list[StageView]) -> str:
    for s in reversed(stages):
        if s.predicted_ttft_s is not None and s.predicted_total_s is not None:
            return f": first token after {seconds(s.predicted_ttft_s)}, the last after {seconds(s.predicted_total_s)}"
    return ""


def whatif(
    requests: Annotated[int, typer.Option(min=1, max=1000, help="of each cluster, the latest")] = 300,
    policy: Annotated[list[str] | None, typer.Option(help="one to compare; may be repeated; default: all")] = None,
    node: Annotated[str, typer.Option(help="region/cluster; default: all together")] = "",
    each: Annotated[bool, typer.Option("--each", help="a table for each cluster")] = False,
    admin: Admin = ADMIN_URL,
    as_json: Json = False,
) -> None:
    """What the other policies would have done with the latest requests, in predicted seconds."""
    params = {"requests": requests, "policy": policy or [], "node": node, "everywhere": True}
    found, content = asked("GET", admin, "/admin/v1/counterfactual", list[Counterfactual], params=params)
    if as_json:
        typer.echo(content.decode())
        return
    if not found:
        raise failed("no tier remembers a request that it sent to an instance itself")
    console = Console()
    for pool in found if each else [together(found)]:
        console.print(_comparison(pool))
        if pool.seen_ttft_s is not None and pool.seen_completion_s is not None:
            seen = f"first token after {seconds(pool.seen_ttft_s)}, complete after {seconds(pool.seen_completion_s)}"
            console.print(f"Seen: {seen} in the mean.\n")


def _comparison(pool: Counterfactual) -> Table:
    title = f"The last {pool.requests} requests of {pool.node}, as predicted"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for name in ("TTFT", "p95", "all", "+ others", "moved", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in pool.policies:
        here = p.policy == pool.in_force
        table.add_row(f"{p.policy} *" if here else p.policy, *_figures(p), style="bold" if here else "")
    table.caption_justify = "left"
    table.caption = "* in force; all: to the last token; others: the delay it brings to those already there"
    return table


def _figures(p: PolicyResult) -> tuple[str, ...]:
    elsewhere = f"{100 * p.elsewhere / p.requests:.0f} %" if p.requests else ""
    times = (p.ttft_s, p.ttft_p95_s, p.completion_s, p.cost_s)
    return (*(seconds(t) for t in times), elsewhere, str(p.refused))


def log_level(
    level: Annotated[str, typer.Argument(metavar="[LEVEL]", help="debug, info, warning or error")] = "",
    admin: Annotated[str, typer.Option("--admin", metavar="URL", help="of the process that it is about")] = ADMIN_URL,
) -> None:
    """Show how much a process logs, or change it: until it starts anew, or its file says another level."""
    path = "/admin/v1/log-level"
    options = {"json": {"level": level}} if level else {}
    found, _ = asked("PUT" if level else "GET", admin, path, dict[str, str], **options)
    typer.echo(found["level"])


def policy(
    name: Annotated[str, typer.Argument(metavar="[POLICY]", help="as in `policy.name`; none: show them")] = "",
    process: Annotated[str, typer.Option(metavar="ID", help="only of the process with this id")] = "",
    admin: Admin = ADMIN_URL,
) -> None:
    """Show by which policy each process chooses, or change it: until it starts anew, or its file says otherwise."""
    path = "/admin/v1/policy"
    if name:
        body = {"name": name, "process": process, "everywhere": True}
        found, _ = asked("PUT", admin, path, dict[str, Any], json=body)
    else:
        found, _ = asked("GET", admin, path, dict[str, Any], params={"everywhere": True})
    for one in found["processes"]:
        typer.echo(f"{one['process']}  {one['name']}  {one['price_weight_s_per_usd']:g} s per $")
    if found["unheard"]:
        raise failed(f"{found['unheard']} balancers gave no answer")
