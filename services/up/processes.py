"""Server processes of this machine as replicas: started on ports of their own, drained, stopped, none left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from heapq import nsmallest
from pathlib import Path as File
from typing import Final

import structlog

from common import clock
from common.errors import StoreUnavailable
from common.membership import Drain
from common.scaling.config import ScaledGroup
from common.tier import TierProcess
from common.types import Path
from services.agent.config import InstanceConfig

log = structlog.get_logger()

PORTS: Final = 1000  # looked at for a free one
EARLY_S: Final = 10.0  # one that ends within so long of its start has failed,
PAUSE_S: Final = (1.0, 60.0)  # and the next is started after a pause that doubles from the one to the other
LOOK_S: Final = 0.1

_SETPRIV = shutil.which("setpriv")
DIES_WITH_US: Final = (_SETPRIV, "--pdeathsig", "KILL") if _SETPRIV else ()
"""Where util-linux has it, the kernel ends a replica whose balancer was killed; else it would hold its GPU for ever."""

Child = subprocess.Popen[bytes]


class _Replica:
    """One child process."""

    def __init__(self, port: int, child: Child) -> None:
        self.port = port
        self.child = child
        self.started_at = clock.now()
        self.leaving = False
        self.forgotten = False  # nobody need look at it any more


class ProcessGroup:
    """The replicas of one group of one model (a scaling.Provider)."""

    def __init__(
        self, tier: TierProcess, cluster: Path, model: str, name: str, config: ScaledGroup, changed: Callable[[], None]
    ) -> None:
        """`changed` is called whenever `instances` is another than before."""
        self.failures = 0
        self.instances: Mapping[str, InstanceConfig] = {}
        self._tier = tier
        self._cluster = cluster
        self._model = model
        self._name = name
        self._config = config
        self._changed = changed
        self._replicas: list[_Replica] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._pause_s = PAUSE_S[0]
        self._not_before = 0.0
        self._closed = False

    def want(self, replicas: int, reason: str, *, at_least: bool) -> None:
        """See Provider. All that are there are its own, so there are never more than it knows of."""
        if self._closed:
            return
        staying = [r for r in self._replicas if not r.leaving]
        if clock.now() >= self._not_before:
            for _ in range(replicas - len(staying) - self._starting):
                self._starting += 1
                self._spawn(self._start())
        for replica in nsmallest(len(staying) - replicas, staying, key=self._left):
            replica.leaving = True
            self._spawn(self._leave(replica))

    def _under_way(self, replica: _Replica) -> int:
        return self._tier.balancing.under_way(self._path(replica))

    def _left(self, replica: _Replica) -> tuple[float, int]:
        """What orders replicas by how soon each is predicted to be done with its work."""
        return self._tier.balancing.remaining_s(self._path(replica)), self._under_way(replica)

    def _path(self, replica: _Replica) -> Path:
        return (*self._cluster, self._id(replica))

    def _id(self, replica: _Replica) -> str:
        return f"{self._name}-{replica.port}"

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- a replica's life ----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            port = self._free_port()
            argv = [argument.replace("{port}", str(port)) for argument in self._config.process.command]
            child = self._run(argv, port)
        except OSError as error:
            log.error("replica_not_started", model=self._model, group=self._name, why=str(error))
            self._failed()
            return
        finally:
            self._starting -= 1
        replica = _Replica(port, child)
        self._replicas.append(replica)
        log.info("replica_started", model=self._model, group=self._name, port=port, pid=child.pid)
        self._tell()
        await _ended(child)
        self._replicas.remove(replica)
        self._tell()
        if not replica.leaving:
            log.warning("replica_ended", model=self._model, group=self._name, port=port, code=child.returncode)
            if clock.now() - replica.started_at < EARLY_S:
                self._failed()
        else:
            self._pause_s = PAUSE_S[0]

    def _run(self, argv: list[str], port: int) -> Child:
        # Not asyncio's subprocesses: under uvloop they fork, which gRPC's threads do not take well.
        folder = self._config.process.log_dir
        with (File(folder) / f"{port}.log").open("ab") if folder else nullcontext() as out:
            return subprocess.Popen(  # noqa: S603 - what the operator has configured is what is to run
                [*DIES_WITH_US, *argv], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _failed(self) -> None:
        self.failures += 1
        self._not_before = clock.now() + self._pause_s
        self._pause_s = min(2.0 * self._pause_s, PAUSE_S[1])

    def _free_port(self) -> int:
        """Raises OSError where none is free."""
        first, taken = self._config.process.first_port, {r.port for r in self._replicas}
        for port in range(first, min(first + PORTS, 65_536)):
            if port in taken:
                continue
            with socket.socket() as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise OSError(f"no port from {first} on is free")

    async def _leave(self, replica: _Replica) -> None:
        """No new requests; what is under way ends; then the process does."""
        drain = Drain(self._path(replica), "fewer replicas are needed", "scaling", "")
        try:
            await self._tier.membership.drain(drain)
        except StoreUnavailable as error:  # then it goes as one that ends by itself would
            log.warning("replica_not_drained", port=replica.port, why=str(error))
        until = clock.now() + self._config.process.drain_s
        while self._under_way(replica) and clock.now() < until and replica.child.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        replica.forgotten = True
        self._tell()
        await self._end(replica)
        try:
            await self._tier.membership.undrain(drain.path)
        except StoreUnavailable as error:
            log.warning("replica_still_marked", port=replica.port, why=str(error))
        log.info("replica_stopped", model=self._model, group=self._name, port=replica.port)

    async def _end(self, replica: _Replica) -> None:
        _signal(replica.child, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._config.process.stop_s):
                await _ended(replica.child)
        except TimeoutError:
            _signal(replica.child, signal.SIGKILL)
            await _ended(replica.child)

    def _tell(self) -> None:
        config = self._config
        self.instances = {
            self._id(r): InstanceConfig(
                url=f"http://127.0.0.1:{r.port}",
                id=self._id(r),
                gpu=config.gpu,
                labels=config.labels,
                price_usd_per_hour=config.price_usd_per_hour,
            )
            for r in self._replicas
            if r.child.poll() is None and not r.forgotten
        }
        self._changed()

    async def close(self) -> None:
        """See Provider."""
        self._closed = True
        for replica in self._replicas:
            replica.leaving = True
        await asyncio.gather(*(self._end(replica) for replica in list(self._replicas)))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _ended(child: Child) -> None:
    while child.poll() is None:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(LOOK_S)


def _signal(child: Child, number: int) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return  # it ended in the same instant
