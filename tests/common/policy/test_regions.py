"""The region stage's own terms: where data may go, what is dear, what is full, what is there for want of others."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from common.policy.balancer import Balancer
from common.policy.regions import NO_REGION, Region, Regions, Rule, allowed, regional
from common.policy.stages import predicted_completion, round_robin
from common.types import LoadReport, Shed, Tier
from tests.common.policy.build import ask, balancer_of, busy, done, idle, picked, region

W = 1e4
EU = Rule(tenants=("acme*",), allow=frozenset({"eu", "eu2"}))
NOT_US = Rule(locations=frozenset({"eu"}), deny=frozenset({"us", "eu2"}))
HEADER = Rule(value="eu-only", allow=frozenset({"eu"}))


def world(
    *ids: str, near: str = "", share_cap: float = 0.0, load: dict[str, float] | None = None, **terms: Region
) -> Balancer:
    """Regions of one idle server, or a busy one; all but `near` are 0.1 s away."""
    policy = regional(predicted_completion(W, Tier.GLOBAL), Regions(terms, share_cap), W)
    balancer = balancer_of(*(region(id_) for id_ in ids), parent=(), policy=policy)
    for id_ in ids:
        balancer.round_trip(id_, 0.0 if id_ == near else 0.1, 0.0)
        balancer.report(LoadReport(id_, servers=(busy((load or {}).get(id_, 0.0)),)), 0.0)
    return balancer


def choice(balancer: Balancer, **fields: Any) -> str:
    """Where one request goes, which is over at once."""
    pick = picked(balancer, ask(**fields))
    done(balancer, pick, 0.0)
    return pick.endpoint.id


@pytest.mark.parametrize(
    ("tenant", "location", "value", "found"),
    [
        ("other", "us", "", ((), ())),
        ("acme-1", "us", "", (("eu", "eu2"), ())),
        ("acme-1", "eu", "", (("eu",), ())),
        ("other", "eu", "", ((), ("eu2", "us"))),
        ("other", "us", "eu-only", (("eu",), ())),
    ],
)
def test_all_rules_that_hold_hold_together(
    tenant: str, location: str, value: str, found: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    assert allowed((EU, NOT_US, HEADER), tenant, location, value) == found


def test_rules_that_leave_nothing_leave_nothing() -> None:
    nobody = Rule(tenants=("acme",), allow=frozenset({"us"}), deny=frozenset({"us"}))
    assert allowed((nobody,), "acme", "", "") == ((NO_REGION,), ())


def test_data_goes_nowhere_else_whatever_becomes_of_the_request() -> None:
    balancer = world("eu", "us", near="us")
    assert choice(balancer) == "us"
    assert choice(balancer, only=("eu",)) == "eu"
    assert choice(balancer, never=("us",)) == "eu"
    shed = balancer.pick(ask(only=("ap",)), 0.0, Random(1))
    assert isinstance(shed, Shed)
    assert shed.reason == "residency"
    assert [r.filter for r in shed.removed] == ["residency"]
    again = balancer.pick(ask(only=("eu",)), 0.0, Random(1), ("eu",))
    assert isinstance(again, Shed)
    # Nor do those it is bound to count more.
    assert choice(balancer, only=("eu",), sticky=True, warm=("us", "c1", "i1")) == "eu"
    owned = balancer.pick(ask(only=("eu",), owner=("us", "c1", "i1")), 0.0, Random(1))
    assert isinstance(owned, Shed)
    assert owned.reason == "residency"


def test_a_single_region_is_no_exception() -> None:
    balancer = world("us")
    assert choice(balancer) == "us"
    assert isinstance(balancer.pick(ask(only=("eu",)), 0.0, Random(1)), Shed)


def test_residency_holds_for_every_policy() -> None:
    policy = regional(round_robin(), Regions(), W)
    balancer = balancer_of(region("eu"), region("us"), parent=(), policy=policy)
    assert {choice(balancer, only=("eu",)) for _ in range(4)} == {"eu"}
    assert {choice(balancer) for _ in range(4)} == {"eu", "us"}


def test_tokens_and_traffic_are_dollars_like_gpu_hours() -> None:
    dear = world("eu", "us", near="us", us=Region(usd_per_million_output_tokens=1.0))
    assert choice(dear, output_tokens=5.0) == "us"  # 5e-6 $ weigh 0.05 s: less than 0.1 s of network
    assert choice(dear, output_tokens=2000.0) == "eu"
    pick = picked(dear, ask(output_tokens=2000.0))
    usd = dict(pick.columns)["tokens_usd"]
    assert dict(zip(pick.candidates, usd, strict=True)) == {"eu": 0.0, "us": pytest.approx(0.002)}


def test_an_answer_costs_its_way_out_unless_the_client_is_there() -> None:
    balancer = world("eu", "us", near="us", us=Region(egress_usd_per_gb=90.0))
    request = {"output_tokens": 1000.0}  # a stream of 250 kB: 0.0225 $
    assert choice(balancer, **request, location="eu") == "eu"
    assert choice(balancer, **request, location="us") == "us"
    pick = picked(balancer, ask(**request, location="eu"))
    assert max(dict(pick.columns)["egress_usd"]) == pytest.approx(90.0 * 250_000 * 1e-9)
    whole = picked(balancer, ask(**request, location="eu", stream=False))
    assert max(dict(whole.columns)["egress_usd"]) == pytest.approx(90.0 * 5000 * 1e-9)


def test_a_limit_is_hard() -> None:
    balancer = world("eu", "us", near="us", us=Region(max_in_flight=2))
    assert [picked(balancer).endpoint.id for _ in range(4)] == ["us", "us", "eu", "eu"]
    full = world("us", us=Region(max_in_flight=1))
    pick = picked(full)
    shed = full.pick(ask(), 0.0, Random(1))
    assert isinstance(shed, Shed)
    assert shed.reason == "saturated"
    done(full, pick)
    picked(full, now=2.0)


def test_a_limit_counts_balancers_that_do_not_tell() -> None:
    balancer = world("us", us=Region(max_in_flight=4))
    balancer.replicas(["another"], 0.0)
    assert [picked(balancer).endpoint.id for _ in range(2)] == ["us", "us"]
    assert isinstance(balancer.pick(ask(), 0.0, Random(1)), Shed)


def test_the_cloud_is_there_for_what_the_edge_cannot_do_in_time() -> None:
    terms = {"cloud": Region(fallback_after_s=1.0)}
    assert choice(world("edge", "cloud", near="cloud", **terms)) == "edge"  # though it is nearer
    slow = idle(waiting=40.0, prompt_tokens=40_000.0)
    balancer = world("edge", "cloud", near="edge", **terms)
    balancer.report(LoadReport("edge", servers=(slow,)), 0.0)
    assert choice(balancer) == "cloud"
    balancer = world("edge", "cloud", near="edge", **terms)
    assert picked(balancer, exclude=("edge",)).endpoint.id == "cloud"
    balancer = world("edge", "cloud", near="edge", edge=Region(max_in_flight=1), **terms)
    assert [picked(balancer).endpoint.id for _ in range(2)] == ["edge", "cloud"]


def test_an_idle_region_may_have_everything_a_half_full_one_its_share() -> None:
    rng = Random(1)

    def shares(load: float) -> Counter[str]:
        balancer = world("eu", "us", near="us", share_cap=1.3, load={"us": load, "eu": 0.0})
        came: Counter[str] = Counter()
        for n in range(400):
            now = n * 0.005
            for id_, decoding in (("us", load), ("eu", 3.9)):
                balancer.report(LoadReport(id_, servers=(busy(decoding),)), now)
            pick = picked(balancer, ask(input_tokens=50, output_tokens=1.0), now, rng)
            done(balancer, pick, now)
            came[pick.endpoint.id] += 1
        return came

    assert shares(0.0)["us"] == 400
    assert shares(3.0)["us"] <= 0.66 * 400 + 20  # 1.3 times one half, and what came before a share said anything


@pytest.mark.parametrize("left", [(), ("other",)], ids=["takes nothing", "has the model no more"])
def test_a_region_that_takes_nothing_has_no_share_that_others_are_kept_below(left: tuple[str, ...]) -> None:
    """What it cannot use would be nobody's, and requests refused though two regions serve."""
    balancer = world("ap", "eu", "us", near="us", share_cap=1.3)
    came: Counter[str] = Counter()
    for n in range(400):
        now = n * 0.005
        for id_ in ("ap", "eu"):
            balancer.report(LoadReport(id_, servers=(busy(3.0, models=frozenset({"m"})),)), now)
        balancer.report(LoadReport("us", servers=tuple(idle(models=frozenset({model})) for model in left)), now)
        pick = picked(balancer, ask(model="m", input_tokens=50, output_tokens=1.0), now, Random(n))
        done(balancer, pick, now)
        came[pick.endpoint.id] += 1
    assert set(came) == {"ap", "eu"}
    assert max(came.values()) <= 0.66 * 400 + 20


def test_what_cannot_be_done_by_its_deadline_is_refused_at_once() -> None:
    balancer = world("eu", "us", near="us")
    assert choice(balancer, output_tokens=100.0, deadline_s=30.0) == "us"  # 1 s of decoding at 10 ms a token
    assert choice(balancer, output_tokens=100.0, deadline_s=1.15) == "us"
    shed = balancer.pick(ask(output_tokens=100.0, deadline_s=0.5), 0.0, Random(1))
    assert isinstance(shed, Shed)
    assert shed.reason == "deadline_exceeded"
    balancer.report(LoadReport("us", servers=(idle(waiting=40.0, prompt_tokens=40_000.0),)), 0.0)
    assert choice(balancer, output_tokens=100.0, deadline_s=2.0) == "eu"  # the nearer one would be late
