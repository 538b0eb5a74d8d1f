"""Calls to Redis that are answered within milliseconds or not at all, for the stores that are built on them.

A call is waited for as long as its budget and no longer; the command itself runs on in a task of its own. So neither a
caller's time-out nor its cancellation ever breaks off a reply half way, which is how one caller gets another's answer
(CASES C43), and a connection that takes longer than the budget to set up is there for the next call. A command that has
no reply after `COMMAND_TIMEOUT_S` loses its connection.

A breaker keeps trouble off requests (CASES C27): with the second failing call in a row it opens, and calls fail at once
while one probe looks whether a write succeeds within the budget again. Waiting for a free connection is no failure of
Redis and does not count. A server that reads but does not write (a demoted replica, one out of memory) goes on reading.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import structlog
from redis.exceptions import ClusterError, RedisError, ResponseError

from common.clock import now
from common.errors import StoreUnavailable
from common.store.redis_client import connect, disconnect_idle, server_name

log = structlog.get_logger()

COMMAND_TIMEOUT_S: Final = 1.0  # connecting included; what takes longer will not be waited for anyway
FAILURES: Final = 2  # calls in a row that open the breaker: one may be chance
MAX_CONNECTIONS: Final = 16  # at 1 ms a command, 16,000 commands a second
MAX_WAITING: Final = 1024  # calls that wait for one of them at once
BUSY_LOOP_TURNS: Final = 4  # from bytes in the socket to a finished task; this loop's own delay is no fault of Redis
PROBE_INTERVAL_S: Final = (0.1, 1.0)  # first and longest pause between probes

WRITES: Final = frozenset({"SET", "EVAL"})


# What a command may raise. uvloop has a RuntimeError where asyncio drops what is written to a connection just lost.
ERRORS: Final = (RedisError, OSError, TimeoutError, RuntimeError)


class _State(Enum):
    UP = "up"
    READ_ONLY = "read_only"  # reads are answered, writes refused
    DOWN = "down"


class RedisCalls:
    """The server, sentinels' master or cluster behind `url` (see `redis_client`); connects when first used.

    All calls return or raise within `budget_ms`. Raises ConfigError for a URL that is none.
    """

    probe_key = "headwater:~probe"  # written when looking whether writes succeed; a store has it under its own prefix

    def __init__(
        self,
        url: str,
        *,
        budget_ms: float = 10.0,
        max_connections: int = MAX_CONNECTIONS,
        max_waiting: int = MAX_WAITING,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        self._budget_s = budget_ms / 1000.0
        self._command_timeout_s = max(command_timeout_s, self._budget_s)
        with_probe = max_connections + 1
        self._client = connect(url, max_connections=with_probe, timeout_s=self._command_timeout_s)
        self._server = server_name(url)
        self._free = asyncio.Semaphore(max_connections)
        self._waiting, self._max_waiting = 0, max_waiting
        self._state = _State.UP
        self._failures = 0
        self._commands: set[asyncio.Task[None]] = set()
        self._prober: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def state(self) -> str:
        """up, read_only or down: what the breaker lets through."""
        return self._state.value

    async def ping(self, timeout_s: float) -> None:
        """Return as soon as Redis takes a write, trying until `timeout_s` is over. Raises StoreUnavailable."""
        deadline = now() + timeout_s
        while (found := await self._probe(deadline))[0] is not _State.UP:
            if now() + PROBE_INTERVAL_S[0] > deadline:
                raise StoreUnavailable(f"redis {self._server}: {found[1]}")
            await asyncio.sleep(PROBE_INTERVAL_S[0])

    async def close(self) -> None:
        """Let go of connections; what is under way is given up."""
        self._closed = True
        tasks = [*self._commands, *([self._prober] if self._prober else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._command_timeout_s)
        with suppress(*ERRORS):
            async with asyncio.timeout(self._command_timeout_s):
                await self._client.aclose()

    # -- one call ----------------------------------------------------------------------------------------------------

    async def call(self, *command: Any) -> Any:
        """A command's reply within the budget. Raises StoreUnavailable."""
        deadline = now() + self._budget_s
        self._check(command)
        await self._take_connection(deadline)
        try:
            self._check(command)  # it may have gone down while this call waited for its turn
        except StoreUnavailable:
            self._free.release()
            raise
        run = _Command(command, now())
        task = asyncio.create_task(self._run(run))
        self._commands.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=max(0.0, deadline - now()))
        for _ in range(BUSY_LOOP_TURNS):
            if task.done():
                break
            await asyncio.sleep(0)
        if not task.done():
            # The wait for a connection is not held against Redis: it too has the whole budget, or most of it.
            left_s = run.began + self._budget_s - now()
            if left_s < 0.1 * self._budget_s:
                self._overdue(run)
            else:
                asyncio.get_running_loop().call_later(left_s, self._overdue, run)
            raise StoreUnavailable("redis: no reply within the budget")
        if run.error:
            raise StoreUnavailable(f"redis: {run.error}")
        return run.reply

    def _check(self, command: tuple[Any, ...]) -> None:
        if self._closed:
            raise StoreUnavailable("redis: the store is closed")
        if self._state is _State.DOWN or (self._state is _State.READ_ONLY and command[0] in WRITES):
            raise StoreUnavailable(f"redis: {self._state.value}")

    async def _take_connection(self, deadline: float) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        if self._waiting >= self._max_waiting:
            raise StoreUnavailable("redis: too many calls wait for a connection")
        self._waiting += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - now())):
                await self._free.acquire()
        except TimeoutError:
            raise StoreUnavailable("redis: all connections are busy") from None
        finally:
            self._waiting -= 1

    async def _run(self, run: _Command) -> None:
        """Carry a command out. Raises nothing; `run` has the outcome."""
        try:
            async with asyncio.timeout(self._command_timeout_s):
                run.reply = await self._client.execute_command(*run.command)
        except ERRORS as error:
            run.error = _describe(error)
            if _refuses_writes(error) and run.command[0] in WRITES:
                self._become(_State.READ_ONLY, run.error)
            elif not run.counted:
                self._failed(run.error)
        else:
            if not run.counted:
                self._failures = 0
        finally:
            run.counted = True

    def _overdue(self, run: _Command) -> None:
        if not run.counted:
            run.counted = True
            self._failed("no reply within the budget")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._commands.discard(task)
        self._free.release()

    # -- the breaker -------------------------------------------------------------------------------------------------

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._become(_State.DOWN, reason)

    def _become(self, state: _State, reason: str = "") -> None:
        if state is self._state or self._closed:
            return
        self._state, self._failures = state, 0
        if state is _State.UP:
            log.info("redis answers again", server=self._server)
        else:
            log.warning("redis unavailable, going on without it", server=self._server, state=state.value, reason=reason)
            if self._prober is None or self._prober.done():
                self._prober = asyncio.create_task(self._recover(), name="redis-probe")

    async def _recover(self) -> None:
        """Probe until all is well."""
        pause_s, longest_s = PROBE_INTERVAL_S
        while self._state is not _State.UP:
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, longest_s)
            self._become(*await self._probe(now() + self._command_timeout_s))

    async def _probe(self, deadline: float) -> tuple[_State, str]:
        """What Redis is up to now, and why: connect (until `deadline`), then write within the budget."""
        try:
            if self._state is _State.READ_ONLY:
                # Another server may be the master by now, behind the same name: go and look.
                await disconnect_idle(self._client)
            async with asyncio.timeout(max(0.001, deadline - now())):
                await self._client.execute_command("PING")
            async with asyncio.timeout(self._budget_s):
                await self._client.execute_command("SET", self.probe_key, b"", "PX", 1000)
        except ERRORS as error:
            return (_State.READ_ONLY if _refuses_writes(error) else _State.DOWN), _describe(error)
        return _State.UP, ""


class _Command:
    """One command under way."""

    __slots__ = ("began", "command", "counted", "error", "reply")

    def __init__(self, command: tuple[Any, ...], began: float) -> None:
        self.command = command
        self.began = began  # when it got its connection
        self.reply: Any = None
        self.error = ""
        self.counted = False  # whether its outcome has been told to the breaker


def _refuses_writes(error: BaseException) -> bool:
    """READONLY, OOM, MISCONF, NOPERM, NOREPLICAS: an answer, and no. Not so for a cluster that is down."""
    return isinstance(error, ResponseError) and not isinstance(error, ClusterError)


def _describe(error: BaseException) -> str:
    return "no reply in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"[:200]
