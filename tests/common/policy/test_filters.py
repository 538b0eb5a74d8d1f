from __future__ import annotations

import pytest

from common.policy.balancer import Balancer
from common.policy.candidate import Limits
from common.policy.filters import Filter, has_capacity, not_draining, not_ejected, not_loading, serves_model
from common.types import Outcome, Phase
from tests.common.policy.build import ask, balancer_of, done, instance, picked


def kept(keep: Filter, balancer: Balancer, now: float = 0.0, model: str = "m") -> list[str]:
    return [c.endpoint.id for c in keep(ask(model=model), list(balancer.candidates.values()), now)]


def test_serves_model_keeps_what_lists_it_or_lists_nothing() -> None:
    balancer = balancer_of(
        instance("a", models=frozenset({"m", "n"})), instance("b", models=frozenset({"n"})), instance("c")
    )
    assert kept(serves_model, balancer, model="m") == ["a", "c"]
    assert kept(serves_model, balancer, model="n") == ["a", "b", "c"]
    assert kept(serves_model, balancer, model="M") == ["c"]


def test_a_request_without_a_model_goes_to_whoever_speaks_its_api() -> None:
    balancer = balancer_of(instance("a", models=frozenset({"m"}), engine="ollama"), instance("b", engine="vllm"))
    assert kept(serves_model, balancer, model="") == ["a", "b"]
    ollama = ask(model="", api="ollama")
    assert [c.endpoint.id for c in serves_model(ollama, list(balancer.candidates.values()), 0.0)] == ["a"]


def test_what_loads_or_drains_takes_nothing() -> None:
    balancer = balancer_of(*(instance(phase.value, phase=phase) for phase in Phase))
    assert kept(not_draining, balancer) == ["loading", "serving"]
    assert kept(not_loading, balancer) == ["serving", "draining"]


def test_not_ejected_keeps_what_its_breaker_lets_through() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(cooldown_s=2.0))
    pick = picked(balancer, exclude=("b",))
    done(balancer, pick, now=10.0, outcome=Outcome.FAILED, unreachable=True)
    assert kept(not_ejected, balancer, now=11.9) == ["b"]
    assert kept(not_ejected, balancer, now=12.0) == ["a", "b"]


def test_has_capacity_drops_what_is_at_its_bound_until_one_ends() -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(max_in_flight=2))
    first, _ = (picked(balancer, exclude=("b",)) for _ in range(2))
    assert kept(has_capacity, balancer) == ["b"]
    done(balancer, first)
    assert kept(has_capacity, balancer) == ["a", "b"]


@pytest.mark.parametrize(("asked_s", "back_s"), [(None, 1.0), (3.0, 3.0), (0.0, 0.0)])
def test_has_capacity_leaves_what_refused_alone_for_as_long_as_it_asked(asked_s: float | None, back_s: float) -> None:
    balancer = balancer_of(instance("a"), instance("b"), limits=Limits(busy_s=1.0))
    done(balancer, picked(balancer, exclude=("b",)), 10.0, Outcome.OVERLOADED, retry_after_s=asked_s)
    if back_s:
        assert kept(has_capacity, balancer, now=10.0 + back_s - 0.01) == ["b"]
    assert kept(has_capacity, balancer, now=10.0 + back_s) == ["a", "b"]


@pytest.mark.parametrize("keep", [serves_model, not_draining, not_ejected, not_loading, has_capacity])
def test_a_filter_keeps_the_order_and_makes_nothing_of_nothing(keep: Filter) -> None:
    balancer = balancer_of(*(instance(name) for name in "dbca"))
    assert kept(keep, balancer) == ["d", "b", "c", "a"]
    assert keep(ask(), [], 0.0) == []
