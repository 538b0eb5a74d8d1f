"""The `headwater` command: one subcommand a process or a question.

Heavy imports happen inside the subcommands, so that each starts with what it needs and no more.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from common.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from common.config import TierConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A load balancer for AI inference in three tiers: region, cluster, instance.",
)

Config = Annotated[
    Path | None, typer.Option("--config", help="YAML file; every key is also HEADWATER_… in the environment")
]
Listen = Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="data listener")]
Admin = Annotated[str | None, typer.Option("--admin", metavar="HOST:PORT", help="admin listener")]
WorkerCount = Annotated[int | None, typer.Option("--workers", metavar="N", help="processes that share the port")]
ADMIN_URL = "http://127.0.0.1:9080"

C = TypeVar("C", bound="BaseModel")
T = TypeVar("T", bound="TierConfig")


def fail(message: str) -> typer.Exit:
    """Say what is wrong in one line and end with status 1."""
    typer.echo(f"headwater: {message}", err=True)
    return typer.Exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"headwater {version('headwater')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Options of the command itself."""


def _serve(run: Callable[[C, Any], Coroutine[Any, Any, None]], load: Callable[[], C], file: Path | None) -> None:
    """Load a configuration and run a process on it, following its file, until it is told to stop."""
    import uvloop  # noqa: PLC0415

    from common.config import TierConfig as AnyTier  # noqa: PLC0415
    from common.logs import configure  # noqa: PLC0415
    from common.reload import Source  # noqa: PLC0415

    try:
        config = load()
        log = getattr(config, "log", None)
        configure(*((log.format, log.level) if log is not None else ()))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it means: read the configuration again
        if isinstance(config, AnyTier) and config.workers > 1:
            config = _one_of_several(config)
            load = partial(_own, load)
        uvloop.run(run(config, Source(load, file)))
    except ConfigError as error:
        raise fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _own(load: Callable[[], Any]) -> Any:
    """The configuration that a worker has of the one it was started with, read again."""
    return _one_of_several(load())


def _one_of_several(config: T) -> T:
    """A worker's own configuration; the process that was started itself only looks after the workers, and ends here."""
    from services.cli import workers  # noqa: PLC0415

    own = workers.number()
    if own is None:
        raise typer.Exit(workers.Workers(config.workers).run())
    return workers.own_settings(config, own)


@app.command()
def up(
    instance: Annotated[
        list[str] | None, typer.Option("--instance", metavar="URL", help="a server; may be repeated")
    ] = None,
    config: Config = None,
    listen: Listen = None,
    admin: Admin = None,
    workers: WorkerCount = None,
) -> None:
    """All three stages in one process, in front of your own servers; nothing else is needed."""
    from common.config import load  # noqa: PLC0415
    from services.up.__main__ import run  # noqa: PLC0415
    from services.up.config import UpConfig  # noqa: PLC0415

    overrides: dict[str, Any] = {"listen": listen, "admin": admin, "workers": workers}
    if instance:
        overrides["instances"] = [{"url": url} for url in instance]
    _serve(run, lambda: load(UpConfig, config, overrides), config)


@app.command("global")
def global_(config: Config = None, listen: Listen = None, admin: Admin = None, workers: WorkerCount = None) -> None:
    """A global balancer: picks a region."""
    from common.config import load  # noqa: PLC0415
    from services.global_lb.__main__ import run  # noqa: PLC0415
    from services.global_lb.config import GlobalConfig  # noqa: PLC0415

    _serve(run, lambda: load(GlobalConfig, config, {"listen": listen, "admin": admin, "workers": workers}), config)


@app.command()
def region(config: Config = None, listen: Listen = None, admin: Admin = None, workers: WorkerCount = None) -> None:
    """A balancer of one region: picks a cluster."""
    from common.config import load  # noqa: PLC0415
    from services.region_lb.__main__ import run  # noqa: PLC0415
    from services.region_lb.config import RegionConfig  # noqa: PLC0415

    _serve(run, lambda: load(RegionConfig, config, {"listen": listen, "admin": admin, "workers": workers}), config)


@app.command()
def instance(config: Config = None, listen: Listen = None, admin: Admin = None, workers: WorkerCount = None) -> None:
    """A balancer of one cluster: picks an inference server."""
    from common.config import load  # noqa: PLC0415
    from services.instance_lb.__main__ import run  # noqa: PLC0415
    from services.instance_lb.config import InstanceConfig  # noqa: PLC0415

    _serve(run, lambda: load(InstanceConfig, config, {"listen": listen, "admin": admin, "workers": workers}), config)


@app.command()
def agent(config: Config = None) -> None:
    """Beside inference servers: registers them, samples GPUs, reports load."""
    from common.config import load  # noqa: PLC0415
    from services.agent.__main__ import run  # noqa: PLC0415
    from services.agent.config import AgentConfig  # noqa: PLC0415

    _serve(run, lambda: load(AgentConfig, config), config)


@app.command()
def trace(
    trace_id: Annotated[str, typer.Argument(metavar="ID", help="of a request: the x-headwater-decision header")],
    admin: Annotated[
        str, typer.Option("--admin", metavar="URL", envvar="HEADWATER_ADMIN_URL", help="of any tier")
    ] = ADMIN_URL,
) -> None:
    """Print one request's way through all tiers as a tree, from the tiers' own recent spans."""
    import httpx  # noqa: PLC0415
    import msgspec  # noqa: PLC0415

    from common.spans import read_spans, render  # noqa: PLC0415
    from services.cli.admin_api import request  # noqa: PLC0415

    try:
        url, everywhere = f"{admin.rstrip('/')}/admin/v1/traces/{trace_id}", {"everywhere": True}
        reply = request("GET", url, timeout_s=10.0, params=everywhere)
        reply.raise_for_status()
        spans = read_spans(reply.content)
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OSError) as error:
        raise fail(f"no trace from {admin}: {error}") from None
    if not spans:
        raise fail(f"no tier remembers the trace {trace_id}; tiers keep the last `tracing.recent` requests")
    for line in render(spans):
        typer.echo(line)


GROUPS = {  # of several commands each
    "key": ("services.cli.tenants", "key"),
    "rollout": ("services.cli.rollout", "app"),
    "tenant": ("services.cli.tenants", "tenant"),
}
ELSEWHERE = {  # commands whose options stand in a module of their own, which takes long to import
    "check": ("services.cli.check", "check"),
    "explain": ("services.cli.ask", "explain"),
    "route": ("services.cli.ask", "route"),
    "policy": ("services.cli.ask", "policy"),
    "log-level": ("services.cli.ask", "log_level"),
    "top": ("services.cli.top", "top"),
    "whatif": ("services.cli.ask", "whatif"),
    "bench": ("services.bench.__main__", "bench"),
    "drain": ("services.cli.drain", "drain"),
    "undrain": ("services.cli.drain", "undrain"),
    "demo": ("services.demo.__main__", "demo"),
    "certs": ("services.cli.certs", "certs"),
    "engine": ("services.engine_sim.__main__", "command"),
    "sim": ("services.sim.__main__", "sim"),
}


def main() -> None:
    """Entry point of the console script. A process that is started by the dozen imports its own command only."""
    gc.set_threshold(100_000)  # imports leave nothing to collect, and looking for it was a tenth of the start
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    here = {c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands}
    known = asked in {*here, *ELSEWHERE, *GROUPS}  # else it is --help, or a slip, which lists them all
    for name, (module, group) in GROUPS.items():
        if asked == name or not known:
            app.add_typer(getattr(import_module(module), group), name=name)
    for name, (module, function) in ELSEWHERE.items():
        if asked == name or not known:
            app.command(name)(getattr(import_module(module), function))
    app()


if __name__ == "__main__":
    main()
