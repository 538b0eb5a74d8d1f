"""Decisions in sentences: what `headwater explain` prints, and a newcomer understands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from common.explain.causes import SHED, ordered, seconds
from common.explain.decisions import CandidateView, Decision, LeftOut, StageView

SHOWN = 8  # candidates of one stage; the rest are counted
ENDINGS = {
    "complete": "answered",
    "client_left": "given up by the client",
    "broke_before_first_byte": "failed before its first byte",
    "broke_after_first_byte": "broken off after its first byte",
    "refused_here": "refused",
}
WHY = {
    "only_candidate": "it was the only one that could take it",
    "session": "its session was served there last, and it cost least",
    "lowest_cost": "it cost least",
    "about_equal": "it was its turn among those that cost about the same",
}
TERMS = {
    "completion_s": "completion",
    "own_completion_s": "own completion",
    "round_trip_s": "round trip",
    "price_usd": "price",
    "in_flight": "in flight",
}


def explain(decisions: Iterable[Decision]) -> list[str]:
    """Lines about one request, from the decisions that all tiers keep of it; empty if there are none.

    A client may send several requests in one trace: each then gets its own part.
    """
    lines: list[str] = []
    for journey in journeys(decisions):
        if lines:
            lines.append("")
        lines += _journey(journey)
    return lines


def journeys(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Split by request, each with its tiers in the order in which it passed them."""
    ordered = sorted(decisions, key=lambda d: (d.time, len(d.node.split("/")) if d.node else 0))
    found: list[list[Decision]] = []
    for decision in ordered:
        if not decision.from_peer or not found:
            found.append([decision])
            continue
        # Of a lower tier: of the latest request before it that was sent there and has nothing of that process yet.
        home = next((j for j in reversed(found) if _sent_to(j, decision.process)), found[-1])
        home.append(decision)
    return found


def _sent_to(journey: Sequence[Decision], process: str) -> bool:
    tries = sum(a.peer == process for d in journey for a in d.attempts)
    return tries > sum(d.process == process for d in journey)


def _journey(journey: Sequence[Decision]) -> list[str]:
    first = journey[0]
    lines = [*_what_happened(first), *_what_was_asked(first)]
    number = 0
    for decision in journey:
        for stage in decision.stages:
            number += 1
            lines += ["", *stage_lines(number, f"{decision.process} chose", stage)]
            lines += _attempt(decision, stage)
        if decision.shed and not decision.attempts:
            lines += ["", f"{decision.process} found nobody to send it to: {SHED.get(decision.shed, decision.shed)}."]
    return [*lines, "", *_outcome(journey), *_findings(journey)]


def _what_happened(d: Decision) -> list[str]:
    o = d.outcome
    when = datetime.fromtimestamp(d.time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    how = ENDINGS.get(o.ending, o.ending)
    by = f" by {o.served_by}" if o.served_by else ""
    took = f" in {seconds(o.total_s)}" if o.ending == "complete" else f" after {seconds(o.total_s)}"
    model = f" for {d.model}" if d.model else ""
    return [f"Request {d.id}", f"{d.path}{model}, {when} UTC: {how} with {o.status}{took}{by}."]


def _what_was_asked(d: Decision) -> list[str]:
    f = d.features
    if f is None:
        return []
    parts = [f"{f.input_tokens:,} prompt tokens"]
    if f.output_tokens:
        most = f" (at most {f.max_output_tokens:,})" if f.max_output_tokens is not None else ""
        parts.append(f"an answer of about {f.output_tokens:,.0f} expected{most}")
    parts.append("as a stream" if f.stream else "in one piece")
    if f.priority != "standard":
        parts.append(f"priority {f.priority}")
    if f.slo_ttft_s is not None:
        parts.append(f"first token wanted within {seconds(f.slo_ttft_s)}")
    if f.slo_tpot_s is not None:
        parts.append(f"each further token within {seconds(f.slo_tpot_s)}")
    if f.deadline_s is not None:
        parts.append(f"all of it within {seconds(f.deadline_s)}")
    lines = [f"Asked: {', '.join(parts)}."]
    if f.warm:
        lines.append(f"Its session was served by {f.warm} last, where up to {f.warm_tokens:,} tokens may be cached.")
    elif f.session:
        lines.append("It belongs to a session that was not seen before.")
    return lines


def stage_lines(number: int, chose: str, s: StageView) -> list[str]:
    """One stage: whom it chose (`chose` begins the sentence), what the candidates cost, who was left out."""
    place = f" of {s.node}" if s.node else ""
    lines = [f"{number}. {chose} the {s.chooses} {s.chosen}{place}: {WHY.get(s.why, s.why)} ({s.policy})."]
    if s.takeover:
        lines.append(f"   It chose in place of {s.node or 'the global tier'}'s own balancers, which were gone.")
    lines += [f"   {line}" for line in _table(s)]
    if s.runner_up and s.margin is not None:
        unit = s.unit == "s"
        if s.margin >= 0.0:
            by = seconds(s.margin) if unit else f"{s.margin:g}"
            lines.append(f"   Next best was {s.runner_up}, dearer by {by}.")
        else:
            by = seconds(-s.margin) if unit else f"{-s.margin:g}"
            lines.append(f"   {s.runner_up} was cheaper by {by}, too little to decide.")
    lines += [f"   Left out: {_left_out(left)}." for left in s.left_out]
    if s.unheard:
        named = ", ".join(s.unheard[:SHOWN]) + (" …" if len(s.unheard) > SHOWN else "")
        lines.append(f"   No fresh load report: {named}.")
    if s.pool_stale:
        lines.append("   Membership was what was known last: etcd was out of reach.")
    return lines


def _table(s: StageView) -> list[str]:
    """The candidates with their terms, in columns; nothing where there was no choice."""
    if len(s.candidates) < 2:
        return []
    shown = s.candidates[:SHOWN]
    chosen = next(c for c in s.candidates if c.chosen)
    if chosen not in shown:
        shown[-1] = chosen
    terms = list(dict.fromkeys(t for c in shown for t in c.terms))
    rows = [["", s.chooses, "cost", *(TERMS.get(t, t) for t in terms)]]
    rows += [[">" if c.chosen else "", c.id, _cost(c, s.unit), *(_term(c, t, s.unit) for t in terms)] for c in shown]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(len(row))]
        lines.append(" ".join((cells[0], "  ".join(cells[1:]))).rstrip())
    if len(s.candidates) > len(shown):
        lines.append(f"  … and {len(s.candidates) - len(shown)} more")
    return lines


def _cost(c: CandidateView, unit: str) -> str:
    if c.cost is None:
        return "cannot hold it"
    return seconds(c.cost) if unit == "s" else f"{c.cost:g}"


def _term(c: CandidateView, term: str, unit: str) -> str:
    value = c.terms.get(term)
    if value is None:
        return ""
    if term == "price_usd":
        worth = f" = {seconds(c.adds[term])}" if c.adds.get(term) else ""
        return f"${value:.7f}".rstrip("0").rstrip(".") + worth
    return seconds(value) if unit == "s" else f"{value:g}"


def _left_out(left: LeftOut) -> str:
    if not left.endpoints:
        return f"{left.count} ({left.why})"
    more = f" and {left.count - len(left.endpoints)} more" if left.count > len(left.endpoints) else ""
    return f"{', '.join(left.endpoints)}{more} ({left.why})"


def _attempt(d: Decision, s: StageView) -> list[str]:
    """What came of the try that a decision led to: told where a process's last stage of that try ends."""
    last_of_try = [x for x in d.stages if x.attempt == s.attempt][-1]
    if s is not last_of_try or s.attempt >= len(d.attempts):
        return []
    a = d.attempts[s.attempt]
    to = f"the balancer {a.peer}" if a.peer else a.target
    if a.error:
        return [f"   Sent to {to}: {a.error.replace('_', ' ')} after {seconds(a.took_s)}."]
    first = f", first byte after {seconds(a.first_byte_s)}" if a.first_byte_s is not None else ""
    return [f"   Sent to {to}: {a.status}{first}, over after {seconds(a.took_s)}."]


def _outcome(journey: Sequence[Decision]) -> list[str]:
    """The prediction of the tier next to the server against what came of it, and the tokens."""
    o = journey[0].outcome
    lines = []
    predicted = [s for d in journey for s in d.stages if s.predicted_total_s is not None and s.seen_total_s is not None]
    if predicted:
        s = predicted[-1]
        assert s.predicted_total_s is not None
        assert s.seen_total_s is not None
        if s.predicted_ttft_s is not None and s.seen_ttft_s is not None:
            lines.append(f"First token: predicted after {_against(s.predicted_ttft_s, s.seen_ttft_s)}.")
        lines.append(f"All of it: predicted after {_against(s.predicted_total_s, s.seen_total_s)}.")
    if o.output_tokens is not None:
        pace = f", {seconds(o.tpot_s)} for each after the first" if o.tpot_s is not None else ""
        f = journey[0].features
        expected = f" ({f.output_tokens:,.0f} were expected)" if f is not None and f.output_tokens else ""
        lines.append(f"The answer had {o.output_tokens:,.0f} tokens{expected}{pace}.")
    return lines


def _against(predicted: float, seen: float) -> str:
    off = seen / predicted - 1.0 if predicted > 0.0 else 0.0
    later = f"{100 * abs(off):.0f} % {'later' if off > 0 else 'sooner'}" if abs(off) >= 0.01 else "as predicted"
    return f"{seconds(predicted)}, seen after {seconds(seen)}: {later}"


def _findings(journey: Sequence[Decision]) -> list[str]:
    seen: set[str] = set()
    found = []
    for finding in ordered(f for d in journey for f in d.findings):
        if finding.text not in seen:
            seen.add(finding.text)
            found.append(finding)
    if not found:
        return ["Nothing stands out: it took about as long as such a request takes."]
    return ["What stands out, the largest first:", *(f" - {finding.text}" for finding in found)]
