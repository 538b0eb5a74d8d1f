"""Runs one agent: `headwater agent --config FILE`."""

from __future__ import annotations

import asyncio
import secrets
import signal
from random import Random
from typing import Final

import structlog

from common.errors import ConfigError, StoreUnavailable
from common.membership import Membership
from common.reload import Reloader, Source
from common.store.etcd import EtcdMembershipStore, EtcdTls
from services.agent.agent import Agent
from services.agent.config import AgentConfig
from services.agent.sources.sources import Sources

log = structlog.get_logger()

STORE_START_S: Final = 5.0  # etcd is given this long to answer before start-up goes on without it


async def run(config: AgentConfig, source: Source[AgentConfig] | None = None) -> None:
    """Register and report until SIGTERM or SIGINT, then leave; a second signal ends the process at once.

    The list of instances follows `source`. Raises ConfigError when it cannot start. That etcd is away is no reason not
    to: after a power cut agents may be up before it, and what is to be registered is registered when it answers.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        if stop.is_set():
            raise SystemExit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    following: asyncio.Task[None] | None = None
    store = _store(config)
    rng = Random(secrets.randbits(64))
    agent = Agent(config, Membership(store, ttl_s=config.etcd.ttl_s, root=config.etcd.prefix), rng)
    sources = Sources(config, agent.reconfigure, rng)
    try:
        await agent.start()
        sources.start()
        if source is not None:
            following = asyncio.create_task(
                Reloader(config, source, sources.reconfigure, live=("instances",)).run(), name="configuration"
            )
        await _wait_for(store, config, stop)
        await stop.wait()
    finally:
        if following is not None:
            following.cancel()
        await sources.close()
        await agent.close()
        await store.close()


def _store(config: AgentConfig) -> EtcdMembershipStore:
    etcd = config.etcd
    if not etcd.urls:
        raise ConfigError("etcd.urls: an agent needs etcd to make its instances known")
    tls = EtcdTls(etcd.ca_file, etcd.cert_file, etcd.key_file)
    return EtcdMembershipStore(etcd.urls, user=etcd.user, password=etcd.password, tls=tls)


async def _wait_for(store: EtcdMembershipStore, config: AgentConfig, stop: asyncio.Event) -> None:
    """Say so if etcd does not answer; returns early when the agent is told to stop."""
    ping = asyncio.ensure_future(store.ping(STORE_START_S))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((ping, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ping.done():
        ping.cancel()
        return
    error = ping.exception()
    if isinstance(error, StoreUnavailable):
        log.warning("etcd_away", urls=config.etcd.urls, error=str(error))
    elif error is not None:
        raise error
