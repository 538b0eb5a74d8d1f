from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

from common import clock
from common.balancing import Balancing
from common.exchange import Exchange
from common.policy.candidate import Limits
from common.policy.quarantine import Quarantine
from common.policy.stages import predicted_completion
from common.store.memory import MemoryAffinityStore
from common.types import Endpoint, InferenceRequest, Pick, Pool
from tests.servers import eventually

NODE = ("eu", "c1")
REQUEST = InferenceRequest("0" * 32, "m", stream=True, input_tokens=100, output_tokens=50.0)


def balancing(name: str) -> Balancing:
    made = Balancing(name, lambda path: True, lambda path: predicted_completion(), Limits(), Random(1))
    made.update({NODE: Pool(NODE, tuple(Endpoint(i, url=f"http://{i}", gpu="h100") for i in "ab"))})
    return made


def exchanging(store: MemoryAffinityStore, one: Balancing, other: Balancing) -> list[asyncio.Task[None]]:
    tasks = []
    for made, name in ((one, "other"), (other, "one")):
        made.balancers[NODE].replicas([name], 0.0)
        exchange = Exchange(store, NODE, made, Quarantine(0.0), lambda name=name: frozenset({name}))
        tasks.append(asyncio.create_task(exchange.run()))
    return tasks


async def test_two_balancers_see_what_the_other_has_under_way_and_forget_it_when_it_dies() -> None:
    store = MemoryAffinityStore()
    one, other = balancing("one"), balancing("other")
    tasks = exchanging(store, one, other)
    picks = [one.balancers[NODE].pick(REQUEST, 0.0, Random(2), ("b",)) for _ in range(5)]
    assert all(isinstance(p, Pick) for p in picks)
    await asyncio.sleep(0.2)
    seen = other.balancers[NODE].candidates["a"]
    assert seen.server.w == 5
    assert seen.server.copies == 1.0
    tasks[0].cancel()
    other.balancers[NODE].replicas([], 0.0)
    assert seen.server.w == 0
    tasks[1].cancel()


async def test_where_a_prompt_went_is_known_to_the_other_balancer() -> None:
    store = MemoryAffinityStore()
    one, other = balancing("one"), balancing("other")
    tasks = exchanging(store, one, other)
    hashes = (2**64 - 1, 3)
    assert isinstance(one.balancers[NODE].pick(replace(REQUEST, prefix_hashes=hashes), clock.now(), Random(2)), Pick)
    caches = [c.prefix for c in other.balancers[NODE].candidates.values()]
    await eventually(lambda: [cache.held(hashes) for cache in caches] in ([2, 0], [0, 2]), 10.0)
    for task in tasks:
        task.cancel()


async def test_alone_nothing_is_told() -> None:
    store = MemoryAffinityStore()
    task = asyncio.create_task(Exchange(store, NODE, balancing("one"), Quarantine(60.0), frozenset).run())
    await asyncio.sleep(0.15)
    assert not store._shared
    task.cancel()


async def test_a_prompt_that_took_servers_down_behind_one_balancer_is_refused_by_the_other() -> None:
    store = MemoryAffinityStore()
    one, other = Quarantine(60.0), Quarantine(60.0)
    tasks = [
        asyncio.create_task(Exchange(store, NODE, balancing(name), mine, lambda o=others: frozenset({o})).run())
        for name, others, mine in (("one", "other", one), ("other", "one", other))
    ]
    one.struck(7, clock.now(), certain=True)
    other.struck(7, clock.now(), certain=True)  # the second of the two, wherever
    one.struck(8, clock.now(), certain=True)
    await eventually(lambda: one.refused_for_s(7, clock.now()) and other.refused_for_s(7, clock.now()), 10.0)
    assert not other.refused_for_s(8, clock.now())
    one.answered(7, clock.now())
    one.answered(8, clock.now())
    await eventually(lambda: not one.refused_for_s(7, clock.now()) and not other.refused_for_s(7, clock.now()), 10.0)
    for task in tasks:
        task.cancel()
