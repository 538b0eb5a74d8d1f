from __future__ import annotations

from common.explain.decisions import decision_of
from common.explain.words import explain, journeys
from common.records import Ending
from common.types import Removed, Shed
from tests.common.build import BEGAN, WALL_NS, attempt, record, stage
from tests.common.policy.build import ask


def priced(path, chosen, costs, **fields):
    """A stage whose costs are completion, and a price at 10,000 seconds a dollar."""
    s = stage(path, chosen, costs, **fields)
    columns = (("completion_s", [c - 0.1 for c in costs.values()]), ("price_usd", [1e-5] * len(costs)))
    s.pick = s.pick._replace(columns=columns)
    s.scorers = (("completion_s", 1.0, None), ("price_usd", 1e4, None))
    return s


def tiers():
    """One request as three tiers remember it; the cluster's own balancer was gone, and its first server as well."""
    far = decision_of(
        record(
            process="global-1",
            node=(),
            served_by="eu/c1/i1",
            request=ask(output_tokens=50.0, max_output_tokens=200, warm=("eu", "c1", "i9"), warm_tokens=300),
            stages=[priced((), "eu", {"eu": 0.5, "us": 0.75}, pool_size=2, predicted_total_s=1.8)],
            attempts=[attempt(("eu",), peer="region-eu")],
        ),
        {},
    )
    first = priced(("eu", "c1"), "i0", {"i0": 0.3, "i1": 0.4}, pool_size=3, takeover=True)
    first.pick = first.pick._replace(removed=(Removed("not_ejected", 1, ("i2",)),))
    again = priced(("eu", "c1"), "i1", {"i1": 0.4}, attempt=1, pool_size=3, unheard=("i1",), pool_stale=True)
    near = decision_of(
        record(
            process="region-eu",
            node=("eu",),
            from_peer=True,
            started_wall_ns=WALL_NS + 1_000_000,
            request=ask(output_tokens=50.0),
            stages=[first, again],
            attempts=[
                attempt(
                    ("eu", "c1", "i0"), first_byte_at=None, ended_at=BEGAN + 0.04, status=0, error="connect_failed"
                ),
                attempt(("eu", "c1", "i1"), at=BEGAN + 0.05),
            ],
        ),
        {},
    )
    return [near, far]


TEXT = """\
Request 4bf92f3577b34da6a3ce929d0e0e4736
/v1/chat/completions for m, 2023-11-14 22:13:20.123 UTC: answered with 200 in 2.00 s by eu/c1/i1.
Asked: 400 prompt tokens, an answer of about 50 expected (at most 200), as a stream.
Its session was served by eu/c1/i9 last, where up to 300 tokens may be cached.

1. global-1 chose the region eu: its session was served there last, and it cost least (predicted_completion).
     region    cost  completion              price
   > eu      500 ms      400 ms  $0.00001 = 100 ms
     us      750 ms      650 ms  $0.00001 = 100 ms
   Next best was us, dearer by 250 ms.
   Sent to the balancer region-eu: 200, first byte after 470 ms, over after 1.97 s.

2. region-eu chose the instance i0 of eu/c1: it cost least (predicted_completion).
   It chose in place of eu/c1's own balancers, which were gone.
     instance    cost  completion              price
   > i0        300 ms      200 ms  $0.00001 = 100 ms
     i1        400 ms      300 ms  $0.00001 = 100 ms
   Next best was i1, dearer by 100 ms.
   Left out: i2 (is left alone after failures).
   Sent to eu/c1/i0: connect failed after 20 ms.

3. region-eu chose the instance i1 of eu/c1: it was the only one that could take it (predicted_completion).
   Left out: i0 (was tried for this request before).
   Left out: 1 (has joined since, or could not take it below).
   No fresh load report: i1.
   Membership was what was known last: etcd was out of reach.
   Sent to eu/c1/i1: 200, first byte after 440 ms, over after 1.94 s.

First token: predicted after 250 ms, seen after 490 ms: 96 % later.
All of it: predicted after 1.50 s, seen after 1.99 s: 33 % later.
The answer had 31 tokens (50 were expected), 50 ms for each after the first.
What stands out, the largest first:
 - Its session was served by eu/c1/i9 before, where some 300 tokens of it were cached.
 - region-eu chose for eu/c1, whose own balancers were gone.
"""


def test_a_request_through_two_tiers_in_words():
    assert "\n".join(explain(tiers())) + "\n" == TEXT  # the first try is not dwelt on: it took twenty milliseconds


def test_of_nothing_there_is_nothing_to_say():
    assert explain([]) == []


def test_a_refusal_in_words():
    d = decision_of(
        record(ending=Ending.REFUSED, status=503, served_by="", shed=Shed("no_endpoints"), request=ask()), {}
    )
    text = "\n".join(explain([d]))
    assert "refused with 503 after 2.00 s." in text
    assert "eu-1 found nobody to send it to: no server of the model takes requests." in text


def test_a_policy_with_a_unit_of_its_own_is_not_given_in_seconds():
    s = stage(("eu", "c1"), "i0", {"i0": 2.0, "i1": 3.0}, policy="least_connections", pool_size=2)
    s.pick = s.pick._replace(columns=(("in_flight", [2.0, 3.0]),))
    text = "\n".join(explain([decision_of(record(stages=[s]), {})]))
    assert "(least_connections)" in text
    assert "Next best was i1, dearer by 1." in text
    assert "2 s" not in text.split("Next best")[0].split("1. ")[1]


def test_many_candidates_are_cut_and_the_chosen_one_is_always_shown():
    s = stage(("eu", "c1"), "i19", {f"i{n:02}": 1.0 + n / 1000 for n in range(20)}, pool_size=20)
    lines = explain([decision_of(record(stages=[s]), {})])
    assert any("> i19" in line for line in lines)
    assert any("… and 12 more" in line for line in lines)
    assert any("i00 was cheaper by 19 ms, too little to decide." in line for line in lines)


def test_several_requests_of_one_trace_are_told_apart():
    def at(ms, process, from_peer=False, peer=""):
        tries = [attempt(("eu",), peer=peer)] if peer else []
        return decision_of(
            record(
                process=process,
                node=("eu",) if from_peer else (),
                from_peer=from_peer,
                started_wall_ns=WALL_NS + ms * 1_000_000,
                attempts=tries,
            ),
            {},
        )

    found = journeys(
        [at(3, "r", True), at(0, "g", peer="r"), at(1, "g", peer="r"), at(2, "r", True), at(9, "g", peer="r")]
    )
    assert [[d.process for d in journey] for journey in found] == [["g", "r"], ["g", "r"], ["g"]]
