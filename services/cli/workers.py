"""Several processes of one tier on one port: starts them, passes signals on, replaces one that dies.

Each is a balancer of its own: its name, admin port and port for reports are those of the configuration, counted up. The
kernel spreads connections over them (SO_REUSEPORT), and they share what they have in flight as balancers of one node
do. A worker that ends without being told to is started anew, with growing pauses should that happen again and again;
where the first ones do not even start, all of them end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType
from typing import TypeVar

import structlog

from common import clock
from common.config import TierConfig

log = structlog.get_logger()

C = TypeVar("C", bound=TierConfig)

NUMBER = "HEADWATER_WORKER"
"""Environment variable that tells a worker its number, from 0."""
STARTED_S = 5.0  # one that ran for so long had started
RESTART_S = (0.5, 30.0)  # first and longest pause before a worker is started anew
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def number() -> int | None:
    """This process's number among its siblings; None in a process that is no worker."""
    value = os.environ.get(NUMBER, "")
    return int(value) if value.isdigit() else None


def own_settings(config: C, worker: int) -> C:
    """The configuration of one worker: its own name and ports."""
    with suppress(OSError, AttributeError):  # other systems do without: a killed parent leaves its workers serving
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    changed: dict[str, object] = {
        "admin": _next_port(config.admin, worker),
        "reports": config.reports.model_copy(update={"listen": _next_port(config.reports.listen, worker)}),
    }
    if config.id:
        changed["id"] = f"{config.id}-{worker}"
    return config.model_copy(update=changed)


def _next_port(host_port: str, by: int) -> str:
    host, _, port = host_port.rpartition(":")
    return f"{host}:{int(port) + by if int(port) else 0}"


class Workers:
    """The parent: `run` until all workers have ended."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: dict[int, tuple[int, subprocess.Popen[bytes], float]] = {}  # pid -> (number, process, since)
        self._due: dict[int, float] = {}  # number -> when it is started anew
        self._pause_s: dict[int, float] = {}
        self._stopping = False
        self._failed = 0

    def run(self) -> int:
        """Start them, wait for them; the exit status."""
        for told in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(told, self._pass_on)
        for worker in range(self._count):
            self._start(worker)
        while self._running or self._due:
            self._reap()
            now = clock.now()
            for worker in [w for w, at in self._due.items() if at <= now]:
                del self._due[worker]
                self._start(worker)
            signal.sigtimedwait([signal.SIGCHLD], 0.2)
        return self._failed

    def _start(self, worker: int) -> None:
        command = [sys.executable, "-m", "services.cli", *sys.argv[1:]]
        process = subprocess.Popen(command, env={**os.environ, NUMBER: str(worker)})  # noqa: S603 - our own command line
        self._running[process.pid] = worker, process, clock.now()

    def _reap(self) -> None:
        for pid, (worker, process, since) in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[pid]
            if self._stopping:
                self._failed = self._failed or max(0, code)
            elif clock.now() - since < STARTED_S and worker not in self._pause_s:
                self._failed = max(1, code)
                self._stop(signal.SIGTERM)  # it cannot start, and the others would fare no better
            else:
                self._again(worker, code, since)

    def _again(self, worker: int, code: int, since: float) -> None:
        first, longest = RESTART_S
        quick = clock.now() - since < STARTED_S
        pause_s = min(2.0 * self._pause_s.get(worker, first / 2.0), longest) if quick else first
        self._pause_s[worker] = pause_s
        self._due[worker] = clock.now() + pause_s
        log.error("worker_ended", worker=worker, code=code, again_in_s=pause_s)

    def _pass_on(self, told: int, frame: FrameType | None) -> None:
        if told == signal.SIGHUP:
            for _, process, _ in self._running.values():
                process.send_signal(told)
        else:
            self._stop(told)

    def _stop(self, told: int) -> None:
        self._stopping = True
        self._due.clear()
        for _, process, _ in self._running.values():
            process.send_signal(told)
