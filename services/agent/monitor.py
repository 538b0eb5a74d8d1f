"""Looks at inference servers and says which exist, in which phase, and how loaded: the scraping half of the agent.

It knows neither etcd nor gRPC, so that `headwater up` can have it in its own process. Per server one task looks every
interval; what a server is asked is its adapter's business (`engines/`), what its answers amount to is decided here:

- nobody listens, several times in a row: it is gone; one look that finds it brings it back
- it takes connections and answers nothing for long: gone as well; shorter silences are how a busy server behaves
- it says it is not ready: its phase, at once, both ways
- another process answers (start time, or counters that went back): another `boot`, so that nobody trusts what was
  learned of the old one
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Final

import structlog

from common import clock
from common.policy.prediction import class_speed
from common.policy.versions import label_of
from common.types import Endpoint, LoadReport, Phase, Speed
from services.agent.accelerators import Accelerators, Unsampled
from services.agent.adapters import AdapterLoader
from services.agent.boot import Boot
from services.agent.config import InstanceConfig
from services.agent.engines import Adapter, EngineState, Scraper, Unreachable, adapter_for, detect
from services.agent.warming import Prober, Warmer

log = structlog.get_logger()

OnEndpoint = Callable[[Endpoint], None]
OnGone = Callable[[str], None]
OnReport = Callable[[LoadReport], None]

HANDOVER_S: Final = 1.0  # a server stays so long after it was taken out, if new ones came in the same change
JITTER: Final = 0.1  # of the interval, so that looks at many servers do not fall together


class InstanceMonitor:
    """Watches the given servers. Call-backs are made on the event loop, and are to return quickly.

    `on_endpoint` when a server is there, and again whenever what it is changes; `on_gone(id)` when it is not any more;
    `on_report` after each look at one that is there.
    """

    def __init__(
        self,
        *,
        on_endpoint: OnEndpoint,
        on_gone: OnGone,
        rng: Random,
        on_report: OnReport | None = None,
        accelerators: Accelerators | None = None,
        agent: str = "",
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        fail_after: int = 3,
        hang_after_s: float = 30.0,
    ) -> None:
        """`agent`: where load reports come from, for `Endpoint.agent`. The other settings are `AgentConfig`'s."""
        self.on_endpoint = on_endpoint
        self.on_gone = on_gone
        self.on_report = on_report
        self.rng = rng
        self.accelerators: Accelerators = accelerators or Unsampled()
        self.agent = agent
        self.interval_s = interval_s
        self.fail_after = fail_after
        self.hang_after_s = hang_after_s
        self.scraper = Scraper(timeout_s)
        self._watches: dict[str, _Watch] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # those whose successors are being looked at

    def watch(self, instances: Mapping[str, InstanceConfig]) -> None:
        """Watch exactly these (by id) from now on.

        One that is no longer among them is gone at once; where others come in its stead it stays HANDOVER_S longer, so
        that there is a server all the time.
        """
        newcomers = instances.keys() - self._watches.keys()
        for id_ in [i for i in self._watches if i not in instances]:
            if not newcomers:
                self._leave(id_)
            elif id_ not in self._leaving:
                self._leaving[id_] = asyncio.get_running_loop().call_later(HANDOVER_S, self._leave, id_)
        for id_ in self._leaving.keys() & instances.keys():
            self._leaving.pop(id_).cancel()
        for id_, config in instances.items():
            watch = self._watches.get(id_)
            if watch is None:
                self._watches[id_] = _Watch(self, id_, config)
            elif watch.config != config:
                watch.reconfigure(config)

    def _leave(self, id_: str) -> None:
        timer = self._leaving.pop(id_, None)
        if timer is not None:
            timer.cancel()
        self._watches.pop(id_).leave()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The servers that are there, in id order."""
        return tuple(w.endpoint for _, w in sorted(self._watches.items()) if w.endpoint is not None)

    def report(self, id_: str, now: float) -> LoadReport:
        """The load of a watched server as of its last look; figures are None if that found nothing."""
        return self._watches[id_].report(now)

    async def close(self) -> None:
        """Stop looking; nobody is told gone."""
        for timer in self._leaving.values():
            timer.cancel()
        watches, self._watches = list(self._watches.values()), {}
        for watch in watches:
            watch.task.cancel()
            watch.loader.close()
            watch.warmer.close()
            watch.prober.close()
        await asyncio.gather(*(w.task for w in watches), return_exceptions=True)
        await self.scraper.close()


class _Watch:
    """One server under watch."""

    def __init__(self, monitor: InstanceMonitor, id_: str, config: InstanceConfig) -> None:
        self.monitor = monitor
        self.id = id_
        self.config = config
        self.endpoint: Endpoint | None = None  # as last told; None while it is not there
        self._adapter: Adapter | None = None
        self._state = EngineState()  # of the last look; nothing known if that failed
        self._known = EngineState()  # what does not change while a process lives, once it was seen
        self._boot = Boot()
        self._looked_at = self._answered_at = clock.now()
        self._refused = 0
        self._trouble: frozenset[str] = frozenset()
        self.loader = AdapterLoader(id_)
        self.warmer = Warmer(id_)
        self.prober = Prober(id_)
        self.task = self._start()

    def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(), name=f"watch {self.id}")

    def reconfigure(self, config: InstanceConfig) -> None:
        """Another URL, model list, …: takes effect with the next look, without a moment of absence."""
        self.task.cancel()
        self.config = config
        self._adapter = None
        self.task = self._start()

    def leave(self) -> None:
        """It is configured no more."""
        self.task.cancel()
        self.loader.close()
        self.warmer.close()
        self.prober.close()
        self._gone("removed from the configuration")

    def report(self, now: float) -> LoadReport:
        accelerator, state = self.monitor.accelerators.of(self.config, now), self._state
        return LoadReport(
            self.id,
            max(0.0, now - self._looked_at),
            running=state.running,
            waiting=state.waiting,
            kv_utilization=state.kv_utilization,
            gpu_utilization=accelerator.utilization,
            gpu_memory_free_bytes=accelerator.memory_free_bytes,
            generated_tokens=state.generated_tokens,
            progress=_progress(state),
            phase=self.endpoint.phase if self.endpoint is not None else Phase.LOADING,
        )

    async def _run(self) -> None:
        while True:
            began = clock.now()
            try:
                self._take(await self._look(), began)
            except Exception:  # an answer that nobody thought of must not end the watch over a good server
                log.exception("look_failed", instance=self.id, url=self.config.url)
            interval = self.monitor.interval_s * self.monitor.rng.uniform(1.0 - JITTER, 1.0 + JITTER)
            await asyncio.sleep(max(began + interval - clock.now(), 0.05))

    async def _look(self) -> EngineState | Unreachable:
        config = self.config
        ask = self.monitor.scraper.of(config.url, metrics_url=config.metrics_url, management_url=config.management_url)
        if self._adapter is None:
            found = adapter_for(config.engine) or await detect(ask)
            if isinstance(found, Unreachable):
                return found
            self._adapter = found
        return await self._adapter.look(ask)

    def _take(self, seen: EngineState | Unreachable, began: float) -> None:
        self._looked_at = began
        if isinstance(seen, Unreachable):
            self._missed(seen)
        else:
            self._found(seen)
        if self.endpoint is not None and self.monitor.on_report is not None:
            self.monitor.on_report(self.report(clock.now()))

    def _missed(self, why: Unreachable) -> None:
        self._state = EngineState()
        self._refused = self._refused + 1 if why.refused else 0
        self._tell_trouble(frozenset({f"server: {why.why}"}))
        silent_s = clock.now() - self._answered_at
        if self._refused >= self.monitor.fail_after or silent_s >= self.monitor.hang_after_s:
            self._gone(why.why)

    def _gone(self, why: str) -> None:
        if self.endpoint is None:
            return
        log.warning("instance_gone", instance=self.id, url=self.config.url, why=why)
        self.endpoint, self._adapter = None, None
        self._boot.left()
        self.monitor.on_gone(self.id)

    def _found(self, state: EngineState) -> None:
        self._refused, self._answered_at = 0, clock.now()
        if self._boot.changed(state):
            self._known = EngineState()
            log.warning("instance_restarted", instance=self.id, url=self.config.url, boot=self._boot.mark)
        self._state = state
        self._known = replace(
            self._known,
            models=state.models if state.models is not None else self._known.models,
            kv_tokens=state.kv_tokens if state.kv_tokens is not None else self._known.kv_tokens,
            max_running=state.max_running if state.max_running is not None else self._known.max_running,
        )
        self._tell_trouble(state.problems)
        phase = state.phase
        models = frozenset(self.config.models) or self._known.models or frozenset()
        if phase is Phase.SERVING and not (self._warm(models) and self._well(state, models)):
            phase = Phase.LOADING
        endpoint = self._described(phase)
        if endpoint != self.endpoint:
            if self.endpoint is None or self.endpoint.phase is not endpoint.phase:
                log.info("instance_found", instance=self.id, url=endpoint.url, phase=endpoint.phase.value)
            self.endpoint = endpoint
            self.monitor.on_endpoint(endpoint)
        if state.phase is Phase.SERVING:
            self.loader.wants(endpoint.engine, self.config.url, self.config.adapters, state.models)

    def _warm(self, models: frozenset[str]) -> bool:
        """Whether it has answered one token since it started, where that is asked of it."""
        return not self.config.warm_up or self.warmer.warm(self._boot.mark, self.config.url, models)

    def _well(self, state: EngineState, models: frozenset[str]) -> bool:
        """Whether it has answered when it was idle; one that does not tell what it is doing is not asked."""
        idle_s = self.config.probe_idle_s
        if not idle_s:
            return True
        idle = state.running == 0 and not state.waiting
        return self.prober.well(self.config.url, models, idle=idle, work=_progress(state), idle_s=idle_s)

    def _described(self, phase: Phase) -> Endpoint:
        config, known, boot = self.config, self._known, self._boot.mark
        accelerator = self.monitor.accelerators.of(config, clock.now())
        gpu, models = accelerator.gpu, frozenset(config.models) or known.models
        return Endpoint(
            self.id,
            url=config.url,
            agent=self.monitor.agent,
            models=models or frozenset(),
            engine=config.engine or (self._adapter.engine if self._adapter is not None else ""),
            gpu=gpu,
            weight=config.weight,
            price_usd_per_hour=config.price_usd_per_hour,
            # A server that lists its models and has none can serve nothing; without a list it might serve anything.
            phase=Phase.LOADING if models == frozenset() else phase,
            boot=f"{config.version}/{boot}" if config.version else boot,
            capacity=_capacity(gpu, known),
            memory_gb=accelerator.memory_gb,
            labels=_labels(config),
            loadable=frozenset(config.loadable) - (models or frozenset()),
        )

    def _tell_trouble(self, trouble: frozenset[str]) -> None:
        """One line when a kind of trouble (what stands before the colon) comes or goes, not one a look."""
        if {t.partition(":")[0] for t in trouble} != {t.partition(":")[0] for t in self._trouble}:
            level = log.warning if trouble else log.info
            level("instance_trouble", instance=self.id, url=self.config.url, trouble=sorted(trouble))
        self._trouble = trouble


def _labels(config: InstanceConfig) -> frozenset[str]:
    """Those it is configured with, and its version as one."""
    labels = frozenset(f"{key}={value}" for key, value in config.labels.items())
    return labels | {label_of(config.version)} if config.version else labels


def _progress(state: EngineState) -> float | None:
    """All its counters of work together; None if it has none."""
    known = [figure for figure in (state.generated_tokens, state.steps) if figure is not None]
    return sum(known) if known else None


def _capacity(gpu: str, known: EngineState) -> Speed | None:
    """The prior of its class of GPU with the limits it told; None if it told none."""
    prior = class_speed(gpu)
    if not known.kv_tokens and not known.max_running:
        return None
    return replace(prior, kv_tokens=known.kv_tokens or prior.kv_tokens, slots=known.max_running or prior.slots)
