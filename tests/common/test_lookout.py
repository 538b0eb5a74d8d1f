"""What counts as an answer of a server that nobody registers any more."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import pytest

from common import lookout
from common.lookout import MISSES, Lookout, _missed
from common.types import Endpoint
from tests.fake_engine import MODEL, FakeEngine, Script
from tests.servers import eventually, free_port


class Kept:
    """The part of a membership that is asked."""

    def __init__(self, **orphans: Endpoint) -> None:
        self.orphans = orphans

    def silent(self, key: str) -> None:
        del self.orphans[key]


def at(url: str, **values: object) -> Endpoint:
    return Endpoint("i1", url, models=frozenset({MODEL}), **values)  # type: ignore[arg-type]


async def missed(endpoint: Endpoint) -> int:
    async with httpx.AsyncClient(timeout=0.2, trust_env=False) as client:
        return await _missed(client, endpoint)


async def test_it_has_to_serve_what_it_did() -> None:
    async with FakeEngine("a") as engine:
        assert await missed(at(engine.url)) == 0
        assert await missed(Endpoint("i1", engine.url, models=frozenset({"another"}))) == MISSES
        engine.models_script = Script.error(401, "a key is needed")
        assert await missed(at(engine.url)) == 0
        for script in (Script.error(404), Script.error(500), Script(chunks=(b"[1]",)), Script(chunks=(b"hello",))):
            engine.models_script = script
            assert await missed(at(engine.url)) == MISSES
        engine.models_script = Script(chunks=(b"{}",), delay_s=5.0)
        assert await missed(at(engine.url)) == 1
    assert await missed(at(engine.url)) == MISSES


async def test_one_that_is_gone_is_let_go_of_at_once_and_a_slow_one_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookout, "LOOK_S", 0.01)
    monkeypatch.setattr(lookout, "TIMEOUT_S", 0.1)
    slow = Script(chunks=(b"{}",), delay_s=5.0)
    async with FakeEngine("well") as well, FakeEngine("slow", models_script=slow) as hangs:
        gone = f"http://127.0.0.1:{free_port()}"
        kept = Kept(well=at(well.url), slow=at(hangs.url), gone=at(gone))
        task = asyncio.create_task(Lookout(kept, ssl.create_default_context).run())  # type: ignore[arg-type]
        await eventually(lambda: set(kept.orphans) == {"well"}, 20.0)
        assert hangs.looks
        looks = well.looks
        await eventually(lambda: well.looks > looks + 2, 20.0)
        assert set(kept.orphans) == {"well"}
        task.cancel()
        await asyncio.wait({task})
