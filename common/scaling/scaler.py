"""Decides for each model that is scaled how many replicas of each group there should be, from what this tier sees.

Every balancer of a node decides alike, so that whoever asks gets the same answer and any can go on alone; the one with
the first name has it done. What comes in is told to the others through the shared store; one that lives and tells
nothing counts as one like ourselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from common import clock
from common.balancing import Balancing
from common.errors import StoreUnavailable
from common.exchange import Board, Wanted, wanted_board
from common.policy.prediction import class_speed
from common.policy.scaling.demand import Counts, GroupSeen, group_seen
from common.policy.scaling.desired import Decision, DesiredReplicas, Group, Rules, Seen
from common.scaling.config import ScaledGroup, ScaledModel, Scaling
from common.store.base import AffinityStore
from common.types import Endpoint, InferenceRequest, Path, Slo

log = structlog.get_logger()

TOLD_S = 10.0  # what a balancer said of its arrivals is believed for so long
SEEN_BEFORE = 8192  # requests remembered, so that one that is tried again counts once

_Told = dict[str, tuple[float, float, float]]


class Provider(Protocol):
    """Makes the replicas of one group more or fewer."""

    failures: int  # of all tries so far

    def want(self, replicas: int, reason: str, *, at_least: bool) -> None:
        """There should be so many from now on. Returns at once; told again and again, changed or not.

        `at_least`: more are left alone. While a balancer is young it may not know yet who is there.
        """

    async def close(self) -> None:
        """Stop trying."""


class _Model:
    """One model's policy, and what was counted for it."""

    def __init__(self, name: str, config: ScaledModel) -> None:
        self.name = name
        self.config = config
        groups = [
            Group(id_, g.price_usd_per_hour, g.min_replicas, g.max_replicas, g.cold_start_s)
            for id_, g in config.groups.items()
        ]
        self.policy = DesiredReplicas(groups, rules_of(config))
        self.counts = Counts()  # of this process, ever
        self.seen: dict[str, GroupSeen] = {}
        self.decision: Decision | None = None
        self._taken = (0.0, 0.0, 0.0)  # of our own
        self._heard: dict[str, tuple[float, float, float]] = {}  # of others, as last told

    def new(self, others: Mapping[str, tuple[float, float, float] | None]) -> tuple[float, float, float]:
        """Requests, tokens in and tokens out since the last call; None: that balancer lives and tells nothing."""
        mine = self.told()
        own = _less(mine, self._taken)
        self._taken = mine
        made = [own]
        for id_, told in others.items():
            if told is None:
                made.append(own)
                continue
            made.append(_less(told, self._heard.get(id_, told)))
            self._heard[id_] = told
        for gone in self._heard.keys() - others.keys():
            del self._heard[gone]
        requests, tokens_in, tokens_out = (sum(column) for column in zip(*made, strict=True))
        return requests, tokens_in, tokens_out

    def told(self) -> tuple[float, float, float]:
        """All that came here, for the others."""
        return self.counts.requests, self.counts.input_tokens, self.counts.output_tokens


class Scaler:
    """Of one process. `cluster` is the pool whose instances are scaled."""

    def __init__(
        self,
        config: Scaling,
        cluster: Path,
        balancing: Balancing,
        store: AffinityStore,
        others: Callable[[], frozenset[str]],
        waiting: Callable[[str], int],
        providers: Mapping[tuple[str, str], Provider],
        above: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`others`: the other live balancers of this node. `waiting`: requests for a model that wait in this process.

        `providers`: by model and group. `above`: the balancers of the tiers above, which wait for what nobody serves.
        """
        self.config = config
        self.cluster = cluster
        self.providers = providers
        self.models = {name: _Model(name, model) for name, model in config.models.items()}
        self.decided = asyncio.Event()  # set and replaced after each round
        self._balancing = balancing
        self._board = Board[_Told](store, cluster, "arrivals", _Told, TOLD_S)
        self._wanted_above = wanted_board(store)
        self._others = others
        self._above = above
        self._waiting = waiting
        self._recent: dict[str, None] = {}
        # The policy's clock goes on over restarts, so that a day has the same phases, and never goes back.
        self._began = clock.now()
        self._wall_s = clock.wall_ns() / 1e9 - clock.now()

    def arrived(self, request: InferenceRequest) -> None:
        """A request came in here, from a client or from a tier above, whatever becomes of it."""
        model = self.models.get(request.model)
        if model is None or request.id in self._recent:
            return
        self._recent[request.id] = None
        if len(self._recent) > SEEN_BEFORE:
            del self._recent[next(iter(self._recent))]
        model.counts.add(request.input_tokens, request.output_tokens)

    @property
    def acts(self) -> bool:
        """Whether this balancer is the one of its node that has replicas started and stopped."""
        return all(self._balancing.process_id < other for other in self._others())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.decide(await self._exchange(), await self._wanted())
            await asyncio.sleep(self.config.interval_s)

    def decide(self, others: Mapping[str, _Told | None], wanted: Wanted | None = None) -> None:
        """One round. `others`: what each other balancer has told of its arrivals, None where it tells nothing.

        `wanted`: what the tiers above wait for.
        """
        now = clock.now() + self._wall_s
        balancer = self._balancing.balancers.get(self.cluster)
        for model in self.models.values():
            arrivals, tokens_in, tokens_out = model.new(
                {id_: None if told is None else told.get(model.name, (0.0, 0.0, 0.0)) for id_, told in others.items()}
            )
            model.seen = {
                id_: group_seen(balancer, _belongs(model.name, group), class_speed(group.gpu))
                if balancer is not None
                else GroupSeen(class_speed(group.gpu))
                for id_, group in model.config.groups.items()
            }
            seen = Seen(
                model.seen,
                arrivals,
                tokens_in,
                tokens_out,
                self._waiting(model.name) + (wanted or {}).get(model.name, 0),
                complete=balancer is None or not balancer.stale,
            )
            before = model.decision
            model.decision = decision = model.policy.decide(seen, now)
            if before is not None and before.desired != decision.desired:
                log.info("scaling", model=model.name, replicas=dict(decision.desired), reason=decision.reason)
            young = clock.now() - self._began < min(model.config.idle_s, model.config.cooldown_s)
            if self.acts:
                for id_, replicas in decision.desired.items():
                    provider = self.providers.get((model.name, id_))
                    if provider is not None:
                        provider.want(replicas, decision.reason, at_least=young)
        self.decided.set()
        self.decided = asyncio.Event()

    async def close(self, grace_s: float) -> None:
        """Stop telling."""
        await asyncio.gather(*(provider.close() for provider in self.providers.values()))

    # -- what the balancers of a node tell each other ------------------------------------------------------------------

    async def _exchange(self) -> dict[str, _Told | None]:
        others = sorted(self._others())
        if not others:
            return {}
        try:
            await self._board.tell(self._balancing.process_id, {n: model.told() for n, model in self.models.items()})
            return await self._board.hear(others)
        except StoreUnavailable:
            return dict.fromkeys(others)

    async def _wanted(self) -> Wanted:
        """What the tiers above wait for; looked at only where a model may have no replica at all."""
        above = self._above() if any(not model.config.min_replicas for model in self.models.values()) else ()
        if not above:
            return {}
        try:
            told = (await self._wanted_above.hear(above)).values()
        except StoreUnavailable:
            return {}
        return sum((Counter(one) for one in told if one), Counter())


def rules_of(model: ScaledModel) -> Rules:
    """A model's settings as its policy takes them."""
    return Rules(
        Slo(model.slo_ttft_s, model.slo_tpot_s),
        model.min_replicas,
        model.max_replicas,
        model.utilization,
        model.drain_s,
        model.panic_window_s,
        model.panic_s,
        model.cooldown_s,
        model.idle_s,
        model.bucket_s,
        model.seasons_s,
    )


def _belongs(model: str, group: ScaledGroup) -> Callable[[Endpoint], bool]:
    labels = {f"{key}={value}" for key, value in group.labels.items()}

    def belongs(endpoint: Endpoint) -> bool:
        return model in endpoint.offers and group.gpu in ("", endpoint.gpu) and labels <= endpoint.labels

    return belongs


def _less(now: tuple[float, float, float], before: tuple[float, float, float]) -> tuple[float, float, float]:
    """What came since; a counter that went back is of a process that began anew."""
    if now[0] < before[0]:
        return now
    return now[0] - before[0], now[1] - before[1], now[2] - before[2]
