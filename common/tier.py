"""One tier as a process: builds what `serving` needs from a configuration, runs it, and leaves in good order.

Start: configuration, stores, listener, membership, reports, admin. Leaving (SIGTERM): readiness fails and the
registration is revoked at once; for a moment clients are still served, each for the last time on its connection, so
that whatever balances in front can notice; then what is under way ends within the grace, and what does not is ended in
the open. A second SIGTERM ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import nullcontext, suppress
from fnmatch import fnmatchcase
from random import Random
from socket import AF_INET, AF_INET6, create_server, gethostname
from ssl import SSLContext
from typing import Any, Protocol

import structlog
import uvicorn
from fastapi import APIRouter

from common import apis, backing, clock, logs, tokenizer
from common.admin import admin_app
from common.admin.peers import Peers
from common.affinity import Affinity
from common.balancing import Balancing
from common.config import PolicySection, TierConfig
from common.config_api import config_router, log_router, policy_router
from common.drain_api import drain_router
from common.errors import ConfigError, ConnectFailed, RejectedError
from common.exchange import Exchange as ReplicaExchange
from common.exchange import tell_wanted
from common.explain.decisions import Decision, decision_of
from common.guard import Guard, peer_token
from common.hook import Hook
from common.hung import HungPeers
from common.local import local_app
from common.lookout import Lookout
from common.membership import Membership
from common.policy import balancer
from common.policy.balancer import Policy
from common.policy.candidate import Limits
from common.policy.placement import placed
from common.policy.regions import regional
from common.policy.stages import POLICIES, policy_named
from common.policy.waiting import Bounds
from common.pool_metrics import PoolMetrics
from common.quotes import Quotes
from common.records import RequestRecord
from common.relay.asgi import AsgiApp, answer_with
from common.relay.exchange import Exchange
from common.relay.heads import Headers
from common.relay.relay import Relay
from common.relay.tls import Certificates
from common.reload import Reloader, Source
from common.reporting import ReportServer, Tls
from common.rollout_api import rollout_router
from common.rollouts import Rollouts
from common.serving import Serving
from common.shadowing import Shadows
from common.spans import OtlpExport
from common.store.base import MembershipStore
from common.telemetry import AccessLog, DecisionSink, Telemetry
from common.tenancy.build import tenants_of
from common.tenancy.directory import Tenant
from common.types import Path, Peer, Pool, Slo, Tier
from common.watchdog import Watchdog
from common.whereabouts import Whereabouts

log = structlog.get_logger()

ADMIN_STOP_S = 1.0
COLLECT_AFTER = 50_000  # objects made and not freed; by Python's own 700 a fifth of all CPU time went into collecting
ROUND_TRIPS_KEPT = 5  # the least of the last five handshakes is the distance; what is above it is scheduling
LIVE = frozenset(  # what may change while a tier runs; the rest is an address, a name, a store, or its way to one
    {
        "limits",
        "upstream",
        "retry",
        "health",
        "drain",
        "policy",
        "affinity",
        "residency",
        "clients",
        "cors",
        "streaming",
        "forward",
        "network",
        "placement",
        "queue",
        "models.aliases",
        "models.splits",
        "models.on_demand",
        "tracing.sample_ratio",
        "log.level",
    }
)
TLS_ROUND_TRIPS = 2  # of a handshake: one for TCP, one for TLS 1.3


class Beside(Protocol):
    """What serves requests beside the data listener, and ends with it."""

    async def close(self, grace_s: float) -> None:
        """Take no more, and give what is under way so long."""


class TierProcess:
    """One running tier. `start`, then `run` until a signal or `stop`."""

    def __init__(
        self,
        config: TierConfig,
        node: Path,
        *,
        serves: Callable[[Path], bool] | None = None,
        store: MembershipStore | None = None,
        source: Source[Any] | None = None,
        on_config: Callable[[Any], None] = lambda config: None,
        live: Collection[str] = (),
    ) -> None:
        """`source`: where the configuration is from, to be followed; `on_config` is told of another one, which may
        differ in the `live` keys besides those that every tier can change.
        """
        verify(config)
        self.config = config
        self._policy_now = config.policy  # the admin API may have changed it since the file was read
        self._source = source
        self._on_config = on_config
        self._live = LIVE | frozenset(live)
        self.node = node
        self.tier = Tier.of(node)
        self.pools: Mapping[Path, Pool] = {}
        self.draining = False
        self.port = 0
        self.admin_port = 0
        self._rng = Random(secrets.randbits(64))
        self._store = store
        self._serves = serves or (lambda path: path == node)
        self._stop = asyncio.Event()
        self._told = asyncio.Event()  # set whenever membership speaks
        self._tasks: list[asyncio.Task[None]] = []
        self.beside: list[Beside] = []
        self.routers: list[APIRouter] = []  # of the admin API, besides those that every tier has
        self._round_trips: dict[str, list[float]] = {}
        self._peer_urls: dict[str, str] = {}  # of all balancers that membership knows, by id

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Learn what there is, bind, register and begin to serve.

        `prepare` is awaited before the first request can come, with the pools known. Raises ConfigError for what cannot
        work; then nothing is left running.
        """
        config = self.config
        self._certificates = Certificates(config.tls)
        store = self._store if self._store is not None else await backing.membership_store(config.etcd)
        self._store = store
        self._keys = backing.RouteKeys(config.auth, config.etcd, store)
        self.signer = await self._keys.signer()
        self.id = config.id or self._default_id()
        self._needs = config.placement.needs()
        self.balancing = Balancing(
            self.id,
            self._serves,
            self._policy,
            self._limits(),
            self._rng,
            self._on_demand,
        )
        self._versions = config.models.versions()
        self.rollouts = Rollouts(
            store, config.etcd.prefix, self.id, self._versions, self.balancing.has_version, self._knows_balancer
        )
        self.affinity_store = backing.affinity_store(config.redis, config.affinity.max_sessions)
        self._make_telemetry()
        self._tenants = await tenants_of(config, store, lambda: len(self.replicas()) + 1)
        self._make_serving()
        tls = Tls(config.tls.cert_file, config.tls.key_file, config.tls.ca_file) if config.tls.cert_file else None
        self.quotes = Quotes(
            self.node, self.balancing, self._rng, config.reports.interval_s, tls=tls, on_peer=self._heard_of
        )
        self.reports = ReportServer(interval_s=config.reports.interval_s, tls=tls)
        self.quotes.offer(self.reports)
        self.membership = Membership(
            store,
            on_change=self._changed,
            ttl_s=config.etcd.ttl_s,
            root=config.etcd.prefix,
            answers=self.balancing.answers,
            adopts=bool(config.etcd.urls),
        )
        try:
            await self._listen(prepare)
        except BaseException:
            await self._close(0.0)
            raise

    def _make_telemetry(self) -> None:
        config = self.config
        self._export = None
        if config.tracing.otlp_endpoint:
            self._export = OtlpExport(config.tracing.otlp_endpoint, self.id, self.tier.value)
        self.telemetry = Telemetry(
            recent=config.tracing.recent,
            recent_s=config.tracing.recent_s,
            known_model=self.balancing.known,
            access_log=config.log.access,
            decisions=self._decision_sinks(),
            export=self._export,
        )
        self.telemetry.registry.register(PoolMetrics(self.balancing, self.telemetry.picks))

    def _decision_sinks(self) -> list[DecisionSink]:
        """Where decision records are kept beside the ring; the stream's writer is started with the other tasks."""
        tracing, found = self.config.tracing, list[DecisionSink]()
        if tracing.decisions_file:
            try:
                fd = os.open(tracing.decisions_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            except OSError as error:
                name = tracing.decisions_file
                raise ConfigError(f"tracing.decisions_file: cannot write {name}: {error.strerror}") from None
            found.append(AccessLog(fd, self._decision_of))
        self._stream = backing.decision_stream(tracing, self.config.redis, self._decision_of)
        if self._stream is not None:
            found.append(self._stream)
        return found

    def _decision_of(self, record: RequestRecord) -> Decision:
        return decision_of(record, self.balancing.balancers)

    def _make_serving(self) -> None:
        config = self.config
        affinity = Affinity(self.affinity_store, config.affinity)
        local: AsgiApp = local_app(self.balancing, lambda: not self.draining, self._versions.aliases)

        async def answer_locally(exchange: Exchange, added: Headers, tenant: Tenant | None) -> None:
            await answer_with(local, exchange, added, {"tenant": tenant})

        gate = self._tenants.gate if self._tenants is not None else None
        if gate is not None:
            self.telemetry.registry.register(gate.metrics)

        self._hook = Hook(config.health.event_url)
        self.serving = Serving(
            self.id,
            self.node,
            self.balancing,
            affinity,
            self.telemetry,
            self.signer,
            answer_locally,
            attempts=config.retry.attempts,
            budget_ratio=config.retry.budget_ratio,
            continue_streams=frozenset(config.retry.continue_streams),
            sample_ratio=config.tracing.sample_ratio,
            rng=self._rng,
            slo=Slo(config.policy.slo_ttft_s, config.policy.slo_tpot_s),
            quarantine_s=config.health.quarantine_s,
            versions=self._versions,
            hook=self._hook,
            queue=_bounds(config),
            allowed_origins=config.cors.allowed_origins,
            dropped_headers=_header_names(config.forward.drop_headers),
            comment_s=config.streaming.keepalive_comment_s,
            verified_peers=config.tls.peers_required,
            gate=gate,
            shadows=Shadows(config.models.copies(), config.models.shadow_requests, config.models.shadow_bytes),
        )
        self.serving.intake.tokenizers = tokenizer.Tokenizers(config.models.tokenizers)
        self.relay = Relay(
            self.serving.serve, _refusal, config.limits, config.upstream, half_close=config.upstream.half_close
        )
        self.relay.delay_of = self._delay_of
        self.relay.tls_of = self._tls_of
        self.serving.relay = self.relay
        self._place_clients()
        self._hung = HungPeers(self.relay)
        self._watchdog = Watchdog(self.relay, self.balancing, config.health.stall_s, self._hook)

    async def _listen(self, prepare: Callable[[], Awaitable[None]] | None) -> None:
        config = self.config
        host, port = _split(config.listen)
        report_port = await self.reports.start(config.reports.listen)
        self.spawn(backing.warm(self.affinity_store), "affinity")
        self.spawn(self.membership.run(), "membership")
        self.spawn(self._keys.follow(self.signer), "route keys")
        self.spawn(self._certificates.watch(), "certificates")
        self.spawn(self.quotes.run(), "quotes")
        if config.etcd.urls:
            self.spawn(Lookout(self.membership, lambda: self._certificates.instances).run(), "lookout")
        exchange = ReplicaExchange(
            self.affinity_store, self.node, self.balancing, self.serving.quarantine, self.replicas
        )
        self.spawn(exchange.run(), "exchange between replicas")
        if self.tier is not Tier.INSTANCE and config.etcd.urls:  # else there is no tier below
            self.spawn(tell_wanted(self.affinity_store, self.id, self._wanted), "what is waited for")
        self.spawn(self._measure_round_trips(), "round trips")
        if self._tenants is not None:
            self.spawn(self._tenants.run(), "tenants")
            await self._tenants.gate.until(lambda directory: True, backing.STORE_START_S)
        if self._stream is not None:
            self.spawn(self._stream.run(), "decision records")
        self.spawn(self._watchdog.run(), "watchdog")
        self.serving.on_versioned = self.rollouts.saw
        self.spawn(self.rollouts.follow(), "rollouts")
        self.spawn(self.rollouts.run(), "rollouts move")
        # The first request must not meet a process that has not heard yet what there is.
        if not await self.membership.until_heard(backing.FIRST_WORD_S):
            log.warning("membership_not_heard", meanwhile="serving nobody yet")
        await self.until(bool, backing.STORE_START_S)
        if prepare is not None:
            await prepare()
        try:
            self.port = await self.relay.listen(host, port, shared=config.workers > 1, tls=self._certificates.listener)
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.listen}: {error.strerror or error}") from None
        await self._start_admin()
        advertised = config.advertise or ("127.0.0.1" if host in ("0.0.0.0", "::") else host)
        report_host, _ = _split(config.reports.listen)
        self._own_url = f"{'https' if config.tls.cert_file else 'http'}://{_bracketed(advertised)}:{self.port}"
        peer = Peer(
            self.id,
            self._own_url,
            f"{_bracketed(advertised if report_host in ('0.0.0.0', '::') else report_host)}:{report_port}",
            self._admin_url(advertised),
        )
        await self.membership.register_balancer(self.node, peer)

    def _admin_url(self, advertised: str) -> str:
        """Where others find the admin listener."""
        host, _ = _split(self.config.admin)
        scheme = "https" if self.config.tls.admin else "http"
        return f"{scheme}://{_bracketed(advertised if host in ('0.0.0.0', '::') else host)}:{self.admin_port}"

    def _default_id(self) -> str:
        where = "-".join(self.node) or "global"
        name = f"{where}-{gethostname().split('.')[0]}-{_split(self.config.listen)[1] or secrets.token_hex(3)}"
        if self.config.workers == 1:
            return name
        return f"{name}-{_split(self.config.admin)[1] or secrets.token_hex(3)}"  # one of several on a port

    def _policy(self, path: Path) -> Policy:
        policy, placement = self._policy_now, self.config.placement
        named = policy_named(policy.name, policy.price_weight_s_per_usd, Tier.of(path))
        found = placed(named, self._needs, placement.adapter_load_s)
        return regional(found, policy.terms(), policy.price_weight_s_per_usd) if not path else found

    def _on_demand(self, model: str) -> bool:
        return any(fnmatchcase(model, glob) for glob in self.config.models.on_demand)

    def _place_clients(self) -> None:
        home = self.node[0] if self.node else ""
        self.serving.intake.whereabouts = Whereabouts(self.config.clients, self.config.residency, home)

    def _limits(self) -> Limits:
        config = self.config
        health = config.health
        return Limits(config.upstream.max_in_flight, health.eject_after, health.cooldown_s, health.max_ejected_ratio)

    def _change_policy(self, policy: PolicySection) -> None:
        self._policy_now = policy
        self.balancing.reconfigure(self._policy, self._limits())

    def _reconfigure(self, config: TierConfig) -> None:
        """Take another configuration over, at once; what is fixed is the same in both."""
        before, self.config = self.config, config
        if config.policy != before.policy:
            self._policy_now = config.policy
        if config.placement != before.placement:
            self._needs = config.placement.needs()
        decides = (config.policy, config.placement, self._limits())
        if decides != (before.policy, before.placement, self.balancing.limits):
            self.balancing.reconfigure(self._policy, self._limits())
        self._versions.adopt(config.models.versions())
        self.serving.queue.reconfigure(_bounds(config))
        self.relay.reconfigure(config.limits, config.upstream, half_close=config.upstream.half_close)
        self.serving.affinity.rules = config.affinity
        self.serving.intake.slo = Slo(config.policy.slo_ttft_s, config.policy.slo_tpot_s)
        if config.log.level != before.log.level:
            logs.set_level(config.log.level)
        self._place_clients()
        self.serving.reconfigure(
            attempts=config.retry.attempts,
            budget_ratio=config.retry.budget_ratio,
            continue_streams=frozenset(config.retry.continue_streams),
            sample_ratio=config.tracing.sample_ratio,
            allowed_origins=config.cors.allowed_origins,
            dropped_headers=_header_names(config.forward.drop_headers),
            comment_s=config.streaming.keepalive_comment_s,
        )
        self._on_config(config)

    async def _start_admin(self) -> None:
        host, port = _split(self.config.admin)
        peers = Peers(self._admin_urls, self._certificates.peers if self.config.tls.cert_file else None)
        app = admin_app(self.id, self.node, self.balancing, self.telemetry, lambda: not self.draining, peers)
        if self._tenants is not None:
            app.include_router(self._tenants.router)
        app.include_router(log_router())
        app.include_router(policy_router(self.id, lambda: self._policy_now, self._change_policy, peers))
        app.include_router(drain_router(self.membership, self.balancing, peers))
        if self._source is not None:
            reloader = Reloader(
                self.config,
                self._source,
                self._reconfigure,
                live=self._live,
                check=verify,
                registry=self.telemetry.registry,
            )
            app.include_router(config_router(reloader))
            self.spawn(reloader.run(), "configuration")
        for router in (rollout_router(self.rollouts), *self.routers):
            app.include_router(router)
        try:
            socket = create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.config.admin} (admin): {error.strerror or error}") from None
        self.admin_port = int(socket.getsockname()[1])
        auth = self.config.auth
        guard = Guard(
            app,
            host,
            auth.admin_tokens,
            lambda: self.signer.keys,
            open_metrics=auth.open_metrics,
            open_admin=auth.admin_open,
        )
        settings = uvicorn.Config(
            guard, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(ADMIN_STOP_S)
        )
        settings.load()
        settings.ssl = self._certificates.admin  # ours, which takes up renewed files
        self._admin = _AdminServer(settings)
        self.spawn(self._admin.serve([socket]), "admin")

    def spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        """Have something run until this process ends; its failure ends the process."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(_crash_loudly)
        self._tasks.append(task)

    # -- while it runs -----------------------------------------------------------------------------------------------

    async def until(self, known: Callable[[Mapping[Path, Pool]], bool], timeout_s: float) -> None:
        """Wait until the pools are such, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not known(self.pools):
                    self._told.clear()
                    await self._told.wait()

    def _changed(self, pools: Mapping[Path, Pool]) -> None:
        self.pools = pools
        self._told.set()
        self.balancing.update(pools)
        self.balancing.replicas(self.node, self.replicas())
        self.quotes.update(pools)
        self.telemetry.keep_only(frozenset(pools))
        self.serving.queue.wake()
        before = self._peer_urls
        self._peer_urls = {p.id: p.url for pool in pools.values() for e in pool.endpoints for p in e.balancers}
        instances = {e.url for pool in pools.values() for e in pool.endpoints if e.url}
        self.relay.keep_only({*self._peer_urls.values(), *instances})
        for id_ in before.keys() - self._peer_urls.keys():
            self._hung.doubt(before[id_])

    def replicas(self) -> frozenset[str]:
        """The other live balancers of our own node."""
        return frozenset(p.id for p in self.membership.balancers(self.node) if p.id != self.id)

    def _heard_of(self, peer_id: str, heard: bool) -> None:
        """A balancer's reports have stopped, or come again."""
        url = self._peer_urls.get(peer_id)
        if url is not None:
            (self._hung.trust if heard else self._hung.doubt)(url)

    def _wanted(self) -> dict[str, int]:
        """What requests wait for here that nobody serves, by model."""
        waiting = self.serving.queue.models()
        served = self.balancing.models() if waiting else frozenset()
        return {model: count for model, count in waiting.items() if model not in served}

    def _knows_balancer(self, id_: str) -> bool:
        return id_ == self.id or id_ in self._peer_urls or any(p.id == id_ for p in self.membership.balancers(()))

    def _admin_urls(self) -> frozenset[str]:
        peers = [p for pool in self.pools.values() for e in pool.endpoints for p in e.balancers]
        peers += self.membership.balancers(())
        token = peer_token(self.signer.keys[0])  # as a URL's password, which httpx takes for basic authentication
        urls = (p.admin.partition("://") for p in peers if p.admin and p.id != self.id)
        return frozenset(f"{scheme}://peer:{token}@{rest}" for scheme, _, rest in urls)

    def _delay_of(self, url: str) -> float:
        """The emulated round trip to a peer, by its region; 0 within our own."""
        table = self.config.network.emulated_rtt_s
        if not table:
            return 0.0
        for path, pool in self.pools.items():
            for endpoint in pool.endpoints:
                region = (*path, endpoint.id)[0]
                if endpoint.url == url or any(p.url == url for p in endpoint.balancers):
                    return table.get(region, 0.0)
        return 0.0

    def _tls_of(self, url: str) -> SSLContext | None:
        if not url.startswith("https:"):
            return None
        certificates = self._certificates
        return certificates.peers if url in self._peer_urls.values() else certificates.instances

    async def _measure_round_trips(self) -> None:
        """A handshake to each region every few seconds, over the relay's own dialler."""
        while True:
            await asyncio.sleep(self.config.network.probe_interval_s)
            pool = self.pools.get(())
            for endpoint in pool.endpoints if pool else ():
                peer = self.balancing.peer_of((endpoint.id,), endpoint)
                if peer is None:
                    continue
                began = clock.now()
                with suppress(ConnectFailed, RejectedError):
                    connections = self.relay.pool(peer.url)
                    connections.put_back(await connections.connect(fresh=True))
                    took = (clock.now() - began) / (TLS_ROUND_TRIPS if peer.url.startswith("https:") else 1)
                    kept = self._round_trips.setdefault(endpoint.id, [])
                    kept.append(took)
                    del kept[:-ROUND_TRIPS_KEPT]
                    self.balancing.round_trip((endpoint.id,), min(kept))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then leave in good order; a second signal ends at once."""
        spare_the_collector()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        log.info(
            "serving",
            compiled=not balancer.__file__.endswith(".py"),
            tier=self.tier.value,
            node="/".join(self.node),
            id=self.id,
            data=f"{_split(self.config.listen)[0]}:{self.port}",
            admin=f"{_split(self.config.admin)[0]}:{self.admin_port}",
        )
        await self._stop.wait()
        await self.stop()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self.telemetry.close()
            raise SystemExit(1)
        self._stop.set()

    async def stop(self) -> None:
        """Leave: revoke the registration, give notice, finish what is under way, close everything."""
        self.draining = self.serving.intake.leaving = True
        drain = self.config.drain
        began = clock.now()
        log.info("draining", id=self.id, in_flight=len([c for c in self.relay.connections if c.current]))
        self.relay.listener.last_call()
        # Of itself only: servers that this process knows of as well are still there for what comes meanwhile.
        revoked = asyncio.ensure_future(self.membership.deregister(self.node, self.id))
        await self.relay.listener.quiet(min(drain.notice_s, drain.grace_s))
        await revoked
        await self._close(max(0.0, drain.grace_s - (clock.now() - began)))
        log.info("stopped", id=self.id)

    def abort(self) -> None:
        """End as a crash would: every socket is reset, nothing is said to anybody."""
        self.relay.abort()
        for task in self._tasks:
            task.cancel()
        self._admin.should_exit = True

    async def _close(self, grace_s: float) -> None:
        await asyncio.gather(self.relay.close(grace_s), *(b.close(grace_s) for b in self.beside))
        self.serving.shadows.close()
        self._hung.close()
        self._hook.close()
        await self.membership.close()
        await self.quotes.close()
        await self.reports.close()
        if hasattr(self, "_admin"):
            self._admin.should_exit = True
        for task in self._tasks:
            if task.get_name() != "admin":
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ADMIN_STOP_S)
        if self._tenants is not None:
            await self._tenants.close()
        if self._stream is not None:
            await self._stream.close()
        await self.affinity_store.close()
        if self._store is not None:
            await self._store.close()
        self.telemetry.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close, 2.0)


def verify(config: TierConfig) -> None:
    """Raise ConfigError for what its types allow and no tier could run with. Asks nobody."""
    if config.policy.name not in POLICIES:
        raise ConfigError(f"policy.name: unknown policy '{config.policy.name}' (known: {', '.join(POLICIES)})")
    backing.verify(config.etcd, config.redis)
    if config.tracing.decisions_stream and not config.redis.url:
        raise ConfigError("tracing.decisions_stream: needs redis.url")
    tokenizer.verify(config.models.tokenizers)


def _bounds(config: TierConfig) -> Bounds:
    return Bounds(config.queue.max_requests, config.queue.max_tokens, config.queue.timeout_s)


def _header_names(names: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(name.lower().replace("_", "-").encode() for name in names)


def spare_the_collector() -> None:
    """Have Python's collector leave alone what is there by now, which stays, and look at the rest less often."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 20)


def _refusal(exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
    """What a client is told of a request that cannot be taken, in the shape of the API it calls."""
    return b"application/json", apis.error_body(apis.family_of(exchange.path), (status, message))


class _AdminServer(uvicorn.Server):
    """uvicorn, leaving signals to the tier."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def _crash_loudly(task: asyncio.Task[None]) -> None:
    """A background task that ends with an error is a bug: say so, with its traceback, rather than run without it."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("background task crashed", task=task.get_name(), exc_info=task.exception())
        signal.raise_signal(signal.SIGTERM)


def _split(host_port: str) -> tuple[str, int]:
    host, _, port = host_port.rpartition(":")
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
