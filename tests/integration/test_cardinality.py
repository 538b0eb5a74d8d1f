"""Nothing that a client can make up grows a process: models, paths, keys and sessions that were never seen before.

Counted in objects of the interpreter, in which one remembered name shows; `bench/cardinality.py` sends 50,000 of each
and looks at what a process holds.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from random import Random

import pytest

from bench.cardinality import KINDS, send, series, tenants_file
from tests.fake_engine import FakeEngine
from tests.integration.clients import get
from tests.integration.system import tiers
from tests.servers import eventually

FILLS, COUNT = 1000, 1200
KEPT = 100  # recent requests and sessions, so that these are full long before


@pytest.mark.parametrize("depth", [1, 3])
async def test_what_strangers_make_up_is_not_remembered(tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch):
    for bound in ("common.policy.quarantine.REMEMBERED", "common.policy.balancer.PROMPTS_REMEMBERED"):
        monkeypatch.setattr(bound, KEPT)
    file, key = tenants_file(tmp_path)
    settings = {"tenants": {"file": str(file)}, "tracing": {"recent": KEPT}, "affinity": {"max_sessions": KEPT}}
    engine = FakeEngine("one")
    async with tiers(engine, depth=depth, **settings) as world:
        rng = Random(7)

        async def measured() -> tuple[int, int]:
            await eventually(world.idle, 30.0)
            engine.seen.clear()
            exposition = (await get(f"{world.admin_url}/metrics")).body.decode()
            gc.collect()
            return series(exposition), sys.getallocatedblocks()

        for kind, statuses in KINDS.items():
            await send(world.url, kind, key, FILLS, rng)  # what is bounded is full of these
            before = await measured()
            answered = await send(world.url, kind, key, COUNT, rng)
            after = await measured()
            assert set(answered) <= {*statuses}, (kind, answered)
            assert after[0] <= before[0] + 5, (kind, before, after)  # of a status or a bucket that was not there yet
            # A name that is kept is an object at least; what else comes and goes is some hundreds.
            assert after[1] < before[1] + COUNT * 5 // 6, (kind, before, after)
