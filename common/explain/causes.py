"""What made a request slow, or end it: what is known of it held against what a rested server of its kind would do.

Each finding says how many seconds it accounts for, so that the largest comes first. They overlap (a slow server is also
a busy one) and need not add up. Made when somebody asks, from the record and from what is known of the servers now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median

import msgspec

from common.policy.balancer import Balancer
from common.policy.candidate import Candidate
from common.records import Ending, RequestRecord, StageRecord
from common.types import InferenceRequest, Path, Speed

WORTH_S, WORTH_SHARE = 0.05, 0.1  # what accounts for less than both is not worth a sentence
LEAST_S = 0.01  # nor is less than this, however short the request was
SLOWER = 1.4  # than its like: beyond what learned speeds of equal servers differ by
LATER = 1.3  # than predicted
BUSIER = 2.0  # first token against one of a server at rest
LEARNED = 5  # answers from which a speed is known well enough to be compared

SHED = {
    "saturated": "every server that could take it was full",
    "loading": "the model is still being loaded",
    "no_endpoints": "no server of the model takes requests",
    "model_not_found": "no server has this model",
    "no_placement": "by the rules of placement no server that has this model may take it",
    "too_large": "it is larger than any server of this model can hold",
    "deadline_exceeded": "it could not have been answered before its deadline",
}


class Finding(msgspec.Struct):
    """One cause: what kind, how many seconds it accounts for (0: it is worth knowing), and a sentence."""

    kind: str
    seconds: float
    text: str


def findings_of(record: RequestRecord, balancers: Mapping[Path, Balancer]) -> list[Finding]:
    """The causes that this process can see, what accounts for most first."""
    found = [
        *_before_it_was_sent(record),
        *_on_the_way(record),
        *_at_the_server(record, balancers),
        *_how_it_ended(record),
    ]
    total = max(record.total_s, 1e-9)
    least = max(LEAST_S, min(WORTH_S, WORTH_SHARE * total))
    return ordered(f for f in found if not f.seconds or f.seconds >= least)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """What accounts for most first; that it took longer than predicted comes last: it is what the others explain."""
    return sorted(findings, key=lambda f: (f.kind == "later_than_predicted", -f.seconds))


def _before_it_was_sent(record: RequestRecord) -> Iterator[Finding]:
    if record.queued_at is not None and record.queued_s > 0.0:
        yield Finding(
            "waiting_room",
            record.queued_s,
            f"It waited {seconds(record.queued_s)} in the waiting room for a free place.",
        )
    for number, attempt in enumerate(record.attempts[:-1], 1):
        ended = record.ended_at if attempt.ended_at is None else attempt.ended_at
        took = ended - attempt.at
        how = attempt.error or f"status {attempt.status}"
        to = attempt.peer or "/".join(attempt.target)
        yield Finding(
            "retry", took, f"Try {number}, at {to}, came to nothing after {seconds(took)} ({how}); it was repeated."
        )


def _on_the_way(record: RequestRecord) -> Iterator[Finding]:
    for stage in record.answered_stages:
        columns = dict(stage.pick.columns)
        if "round_trip_s" in columns and stage.chosen in stage.pick.candidates:
            far = columns["round_trip_s"][stage.pick.candidates.index(stage.chosen)]
            if far:
                yield Finding("network", far, f"The round trip to {stage.chosen} takes {seconds(far)}.")
    for node in dict.fromkeys("/".join(stage.path) for stage in record.stages if stage.takeover):
        where = node or "the global tier"
        yield Finding("takeover", 0.0, f"{record.process} chose for {where}, whose own balancers were gone.")
    request = record.request
    if request is not None and request.warm and record.served_by and not record.from_peer:
        warm = "/".join(request.warm)
        if warm != record.served_by:
            text = (
                f"Its session was served by {warm} before, where some {request.warm_tokens:,} tokens of it were cached."
            )
            yield Finding("session_moved", 0.0, text)


def _at_the_server(record: RequestRecord, balancers: Mapping[Path, Balancer]) -> Iterator[Finding]:
    last = next((s for s in record.answered_stages if len(s.path) == 2), None)
    if last is None or record.request is None:
        return
    balancer = balancers.get(last.path)
    server = balancer.candidates.get(last.chosen) if balancer is not None else None
    if balancer is None or server is None:
        return
    usual_s = _usual_step_s(server, balancers)
    ratio = _step_s(server.estimates[0].speed) / usual_s if usual_s else 1.0
    if usual_s and ratio >= SLOWER:
        yield _slow_server(record, last, server, usual_s, ratio)
    yield from _what_it_asked(record, record.request, server, max(1.0, ratio))
    yield from _later_than_predicted(record, last)
    removed = sum(r.number for r in last.pick.removed)
    if removed and removed >= len(last.pick.candidates):
        few = f"Of {last.pool_size} servers only {len(last.pick.candidates)} could take it."
        yield Finding("few_candidates", 0.0, few)


def _usual_step_s(server: Candidate, balancers: Mapping[Path, Balancer]) -> float | None:
    """Seconds a token at rest of servers of the same GPU and models; None when too little is known of it or them."""
    if server.estimates[0].samples < LEARNED or not server.endpoint.gpu:
        return None
    like = [
        _step_s(c.estimates[0].speed)
        for path, balancer in balancers.items()
        if len(path) == 2
        for c in balancer.candidates.values()
        if c is not server
        and c.endpoint.gpu == server.endpoint.gpu
        and c.endpoint.models == server.endpoint.models
        and c.estimates[0].samples >= LEARNED
    ]
    return median(like) if like else None


def _slow_server(record: RequestRecord, stage: StageRecord, server: Candidate, usual_s: float, ratio: float) -> Finding:
    who = f"{'/'.join((*stage.path, stage.chosen))} is {ratio:.1f} times as slow as the other {server.endpoint.gpu}"
    text = f"{who}: {1e3 * ratio * usual_s:.1f} ms a token at rest, where those like it take {1e3 * usual_s:.1f} ms."
    return Finding("slow_server", record.total_s * (1.0 - 1.0 / ratio), text)


def _step_s(speed: Speed) -> float:
    """Seconds of one step with one sequence."""
    return speed.alpha_s + speed.beta_s


def _what_it_asked(
    record: RequestRecord, request: InferenceRequest, server: Candidate, ratio: float
) -> Iterator[Finding]:
    """What its length accounts for; `ratio`: so many times slower than usual is the server, which is told by itself."""
    speed = server.estimates[0].speed
    reading = request.input_tokens / speed.prefill_tokens_per_s + speed.alpha_s
    if record.ttft_s is not None and record.stream and record.ttft_s > BUSIER * reading:
        waited = record.ttft_s - reading
        text = (
            f"The first token came after {seconds(record.ttft_s)}; of a server at rest it would have come after "
            f"{seconds(reading)}: it stood behind others for {seconds(waited)}."
        )
        yield Finding("busy_server", waited, text)
    if reading >= 0.5 * record.total_s:
        yield Finding(
            "long_prompt",
            reading / ratio,
            f"Its prompt is long: reading {request.input_tokens:,} tokens takes {seconds(reading / ratio)}.",
        )
    if record.output_tokens:
        writing = record.output_tokens * _step_s(speed)
        if writing >= 0.5 * record.total_s:
            best = f"take {seconds(writing / ratio)} at the best pace of a server of this kind"
            text = f"Its answer is long: {record.output_tokens:,.0f} tokens {best}."
            yield Finding("long_answer", writing / ratio, text)


def _later_than_predicted(record: RequestRecord, stage: StageRecord) -> Iterator[Finding]:
    predicted, seen = stage.predicted_total_s, record.ended_at - stage.at
    if record.ending is Ending.COMPLETE and predicted and seen > LATER * predicted:
        more = ""
        if record.output_tokens and record.predicted_output_tokens:
            more = (
                f" (its answer had {record.output_tokens:,.0f} tokens, {record.predicted_output_tokens:,.0f} expected)"
            )
        took = f"{seconds(seen)} from the choice of the server on"
        text = f"It took {took}, where {seconds(predicted)} were predicted{more}."
        yield Finding("later_than_predicted", seen - predicted, text)


def _how_it_ended(record: RequestRecord) -> Iterator[Finding]:
    if record.shed is not None and record.ending is Ending.REFUSED:
        yield Finding("refused", 0.0, f"It was refused: {SHED.get(record.shed.reason, record.shed.reason)}.")
    elif record.ending is Ending.REFUSED:
        yield Finding("refused", 0.0, f"It was refused here: {record.error or f'status {record.status}'}.")
    elif record.ending is Ending.CLIENT_LEFT:
        yield Finding("client_left", 0.0, f"The client left after {seconds(record.total_s)}.")
    elif record.ending is not Ending.COMPLETE:
        yield Finding("broke", 0.0, f"The answer broke off after {seconds(record.total_s)}: {record.error}.")


def seconds(value: float) -> str:
    """Seconds as people read them."""
    if value < 0.0005:
        return f"{1e6 * value:.0f} µs"
    return f"{1e3 * value:.0f} ms" if value < 0.9995 else f"{value:.2f} s"
