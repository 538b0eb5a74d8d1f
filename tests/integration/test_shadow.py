"""Shadow traffic: what another version is sent of it, and that clients have nothing of it, for good or ill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_engine import BEFORE_HEAD, MODEL, FakeEngine, Script
from tests.integration.clients import ask, chat, get, metrics, total
from tests.integration.system import headwater, run_command, tiers
from tests.servers import eventually

PATH = "/v1/chat/completions"
STREAM = Script.stream("one ", "two ")
COUNTED = "headwater_shadow_requests_total"


def two() -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine("old", STREAM, version="v1"), FakeEngine("new", STREAM, version="v2")


def shadowed(**more: object) -> dict[str, object]:
    """All of v1, and copies to v2."""
    return {"splits": {MODEL: {"v1": 1.0, "v2": 0.0}}, "shadows": {MODEL: {"version": "v2"}}, **more}


@pytest.mark.parametrize("depth", [1, 3])
async def test_another_version_is_sent_copies_and_clients_do_not_notice(depth: int) -> None:
    old, new = two()
    async with tiers(old, new, depth=depth, models=shadowed()) as world:
        body = chat(MODEL, stream=True)
        answers = [await ask(world.url, PATH, body, "x-session-id: s", "x-kept: yes") for _ in range(6)]
        assert {a.status for a in answers} == {200}
        assert {a.header("x-headwater-served-by") for a in answers} == {"r/c/old"}
        await eventually(lambda: len(new.ended("complete")) == 6, 20.0)
        assert {(s.body, s.header("x-kept")) for s in (*old.seen, *new.seen)} == {(body, "yes")}
        for tier in world.chain:
            admin = f"http://127.0.0.1:{tier.admin_port}"
            await eventually(lambda a=admin: _counted(a, COUNTED, 6, version="v2", status="200"), 20.0)
            assert total(await metrics(admin), "headwater_requests_total") == 6
        await eventually(world.idle, 20.0)
        recent = (await get(f"{world.admin_url}/admin/v1/decisions")).json()
        copies = [r for r in recent if r.get("shadow_of")]
        assert {r["shadow_of"] for r in copies} == {a.header("x-headwater-decision") for a in answers}


async def _counted(admin: str, name: str, count: int, **labels: str) -> bool:
    return total(await metrics(admin), name, **labels) == count


async def test_what_a_shadow_does_is_no_client_s_matter() -> None:
    old, new = two()
    new.choose = lambda seen: [
        Script.whole(cut="rst", cut_after=BEFORE_HEAD),
        STREAM.but(cut="rst", cut_after=1),
        Script.error(400),
        Script.error(500),
    ][len(new.seen) % 4]
    async with tiers(old, new, models=shadowed(), health={"eject_after": 1000}) as world:
        for number in range(12):  # the same prompt: on the client's own account it would be quarantined by now
            answer = await ask(world.url, PATH, chat(MODEL, stream=True))
            assert (answer.status, answer.header("x-headwater-served-by")) == (200, "r/c/old")
            await eventually(lambda n=number: _counted(world.admin_url, COUNTED, n + 1), 20.0)
        await eventually(world.idle, 20.0)
        assert len(old.seen) == 12  # no copy is tried again, there or elsewhere
        new.choose, new.script = None, Script.error(500, "CUDA out of memory.")
        for size in (400, 200, 100):
            assert (await ask(world.url, PATH, chat(MODEL, text="x " * size))).status == 200
        await eventually(world.idle, 20.0)
        new.kill()
        assert (await ask(world.url, PATH, chat(MODEL))).status == 200
        await eventually(world.idle, 20.0)


async def test_copies_are_bounded_and_dropped_above_that() -> None:
    old, new = two()
    new.script = STREAM.but(cut="stall", cut_after=BEFORE_HEAD)
    async with tiers(old, new, models=shadowed(shadow_requests=3, shadow_bytes=1000)) as world:
        for _ in range(8):
            assert (await ask(world.url, PATH, chat(MODEL))).status == 200
        await eventually(lambda: len(new.seen) == 3, 20.0)
        assert await _counted(world.admin_url, "headwater_shadow_dropped_total", 5)
        new.kill()
        await eventually(world.idle, 20.0)
        await new.start()
        assert (await ask(world.url, PATH, chat(MODEL, text="x" * 1000))).status == 200
        assert await _counted(world.admin_url, "headwater_shadow_dropped_total", 6)


async def test_nobody_of_the_version_and_other_requests_mean_no_copies() -> None:
    old = FakeEngine("old", STREAM, version="v1")
    other = FakeEngine("other", Script.whole(), model="other")
    shadows = {MODEL: {"version": "v2"}, "alias": {"model": "other", "paths": ["/v1/chat/*"]}}
    async with tiers(old, other, models={"aliases": {"alias": MODEL}, "shadows": shadows}) as world:
        assert (await ask(world.url, PATH, chat(MODEL))).status == 200
        assert (await ask(world.url, "/v1/completions", b'{"model":"alias","prompt":"x"}')).status == 200
        assert (await ask(world.url, PATH, chat("alias"))).status == 200
        await eventually(lambda: len(other.seen) == 1, 20.0)
        assert json.loads(other.seen[0].body)["model"] == "other"
        await eventually(world.idle, 20.0)
        assert len(old.seen) == 3


async def test_a_tenant_is_not_charged_for_copies(tmp_path: Path) -> None:
    key, tenants = await run_command(headwater("key", "new", "acme", "--yaml"))
    (tmp_path / "tenants.yaml").write_text(tenants)
    usage = tmp_path / "usage"
    old, new = two()
    old.script = new.script = Script.whole()
    config = {"file": str(tmp_path / "tenants.yaml"), "usage_file": str(usage)}
    async with tiers(old, new, models=shadowed(), tenants=config) as world:
        answer = await ask(world.url, PATH, chat(MODEL), f"authorization: Bearer {key.strip()}")
        assert answer.status == 200
        await eventually(lambda: len(new.ended("complete")) == 1, 20.0)
        assert new.seen[0].header("authorization") is None
        await eventually(world.idle, 20.0)
        await eventually(lambda: usage.exists() and usage.read_text().endswith("\n"), 20.0)
    assert len({json.loads(line)["record"] for line in usage.read_text().splitlines()}) == 1  # one may be there twice
