"""How many requests a second will come, some minutes ahead: by the trend of the last minutes, and by the season.

Arrivals are counted in buckets of some seconds. Two kinds of expert look at them. The trend goes on from the present
level and slope, damped, and needs nothing but a few buckets. A season (a day, a week) remembers what came at each of
its phases and scales that by how today compares with it; it speaks of a phase from the second time on. Each is judged
by what it said of the buckets that have since come, and until a season has been judged for one whole length of itself
the larger of the forecasts counts: having too many servers costs money, having too few costs requests.

A forecast is an upper one: the mean plus so many deviations of the expert's own errors at that horizon, which scale
with the square root of the rate, as counts of independent arrivals do. A bucket that nobody counted is unknown, and not
zero.
Sources: Holt's linear trend, damped (Gardner and McKenzie, 1985); seasonal indices as in Winters (1960); experts judged
by quantile loss (Koenker and Bassett, 1978).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, floor, sqrt
from typing import Protocol

LEVEL_GAIN = 0.35  # of the newest bucket: the level follows a step within some five buckets
SLOPE_GAIN = 0.1
DAMPING = 0.92  # of the slope, each bucket ahead: a ramp goes on for some twelve buckets, and not for ever
SEASON_GAIN = 0.4  # of the newest season: what is usual is some four seasons old at most
SEASON_LOOK = 12  # buckets over which today is compared with what is usual,
SEASON_PRIOR = 20.0  # as if so many requests more had come exactly as usual
SEASON_RATIO = 3.0  # today is at most so many times as busy as usual, or as much less
NEIGHBOURS = 1  # buckets to either side that a season's peak may be early or late
ERROR_KEEP = 0.97  # of the errors' variance, each bucket: some 30 buckets
ERROR_MOST = 3.0  # deviations: no single bucket counts for more
LEAST_RATE = 0.05  # requests a second below which an error is no longer taken relative to the root of the rate
GAP_BUCKETS = 3  # buckets that nobody counted, after which the trend starts over
MOST_BUCKETS = 100_800  # of one season: a week of buckets of six seconds


class _Expert(Protocol):
    """Says what the rate will be `ahead` buckets after bucket number `at`, or None if it cannot tell."""

    def says(self, at: int, ahead: int) -> float | None: ...

    def sees(self, at: int, rate: float) -> None: ...


class _Trend:
    def __init__(self) -> None:
        self.level: float | None = None
        self.slope = 0.0

    def says(self, at: int, ahead: int) -> float | None:
        if self.level is None:
            return None
        steps = DAMPING * (1.0 - DAMPING**ahead) / (1.0 - DAMPING)
        return max(0.0, self.level + self.slope * steps)

    def sees(self, at: int, rate: float) -> None:
        if self.level is None:
            self.level = rate
            return
        before = self.level
        self.level = max(0.0, LEVEL_GAIN * rate + (1.0 - LEVEL_GAIN) * (before + DAMPING * self.slope))
        self.slope = SLOPE_GAIN * (self.level - before) + (1.0 - SLOPE_GAIN) * DAMPING * self.slope

    def forgets(self) -> None:
        self.level, self.slope = None, 0.0


class _Season:
    """`usual` has one rate for each phase; None where that has not been seen."""

    def __init__(self, buckets: int, bucket_s: float) -> None:
        self.usual: list[float | None] = [None] * buckets
        self._bucket_s = bucket_s
        self._recent: deque[tuple[float, float]] = deque(maxlen=SEASON_LOOK)  # (what came, what was usual)

    def says(self, at: int, ahead: int) -> float | None:
        near = [self._at(at + ahead + i) for i in range(-NEIGHBOURS, NEIGHBOURS + 1)]
        known = [rate for rate in near if rate is not None]
        if self._at(at + ahead) is None:
            return None
        return max(known) * self._ratio()

    def _at(self, bucket: int) -> float | None:
        return self.usual[bucket % len(self.usual)]

    def _ratio(self) -> float:
        prior = SEASON_PRIOR / self._bucket_s
        came, usual = sum(r[0] for r in self._recent), sum(r[1] for r in self._recent)
        return min(SEASON_RATIO, max(1.0 / SEASON_RATIO, (came + prior) / (usual + prior)))

    def sees(self, at: int, rate: float) -> None:
        phase = at % len(self.usual)
        usual = self.usual[phase]
        if usual is None:
            self.usual[phase] = rate
            return
        self._recent.append((rate, usual))
        self.usual[phase] = usual + SEASON_GAIN * (rate - usual)


class _Judged:
    """An expert, what it last said of buckets to come, and how far it was off."""

    def __init__(self, expert: _Expert, horizon: int, memory: int) -> None:
        self.expert = expert
        self.judged = 0  # buckets
        self.loss = 0.0
        self._keep = 1.0 - 1.0 / max(2, memory)
        self._horizon = horizon
        self._said: deque[tuple[int, float, float]] = deque()  # (bucket, mean, upper); bounded by the horizon
        self._variance = 0.0
        self._weight = 0.0

    def upper(self, at: int, ahead: int, deviations: float) -> float | None:
        mean = self.expert.says(at, ahead)
        return None if mean is None else mean + deviations * self.deviation * sqrt(max(mean, LEAST_RATE))

    @property
    def deviation(self) -> float:
        """Of an error, as a multiple of the root of the rate (1/√s)."""
        return sqrt(self._variance / self._weight) if self._weight else 0.0

    def sees(self, at: int, rate: float, bucket_s: float, deviations: float) -> None:
        while self._said and self._said[0][0] < at:
            self._said.popleft()
        if self._said and self._said[0][0] == at:
            self._judge(rate, *self._said.popleft()[1:], bucket_s, deviations)
        self.expert.sees(at, rate)
        mean = self.expert.says(at, self._horizon)
        if mean is not None:
            upper = mean + deviations * self.deviation * sqrt(max(mean, LEAST_RATE))
            self._said.append((at + self._horizon, mean, upper))

    def _judge(self, rate: float, mean: float, upper: float, bucket_s: float, deviations: float) -> None:
        error = (rate - mean) / sqrt(max(mean, LEAST_RATE))
        # Counts alone deviate by 1/√bucket; until there are errors to go by that is what is expected.
        most = ERROR_MOST * max(self.deviation, 1.0 / sqrt(bucket_s))
        error = max(-most, min(most, error))
        self._variance = ERROR_KEEP * self._variance + (1.0 - ERROR_KEEP) * error * error
        self._weight = ERROR_KEEP * self._weight + (1.0 - ERROR_KEEP)
        share = _upper_share(deviations)
        loss = share * (rate - upper) if rate > upper else (1.0 - share) * (upper - rate)
        self.loss = self._keep * self.loss + (1.0 - self._keep) * loss
        self.judged += 1

    def forgets(self) -> None:
        self._said.clear()


def _upper_share(deviations: float) -> float:
    """Share of a normal distribution below so many deviations, by the logistic approximation (off by under 0.01)."""
    return 1.0 / (1.0 + exp(-1.702 * deviations))


class Forecast:
    """Of one rate. `now` is in seconds, on a clock that goes on over restarts: phases of a season are counted by it."""

    def __init__(
        self, bucket_s: float, horizon_s: float, seasons_s: Sequence[float] = (), deviations: float = 1.3
    ) -> None:
        """`horizon_s`: how far ahead its experts are judged. `deviations`: of an upper forecast; 1.3 are 90 %.

        Raises ValueError for a season that is no whole number of buckets, from 2 to MOST_BUCKETS of them.
        """
        self.bucket_s = bucket_s
        self.deviations = deviations
        horizon = max(1, round(horizon_s / bucket_s))
        self._trend = _Trend()
        self._seasons: list[_Season] = []
        for season_s in seasons_s:
            buckets = round(season_s / bucket_s)
            if not 2 <= buckets <= MOST_BUCKETS or abs(buckets * bucket_s - season_s) > 1e-6 * season_s:
                raise ValueError(f"a season of {season_s:g} s is no whole number of buckets of {bucket_s:g} s")
            self._seasons.append(_Season(buckets, bucket_s))
        memory = max((len(s.usual) for s in self._seasons), default=100)
        experts: list[_Expert] = [self._trend, *self._seasons]
        self._experts = [_Judged(e, horizon, memory) for e in experts]
        self._open: int | None = None  # number of the bucket that is being counted
        self._count = 0.0
        self._whole = False  # it was counted from its beginning
        self._last: int | None = None  # number of the last one that was

    # -- what came ---------------------------------------------------------------------------------------------------

    def observe(self, arrivals: float, now: float) -> None:
        """So many came since the last call (or are known to have come, at the first one). Call it often."""
        bucket = floor(now / self.bucket_s)
        if self._open is None:
            self._open = bucket
        elif bucket > self._open + GAP_BUCKETS:
            self._gap(bucket)
            return
        while self._open < bucket:
            self._close()
        self._count += arrivals

    def _gap(self, bucket: int) -> None:
        """Nobody counted for a while: what came then is unknown."""
        self._open, self._count, self._whole = bucket, 0.0, False
        self._trend.forgets()
        for expert in self._experts:
            expert.forgets()

    def _close(self) -> None:
        assert self._open is not None
        if self._whole:
            rate = self._count / self.bucket_s
            for expert in self._experts:
                expert.sees(self._open, rate, self.bucket_s, self.deviations)
            self._last = self._open
        self._open, self._count, self._whole = self._open + 1, 0.0, True

    # -- what will come ----------------------------------------------------------------------------------------------

    def peak(self, now: float, ahead_s: float, deviations: float | None = None) -> float:
        """Largest upper forecast of any bucket from now until `ahead_s` from now, requests a second; 0 if unknown.

        `deviations`: above the mean; None: those it was made for.
        """
        deviations = self.deviations if deviations is None else deviations
        if self._last is None:
            return 0.0
        first = max(1, floor(now / self.bucket_s) - self._last)
        last = max(first, floor((now + ahead_s) / self.bucket_s) - self._last)
        return max(self._upper(ahead, deviations) for ahead in range(first, last + 1))

    def _upper(self, ahead: int, deviations: float) -> float:
        """By the expert that has been closest; by the largest while a season is still new."""
        assert self._last is not None
        said = [(e, rate) for e in self._experts if (rate := e.upper(self._last, ahead, deviations)) is not None]
        if not said:
            return 0.0
        if any(e.judged < self._needed(e) for e, _ in said):
            return max(rate for _, rate in said)
        return min(said, key=lambda s: s[0].loss)[1]

    def _needed(self, judged: _Judged) -> int:
        """Buckets after which an expert's losses are comparable: one season, or none for the trend."""
        return len(judged.expert.usual) if isinstance(judged.expert, _Season) else 0
