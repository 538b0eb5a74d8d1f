from __future__ import annotations

import pytest

from common.explain.causes import findings_of, seconds
from common.records import Ending
from common.types import Shed
from tests.common.build import BEGAN, attempt, record, stage
from tests.common.explain.build import answered, learn, pool
from tests.common.policy.build import ask


def kinds(record, *balancers):
    return [f.kind for f in findings_of(record, {b.parent: b for b in balancers})]


def test_of_an_ordinary_request_nothing_stands_out():
    balancer = pool("a", "b")
    r = answered(balancer, first_byte_at=BEGAN + 0.04, ended_at=BEGAN + 0.75, output_tokens=100.0)
    assert kinds(r, balancer) == ["long_answer"]  # all there is to say: most of it was writing


def test_a_server_that_is_slower_than_its_like_is_named_with_its_pace():
    balancer = pool("a", "b", "c")
    for id_, times in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        learn(balancer, id_, times)
    request = ask(warm=("eu", "c1", "a"), warm_tokens=399)
    for other in ("b", "c"):  # so that the slow one gets it
        balancer.candidates[other].in_flight = balancer.candidates[other].max_in_flight
    r = answered(balancer, request)
    (slow,) = [f for f in findings_of(r, {balancer.parent: balancer}) if f.kind == "slow_server"]
    assert "eu/c1/a is 2.0 times as slow as the other h100" in slow.text
    assert slow.seconds == pytest.approx(1.0, abs=0.1)  # half of its two seconds


def test_one_whose_like_is_not_known_is_not_blamed():
    balancer = pool("a", "b")
    learn(balancer, "a", 3.0)
    balancer.candidates["b"].in_flight = balancer.candidates["b"].max_in_flight
    assert "slow_server" not in kinds(answered(balancer), balancer)


def test_all_alike_are_not_blamed_for_being_slower_than_the_prior():
    balancer = pool("a", "b", "c")
    for id_ in "abc":
        learn(balancer, id_, 3.0)
    assert "slow_server" not in kinds(answered(balancer), balancer)


def test_a_long_wait_for_the_first_token_is_a_busy_server():
    balancer = pool("a", "b")
    r = answered(balancer, first_byte_at=BEGAN + 1.9, ended_at=BEGAN + 2.0, output_tokens=3.0)
    found = findings_of(r, {balancer.parent: balancer})
    assert found[0].kind == "later_than_predicted" or found[0].kind == "busy_server"
    (busy,) = [f for f in found if f.kind == "busy_server"]
    assert busy.seconds == pytest.approx(1.9, abs=0.1)


def test_a_long_prompt_is_what_takes_long():
    balancer = pool("a", "b")
    request = ask(input_tokens=40_000, output_tokens=10.0)
    r = answered(balancer, request, first_byte_at=BEGAN + 2.2, ended_at=BEGAN + 2.3, output_tokens=3.0)
    assert "long_prompt" in kinds(r, balancer)
    assert "busy_server" not in kinds(r, balancer)


def test_tries_that_came_to_nothing_and_the_waiting_room_are_counted_with_their_seconds():
    tries = [
        attempt(("eu", "c1", "i0"), first_byte_at=None, ended_at=BEGAN + 1.02, status=0, error="first_byte_timeout"),
        attempt(("eu", "c1", "i1"), at=BEGAN + 1.03),
    ]
    found = findings_of(record(attempts=tries, queued_at=BEGAN, queued_s=0.4), {})
    assert [(f.kind, pytest.approx(f.seconds)) for f in found] == [("retry", 1.0), ("waiting_room", 0.4)]
    assert "eu/c1/i0" in found[0].text
    assert "first_byte_timeout" in found[0].text


def test_what_is_short_is_not_worth_a_sentence():
    assert kinds(record(queued_at=BEGAN, queued_s=0.01)) == []
    assert kinds(record(queued_at=BEGAN, queued_s=0.01, ended_at=BEGAN + 0.05)) == ["waiting_room"]


def test_the_network_a_takeover_and_a_session_that_moved():
    far = stage((), "ap", {"ap": 1.0}, takeover=True)
    far.pick = far.pick._replace(columns=(("round_trip_s", [0.3]),))
    r = record(stages=[far], attempts=[attempt(("ap",), peer="region-ap")], request=ask(warm=("eu", "c1", "z")))
    assert kinds(r) == ["network", "takeover", "session_moved"]


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"ending": Ending.REFUSED, "shed": Shed("loading"), "status": 503}, "refused", "still being loaded"),
        ({"ending": Ending.REFUSED, "error": "invalid_request", "status": 400}, "refused", "invalid_request"),
        ({"ending": Ending.CLIENT_LEFT}, "client_left", "left after 2.00 s"),
        ({"ending": Ending.BROKE_AFTER, "error": "stream_broken"}, "broke", "stream_broken"),
    ],
)
def test_how_it_ended_is_said(fields, kind, words):
    (found,) = findings_of(record(**fields), {})
    assert found.kind == kind
    assert words in found.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 µs"), (3.3e-4, "330 µs"), (0.0123, "12 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (75.0, "75.00 s")],
)
def test_seconds_as_people_read_them(value, text):
    assert seconds(value) == text
