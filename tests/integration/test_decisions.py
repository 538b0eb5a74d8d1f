"""Every request can be explained at every tier that it passed, by the admin API and by the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio import Redis

from common.config import TierConfig
from common.errors import ConfigError
from common.explain.decisions import Decision
from common.explain.whatif import Counterfactual, DryRun
from common.policy.stages import POLICIES
from common.tier import verify
from tests.fake_engine import FakeEngine, Script
from tests.integration.clients import Response, get
from tests.integration.system import CLUSTER, Tiers, run, tiers
from tests.servers import RedisServer, eventually


async def decisions(world: Tiers, reply: Response, tiers: int) -> list[Decision]:
    """The records of all tiers; each writes its own when its part of the request has ended, not before."""
    trace = reply.header("x-headwater-decision")
    found: list[Decision] = []

    async def there() -> bool:
        answer = await get(f"{world.admin_url}/admin/v1/decisions/{trace}?everywhere=true")
        if answer.status == 200:
            found[:] = msgspec.json.decode(answer.body, type=list[Decision])
        return len(found) >= tiers

    await eventually(there, 20.0)
    return found


async def headwater(*arguments: str) -> tuple[int, str, str]:
    """Run one of the commands, beside the tiers of this very process."""
    return await run(sys.executable, "-m", "services.cli", *arguments)


async def post_json(url: str, value: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20.0) as client:
        # As Python writes it, infinity included.
        headers = {"content-type": "application/json"}
        return await client.post(url, content=json.dumps(value).encode(), headers=headers)


async def test_one_request_is_explained_by_all_three_tiers():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        reply = await world.chat(stream=True, max_tokens=20)
        assert reply.status == 200
        found = {d.tier: d for d in await decisions(world, reply, 3)}
        assert set(found) == {"global", "region", "instance"}
        assert [found[t].stages[0].chosen for t in ("global", "region")] == ["r", "c"]
        stage = found["instance"].stages[0]
        assert (stage.node, stage.pool_size, stage.unit) == ("r/c", 2, "s")
        assert {c.id for c in stage.candidates} == {"one", "two"}
        assert all(c.terms["completion_s"] > 0.0 for c in stage.candidates)
        assert stage.predicted_ttft_s is not None
        assert stage.seen_ttft_s is not None
        assert found["instance"].outcome.served_by == reply.header("x-headwater-served-by") == f"r/c/{stage.chosen}"
        assert found["global"].features is not None
        assert found["global"].features.max_output_tokens == 20
        assert [a.peer for t in ("global", "region") for a in found[t].attempts] == ["tier-r", "tier-r-c"]
        assert not any(s.takeover for d in found.values() for s in d.stages)

        code, out, err = await headwater("explain", found["global"].id, "--admin", world.admin_url)
        assert (code, err) == (0, "")
        assert "answered with 200 in" in out
        assert "1. tier chose the region r: it was the only one that could take it" in out
        assert f"3. tier-r-c chose the instance {stage.chosen} of r/c" in out
        assert "All of it: predicted after" in out
        code, out, _ = await headwater("explain", found["global"].id, "--json", "--admin", world.admin_url)
        assert len(json.loads(out)) == 3


async def test_a_try_that_failed_and_whom_it_ruled_out_are_told():
    async with tiers(FakeEngine("one"), FakeEngine("two")) as world:
        for engine in world.engines:
            engine.script = Script.error(503)
        reply = await world.chat()
        assert reply.status == 503
        (d,) = await decisions(world, reply, 1)
        assert [a.status for a in d.attempts] == [503, 503]
        again = d.stages[-1]
        assert [(left.by, left.count) for left in again.left_out] == [("tried_already", 1)]
        assert d.outcome.ending == "refused_here"
        slow = await get(f"{world.admin_url}/admin/v1/decisions?failed=true")
        assert [x["id"] for x in slow.json()] == [d.id]


async def test_they_can_be_kept_in_a_file(tmp_path: Path):
    file = tmp_path / "decisions.jsonl"
    async with tiers(FakeEngine("one"), tracing={"decisions_file": str(file)}) as world:
        reply = await world.chat()
        await eventually(lambda: file.read_text().endswith("\n"), 20.0)
        kept = msgspec.json.decode(file.read_bytes(), type=Decision)
        assert (kept.id, kept.outcome.status) == (reply.header("x-headwater-decision"), 200)
        assert kept.stages[-1].chosen == "one"


async def test_they_can_be_kept_in_a_stream_that_stays_short_and_holds_nothing_up():
    async with RedisServer() as redis:
        tracing = {"decisions_stream": "why", "decisions_stream_entries": 100}
        async with tiers(FakeEngine("one"), tracing=tracing, redis={"url": redis.url, "budget_ms": 500}) as world:
            client = Redis.from_url(redis.url)
            first = (await world.chat()).header("x-headwater-decision")

            async def newest() -> Decision:
                [(_, fields)] = await client.xrevrange("why", count=1)
                return msgspec.json.decode(fields[b"decision"], type=Decision)

            async def kept(count: int) -> bool:
                return bool(await client.xlen("why") >= count)

            await eventually(lambda: kept(1), 20.0)
            assert (await newest()).id == first
            assert (await newest()).stages[-1].chosen == "one"
            for _ in range(320):
                assert (await world.chat()).status == 200

            async def all_written() -> bool:
                return world.top._stream is not None and world.top._stream.written == 321

            await eventually(all_written, 20.0)
            assert 100 <= await client.xlen("why") <= 210  # Redis trims by blocks of a hundred
            await client.aclose()
            redis.kill()
            last = [(await world.chat()).status for _ in range(20)]
            assert last == [200] * 20
            stream = world.top._stream
            assert stream is not None
            await eventually(lambda: stream.pending == 20, 20.0)
            await redis.start()
            await eventually(lambda: stream.pending == 0, 30.0)
            assert stream.dropped == 0


async def test_a_stream_needs_redis():
    with pytest.raises(ConfigError, match=r"tracing.decisions_stream: needs redis.url"):
        verify(TierConfig.model_validate({"tracing": {"decisions_stream": "why"}}))


async def test_the_latest_are_listed_and_can_be_narrowed_down():
    async with tiers(FakeEngine("one"), FakeEngine("two")) as world:
        replies = [await world.chat() for _ in range(5)]
        await decisions(world, replies[-1], 1)
        url = f"{world.admin_url}/admin/v1/decisions"
        ids = [r.header("x-headwater-decision") for r in reversed(replies)]
        assert [d["id"] for d in (await get(url)).json()] == ids
        assert [d["id"] for d in (await get(f"{url}?limit=2")).json()] == ids[:2]
        assert (await get(f"{url}?model=other")).json() == []
        one = (await get(f"{url}?served_by=r/c/one")).json()
        two = (await get(f"{url}?served_by=r/c/two")).json()
        assert len(one) + len(two) == 5
        assert (await get(f"{url}?slow=true")).json() == []


async def test_a_bad_bound_is_refused():
    async with tiers(FakeEngine("one")) as world:
        for limit in ("0", "201", "-1", "x", "1e9"):
            assert (await get(f"{world.admin_url}/admin/v1/decisions?limit={limit}")).status == 422


async def test_what_nobody_remembers_is_not_found_and_said_in_one_line():
    async with tiers(FakeEngine("one"), depth=3) as world:
        for trace in ("0" * 31 + "1", "nonsense", "A" * 32):
            found = await get(f"{world.admin_url}/admin/v1/decisions/{trace}?everywhere=true")
            assert found.status == (404 if trace.endswith("1") else 422)
        code, out, err = await headwater("explain", "0" * 31 + "1", "--admin", world.admin_url)
        assert (code, out, err) == (1, "", "headwater: no tier that was asked remembers this request\n")
        code, _, err = await headwater("explain", "0" * 32, "--admin", "http://127.0.0.1:9")
        assert code == 1
        assert err.startswith("headwater: no answer from http://127.0.0.1:9: ")
        code, _, err = await headwater("explain", "nonsense", "--admin", world.admin_url)
        assert (code, err) == (1, "headwater: trace_id: String should match pattern '^[0-9a-f]{32}$'\n")


async def test_a_dry_run_goes_through_all_tiers_and_sends_nothing():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        question = {"model": "fake-model", "input_tokens": 1000, "output_tokens": 50}
        reply = await post_json(f"{world.admin_url}/admin/v1/route/dry-run", question)
        assert reply.status_code == 200, reply.text
        answer = msgspec.json.decode(reply.content, type=DryRun)
        assert [s.tier for s in answer.stages] == ["global", "region", "instance"]
        assert answer.target in ("r/c/one", "r/c/two")
        assert (answer.handed_to, answer.shed) == ("", "")
        assert not any(engine.seen for engine in world.engines)
        assert world.idle()
        real = await world.chat()
        assert real.header("x-headwater-served-by") in ("r/c/one", "r/c/two")

        code, out, err = await headwater("route", "--dry-run", "--model", "fake-model", "--admin", world.admin_url)
        assert (code, err) == (0, "")
        assert "3. It would go to the instance" in out
        assert "It would be sent to r/c/" in out
        code, out, _ = await headwater("route", "--dry-run", "--model", "nobody's", "--admin", world.admin_url)
        assert (code, out) == (0, "Nobody would take it: no server has this model.\n")
        code, _, err = await headwater("route", "--model", "m", "--admin", world.admin_url)
        assert (code, err) == (1, "headwater: route only answers questions: add --dry-run\n")


async def test_with_a_tier_gone_a_dry_run_shows_who_would_stand_in():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        world.chain[1].balancing.peer_lost("tier-r-c")
        url = f"http://127.0.0.1:{world.chain[1].admin_port}/admin/v1/route/dry-run"
        answer = (await post_json(url, {"model": "fake-model", "node": "r"})).json()
        assert [(s["node"], s.get("takeover", False)) for s in answer["stages"]] == [("r", False), ("r/c", True)]


NONSENSE: tuple[Any, ...] = (
    {"input_tokens": 0},
    {"input_tokens": "many"},
    {"output_tokens": float("inf")},
    {"node": "a/b/c"},
    {"warm": "a/b/c/d"},
    {"warm": "x" * 300},
    {"priority": "vip"},
    {"slo_ttft_s": -1},
    {"modle": "m"},
    [],
)


async def test_a_question_that_makes_no_sense_is_refused():
    async with tiers(FakeEngine("one")) as world:
        for question in NONSENSE:
            refused = await post_json(f"{world.admin_url}/admin/v1/route/dry-run", question)
            assert refused.status_code == 422, (question, refused.text)


async def test_the_live_picture_in_a_terminal():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        for _ in range(3):
            await world.chat(stream=True, max_tokens=20)
        code, out, err = await headwater("top", "--once", "--admin", world.admin_url)
        assert (code, err) == (0, "")
        assert "Headwater  3 processes" in out
        nodes = [line.split() for line in out.splitlines()]
        assert [words[:2] for words in nodes if words and words[0] in ("r", "c", "one", "two")] == [
            [name, "serving"] for name in ("r", "c", "one", "two")
        ]
        code, _, err = await headwater("top", "--once", "--admin", "http://127.0.0.1:9")
        assert code == 1
        assert err.startswith("headwater: no answer from http://127.0.0.1:9: ")


async def test_other_policies_are_given_the_same_requests_wherever_they_were_decided():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        for _ in range(12):
            last = await world.chat(stream=True)
        await decisions(world, last, 3)
        reply = await get(f"{world.admin_url}/admin/v1/counterfactual?everywhere=true")
        (found,) = msgspec.json.decode(reply.body, type=list[Counterfactual])
        assert (found.node, found.requests, found.in_force) == ("/".join(CLUSTER), 12, "predicted_completion")
        assert {p.policy for p in found.policies} == set(POLICIES)
        assert all(p.cost_s > 0.0 for p in found.policies)
        assert found.seen_ttft_s is not None
        here = await get(f"{world.admin_url}/admin/v1/counterfactual")  # this tier sent none to an instance itself
        assert here.json() == []
        few = await get(f"{world.admin_url}/admin/v1/counterfactual?everywhere=true&requests=5&policy=hash&policy=hash")
        assert [(c["requests"], [p["policy"] for p in c["policies"]]) for c in few.json()] == [(5, ["hash"])]
        assert (await get(f"{world.admin_url}/admin/v1/counterfactual?policy=best")).status == 422

        code, out, err = await headwater("whatif", "--admin", world.admin_url)
        assert (code, err) == (0, "")
        assert "The last 12 requests of r/c, as predicted" in out
        assert "predicted_completion *" in out
        assert "Seen: first token after" in out


async def test_another_policy_is_chosen_by_while_they_run_in_one_process_or_in_all():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        url = f"{world.admin_url}/admin/v1/policy"

        def names() -> list[str]:
            return [tier.balancing.balancers[tier.node].policy.name for tier in world.chain]

        async with httpx.AsyncClient(timeout=20.0) as client:
            reply = await client.put(url, json={"name": "round_robin", "process": "tier-r-c", "everywhere": True})
            assert reply.status_code == 200, reply.text
            assert names() == ["predicted_completion", "predicted_completion", "round_robin"]
            seen = [(await world.chat()).header("x-headwater-served-by") for _ in range(4)]
            assert sorted(seen) == ["r/c/one", "r/c/one", "r/c/two", "r/c/two"]
            assert [p["name"] for p in (await client.get(url)).json()["processes"]] == ["predicted_completion"]
            assert (await client.put(url, json={"name": "luck"})).status_code == 422
            assert (await client.put(url, json={"name": "hash"}, headers={"origin": "http://evil"})).status_code == 403
        code, out, err = await headwater("policy", "least_load", "--admin", world.admin_url)
        assert (code, err) == (0, "")
        assert out.count("least_load  10000 s per $") == 3
        assert names() == ["least_load"] * 3
        assert (await world.chat()).status == 200
        code, out, _ = await headwater("policy", "--admin", world.admin_url)
        assert [line.split()[0] for line in out.splitlines()] == ["tier", "tier-r", "tier-r-c"]
