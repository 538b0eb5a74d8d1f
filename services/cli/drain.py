"""`headwater drain` and `headwater undrain`: by the admin API of any tier."""

from __future__ import annotations

import getpass
import time
from typing import Annotated, Any

import httpx
import typer

from common import clock
from services.cli.admin_api import ADMIN_URL, Admin, request

TIMEOUT_S = 10.0
POLL_S = 0.5


def drain(
    id_: Annotated[
        str, typer.Argument(metavar="[ID]", help="eu, eu/eu-a, eu/eu-a/i1, or a name that is carried once")
    ] = "",
    reason: Annotated[str, typer.Option(help="For people who look later.")] = "",
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Wait for what is under way there to end.")
    ] = 0.0,
    admin: Admin = ADMIN_URL,
) -> None:
    """Send no new work to a region, cluster or instance, until it is undrained; without ID, list what is drained."""
    url = f"{admin.rstrip('/')}/admin/v1/drains"
    if not id_:
        _list(_call("GET", url, params={"everywhere": True}))
        return
    mark = _call("POST", url, json={"id": id_, "reason": reason, "by": _user()})
    typer.echo(f"{mark['path']} gets no new work")
    if wait:
        _wait(url, mark["path"], wait)


def undrain(
    id_: Annotated[str, typer.Argument(metavar="ID", help="as given to drain")], admin: Admin = ADMIN_URL
) -> None:
    """Send work again to what was drained, slowly at first."""
    mark = _call("DELETE", f"{admin.rstrip('/')}/admin/v1/drains/{id_.strip('/')}")
    typer.echo(f"{mark['path']} gets work again")


def _call(method: str, url: str, **options: Any) -> Any:
    """The reply's JSON. Ends the command with one line for what went wrong."""
    try:
        reply = request(method, url, timeout_s=TIMEOUT_S, **options)
        value = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise _fail(f"no answer from {url}: {error}") from None
    if reply.is_error:
        detail = value.get("detail") if isinstance(value, dict) else None
        raise _fail(detail if isinstance(detail, str) else f"{url} answered {reply.status_code}")
    return value


def _wait(url: str, path: str, seconds: float) -> None:
    until = clock.now() + seconds
    told = False
    while True:
        marks = _call("GET", url, params={"everywhere": True})
        mark = next((mark for mark in marks if mark["path"] == path), None)
        left = None if mark is None else mark["in_flight"]
        if mark is not None and left and not told:
            typer.echo(_under_way(mark))
            told = True
        if left == 0:
            typer.echo("nothing is under way there any more")
            return
        if clock.now() >= until:
            said = "the tier does not see the mark yet" if left is None else f"{left} requests are still under way"
            raise _fail(f"after {seconds:g} s {said}")
        time.sleep(min(POLL_S, max(0.0, until - clock.now())))


def _list(marks: list[dict[str, Any]]) -> None:
    if not marks:
        typer.echo("nothing is drained")
    for mark in marks:
        by = f" by {mark['by']}" if mark["by"] else ""
        why = f": {mark['reason']}" if mark["reason"] else ""
        gone = "" if mark["exists"] else ", not registered at present"
        typer.echo(f"{mark['path']}  since {mark['since']}{by}, {_under_way(mark)}{gone}{why}")


def _under_way(mark: dict[str, Any]) -> str:
    left_s = mark.get("remaining_s", 0.0)  # which an older balancer does not tell
    predicted = f", predicted to end in {left_s:.0f} s" if left_s >= 1.0 else ""
    return f"{mark['in_flight']} under way{predicted}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in containers
        return ""


def _fail(message: str) -> typer.Exit:
    typer.echo(f"headwater: {message}", err=True)
    return typer.Exit(1)
