from itertools import product

from common.policy.scaling.covering import Offer, cheapest, dearest

H100 = Offer("h100", 10.0, 4.0, 10)
L4 = Offer("l4", 1.5, 0.8, 10)


def price(offers: list[Offer], replicas: dict[str, int]) -> float:
    return sum(o.price * replicas.get(o.name, 0) for o in offers)


def test_a_little_is_covered_by_the_small_and_much_by_what_is_cheaper_a_request() -> None:
    assert cheapest([H100, L4], 2.0) == {"l4": 2}
    assert cheapest([H100, L4], 20.0) == {"h100": 2}
    assert cheapest([H100, L4], 21.0) == {"h100": 2, "l4": 1}


def test_it_is_near_the_best_of_all_that_could_be_had() -> None:
    offers = [H100, L4, Offer("a100", 4.5, 2.2, 10)]
    for tenths in range(1, 300, 7):
        rate = tenths / 10.0
        found = cheapest(offers, rate)
        assert sum(o.capacity * found.get(o.name, 0) for o in offers) >= rate
        best = min(
            price(offers, dict(zip(("h100", "l4", "a100"), counts, strict=True)))
            for counts in product(range(5), range(11), range(8))
            if sum(o.capacity * n for o, n in zip(offers, counts, strict=True)) >= rate
        )
        assert price(offers, found) <= best + 0.8  # one of the cheapest more


def test_ceilings_hold_and_what_keeps_no_level_is_not_taken() -> None:
    few = [H100._replace(most=1), L4._replace(most=2)]
    assert cheapest(few, 100.0) == {"h100": 1, "l4": 2}
    assert cheapest([Offer("t4", 0.0, 0.1, 10)], 5.0) == {}


def test_the_dearest_for_what_they_bear_go_first_and_floors_stay() -> None:
    offers = {o.name: o for o in (H100, L4)}
    assert dearest({"h100": 2, "l4": 4}, offers, {}, 20.0) == {"l4": 4}
    assert dearest({"h100": 2, "l4": 4}, offers, {"l4": 1}, 20.0) == {"l4": 3}
    assert dearest({"h100": 2, "l4": 1}, offers, {"h100": 2}, 0.0) == {"l4": 1}
    assert dearest({"h100": 1}, offers, {}, 9.0) == {}
