"""Rollouts at work: every tier that clients call follows those in the membership store, and one of them moves each on.

A rollout stands under `{root}/rollouts/{hex of the model's name}`, without a lease, so that it outlives its owner. The
balancer that started it is its owner: it judges by the requests that came in there. When it is gone, another one that
clients call takes over, after a while, and starts the step again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import msgspec
import structlog

from common import clock
from common.errors import StoreUnavailable
from common.policy.rollout import Rollout, Seen, Stage, moved_on
from common.policy.versions import NOT, Versions
from common.records import Ending, RequestRecord
from common.store.base import MembershipStore

log = structlog.get_logger()

TICK_S: Final = 0.25
ORPHANED_S: Final = 10.0  # an owner that is not known for so long is gone
BROKEN: Final = (Ending.BROKE_BEFORE, Ending.BROKE_AFTER)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Rollout).decode


class Rollouts:
    """Those of one process. `there(model, version)`: whether an instance of that version takes work; `alive(id)`:
    whether a balancer of that name is known.
    """

    def __init__(
        self,
        store: MembershipStore,
        root: str,
        process_id: str,
        versions: Versions,
        there: Callable[[str, str], bool],
        alive: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._prefix = f"{root}/rollouts/"
        self._process_id = process_id
        self._versions = versions
        self._there = there
        self._alive = alive
        self.known: dict[str, Rollout] = {}
        self._seen: dict[str, tuple[Seen, Seen]] = {}  # (new version, all others) in this step
        self._since: dict[str, float] = {}  # when this step began here
        self._orphaned: dict[str, float] = {}  # since when its owner is not known

    # -- what is told ------------------------------------------------------------------------------------------------

    async def start(self, rollout: Rollout) -> Rollout:
        """Begin one, in the place of whatever there was for this model. Raises StoreUnavailable."""
        mine = replace(rollout, owner=self._process_id, stage=Stage.WAITING, step=0, reason="")
        await self._write(mine)
        return mine

    async def abort(self, model: str) -> Rollout | None:
        """End one: all requests go to the old version again. None if there is none. Raises StoreUnavailable."""
        rollout = self.known.get(model)
        if rollout is not None:
            rollout = replace(rollout, stage=Stage.ABORTED, reason="by hand")
            await self._write(rollout)
        return rollout

    async def forget(self, model: str) -> None:
        """Take one away: requests go to whichever version there is. Raises StoreUnavailable."""
        await self._store.delete(self._key(model))

    def saw(self, record: RequestRecord) -> None:
        """A client's request has ended here."""
        rollout = self.known.get(record.model)
        if rollout is None or rollout.stage is not Stage.STEPPING or record.from_peer or not record.version:
            return
        if record.ending not in (Ending.COMPLETE, *BROKEN) and record.status < 500:  # the client left, or was refused
            return
        failed = record.ending in BROKEN or record.status >= 500
        new = not record.version.startswith(NOT)
        ttft_s = record.ttft_s if record.stream else None
        self._seen[record.model][0 if new else 1].saw(failed=failed, ttft_s=ttft_s)

    # -- its work ----------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep to what is in the store, until cancelled."""
        async with aclosing(self._store.watch(self._prefix)) as snapshots:
            async for snapshot in snapshots:
                if not snapshot.stale:
                    self._take([r for v in snapshot.values.values() if (r := _read(v)) is not None])

    def _take(self, rollouts: list[Rollout]) -> None:
        before, self.known = self.known, {rollout.model: rollout for rollout in rollouts}
        for model, rollout in self.known.items():
            old = before.get(model)
            if old is None or (old.stage, old.step, old.to) != (rollout.stage, rollout.step, rollout.to):
                self._begin(rollout)
        self._versions.rollouts = {model: rollout.split() for model, rollout in self.known.items()}

    def _begin(self, rollout: Rollout) -> None:
        self._seen[rollout.model] = (Seen(), Seen())
        self._since[rollout.model] = clock.now()
        log.info(
            "rollout",
            model=rollout.model,
            to=rollout.to,
            stage=rollout.stage.value,
            share=rollout.share,
            reason=rollout.reason,
        )

    async def run(self) -> None:
        """Move on those that are ours, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for rollout in list(self.known.values()):
                if rollout.live and self._ours(rollout):
                    await self._move(rollout)

    def _ours(self, rollout: Rollout) -> bool:
        if rollout.owner == self._process_id:
            return True
        if self._alive(rollout.owner):
            self._orphaned.pop(rollout.model, None)
            return False
        return clock.now() - self._orphaned.setdefault(rollout.model, clock.now()) > ORPHANED_S

    async def _move(self, rollout: Rollout) -> None:
        new, old = self._seen[rollout.model]
        elapsed_s = clock.now() - self._since[rollout.model]
        there = self._there(rollout.model, rollout.to)
        after = moved_on(rollout, new, old, elapsed_s, there=there)
        if after == rollout:
            return
        try:
            await self._write(replace(after, owner=self._process_id))
        except StoreUnavailable as error:
            log.warning("rollout_not_written", model=rollout.model, reason=str(error))
            return
        if after.stage is Stage.ROLLED_BACK:
            log.warning("rolled_back", model=after.model, version=after.to, reason=after.reason)

    async def _write(self, rollout: Rollout) -> None:
        await self._store.put(self._key(rollout.model), _encode(rollout))
        # At once here: what the store tells later is the same.
        self._take([*(r for m, r in self.known.items() if m != rollout.model), rollout])

    def _key(self, model: str) -> str:
        return self._prefix + model.encode().hex()


def _read(value: bytes) -> Rollout | None:
    try:
        return _decode(value)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        log.warning("rollout_not_understood", reason=str(error))
        return None
