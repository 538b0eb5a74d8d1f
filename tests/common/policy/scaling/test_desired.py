from collections.abc import Callable, Mapping

import pytest

from common.policy.prediction import class_speed
from common.policy.scaling.demand import GroupSeen
from common.policy.scaling.desired import Decision, DesiredReplicas, Group, Rules, Seen
from common.types import Slo

RULES = Rules(Slo(2.0, 0.1), seasons_s=(), cool_down_s=60.0, idle_s=60.0, panic_s=30.0)
PROMPT, ANSWER = 1000.0, 200.0


class Fleet:
    """Carries out at once, or after `cold_s`, what is desired; nothing piles up on it unless it is told."""

    def __init__(self, groups: list[Group], rules: Rules = RULES, cold_s: float = 0.0, **there: int) -> None:
        self.policy = DesiredReplicas(groups, rules)
        self.serving = {g.name: there.get(g.name, 0) for g in groups}
        self.coming: list[tuple[float, str]] = []
        self.cold_s = cold_s
        self.now = 0.0
        self.decisions: list[Decision] = []

    def run(
        self,
        seconds: float,
        rate: Callable[[float], float],
        *,
        waiting: float = 0.0,
        backlog: Mapping[str, float] | None = None,
        complete: bool = True,
    ) -> Decision:
        for _ in range(int(seconds)):
            self.now += 1.0
            for at, name in [c for c in self.coming if c[0] <= self.now]:
                self.coming.remove((at, name))
                self.serving[name] += 1
            came = rate(self.now)
            groups = {
                name: GroupSeen(
                    class_speed(name), n, 0, (0.0, q := (backlog or {}).get(name, 0.0), q * PROMPT, 0.0, q * ANSWER)
                )
                for name, n in self.serving.items()
            }
            decision = self.policy.decide(Seen(groups, came, came * PROMPT, came * ANSWER, waiting, complete), self.now)
            self.decisions.append(decision)
            for name, n in decision.desired.items():
                expected = self.serving[name] + sum(1 for _, other in self.coming if other == name)
                self.coming += [(self.now + self.cold_s, name)] * max(0, n - expected)
                self.serving[name] = min(self.serving[name], n)
        return self.decisions[-1]


def steady(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def test_as_many_as_bear_the_rate_with_some_to_spare() -> None:
    decision = Fleet([Group("l4", most=50)], l4=1).run(120, steady(5.0))
    assert decision.desired["l4"] * decision.capacity["l4"] >= 5.0
    assert (decision.desired["l4"] - 2) * decision.capacity["l4"] < 5.0


def test_a_stricter_service_level_needs_more_of_them() -> None:
    few = Fleet([Group("l4", most=50)], l4=1).run(60, steady(5.0)).replicas
    strict = Rules(Slo(2.0, 0.06), seasons_s=())
    assert Fleet([Group("l4", most=50)], strict, l4=1).run(60, steady(5.0)).replicas > few


def test_floor_and_ceiling_hold() -> None:
    assert Fleet([Group("l4", least=2, most=4)]).run(300, steady(0.0)).replicas == 2
    assert Fleet([Group("l4", least=2, most=4)]).run(60, steady(50.0)).replicas == 4
    capped = Rules(RULES.slo, most=3, seasons_s=())
    assert Fleet([Group("l4", most=50)], capped).run(60, steady(50.0)).replicas == 3


def test_a_burst_is_answered_within_seconds_and_not_given_up_at_once() -> None:
    fleet = Fleet([Group("a100", most=50, cold_start_s=20.0)], cold_s=20.0, a100=2)
    before = fleet.run(120, steady(3.0))
    panic = fleet.run(5, steady(15.0))
    assert panic.panic
    assert panic.reason == "panic"
    assert panic.replicas >= 2 * before.replicas
    assert fleet.run(20, steady(3.0)).replicas >= panic.replicas  # the cool-down
    after = fleet.run(300, steady(3.0))
    assert not after.panic
    assert after.replicas <= before.replicas + 1


def test_two_requests_in_a_row_are_no_burst() -> None:
    fleet = Fleet([Group("a100", most=50)], a100=1)
    fleet.run(60, lambda now: 2.0 if now % 20 == 0 else 0.0)
    assert not any(d.panic for d in fleet.decisions)


def test_a_backlog_asks_for_more_than_the_rate_does() -> None:
    calm = Fleet([Group("l4", most=50)], l4=2).run(30, steady(1.0))
    full = Fleet([Group("l4", most=50)], l4=2)
    full.run(30, steady(1.0), backlog={"l4": 400.0})
    asked = next(d for d in full.decisions if d.reason == "backlog")
    assert asked.excess_requests > 100.0
    assert max(d.replicas for d in full.decisions) > calm.replicas


def test_without_demand_the_floor_is_left_and_one_request_is_enough_to_come_back() -> None:
    fleet = Fleet([Group("l4", most=5)], l4=1)
    idle = fleet.run(120, steady(0.0))
    assert idle.replicas == 0
    assert idle.reason == "idle"
    assert fleet.run(1, steady(1.0)).replicas == 1
    assert Fleet([Group("l4", most=5)]).run(1, steady(0.0), waiting=1.0).replicas == 1


def test_after_a_busy_time_none_is_left_within_minutes_of_silence() -> None:
    fleet = Fleet([Group("l4", most=50, cold_start_s=60.0)], Rules(Slo(2.0, 0.1)), l4=1)
    fleet.run(600, lambda now: 8.0 if now % 3 else 0.0)
    assert fleet.run(330, steady(0.0)).replicas == 0


def test_nothing_is_given_up_while_somebody_is_not_heard() -> None:
    fleet = Fleet([Group("l4", most=50)], l4=1)
    many = fleet.run(60, steady(5.0)).replicas
    assert fleet.run(200, steady(0.5), complete=False).replicas >= many
    assert fleet.run(100, steady(0.5)).replicas < many


@pytest.mark.parametrize(("h100", "taken"), [(4.0, "h100"), (40.0, "l4")])
def test_the_class_that_bears_it_for_least_is_taken(h100: float, taken: str) -> None:
    groups = [Group("h100", h100, most=20), Group("l4", 0.8, most=50)]
    desired = Fleet(groups).run(120, steady(20.0)).desired
    other = {"h100": "l4", "l4": "h100"}[taken]
    assert desired[taken] >= 2
    assert desired[other] <= 2


def test_a_class_that_cannot_keep_the_service_level_is_not_taken() -> None:
    strict = Rules(Slo(2.0, 0.03), seasons_s=())  # an l4 needs longer for a step
    desired = Fleet([Group("l4", 0.1, most=50), Group("a100", 9.0, most=50)], strict).run(60, steady(5.0)).desired
    assert desired["l4"] == 0
    assert desired["a100"] >= 1


def test_a_class_whose_replicas_do_not_come_is_asked_for_no_more_of_them() -> None:
    fleet = Fleet([Group("l4", 0.5, most=50, cold_start_s=10.0), Group("a100", 9.0, most=50)], cold_s=1e9, a100=0)
    decision = fleet.run(200, steady(3.0))
    assert decision.overdue["l4"] > 0
    assert decision.desired["a100"] > 0


def test_a_peak_that_comes_every_season_finds_its_replicas_there() -> None:
    rules = Rules(Slo(2.0, 0.1), seasons_s=(300.0,), cool_down_s=30.0, idle_s=30.0, panic_s=20.0)
    fleet = Fleet([Group("a100", most=50, cold_start_s=20.0)], rules, cold_s=20.0, a100=1)

    def peaks(now: float) -> float:
        return 20.0 if 150.0 <= now % 300.0 < 200.0 else 1.0

    fleet.run(900 + 148, peaks)  # in the fourth season, just before the peak
    assert fleet.serving["a100"] >= 3
    early = [d.replicas for d in fleet.decisions[900 + 60 : 900 + 100]]
    assert max(early) <= 2  # and they were not there all the time
