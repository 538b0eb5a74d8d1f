"""`--workers`: several processes on one port, which end together and one of which may die."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.fake_engine import FakeEngine
from tests.integration.clients import get
from tests.integration.relay.process import Alone, alone
from tests.servers import eventually


def children(world: Alone) -> set[int]:
    """The workers' processes."""
    with open(f"/proc/{world.process.pid}/task/{world.process.pid}/children") as file:
        return {int(pid) for pid in file.read().split()}


async def ready(world: Alone, worker: int) -> bool:
    try:
        return (await get(f"http://127.0.0.1:{world.addresses.admin + worker}/readyz")).status == 200
    except OSError:
        return False


async def test_two_workers_share_a_port_and_one_that_dies_is_replaced() -> None:
    async with alone(FakeEngine("a"), workers=2) as world:
        for worker in (0, 1):
            await eventually(lambda w=worker: ready(world, w), 30.0)
        before = children(world)
        assert len(before) == 2
        assert [(await world.chat()).status for _ in range(20)] == [200] * 20
        await asyncio.sleep(5.5)  # one that dies sooner has failed to start
        os.kill(min(before), signal.SIGKILL)
        await eventually(lambda: len(children(world)) == 2 and children(world) != before, 30.0)
        for worker in (0, 1):
            await eventually(lambda w=worker: ready(world, w), 30.0)
        assert [(await world.chat()).status for _ in range(20)] == [200] * 20
        last, parent = children(world), world.process.process
        assert parent is not None
        parent.send_signal(signal.SIGTERM)
        await eventually(lambda: parent.poll() is not None, 30.0)
        assert parent.poll() == 0
        assert not [pid for pid in last if os.path.exists(f"/proc/{pid}")]
