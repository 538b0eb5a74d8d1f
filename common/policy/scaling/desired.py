"""How many replicas of a model there should be, of which groups: decided every second or so from what is seen.

What is needed is a rate of requests. It is the largest of

    forecast     the upper forecast from now until a replica that is asked for now would serve
    panic        what came in the last seconds, while that is more than all there is can bear within the service level
    … plus what it takes to get rid of the backlog that will be there by then, within `drain_s`

and what a replica bears of it follows from its learned speed and the service level (`capacity`). More is asked for at
once, of the groups where it costs least (`covering`). Less is asked for only when the need has been lower for the
whole cool-down, will stay lower for as long, nobody panics and everybody was heard. Without any demand for `idle_s` the
floor is left, which may be none; a single request is enough to come up from there.

Sources: panic and stable windows as in Knative's autoscaler; the stabilisation window as in Kubernetes' HPA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from common.policy.scaling.capacity import Mix, occupancy, sustainable_rate
from common.policy.scaling.covering import Offer, cheapest, dearest
from common.policy.scaling.demand import GroupSeen, backlog_s
from common.policy.scaling.forecast import Forecast
from common.policy.scaling.starts import Pace, Starts
from common.types import Slo, Speed

MIX_REQUESTS = 200.0  # the mean request is that of so many of late
FIRST_MIX = Mix(1000.0, 200.0)  # the mean of public conversation traffic, until requests have come
IDLE_RATE = 0.5  # requests expected until a replica would serve: fewer than this are none
PANIC_DEVIATIONS = 2.0  # of a count, by which more has to come than can be borne: chance does not do that often
PANIC_LEAST = 2.0  # requests more than that: two in a row are no burst
FASTEST = 0.25  # seconds between two decisions below which arrivals are put together


@dataclass(frozen=True, slots=True)
class Group:
    """Like replicas in one place."""

    name: str
    price_usd_per_hour: float = 0.0
    least: int = 0
    most: int = 10
    cold_start_s: float = 60.0  # from asking to serving; a first guess, learned from then on


@dataclass(frozen=True, slots=True)
class Rules:
    """How one model is scaled. Times are seconds."""

    slo: Slo = field(default_factory=lambda: Slo(ttft_s=2.0, tpot_s=0.1))
    least: int = 0  # replicas over all groups
    most: int = 100
    utilization: float = 0.8  # of what a replica could bear within the service level
    drain_s: float = 30.0  # within which a backlog is to be gone, once replicas have come for it
    panic_window_s: float = 6.0
    panic_s: float = 60.0  # a panic lasts for so long after its last cause
    cool_down_s: float = 300.0
    idle_s: float = 300.0
    bucket_s: float = 10.0
    seasons_s: tuple[float, ...] = (86_400.0,)
    deviations: float = 1.3  # of the upper forecast


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one model since the last decision."""

    groups: Mapping[str, GroupSeen]
    arrivals: float = 0.0
    input_tokens: float = 0.0  # of all these together
    output_tokens: float = 0.0
    waiting: float = 0.0  # requests that wait where they came in
    complete: bool = True  # everybody who may know something was heard


@dataclass(frozen=True, slots=True)
class Decision:
    """What there should be, and why. Rates are requests a second."""

    desired: Mapping[str, int]  # replicas by group
    reason: str  # what the need comes from: forecast, panic, backlog, floor, idle
    needed_rate: float
    held_rate: float  # what is kept up for, the cool-down considered
    arrival_rate: float  # over the panic window
    forecast_rate: float
    supplied_rate: float  # by what was asked for and is there or on its way
    excess_requests: float  # backlog above what the service level allows
    capacity: Mapping[str, float]  # requests a second of one replica, by group
    cold_start_s: Mapping[str, float]
    panic: bool
    overdue: Mapping[str, int]  # replicas by group that were asked for long ago and have not come

    @property
    def replicas(self) -> int:
        """Over all groups."""
        return sum(self.desired.values())


class DesiredReplicas:
    """Of one model. `now` is in seconds on a clock that never goes back and goes on over restarts."""

    def __init__(self, groups: Sequence[Group], rules: Rules) -> None:
        self.groups = {g.name: g for g in groups}
        self.rules = rules
        longest = max((g.cold_start_s for g in groups), default=rules.bucket_s)
        self.forecast = Forecast(rules.bucket_s, longest + rules.bucket_s, rules.seasons_s, rules.deviations)
        self._asked: dict[str, int] = {}
        self._starts = {g.name: Starts(g.cold_start_s) for g in groups}
        self._paces: dict[str, Pace] = {}  # of groups that were seen
        self._speeds: dict[str, Speed] = {}
        self._mix = FIRST_MIX
        self._mixed = 0.0  # requests the mix comes from, at most MIX_REQUESTS
        self._came: deque[tuple[float, float]] = deque()  # (when, arrivals) within the panic window
        self._needs: deque[tuple[float, float]] = deque()  # (when, rate) of the cool-down, the largest first
        self._began: float | None = None
        self._busy_at: float | None = None  # when there last was any demand
        self._panic_at = -inf
        self._panic_rate = 0.0

    def adopt(self, desired: Mapping[str, int]) -> None:
        """Go on from what was asked for before, by another process or by hand."""
        self._asked = {name: max(0, desired.get(name, 0)) for name in self.groups}

    # -- the decision ------------------------------------------------------------------------------------------------

    def decide(self, seen: Seen, now: float) -> Decision:
        """Take in what is seen, and say what should be there. O(groups + buckets ahead)."""
        rules = self.rules
        if not self._asked:
            self.adopt({name: g.serving + g.loading for name, g in seen.groups.items()})
        self._take(seen, now)
        offers = self._offers()
        lead_s = max((self._starts[n].cold_start_s for n, o in offers.items() if o.capacity > 0.0), default=0.0)
        overdue = {name: starts.overdue(now) for name, starts in self._starts.items()}
        counted = {name: max(0, n - overdue[name]) for name, n in self._asked.items()}
        supplied = sum(offers[name].capacity * n for name, n in counted.items())
        arrival_rate = self._arrival_rate(now)
        panic = self._panics(arrival_rate, supplied / rules.utilization, now)
        forecast_rate = self.forecast.peak(now, lead_s)
        rate, reason = max((forecast_rate, "forecast"), (self._panic_rate if panic else 0.0, "panic"))
        excess = self._excess(seen, offers, arrival_rate, lead_s, now)
        if excess / rules.drain_s > rate:
            reason = "backlog"
        rate += excess / rules.drain_s
        idle = self._idle(self.forecast.peak(now, lead_s, deviations=0.0) * lead_s, now)
        if idle:
            rate, reason, panic = 0.0, "idle", False
        held_rate = self._held(rate, now, idle)
        if not idle:
            held_rate = max(held_rate, self.forecast.peak(now, lead_s + rules.cool_down_s))
        if rate > supplied:
            desired = self._more(offers, counted, overdue, rate)
        else:
            desired = self._fewer(offers, counted, held_rate, seen.complete and not panic)
        desired, floor = self._bounded(desired, offers, idle)
        for name, n in desired.items():
            self._starts[name].asked(n - self._asked[name], now)
        self._asked = desired
        return Decision(
            dict(desired),
            "floor" if floor else reason,
            rate,
            held_rate,
            arrival_rate,
            forecast_rate,
            supplied,
            excess,
            {name: o.capacity for name, o in offers.items()},
            {name: s.cold_start_s for name, s in self._starts.items()},
            panic,
            overdue,
        )

    # -- what is seen ------------------------------------------------------------------------------------------------

    def _take(self, seen: Seen, now: float) -> None:
        self._began = now if self._began is None else self._began
        self.forecast.observe(seen.arrivals, now)
        if seen.arrivals > 0.0:
            gain = min(1.0, seen.arrivals / min(MIX_REQUESTS, self._mixed + seen.arrivals))
            p, o = seen.input_tokens / seen.arrivals, seen.output_tokens / seen.arrivals
            self._mix = Mix(
                self._mix.input_tokens + gain * (p - self._mix.input_tokens),
                self._mix.output_tokens + gain * (o - self._mix.output_tokens),
            )
            self._mixed = min(MIX_REQUESTS, self._mixed + seen.arrivals)
        came = self._came
        if came and now - came[-1][0] < FASTEST:
            came[-1] = (came[-1][0], came[-1][1] + seen.arrivals)
        else:
            came.append((now, seen.arrivals))
        while came[0][0] <= now - self.rules.panic_window_s:
            came.popleft()
        under_way = sum(g.requests for g in seen.groups.values())
        if seen.arrivals > 0.0 or seen.waiting > 0.0 or under_way > 1e-6:
            self._busy_at = now
        elif self._busy_at is None:  # what is there when this begins is there for something; what is not need not come
            self._busy_at = now if any(g.serving or g.loading for g in seen.groups.values()) else -inf
        for name, starts in self._starts.items():
            group = seen.groups.get(name)
            if group is not None:
                starts.seen(group.serving, now)
                pace = self._paces.setdefault(name, Pace())
                pace.add(group.speed, now)
                self._speeds[name] = pace.speed

    def _arrival_rate(self, now: float) -> float:
        assert self._began is not None
        window = min(self.rules.panic_window_s, max(now - self._began, 1.0))
        return sum(n for _, n in self._came) / window

    def _offers(self) -> dict[str, Offer]:
        """One replica of each group: what it bears, and its price; without any price all cost the same."""
        priced = any(g.price_usd_per_hour > 0.0 for g in self.groups.values())
        offers = {}
        for name, group in self.groups.items():
            speed = self._speeds.get(name)
            rate = sustainable_rate(speed, self._mix, self.rules.slo) if speed is not None else 0.0
            price = group.price_usd_per_hour if priced else 1.0
            offers[name] = Offer(name, self.rules.utilization * rate, price, group.most)
        return offers

    # -- what is needed ----------------------------------------------------------------------------------------------

    def _panics(self, arrival_rate: float, bearable: float, now: float) -> bool:
        """More comes than all that was asked for can bear; it counts for a while, as its largest rate."""
        if now - self._panic_at > self.rules.panic_s:
            self._panic_rate = 0.0
        came = sum(n for _, n in self._came)
        expected = bearable * self.rules.panic_window_s
        if came > expected + PANIC_DEVIATIONS * sqrt(expected) + PANIC_LEAST:
            self._panic_at = now
            self._panic_rate = max(self._panic_rate, arrival_rate)
        return self._panic_rate > 0.0

    def _excess(self, seen: Seen, offers: Mapping[str, Offer], arrival_rate: float, lead_s: float, now: float) -> float:
        """Requests above what the service level allows, as of when replicas asked for now would serve."""
        excess, borne = seen.waiting, 0.0
        for name, there in seen.groups.items():
            offer = offers.get(name)
            if offer is None or offer.capacity <= 0.0:
                continue
            speed = self._speeds[name]
            each = _backlog_of_one_s(speed, self._mix)
            normal = occupancy(speed, self._mix, offer.capacity).requests * each
            bearable = offer.capacity / self.rules.utilization
            # Until then those that serve bear their part, and those on the way for what is left of the time.
            borne += bearable * (there.serving * lead_s + self._starts[name].served_s(lead_s, now))
            if each > 0.0:
                backlog = backlog_s(speed, there.serving, there.sums)
                excess += max(0.0, backlog - there.serving * normal) / each
        return max(0.0, excess + arrival_rate * lead_s - borne) if excess > 0.0 else 0.0

    def _idle(self, expected: float, now: float) -> bool:
        assert self._busy_at is not None
        return now - self._busy_at >= self.rules.idle_s and expected < IDLE_RATE

    def _held(self, rate: float, now: float, idle: bool) -> float:
        """The largest need of the cool-down."""
        needs = self._needs
        if idle:
            needs.clear()
        while needs and needs[-1][1] <= rate:
            needs.pop()
        needs.append((now, rate))
        while needs[0][0] < now - self.rules.cool_down_s:
            needs.popleft()
        return needs[0][1]

    # -- what to ask for ---------------------------------------------------------------------------------------------

    def _more(
        self, offers: Mapping[str, Offer], counted: Mapping[str, int], overdue: Mapping[str, int], rate: float
    ) -> dict[str, int]:
        missing = rate - sum(offers[name].capacity * n for name, n in counted.items())
        room = self.rules.most - sum(self._asked.values())
        open_ = [
            o._replace(most=min(o.most - self._asked[o.name], room))
            for o in offers.values()
            if not overdue[o.name]  # one whose replicas do not come is asked for no more of them
        ]
        added = cheapest(open_, missing)
        while sum(added.values()) > room:
            added = _one_less(added, offers)
        return {name: n + added.get(name, 0) for name, n in self._asked.items()}

    def _fewer(
        self, offers: Mapping[str, Offer], counted: Mapping[str, int], rate: float, allowed: bool
    ) -> dict[str, int]:
        if not allowed:
            return dict(self._asked)
        least = {name: g.least for name, g in self.groups.items()}
        given = dearest(counted, offers, least, rate)
        return {name: n - given.get(name, 0) for name, n in self._asked.items()}

    def _bounded(self, desired: dict[str, int], offers: Mapping[str, Offer], idle: bool) -> tuple[dict[str, int], bool]:
        """Within floors and ceilings; while there is demand at least one. And whether a floor made it so."""
        made = {name: min(max(n, self.groups[name].least), self.groups[name].most) for name, n in desired.items()}
        least = max(self.rules.least, 0 if idle else 1)
        missing = least - sum(made.values())
        while missing > 0:
            open_ = [o for o in offers.values() if made[o.name] < self.groups[o.name].most]
            if not open_:
                break
            # One that keeps the service level if there is any, and of those the cheapest.
            take = min(open_, key=lambda o: (o.capacity <= 0.0, o.price, o.name))
            made[take.name] += 1
            missing -= 1
        while sum(made.values()) > self.rules.most:
            over = [o for o in offers.values() if made[o.name] > self.groups[o.name].least]
            if not over:
                break
            made[max(over, key=lambda o: (o.price / max(o.capacity, 1e-9), o.name)).name] -= 1
        return made, made != desired


def _backlog_of_one_s(speed: Speed, mix: Mix) -> float:
    """GPU seconds that one request adds to a server's backlog, counted as `server.Costs` counts it."""
    per_token = speed.beta_s + 2.0 * speed.alpha_s / speed.slots + speed.gamma_s * mix.input_tokens
    return mix.output_tokens * per_token


def _one_less(added: dict[str, int], offers: Mapping[str, Offer]) -> dict[str, int]:
    """Without one replica of the group that bears least for its price."""
    worst = max((n for n, k in added.items() if k), key=lambda n: (offers[n].price / offers[n].capacity, n))
    return {**added, worst: added[worst] - 1}
