"""`headwater rollout start|status|abort`: a new version of a model, step by step, taken back if it is worse."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer

from services.cli.admin_api import ADMIN_URL, Admin, request

TIMEOUT_S = 10.0

app = typer.Typer(no_args_is_help=True, help="Roll a new version of a model out, step by step.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="as requests name it")]


@app.command()
def start(
    model: Model,
    to: Annotated[str, typer.Option("--to", metavar="VERSION", help="the new one: `version` of its instances")],
    steps: Annotated[str, typer.Option(help="Shares of the new version, per cent, rising.")] = "5,25,50,100",
    step_s: Annotated[float, typer.Option(help="Least length of a step, seconds.")] = 60.0,
    error_increase: Annotated[float, typer.Option(help="So much more of its requests may fail, 0 to 1.")] = 0.02,
    ttft_ratio: Annotated[float, typer.Option(help="So much slower its first tokens may be, p99.")] = 1.3,
    min_requests: Annotated[int, typer.Option(help="Of the new version in each step.")] = 20,
    admin: Admin = ADMIN_URL,
) -> None:
    """Start one; instances of the new version may come up afterwards and get nothing before their step."""
    try:
        shares = [float(step) for step in steps.split(",")]
    except ValueError:
        raise _fail(f"--steps: {steps!r} are no numbers, as in 5,25,50,100") from None
    asked = {
        "model": model,
        "to": to,
        "steps": shares,
        "step_s": step_s,
        "error_increase": error_increase,
        "ttft_ratio": ttft_ratio,
        "min_requests": min_requests,
    }
    typer.echo(_line(_ask("POST", admin, "", json=asked)))


@app.command()
def status(admin: Admin = ADMIN_URL) -> None:
    """Show all rollouts, the finished ones included."""
    rollouts = _ask("GET", admin, "")
    for rollout in rollouts:
        typer.echo(_line(rollout))
    if not rollouts:
        typer.echo("no rollouts")


@app.command()
def abort(
    model: Model,
    forget: Annotated[bool, typer.Option("--forget", help="Have any version serve it again.")] = False,
    admin: Admin = ADMIN_URL,
) -> None:
    """Send everything to the old version again, at once."""
    answer = _ask("DELETE", admin, f"/{model}", params={"forget": forget})
    typer.echo(_line(answer) if answer else f"{model}: forgotten")


def _ask(method: str, admin: str, path: str, **options: Any) -> Any:
    url = f"{admin.rstrip('/')}/admin/v1/rollouts{path}"
    try:
        reply = request(method, url, timeout_s=TIMEOUT_S, **options)
        body = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise _fail(f"no answer from {admin}: {error}") from None
    if reply.is_error:
        raise _fail(_reason(body) or f"{reply.status_code} from {url}")
    return body


def _reason(body: Any) -> str:
    detail = body.get("detail", "") if isinstance(body, dict) else ""
    if isinstance(detail, list):
        return "; ".join(f"{'.'.join(map(str, e.get('loc', ())[1:]))}: {e.get('msg', '')}" for e in detail)
    return str(detail)


def _line(rollout: dict[str, Any]) -> str:
    reason = f" ({rollout['reason']})" if rollout["reason"] else ""
    return f"{rollout['model']}: {rollout['to']} has {rollout['share']:g} %, {rollout['stage']}{reason}"


def _fail(message: str) -> typer.Exit:
    typer.echo(f"headwater: {message}", err=True)
    return typer.Exit(1)
