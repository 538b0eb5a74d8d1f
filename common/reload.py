"""A configuration that changes while its process runs: all of it or nothing (CASES C29).

The file is read again on SIGHUP and whenever it is another one: its own change, another file under its name, or
another target of a link on the way to it. What is read is checked as a whole before any of it counts, so a bad file
changes nothing; it costs one log line, and a gauge says so until a good one is there. Settings that a running process
cannot change (addresses, names, stores) are refused the same way, by name.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from common import clock
from common.errors import ConfigError
from common.metrics import Counts, Level, Scrape

log = structlog.get_logger()

LOOK_S = 0.5  # how often the file is looked at
SETTLED_S = 0.1  # it has to be the same for so long: a write is not read half way
SETTLE_LOOKS = 20  # one that is written without end is read as it is

C = TypeVar("C", bound=BaseModel)

Seen = tuple[int, int, int, int] | None
"""What tells one state of a file from another; None: it is not there."""


@dataclass(frozen=True, slots=True)
class Source(Generic[C]):
    """Where a process has its configuration from. `load` raises ConfigError; `file` is None where there is none."""

    load: Callable[[], C]
    file: FilePath | None = None


def changes(old: BaseModel, new: BaseModel, at: str = "") -> Iterator[str]:
    """The keys, as in `limits.max_body_bytes`, whose values differ; lists and mappings count as one value."""
    for name in type(new).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel) and type(before) is type(after):
            yield from changes(before, after, f"{at}{name}.")
        elif before != after:
            yield f"{at}{name}"


class Reloader(Generic[C]):
    """Keeps a process on the configuration that its file holds.

    `check` raises ConfigError for what cannot work; `apply` takes a good one over, at once and without failing. `live`
    has the sections and keys that may change, as in `limits` and `tracing.sample_ratio`.
    """

    def __init__(
        self,
        config: C,
        source: Source[C],
        apply: Callable[[C], None],
        *,
        live: Collection[str],
        check: Callable[[C], None] = lambda config: None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.config = config
        self.error = ""
        self.loaded_at_ns = clock.wall_ns()
        self.file = source.file
        self._load = source.load
        self._apply = apply
        self._check = check
        self._live = frozenset(live)
        self._asked = asyncio.Event()
        self._seen = self._look()
        self._results = Counts("headwater_config_reloads", "Configurations read while running.", ("result",))
        self._valid = Level("headwater_config_valid", "1 while the configuration file is the one in use.")
        self._valid.value = 1.0
        if registry is not None:
            registry.register(Scrape(self._results, self._valid))

    async def run(self) -> None:
        """Follow the file and SIGHUP until cancelled."""
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):  # not the main thread: signals go to others
            loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self.file is not None else None):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            if asked or self._look() != self._seen:
                await self._settle()
                await self.reload()

    async def reload(self) -> bool:
        """Read the configuration now; whether it is the one in use afterwards."""
        self._seen = self._look()
        try:
            new = await asyncio.to_thread(self._load)
            changed = list(changes(self.config, new))
            self._refuse_fixed(changed)
            await asyncio.to_thread(self._check, new)
        except ConfigError as error:
            self._refused(str(error))
            return False
        if changed:
            self._apply(new)
            self.config = new
            log.info("config_reloaded", changed=changed)
        elif self.error:
            log.info("config_valid_again", changed=[])
        self.error, self._valid.value, self.loaded_at_ns = "", 1.0, clock.wall_ns()
        self._results.add(("applied" if changed else "unchanged",))
        return True

    def _refuse_fixed(self, changed: list[str]) -> None:
        fixed = [key for key in changed if key not in self._live and key.partition(".")[0] not in self._live]
        if fixed:
            raise ConfigError(
                f"{self.file or 'configuration'}: {', '.join(fixed)} cannot change while the process runs"
            )

    def _refused(self, error: str) -> None:
        self._results.add(("refused",))
        self._valid.value = 0.0
        if error != self.error:
            log.error("config_refused", error=error, meanwhile="the last good one stays in use")
        self.error = error

    async def _settle(self) -> None:
        """Wait until the file has been the same for a moment; the last of several writes wins."""
        before: Seen = (-1, -1, -1, -1)
        for _ in range(SETTLE_LOOKS):
            now = self._look()
            if now == before:
                return
            before = now
            await asyncio.sleep(SETTLED_S)

    def _look(self) -> Seen:
        if self.file is None:
            return None
        try:
            found = os.stat(self.file)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
