"""Aliases, splits and rollouts: who goes where, and when a version is taken back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.rollout import Guard, Rollout, Seen, Stage, moved_on
from common.policy.versions import Split, Target, Versions, matches
from common.types import Pick, Shed
from tests.common.policy.build import ask, balancer_of, instance, picked, region


def shares(split: Split, sessions: int = 4000) -> dict[str, float]:
    """Of each version, by a count of sessions."""
    versions = [split.of(f"session-{i}").version for i in range(sessions)]
    return {version: versions.count(version) / sessions for version in set(versions)}


def canary(percent: float) -> Split:
    return Rollout("m", "v2", (percent, 100.0) if percent < 100.0 else (100.0,), stage=Stage.STEPPING).split()


@pytest.mark.parametrize("percent", [5.0, 25.0, 50.0])
def test_a_split_keeps_its_shares(percent: float) -> None:
    found = shares(canary(percent))
    assert found["v2"] == pytest.approx(percent / 100.0, abs=0.02)


def test_nothing_and_everything_are_exact() -> None:
    assert shares(Rollout("m", "v2").split()) == {"!v2": 1.0}
    assert shares(canary(100.0)) == {"v2": 1.0}


@given(st.text(), st.floats(1.0, 99.0), st.floats(1.0, 99.0))
def test_as_a_share_grows_sessions_move_to_it_and_never_away(session: str, one: float, other: float) -> None:
    before, after = canary(min(one, other)).of(session), canary(max(one, other)).of(session)
    assert before == canary(min(one, other)).of(session)
    assert after.version == "v2" or before.version == "!v2"


def test_an_alias_comes_before_the_split_of_what_it_names() -> None:
    aliases = {"chat": Split("chat", (Target("m"),))}
    versions = Versions(aliases, {"m": Split("m", (Target("m", "v1", 1.0), Target("m", "v2", 0.0)))})
    assert versions.target("chat", "s") == Target("m", "v1", 1.0)
    assert versions.target("other", "s") == Target("other")
    versions.rollouts["m"] = canary(100.0)
    assert versions.target("chat", "s").version == "v2"


def test_a_version_is_a_label() -> None:
    assert matches("v2", {"version=v2", "site=edge"})
    assert not matches("v2", {"version=v1"})
    assert matches("!v2", {"version=v1"})
    assert matches("!v2", set())
    assert not matches("!v2", {"version=v2"})
    assert matches("", {"version=v2"})


def served(id_: str, version: str) -> dict[str, object]:
    return {"models": frozenset({"m"}), "labels": frozenset({f"version={version}"} if version else ())}


def test_no_request_goes_to_another_version() -> None:
    balancer = balancer_of(instance("a", **served("a", "v1")), instance("b", **served("b", "v2")))
    for version, id_ in (("v2", "b"), ("!v2", "a"), ("v1", "a")):
        assert {picked(balancer, ask(version=version)).endpoint.id for _ in range(8)} == {id_}
    assert {picked(balancer, ask()).endpoint.id for _ in range(40)} == {"a", "b"}
    assert isinstance(balancer.pick(ask(version="v3"), 0.0, Random(1)), Shed)


def test_above_a_cluster_what_is_below_it_counts() -> None:
    kinds = instance("x", **served("x", "v2"))
    from common.membership.pools import _kinds

    one = region("one", models=frozenset({"m"}), kinds=_kinds([kinds]))
    two = region("two", models=frozenset({"m"}), kinds=_kinds([instance("y", **served("y", "v1"))]))
    balancer = balancer_of(one, two, parent=("eu",))
    decision = picked(balancer, ask(version="v2"))
    assert isinstance(decision, Pick)
    assert decision.endpoint.id == "one"


# -- rollouts ----------------------------------------------------------------------------------------------------------

STEPPING = Rollout("m", "v2", (10.0, 100.0), 60.0, Guard(0.02, 1.3, 20), Stage.STEPPING)


def seen(requests: int, failed: int = 0, ttft_s: float | None = None) -> Seen:
    found = Seen()
    for i in range(requests):
        found.saw(failed=i < failed, ttft_s=ttft_s)
    return found


def test_it_waits_for_the_new_version_and_steps_to_the_end() -> None:
    waiting = replace(STEPPING, stage=Stage.WAITING)
    assert moved_on(waiting, Seen(), Seen(), 1e6, there=False) == waiting
    rollout = moved_on(waiting, Seen(), Seen(), 0.0, there=True)
    assert (rollout.stage, rollout.share) == (Stage.STEPPING, 10.0)
    assert moved_on(rollout, seen(100), seen(900), 59.0, there=True) == rollout  # not long enough
    assert moved_on(rollout, seen(19), seen(900), 1e6, there=True) == rollout  # too few to tell
    rollout = moved_on(rollout, seen(100), seen(900), 60.0, there=True)
    assert rollout.share == 100.0
    rollout = moved_on(rollout, seen(100), Seen(), 60.0, there=True)
    assert (rollout.stage, rollout.share, rollout.live) == (Stage.DONE, 100.0, False)


@pytest.mark.parametrize(
    ("new", "old", "taken_back"),
    [
        (seen(5, 5), seen(100), True),  # grossly bad: nobody waits for more
        (seen(5, 5), seen(100, 80), False),  # so is the old one: it is something else
        (seen(19, 4), seen(100), False),
        (seen(20, 1), seen(100), True),
        (seen(100, 5), seen(100, 4), False),
        (seen(40, 0, 0.9), seen(400, 0, 0.3), True),
        (seen(40, 0, 0.35), seen(400, 0, 0.3), False),
        (seen(10, 0, 9.0), seen(400, 0, 0.3), False),
    ],
)
def test_it_is_taken_back_when_it_is_worse(new: Seen, old: Seen, taken_back: bool) -> None:
    rollout = moved_on(STEPPING, new, old, 1.0, there=True)
    assert (rollout.stage is Stage.ROLLED_BACK) == taken_back
    assert bool(rollout.reason) == taken_back
    if taken_back:
        assert moved_on(rollout, seen(100), seen(100), 1e6, there=True) == rollout  # for good
