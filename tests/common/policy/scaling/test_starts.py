from dataclasses import replace

from common.policy.prediction import class_speed
from common.policy.scaling.starts import Pace, Starts


def test_how_long_they_take_is_learned_and_the_slowest_of_late_counts() -> None:
    starts = Starts(60.0)
    starts.seen(0, 0.0)
    for number, took in enumerate((20.0, 25.0, 22.0, 21.0, 20.0), start=1):
        asked = 100.0 * number
        starts.asked(1, asked)
        starts.seen(number, asked + took)
    assert starts.cold_start_s == 25.0  # the guess has been forgotten


def test_what_does_not_come_is_overdue_and_what_is_taken_back_is_not() -> None:
    starts = Starts(10.0)
    starts.asked(2, 0.0)
    assert starts.overdue(100.0) == 0
    assert starts.overdue(130.0) == 2
    starts.asked(-1, 140.0)
    assert starts.overdue(140.0) == 1


def test_those_on_the_way_serve_for_what_is_left_of_the_time() -> None:
    starts = Starts(20.0)
    starts.asked(2, 0.0)
    assert starts.served_s(30.0, 10.0) == 2 * 20.0


def test_a_pace_is_the_median_so_one_odd_moment_does_not_count() -> None:
    pace, usual = Pace(), class_speed("a100")
    for second in range(30):
        pace.add(usual if second != 20 else replace(usual, alpha_s=1.0), float(second))
    assert pace.speed == usual
