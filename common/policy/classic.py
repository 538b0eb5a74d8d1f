"""What the classic policies compare: connections, turns, response times, reported resources, hashes, prefixes.

Each is a scorer as `scorers` defines it, in its own unit. They are there for comparison and for those who want them; on
unlike servers only those that know weights are in the running.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log
from typing import TYPE_CHECKING

from common.policy.candidate import FRESH_REPORT_S
from common.policy.prediction import marginal_cost
from common.types import InferenceRequest

if TYPE_CHECKING:
    from common.policy.candidate import Candidate


def in_flight(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Requests under way from here."""
    return [float(c.in_flight) for c in candidates]


def turn(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """How lately it had its turn: the least recent first."""
    return [float(c.last_turn) for c in candidates]


def weighted_in_flight(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Requests under way from here, this one included, over the weight; a weight of 0 takes none.

    Counting this one sends the first to the strongest; it is LVS's shortest expected delay.
    """
    return [(c.in_flight + 1.0) / w if (w := c.share) > 0.0 else inf for c in candidates]


def weighted_response_time(
    request: InferenceRequest, candidates: Sequence[Candidate], now: float
) -> list[float] | None:
    """Seconds a request takes there of late, times those under way and this one, over the weight.

    One that was never measured counts as the quickest of the others, so that it is. Source: Finagle's peak EWMA.
    """
    known = [t for c in candidates if (t := c.response_s.value) is not None]
    unknown = min(known, default=1.0)
    costs = []
    for c in candidates:
        seen = c.response_s.value
        weight = c.share
        costs.append((seen if seen is not None else unknown) * (c.in_flight + 1.0) / weight if weight > 0.0 else inf)
    return costs


def resources(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Share of its batch slots, or of its KV memory if that is more, in use by its report and by what was sent since.

    Where one has no fresh report, all are compared by what was sent from here over their slots, which all have.
    """
    blind = any(c.report is None or c.report.running is None or now - c.report_at > FRESH_REPORT_S for c in candidates)
    costs = []
    for c in candidates:
        slots = max(sum(s.speed.slots * s.count for s in c.own), 1.0)
        report = c.report
        if blind or report is None:
            costs.append(c.in_flight / slots)
            continue
        # Whatever was sent after the report was made is not in it.
        running = (report.running or 0.0) + (report.waiting or 0.0)
        missing = max(0.0, c.in_flight - c.in_flight_reported)
        costs.append(max((running + missing) / slots, report.kv_utilization or 0.0))
    return costs


def fits(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Requests under way from here over the weight, where KV memory can hold this one at all."""
    tokens = request.input_tokens + request.output_tokens
    return [
        (c.in_flight + 1.0) / w
        if (w := c.share) > 0.0 and any(s.speed.kv_tokens >= tokens for s in c.quoted or c.own)
        else inf
        for c in candidates
    ]


def work_left(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """GPU seconds of all that is under way there and of this request, on the server below it that has least."""
    return [_least_work(request, c) for c in candidates]


def _least_work(request: InferenceRequest, candidate: Candidate) -> float:
    uncached, output = candidate.uncached_tokens(request), request.output_tokens
    costs = [server.costs() for server in candidate.quoted or candidate.own]
    return min(c.backlog_s + uncached * c.seconds_per_prompt_token + output * c.backlog_per_token_s for c in costs)


def own_completion(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Seconds until this request would be complete there, whatever it costs the others."""
    costs = []
    for c in candidates:
        uncached = c.uncached_tokens(request)
        servers = c.quoted or c.own
        terms = [marginal_cost(s, uncached, request.input_tokens, request.output_tokens) for s in servers]
        costs.append(min(t.ttft + t.decode for t in terms))
    return costs


def rendezvous(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Distance of each candidate from the request's session (else its prefix, else itself), nearest taken.

    When one joins or leaves, only what hashed to it moves. Source: Thaler and Ravishankar, *Using Name-Based Mappings
    to Increase Hit Rates* (1998), in the weighted form of Schindelhauer and Schomaker (2005).
    """
    key = request.session or (str(request.prefix_hashes[0]) if request.prefix_hashes else request.id)
    return [-log(_unit(key, c.endpoint.id)) / w if (w := c.share) > 0.0 else inf for c in candidates]


def _unit(key: str, id_: str) -> float:
    """A number in (0, 1) that is the same on every host: FNV-1a with a final mix (MurmurHash3)."""
    value = 0xCBF29CE484222325
    for byte in f"{key}\x00{id_}".encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 33
    return ((value >> 11) + 0.5) / float(1 << 53)


MATCH_RATIO = 0.5  # of the prompt's blocks: below it the prefix does not decide
IMBALANCE, IMBALANCE_RATIO = 32, 1.5  # requests the busiest has more than the idlest, both ways: then load decides


def prefix_match(request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
    """Fewest uncached blocks first where one has half of the prompt; else, or when unbalanced, fewest under way.

    The rule of cache-aware routers (SGLang's, vLLM's), with their thresholds, for comparison with priced affinity.
    """
    loads = [c.in_flight for c in candidates]
    busiest, idlest = max(loads), min(loads)
    held = [c.cached_blocks(request) for c in candidates]
    total = len(request.prefix_hashes)
    unbalanced = busiest - idlest > IMBALANCE and busiest > IMBALANCE_RATIO * idlest
    if unbalanced or not total or max(held) < MATCH_RATIO * total:
        return [float(load) for load in loads]
    most = max(loads) + 1.0
    return [(total - blocks) + load / most for blocks, load in zip(held, loads, strict=True)]


class WeightedTurns:
    """Whose turn it is by weight, spread evenly: 0 for that one and 1 for the others; a weight of 0 has no turn.

    Source: nginx's smooth weighted round robin: each gains its weight a turn, the richest is taken and pays for all.
    The order is kept for the candidates there are; one that comes anew begins with nothing saved.
    """

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __call__(self, request: InferenceRequest, candidates: Sequence[Candidate], now: float) -> list[float] | None:
        """Take a turn: the next call is another request's."""
        weights = {c.endpoint.id: w for c in candidates if (w := c.share) > 0.0}
        if not weights:
            return [inf for _ in candidates]
        saved = {id_: self._saved.get(id_, 0.0) + weight for id_, weight in weights.items()}
        chosen = max(saved, key=lambda id_: saved[id_])
        saved[chosen] -= sum(weights.values())
        # Those left out of this choice (busy, or of another model) keep what they have saved, within a bound.
        kept = {} if len(self._saved) > MOST_TURNS else self._saved
        self._saved = kept | saved
        return [0.0 if c.endpoint.id == chosen else 1.0 if c.share > 0.0 else inf for c in candidates]


MOST_TURNS = 10_000  # endpoints whose savings are remembered; beyond that those that are gone are forgotten
