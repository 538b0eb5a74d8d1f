"""Puts engines on their ports, says so on standard output, and lets them end in order.

A death on command ends the whole process if it holds this engine alone; otherwise this engine's listener closes and its
connections are reset, which looks the same from outside.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from common import clock
from common.errors import ConfigError
from services.engine_sim.app import App
from services.engine_sim.config import EngineConfig, ServeConfig
from services.engine_sim.http import Connection
from services.engine_sim.live import LiveEngine

BACKLOG = 2_048
SWEEP_S = 1.0  # how often idle connections are looked for


class EngineServer:
    """One engine on its port. `alone`: nothing else lives in this process, so that its death is the process's."""

    def __init__(self, config: EngineConfig, *, alone: bool = False) -> None:
        self.config = config
        self.alone = alone
        self.engine = LiveEngine(config, self._die)
        self.app = App(self.engine)
        self._listener: asyncio.Server | None = None
        self._revival: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.config.port}"

    async def start(self) -> None:
        """Listen; from here on `config` has the port and name in use. Raises ConfigError if the port cannot be had."""
        loop = asyncio.get_running_loop()
        host, port = self.config.host, self.config.port
        try:
            self._listener = await loop.create_server(lambda: Connection(self.app), host, port, backlog=BACKLOG)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"port: cannot listen on {host}:{port}: {reason}") from None
        port = self._listener.sockets[0].getsockname()[1]
        self.config = replace(self.config, port=port, name=self.config.name or f"{self.config.profile}-{port}")
        self.engine.rename(self.config)
        self._sweep_idle()

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let answers under way end for `grace_s`, then break the rest."""
        self.app.draining = True
        self._close_listener()
        for connection in list(self.app.connections):
            if not connection.busy:
                connection.close()
        deadline = clock.now() + grace_s
        while self.app.connections and clock.now() < deadline:  # noqa: ASYNC110 - once in a life
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Be gone at once: listener closed, connections reset."""
        self._close_listener()
        for connection in list(self.app.connections):
            connection.reset()
        self.engine.stop()

    def _close_listener(self) -> None:
        for timer in (self._revival, self._sweep):
            if timer is not None:
                timer.cancel()
        self._revival = self._sweep = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _die(self) -> None:
        if self.alone:
            os._exit(1)
        revive_after_s = self.engine.faults.revive_after_s
        self.kill()
        if revive_after_s is not None:
            loop = asyncio.get_running_loop()
            self._revival = loop.call_later(revive_after_s, lambda: loop.create_task(self._revive()))

    async def _revive(self) -> None:
        """Start again on the same port, empty and with the load time of a first start."""
        self._revival = None
        self.engine = LiveEngine(self.config, self._die)
        self.app = App(self.engine)
        await self.start()

    def _sweep_idle(self) -> None:
        """Close connections that have been idle for too long, as uvicorn does."""
        limit = clock.now() - self.config.keepalive_timeout_s
        for connection in [c for c in self.app.connections if not c.busy and c.idle_since_s < limit]:
            connection.close()
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_idle)


def announce(server: EngineServer) -> None:
    """One line of JSON on standard output: this engine answers now."""
    config = server.config
    line = {"engine": config.name, "url": server.url, "model": config.model, "profile": config.profile}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


async def serve(config: ServeConfig, ready: Callable[[EngineServer], None] = announce) -> None:
    """Run all engines of a process until SIGTERM or SIGINT, the second of which ends it at once.

    Raises ConfigError if a port cannot be had; then none of them was announced.
    """
    loop = asyncio.get_running_loop()
    asked_to_stop = asyncio.Event()

    def on_signal() -> None:
        if asked_to_stop.is_set():
            os._exit(1)
        asked_to_stop.set()

    servers: list[EngineServer] = []
    try:
        for engine in config.engines:
            servers.append(EngineServer(engine, alone=len(config.engines) == 1))
            await servers[-1].start()
    except ConfigError:
        for server in servers:
            server.kill()
        raise
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    for server in servers:
        ready(server)
    gc.collect()
    gc.freeze()  # what is here now stays: the collector need not look at it again
    await asked_to_stop.wait()
    await asyncio.gather(*(server.stop(config.grace_s) for server in servers))
