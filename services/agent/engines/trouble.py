"""What an adapter could not read, in words for one log line; and what it means that nothing came at all.

A problem is a kind and its detail, as in `metrics: status 404`: the monitor logs when a kind comes or goes.
"""

from __future__ import annotations

from services.agent.engines.base import Answer, Unreachable
from services.agent.engines.prometheus import Page


def unreachable(*answers: Answer) -> Unreachable:
    """What it means that none of these came: gone only if nobody listens, else hung or cut off."""
    refused = all(a.refused for a in answers)
    return Unreachable(refused, ", ".join(sorted({a.problem for a in answers})))


def reason(answer: Answer) -> str:
    """Why an answer is of no use, in words."""
    if answer.problem:
        return answer.problem
    return f"status {answer.status}" if answer.status != 200 else "not understood"


def listing(answer: Answer, *, known: bool) -> frozenset[str]:
    """What is wrong with the answer that was to list the models: nothing if they are known."""
    return frozenset() if known else frozenset({f"models: {reason(answer)}"})


def metrics(answer: Answer, page: Page, prefix: str, owner: str, running: float | None) -> frozenset[str]:
    """What is wrong with a metrics page on which names with this prefix were looked for, a running count among them."""
    if not answer.ok:
        return frozenset({f"metrics: {reason(answer)}"})
    if not page.has(prefix):
        return frozenset({f"metrics: none of {owner}'s"})
    if running is None:
        return frozenset({"metrics: no number of running requests"})
    return frozenset()
