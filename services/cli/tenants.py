"""`headwater tenant` and `headwater key`: tenants and their keys, over the admin API of any tier that clients reach.

A key is printed once, by the command that made it, on standard output alone: it can go straight into a secret store.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import httpx
import typer

from common import clock
from common.tenancy.keys import make
from common.tenancy.sources import in_yaml
from services.cli.admin_api import ADMIN_URL, Admin, request

TIMEOUT_S = 10.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

tenant = typer.Typer(no_args_is_help=True, help="Tenants: who may call, and what each may use.")
key = typer.Typer(no_args_is_help=True, help="Keys of tenants: made, rotated, revoked.")

AsJson = Annotated[bool, typer.Option("--json", help="as the admin API says it")]
Name = Annotated[str, typer.Argument(metavar="TENANT")]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="of the key, as listed; not the key itself")]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="refused from then on: 90d, 12h, or 2027-01-31")
]
Note = Annotated[str, typer.Option("--note", help="whose it is, in words")]


def fail(message: str) -> typer.Exit:
    """Say what is wrong in one line and end with status 1."""
    typer.echo(f"headwater: {message}", err=True)
    return typer.Exit(1)


def ask(method: str, admin: str, path: str, body: Any = None) -> Any:
    """What the admin API answers. Ends the command where it refuses."""
    try:
        url = f"{admin.rstrip('/')}/admin/v1{path}"
        reply = request(method, url, timeout_s=TIMEOUT_S, json=body)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise fail(f"{admin}: {error}") from None
    if reply.is_success:
        return reply.json() if reply.content else None
    try:
        detail = reply.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = reply.text[:200]
    if reply.status_code == 404 and detail == "Not Found":
        detail = "this process has no tenants: see `tenants:` in its configuration"
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(str(p) for p in d['loc'][1:])}: {d['msg']}" for d in detail)
    raise fail(f"{detail} ({reply.status_code})")


# -- tenants -----------------------------------------------------------------------------------------------------------


@tenant.command("list")
def list_tenants(admin: Admin = ADMIN_URL, as_json: AsJson = False) -> None:
    """All tenants."""
    found = ask("GET", admin, "/tenants")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = ("name", "priority", "requests_per_minute", "tokens_per_minute", "concurrent_requests", "under_way_here")
    _table([columns, *([str("-" if t[c] is None else t[c]) for c in columns] for t in found)])


@tenant.command("show")
def show_tenant(name: Name, admin: Admin = ADMIN_URL) -> None:
    """One of them: limits, keys, and what it has used this month, as JSON."""
    typer.echo(json.dumps(ask("GET", admin, f"/tenants/{name}"), indent=2))


@tenant.command("set")
def set_tenant(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="as requests_per_minute=600 or models=m1,m2")
    ] = None,
    admin: Admin = ADMIN_URL,
) -> None:
    """Create a tenant, or change some of what it may; an empty value takes a limit away."""
    there = {t["name"]: t for t in ask("GET", admin, "/tenants")}
    spec = {k: v for k, v in there.get(name, {}).items() if k not in ("name", "under_way_here")}
    for setting in settings or []:
        field, equals, value = setting.partition("=")
        if not equals:
            raise fail(f"{setting!r} is not KEY=VALUE")
        spec[field] = _value(field, value)
    typer.echo(json.dumps(ask("PUT", admin, f"/tenants/{name}", spec), indent=2))


@tenant.command("delete")
def delete_tenant(name: Name, admin: Admin = ADMIN_URL) -> None:
    """Delete a tenant and all its keys."""
    ask("DELETE", admin, f"/tenants/{name}")


def _value(field: str, value: str) -> Any:
    if field in ("models", "regions"):
        return [part for part in value.split(",") if part]
    if field == "disabled":
        return value.lower() in ("true", "yes", "1")
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value or None  # a class, or nonsense, which the API refuses


# -- keys --------------------------------------------------------------------------------------------------------------


@key.command("list")
def list_keys(name: Name, admin: Admin = ADMIN_URL, as_json: AsJson = False) -> None:
    """A tenant's keys, by their ids."""
    found = ask("GET", admin, f"/tenants/{name}/keys")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = ("id", "created", "expires", "note")
    _table([columns, *([str(k[c] or "-") for c in columns] for k in found)])


@key.command("new")
def new_key(
    name: Name,
    expires: Expires = None,
    note: Note = "",
    yaml: Annotated[
        bool, typer.Option("--yaml", help="ask nobody: print the key, and the lines for a file of tenants on stderr")
    ] = False,
    admin: Admin = ADMIN_URL,
) -> None:
    """Make a key, and print it; nobody can show it again."""
    until = _time(expires)
    if yaml:
        made, spec = make(_now(), until, note)
        typer.echo(made)
        typer.echo(in_yaml(name, spec), err=True, nl=False)
        return
    body = {"expires": until.isoformat() if until else None, "note": note}
    _shown(ask("POST", admin, f"/tenants/{name}/keys", body))


@key.command("rotate")
def rotate_key(
    id_: KeyId,
    overlap: Annotated[str, typer.Option("--overlap", metavar="TIME", help="how long the old one is good")] = "1d",
    expires: Expires = None,
    admin: Admin = ADMIN_URL,
) -> None:
    """Make a key in another's place, and print it."""
    until = _time(expires)
    body = {"overlap_s": _seconds(overlap), "expires": until.isoformat() if until else None}
    _shown(ask("POST", admin, f"/keys/{id_}/rotate", body))


@key.command("revoke")
def revoke_key(id_: KeyId, admin: Admin = ADMIN_URL) -> None:
    """Refuse a key from now on."""
    ask("DELETE", admin, f"/keys/{id_}")


def _shown(made: dict[str, Any]) -> None:
    typer.echo(made["key"])
    typer.echo(f"{made['id']} of {made['tenant']}, expires {made['expires'] or 'never'}", err=True)


def _now() -> datetime:
    return datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, UTC)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None:
        raise fail(f"{text!r} is no time: say 90d, 12h, 30m or 60s")
    return int(match[1]) * _UNITS[match[2]]


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    if re.fullmatch(r"\d{1,6}[smhd]", text):
        return _now() + timedelta(seconds=_seconds(text))
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise fail(f"{text!r} is no time: say 90d, 12h, or 2027-01-31") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _table(rows: list[Any]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
