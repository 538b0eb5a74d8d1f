"""`headwater certs`: mutual TLS for a small deployment, in one folder; run again, it renews what soon ends.

For larger ones there are better authorities (cert-manager, step-ca, Vault); tiers read renewed files by themselves,
whoever writes them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from common import clock


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="made where it is not there")],
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME[=HOST,HOST…]…", help="a process, and how others reach it; default: by its name"),
    ],
    days: Annotated[int, typer.Option(help="a certificate is good for so long", min=1, max=825)] = 90,
    renew: Annotated[bool, typer.Option("--renew", help="make all certificates anew, by the same authority")] = False,
) -> None:
    """Mutual TLS for a small deployment: an authority, and a certificate for each process that it signs."""
    wanted = [_wanted(name) for name in names]
    try:
        from services.cli import authority  # noqa: PLC0415 - an extra, and needed by this command alone
    except ImportError as error:
        typer.echo(f"headwater: certs needs `pip install 'headwater[security]'` ({error})", err=True)
        raise typer.Exit(1) from None
    now = datetime.fromtimestamp(clock.wall_ns() // 1_000_000_000, UTC)
    try:
        said = authority.make(folder, wanted, now, days, renew=renew)
    except (OSError, ValueError) as error:
        typer.echo(f"headwater: {error}", err=True)
        raise typer.Exit(1) from None
    for line in said:
        typer.echo(line, err=True)
    for name, _ in wanted:
        typer.echo(f"# {name}\ntls: {{cert_file: {folder}/{name}.pem, key_file: {folder}/{name}-key.pem,")
        typer.echo(f"      ca_file: {folder}/ca.pem, peers_required: true}}")


def _wanted(text: str) -> tuple[str, list[str]]:
    name, equals, hosts = text.partition("=")
    listed = [host for host in hosts.split(",") if host] if equals else [name]
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name in ("ca", "ca-key") or not listed:
        raise typer.BadParameter(f"{text!r} is not NAME or NAME=HOST,HOST")
    if not all(re.fullmatch(r"(\*\.)?[A-Za-z0-9.:_-]{1,253}", host) for host in listed):
        raise typer.BadParameter(f"{hosts!r} are no host names or addresses")
    return name, listed
