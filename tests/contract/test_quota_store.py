"""What every quota store must do; run against the one in memory and against a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from common import clock
from common.policy.window import Draw, Span
from common.store.base import QuotaCall, QuotaReply, QuotaStore, SlotCall, WindowCall
from common.store.memory_quota import MemoryQuotaStore
from common.store.redis_quota import RedisQuotaStore
from tests.servers import RedisServer, eventually

SPAN = Span(window_s=2.0, lease_s=0.2, bucket_s=0.1)
LONG = Span()


@dataclass
class World:
    """A store as two balancers see it."""

    one: QuotaStore
    two: QuotaStore
    redis: RedisServer | None = None


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    span = getattr(request.function, "span", LONG)
    if request.param == "memory":
        store = MemoryQuotaStore(span)
        yield World(store, store)
        return
    async with RedisServer() as redis:
        stores = [RedisQuotaStore(redis.url, budget_ms=5000.0, span=span) for _ in range(2)]
        yield World(stores[0], stores[1], redis)
        for each in stores:
            await each.close()


def quick(test: Any) -> Any:
    test.span = SPAN
    return test


_numbers = count(1)


def call(balancer: str = "a", **fields: Any) -> QuotaCall:
    values = {"tenant": "acme", "balancer": balancer, "settles": next(_numbers), "month": "2026-11"}
    return QuotaCall(**values | fields)


def window(limit: int, least: int = 1, most: int = 0, **more: Any) -> WindowCall:
    return WindowCall(limit, least, max(least, most), **more)


async def take(store: QuotaStore, limit: int, least: int = 1, most: int = 0, balancer: str = "a") -> int:
    reply = await store.exchange(call(balancer, requests=window(limit, least, most)))
    assert reply.requests is not None
    return reply.requests.amount


async def test_a_limit_holds_over_all_balancers(world: World) -> None:
    assert await take(world.one, 5, 3) == 3
    assert await take(world.two, 5, 2, balancer="b") == 2
    assert await take(world.two, 5, balancer="b") == 0


async def test_tenants_do_not_share(world: World) -> None:
    assert await take(world.one, 1) == 1
    reply = await world.one.exchange(call(tenant="other", requests=window(1)))
    assert reply.requests is not None
    assert reply.requests.amount == 1


async def test_a_lease_in_advance_is_a_fraction_of_what_is_left(world: World) -> None:
    assert await take(world.one, 1000, 1, 50) == 50
    assert await take(world.one, 100, 1, 50) == 1 + 49 // 4


async def test_a_refusal_says_how_long_and_changes_nothing(world: World) -> None:
    await take(world.one, 10, 8)
    reply = await world.one.exchange(call(requests=window(10, 5)))
    assert reply.requests is not None
    assert (reply.requests.amount, reply.requests.used) == (0, 8)
    assert 55.0 < reply.requests.wait_s <= 61.0
    assert await take(world.one, 10, 2) == 2


async def test_what_never_fits_waits_for_ever(world: World) -> None:
    reply = await world.one.exchange(call(requests=window(10, 11)))
    assert reply.requests is not None
    assert reply.requests.wait_s == inf


async def test_both_windows_or_neither(world: World) -> None:
    reply = await world.one.exchange(call(requests=window(10), tokens=window(100, 200)))
    assert reply.requests is not None
    assert reply.tokens is not None
    assert (reply.requests.amount, reply.tokens.amount, reply.requests.used) == (0, 0, 0)
    assert reply.requests.wait_s == 0.0  # it is not the requests that are too many
    assert reply.tokens.wait_s == inf


async def test_what_was_not_spent_is_given_back(world: World) -> None:
    first = (await world.one.exchange(call(requests=window(10, 10)))).requests
    assert first is not None
    settled = await world.one.exchange(call(requests=window(10, 0, returned=(Draw(first.bucket, 4),))))
    assert settled.requests is not None
    assert settled.requests.used == 6
    assert await take(world.two, 10, 4) == 4


async def test_what_was_used_beyond_is_charged_over_the_limit(world: World) -> None:
    await take(world.one, 10, 10)
    reply = await world.one.exchange(call(requests=window(10, 0, charge=15)))
    assert reply.requests is not None
    assert (reply.requests.amount, reply.requests.used) == (0, 25)


async def test_a_call_told_twice_settles_once(world: World) -> None:
    once = call(tokens_spent=100, micro_usd_spent=7, tokens=window(1000, 0, charge=30))
    await world.one.exchange(once)
    reply = await world.two.exchange(replace(once, tokens=window(1000, 0, charge=30)))
    assert reply.tokens is not None
    assert (reply.month_tokens, reply.month_micro_usd, reply.tokens.used) == (100, 7, 30)


async def test_the_month_adds_up_over_balancers_and_begins_anew(world: World) -> None:
    await world.one.exchange(call("a", tokens_spent=2**40, micro_usd_spent=5))
    reply = await world.two.exchange(call("b", tokens_spent=1, micro_usd_spent=6))
    assert (reply.month_tokens, reply.month_micro_usd) == (2**40 + 1, 11)
    reply = await world.two.exchange(call("b", month="2026-12", tokens_spent=3))
    assert (reply.month_tokens, reply.month_micro_usd) == (3, 0)


@quick
async def test_units_come_back_when_the_window_has_passed(world: World) -> None:
    began = clock.now()
    assert await take(world.one, 4, 4) == 4

    async def again() -> bool:
        return await take(world.two, 4, 4) == 4

    await eventually(again, 20.0)
    assert clock.now() - began >= SPAN.window_s + SPAN.lease_s


@quick
async def test_the_wait_that_is_told_is_long_enough_and_not_much_longer(world: World) -> None:
    await take(world.one, 4, 4)
    refused = (await world.one.exchange(call(requests=window(4)))).requests
    assert refused is not None
    assert SPAN.window_s < refused.wait_s <= SPAN.window_s + SPAN.lease_s + SPAN.bucket_s
    await asyncio.sleep(refused.wait_s)
    assert await take(world.one, 4) == 1


# -- places for requests under way -------------------------------------------------------------------------------------


async def hold(store: QuotaStore, balancer: str, in_use: int, least: int, most: int = 0, ttl_s: float = 60.0) -> int:
    slots = SlotCall(5, in_use, least, max(least, most), ttl_s)
    return (await store.exchange(call(balancer, slots=slots))).slots


async def test_places_are_shared_by_all_balancers(world: World) -> None:
    assert await hold(world.one, "a", 0, 3) == 3
    assert await hold(world.two, "b", 0, 2) == 2
    assert await hold(world.two, "b", 2, 3) == 2  # none is left
    assert await hold(world.one, "a", 1, 1) == 1
    assert await hold(world.two, "b", 2, 3) == 3


async def test_places_in_use_are_kept_even_over_the_limit(world: World) -> None:
    assert await hold(world.one, "a", 0, 5) == 5
    slots = SlotCall(2, 5, 6, 6, 60.0)
    assert (await world.one.exchange(call("a", slots=slots))).slots == 5


async def test_places_held_in_advance_are_given_up(world: World) -> None:
    assert await hold(world.one, "a", 0, 1, 9) == 2
    assert await hold(world.one, "a", 0, 0) == 0
    assert await hold(world.two, "b", 0, 5) == 5


@quick
async def test_places_of_a_balancer_that_is_gone_come_free(world: World) -> None:
    assert await hold(world.one, "a", 0, 5, ttl_s=0.5) == 5
    assert await hold(world.two, "b", 0, 1) == 0

    async def free() -> bool:
        return await hold(world.two, "b", 0, 5) == 5

    await eventually(free, 20.0)


async def test_a_request_without_a_place_uses_up_no_window(world: World) -> None:
    await hold(world.one, "a", 0, 5)
    reply = await world.two.exchange(call("b", requests=window(10), slots=SlotCall(5, 0, 1, 1, 60.0)))
    assert reply.requests is not None
    assert (reply.slots, reply.requests.amount, reply.requests.used) == (0, 0, 0)


# -- Redis itself ------------------------------------------------------------------------------------------------------


async def test_redis_says_the_same_as_memory() -> None:
    """Two hundred random calls, close together, to both: every reply the same but for what the clock does to it."""
    rng, now = Random(7), 1000.0
    async with RedisServer() as server:
        redis = RedisQuotaStore(server.url, budget_ms=5000.0, span=LONG)
        memory = MemoryQuotaStore(LONG, lambda: now)
        draws: dict[str, list[tuple[Draw, Draw]]] = {"requests": [], "tokens": []}
        granted = {"requests": 0, "tokens": 0}
        for _ in range(200):
            ours, theirs = _random_call(rng, draws)
            answers = await memory.exchange(ours), await redis.exchange(theirs)
            assert _comparable(answers[0]) == _comparable(answers[1])
            for kind, taken in draws.items():
                grants = getattr(answers[0], kind), getattr(answers[1], kind)
                if grants[0] is not None and grants[0].amount:
                    granted[kind] += 1
                    taken.append((Draw(grants[0].bucket, grants[0].amount), Draw(*grants[1][1::-1])))
        assert min(granted.values()) > 20
        await redis.close()


def _random_call(rng: Random, draws: dict[str, list[tuple[Draw, Draw]]]) -> tuple[QuotaCall, QuotaCall]:
    fields: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for kind, limit in (("requests", 60), ("tokens", 5000)):
        if rng.random() < 0.3:
            continue
        back = draws[kind].pop(rng.randrange(len(draws[kind]))) if draws[kind] and rng.random() < 0.9 else None
        least = rng.choice((0, 1, limit // 20, limit // 4))
        wanted = WindowCall(
            limit, least, least + rng.randrange(limit // 4), rng.choice((0, 0, 0, 0, 0, 0, limit // 50))
        )
        for at in (0, 1):
            fields[at][kind] = replace(wanted, returned=(back[at],) if back else ())
    if rng.random() < 0.5:
        in_use = rng.randrange(3)
        least = in_use + rng.randrange(2)
        fields[0]["slots"] = fields[1]["slots"] = SlotCall(8, in_use, least, least + rng.randrange(5), 60.0)
    both = call(rng.choice("abc"), tokens_spent=rng.randrange(50), micro_usd_spent=rng.randrange(9))
    return replace(both, **fields[0]), replace(both, **fields[1])


def _comparable(reply: QuotaReply) -> Any:
    grants = [None if g is None else (g.amount, g.used, g.wait_s > 0.0) for g in (reply.requests, reply.tokens)]
    return reply.month_tokens, reply.month_micro_usd, reply.slots, grants


async def test_what_is_kept_in_redis_expires_and_is_bounded(world: World) -> None:
    if world.redis is None:
        pytest.skip("of Redis alone")
    slots = SlotCall(5, 0, 1, 1, 60.0)
    await world.one.exchange(call(requests=window(9), tokens=window(9), slots=slots, tokens_spent=1))
    keys = await world.redis.cli("KEYS", "*")
    assert len(keys) == 5
    assert all(key.startswith(b"headwater:tenant:{acme}:") for key in keys)
    for key in keys:
        assert await world.redis.cli("TTL", key.decode()) > 0
