import asyncio

import pytest
from pydantic import ValidationError

from common.scaling.config import ScaledModel
from common.scaling.scaler import rules_of
from common.store.memory import MemoryAffinityStore
from common.types import Phase
from tests.common.scaling.build import MODEL, Noted, config, pool, request, scaler


def test_nobody_asks_and_nothing_is_there_so_nothing_is_wanted() -> None:
    noted = Noted()
    one = scaler(providers={(MODEL, "l4"): noted})
    one.decide({})
    decision = one.models[MODEL].decision
    assert decision is not None
    assert decision.replicas == 0
    assert noted.wanted == [(0, True)]  # and what it does not know of is left alone


def test_the_first_request_wants_a_replica_and_so_does_one_that_waits() -> None:
    noted = Noted()
    one = scaler(providers={(MODEL, "l4"): noted})
    one.decide({})
    one.arrived(request(1))
    one.decide({})
    assert noted.wanted[-1][0] == 1
    other = scaler(waiting=1)
    other.decide({})
    assert other.models[MODEL].decision.replicas == 1  # type: ignore[union-attr]


def test_a_request_that_is_tried_again_counts_once_and_others_models_do_not() -> None:
    one = scaler()
    for number in (1, 1, 2):
        one.arrived(request(number))
    one.arrived(request(3, "another"))
    assert one.models[MODEL].told() == (2.0, 2000.0, 400.0)


def test_instances_count_by_model_class_and_phase() -> None:
    one = scaler(scaling=config(groups={"l4": {"gpu": "l4"}, "h100": {"gpu": "h100"}}))
    pool(one._balancing, 3)
    one.decide({})
    seen = one.models[MODEL].seen
    assert (seen["l4"].serving, seen["h100"].serving) == (3, 0)
    pool(one._balancing, 2, phase=Phase.LOADING)
    one.decide({})
    assert (one.models[MODEL].seen["l4"].serving, one.models[MODEL].seen["l4"].loading) == (0, 2)
    pool(one._balancing, 2, model="another")
    one.decide({})
    assert one.models[MODEL].seen["l4"].loading == 0


async def test_balancers_of_a_node_tell_each_other_what_came_and_one_of_them_acts() -> None:
    store, alive = MemoryAffinityStore(), frozenset({"b1", "b2"})
    providers = {id_: Noted() for id_ in alive}
    both = [
        scaler(id_, store=store, others=lambda id_=id_: alive - {id_}, providers={(MODEL, "l4"): providers[id_]})  # type: ignore[misc]
        for id_ in sorted(alive)
    ]
    tasks = [asyncio.create_task(one.run()) for one in both]
    decided = [one.decided for one in both]
    await asyncio.gather(*(d.wait() for d in decided))
    for number in range(30):
        both[1].arrived(request(number))

    def rates() -> list[float]:
        return [one.models[MODEL].decision.arrival_rate for one in both]  # type: ignore[union-attr]

    async with asyncio.timeout(20.0):
        while not all(rate >= 4.9 for rate in rates()):
            await asyncio.gather(*(one.decided.wait() for one in both))
    assert providers["b1"].wanted
    assert not providers["b2"].wanted
    for task in tasks:
        task.cancel()


def test_one_that_tells_nothing_counts_as_one_like_ourselves() -> None:
    one = scaler(others=lambda: frozenset({"b2"}))
    one.decide({"b2": None})
    for number in range(12):
        one.arrived(request(number))
    one.decide({"b2": None})
    alone = scaler()
    alone.decide({})
    for number in range(12):
        alone.arrived(request(number))
    alone.decide({})
    rates = [s.models[MODEL].decision.arrival_rate for s in (one, alone)]  # type: ignore[union-attr]
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.2)


def test_settings_reach_the_policy_and_what_cannot_be_is_refused() -> None:
    rules = rules_of(config(slo_ttft_s=1.5, max_replicas=7, idle_s=12.0, seasons_s=(600.0,)).models[MODEL])
    assert (rules.slo.ttft_s, rules.most, rules.idle_s, rules.seasons_s) == (1.5, 7, 12.0, (600.0,))
    for wrong in (
        {"groups": {}},
        {"groups": {"l4": {"min_replicas": 3, "max_replicas": 2}}},
        {"groups": {"l4": {"max_replicas": 2}}, "min_replicas": 3},
        {"groups": {"l4": {"webhook": {"url": "http://x/"}, "kubernetes": {"name": "y"}}}},
        {"groups": {"l4": {}}, "seasons_s": (605.0,)},
        {"groups": {"l4": {}}, "replicas": 3},
    ):
        with pytest.raises(ValidationError):
            config(**wrong)
    with pytest.raises(ValidationError):
        ScaledModel.model_validate({})
