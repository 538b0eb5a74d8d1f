"""A quote: what a region or cluster says of the servers below it, short enough to be sent several times a second.

Up to QUOTE_INSTANCES servers are listed one by one; beyond that each GPU class is one mean server with a count, which
loses nothing measurable in the choice among regions. The chooser replays on it what it has sent since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from common.types import ServerLoad

QUOTE_INSTANCES = 16


def class_means(loads: Sequence[ServerLoad]) -> tuple[ServerLoad, ...]:
    """One mean server per (GPU class, models), counted."""
    groups: dict[tuple[str, frozenset[str]], list[ServerLoad]] = {}
    for load in loads:
        groups.setdefault((load.gpu, load.models), []).append(load)
    return tuple(_mean(group) for group in groups.values())


def _mean(group: Sequence[ServerLoad]) -> ServerLoad:
    count = sum(load.count for load in group)

    def mean(value: Callable[[ServerLoad], float]) -> float:
        return sum(value(load) * load.count for load in group) / count

    first = group[0]
    speed = replace(
        first.speed,
        alpha_s=mean(lambda x: x.speed.alpha_s),
        beta_s=mean(lambda x: x.speed.beta_s),
        gamma_s=mean(lambda x: x.speed.gamma_s),
        prefill_tokens_per_s=mean(lambda x: x.speed.prefill_tokens_per_s),
        slots=mean(lambda x: x.speed.slots),
        kv_tokens=mean(lambda x: x.speed.kv_tokens),
    )
    return ServerLoad(
        speed,
        first.gpu,
        count,
        mean(lambda x: x.decoding),
        mean(lambda x: x.waiting),
        mean(lambda x: x.prompt_tokens),
        mean(lambda x: x.context_tokens),
        mean(lambda x: x.remaining_tokens),
        mean(lambda x: x.prefill_share),
        mean(lambda x: x.price_usd_per_hour),
        first.models,
    )
