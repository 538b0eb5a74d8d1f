"""`headwater check FILE`: whether a process would start on a configuration, without starting it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from common.config import TierConfig, load
from common.errors import ConfigError

CONNECT_S = 5.0  # for a store to answer

KINDS: Final = ("global", "region", "instance", "agent", "up")


def check(
    file: Annotated[Path, typer.Argument(help="YAML, as given to --config.")],
    kind: Annotated[str, typer.Option("--as", metavar="KIND", help=f"{', '.join(KINDS)}; default: by its keys")] = "",
    connect: Annotated[bool, typer.Option("--connect", help="Also ask etcd and Redis whether they answer.")] = False,
) -> None:
    """Say whether a configuration is good, with the environment as it is here; the first thing wrong ends it with 1."""
    try:
        if kind and kind not in KINDS:
            raise ConfigError(f"--as {kind}: expected one of {', '.join(KINDS)}")
        kind = kind or _guess(file)
        config = load(_model(kind), file)
        if isinstance(config, TierConfig):
            _verify(config)
        if connect:
            asyncio.run(_connect(config))
    except ConfigError as error:
        typer.echo(f"headwater: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: good, for headwater {kind}")


def _guess(file: Path) -> str:
    """What the keys of a file are of; what cannot be read is left to `load`, which says why."""
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        keys = None
    if not isinstance(keys, dict):
        return "global"
    if "instances" in keys:
        return "agent" if "region" in keys or "cluster" in keys else "up"
    return "instance" if "cluster" in keys else "region" if "region" in keys else "global"


def _model(kind: str) -> type[Any]:
    from services.agent.config import AgentConfig  # noqa: PLC0415 - each brings its own imports
    from services.global_lb.config import GlobalConfig  # noqa: PLC0415
    from services.instance_lb.config import InstanceConfig  # noqa: PLC0415
    from services.region_lb.config import RegionConfig  # noqa: PLC0415
    from services.up.config import UpConfig  # noqa: PLC0415

    models = {
        "agent": AgentConfig,
        "global": GlobalConfig,
        "instance": InstanceConfig,
        "region": RegionConfig,
        "up": UpConfig,
    }
    return models[kind]


def _verify(config: TierConfig) -> None:
    from common.relay.tls import Certificates  # noqa: PLC0415
    from common.tier import verify  # noqa: PLC0415

    verify(config)
    Certificates(config.tls)


async def _connect(config: Any) -> None:
    """Raises ConfigError for a store that does not answer, or refuses."""
    from common import backing  # noqa: PLC0415
    from common.errors import StoreUnavailable  # noqa: PLC0415

    store = await backing.membership_store(config.etcd)
    await store.close()
    redis = getattr(config, "redis", None)
    if redis is not None and redis.url:
        sessions = backing.affinity_store(redis, 1)
        try:
            await sessions.ping(CONNECT_S)
        except StoreUnavailable as error:
            raise ConfigError(f"redis.url: {error}") from None
        finally:
            await sessions.close()
