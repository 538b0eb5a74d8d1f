from math import pi, sin
from random import Random

import pytest

from common.policy.scaling.forecast import Forecast


def feed(forecast: Forecast, rate_at, start_s: float, end_s: float, rng: Random | None = None) -> None:
    """One call a second; counts are exact, or drawn as those of independent arrivals."""
    owed = 0.0
    for second in range(int(start_s), int(end_s)):
        owed += rate_at(second) if rng is None else max(0.0, rng.gauss(rate_at(second), rate_at(second) ** 0.5))
        whole = int(owed)
        owed -= whole
        forecast.observe(float(whole), float(second))


def wave(second: float) -> float:
    return 20.0 + 18.0 * sin(2.0 * pi * second / 600.0)


def test_nothing_is_expected_before_a_bucket_was_counted() -> None:
    assert Forecast(10.0, 60.0).peak(0.0, 60.0) == 0.0


def test_a_steady_rate_goes_on() -> None:
    forecast = Forecast(10.0, 60.0)
    feed(forecast, lambda s: 8.0, 0, 600)
    assert forecast.peak(600.0, 60.0) == pytest.approx(8.0, rel=0.1)


def test_a_ramp_is_seen_ahead() -> None:
    forecast = Forecast(10.0, 60.0)
    feed(forecast, lambda s: s / 20.0, 0, 400)
    assert forecast.peak(400.0, 60.0) > 20.5  # there now, and it goes on


def test_a_season_is_known_from_its_second_time_on_and_before_its_rise() -> None:
    forecast = Forecast(10.0, 60.0, (600.0,))
    plain = Forecast(10.0, 60.0)
    rng = Random(1)
    for f, r in ((forecast, rng), (plain, Random(1))):
        feed(f, wave, 0, 1800 + 450, r)  # at the bottom of the fourth, 150 s before it is at its mean again
    peak = max(wave(s) for s in range(2250, 2250 + 200))
    assert forecast.peak(2250.0, 200.0) > 0.85 * peak
    assert plain.peak(2250.0, 200.0) < 0.6 * peak


def test_noise_makes_the_upper_forecast_higher() -> None:
    calm, noisy = Forecast(10.0, 60.0), Forecast(10.0, 60.0)
    feed(calm, lambda s: 10.0, 0, 900)
    feed(noisy, lambda s: 10.0, 0, 900, Random(3))
    assert noisy.peak(900.0, 30.0) > calm.peak(900.0, 30.0) + 0.3


def test_what_nobody_counted_is_unknown_and_not_zero() -> None:
    forecast = Forecast(10.0, 60.0, (600.0,))
    feed(forecast, lambda s: 10.0, 0, 700)
    feed(forecast, lambda s: 10.0, 900, 1200)  # nobody was there between
    assert forecast.peak(1200.0, 120.0) == pytest.approx(10.0, rel=0.15)


def test_a_season_that_is_no_whole_number_of_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole number"):
        Forecast(10.0, 60.0, (605.0,))
