"""One tier as a process: builds what `serving` needs from a configuration, runs it, and leaves in good order.

Start: configuration, stores, listener, membership, reports, admin. Leaving (SIGTERM): readiness fails, the registration
is revoked, nothing new is taken, what is under way ends within the grace; a second SIGTERM ends at once.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from random import Random
from socket import AF_INET, AF_INET6, create_server, gethostname

import structlog
import uvicorn

from common import apis, clock
from common.admin import admin_app
from common.affinity import Affinity
from common.balancing import Balancing
from common.config import TierConfig
from common.errors import ConfigError, ConnectFailed, Saturated, StoreUnavailable
from common.local import local_app
from common.membership import Membership
from common.policy.balancer import Policy
from common.policy.candidate import Limits
from common.policy.stages import POLICIES, policy_named
from common.quotes import Quotes
from common.relay.asgi import AsgiApp, answer_with
from common.relay.client import Exchange
from common.relay.heads import Headers
from common.relay.relay import Relay
from common.reporting import ReportServer
from common.route import RouteSigner
from common.serving import Serving
from common.spans import OtlpExport
from common.store.base import AffinityStore, MembershipStore
from common.store.memory import MemoryAffinityStore, MemoryMembershipStore
from common.telemetry import Telemetry
from common.types import Path, Peer, Pool, Tier

log = structlog.get_logger()

STORE_START_S = 5.0  # etcd must answer within this when a tier starts
ADMIN_STOP_S = 1.0
ROUND_TRIPS_KEPT = 5  # the least of the last five handshakes is the distance; what is above it is scheduling


class TierProcess:
    """One running tier. `start`, then `run` until a signal or `stop`."""

    def __init__(
        self,
        config: TierConfig,
        node: Path,
        *,
        serves: Callable[[Path], bool] | None = None,
        store: MembershipStore | None = None,
    ) -> None:
        if config.policy.name not in POLICIES:
            raise ConfigError(f"policy.name: unknown policy '{config.policy.name}' (known: {', '.join(POLICIES)})")
        self.config = config
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
        self._round_trips: dict[str, list[float]] = {}

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Learn what there is, bind, register and begin to serve.

        `prepare` is awaited before the first request can come, with the pools known. Raises ConfigError for what cannot
        work; then nothing is left running.
        """
        config = self.config
        store = self._store if self._store is not None else await self._membership_store()
        self._store = store
        signer = RouteSigner(await self._route_keys(store))
        self.id = config.id or self._default_id()
        limits = Limits(config.upstream.max_in_flight, config.health.eject_after, config.health.cooldown_s)
        self.balancing = Balancing(self.id, self._serves, self._policy, limits, self._rng)
        self._affinity_store = self._make_affinity_store()
        affinity = Affinity(
            self._affinity_store, timeout_s=config.affinity.timeout_s, max_sessions=config.affinity.max_sessions
        )
        export = None
        if config.tracing.otlp_endpoint:
            export = OtlpExport(config.tracing.otlp_endpoint, self.id, self.tier.value)
        self._export = export
        self.telemetry = Telemetry(
            recent=config.tracing.recent,
            known_model=self.balancing.known,
            access_log=config.log.access,
            export=export,
        )
        local: AsgiApp = local_app(self.balancing, lambda: not self.draining)

        async def answer_locally(exchange: Exchange, added: Headers) -> None:
            await answer_with(local, exchange, added)

        self.serving = Serving(
            self.id,
            self.node,
            self.balancing,
            affinity,
            self.telemetry,
            signer,
            answer_locally,
            attempts=config.retry.attempts,
            budget_ratio=config.retry.budget_ratio,
            sample_ratio=config.tracing.sample_ratio,
            allowed_origins=config.cors.allowed_origins,
            rng=self._rng,
        )
        self.relay = Relay(
            self.serving.serve,
            _refusal,
            config.limits,
            config.upstream,
            max_connections=config.limits.max_connections,
            half_close=config.upstream.half_close,
        )
        self.relay.delay_of = self._delay_of
        self.serving.relay = self.relay
        self.quotes = Quotes(self.node, self.balancing, self._rng, config.reports.interval_s)
        self.reports = ReportServer(interval_s=config.reports.interval_s)
        self.quotes.offer(self.reports)
        self.membership = Membership(
            store,
            on_change=self._changed,
            ttl_s=config.etcd.ttl_s,
            root=config.etcd.prefix,
            answers=self.balancing.answers,
        )
        try:
            await self._listen(prepare)
        except BaseException:
            await self._close(0.0)
            raise

    async def _listen(self, prepare: Callable[[], Awaitable[None]] | None) -> None:
        config = self.config
        host, port = _split(config.listen)
        report_port = await self.reports.start(config.reports.listen)
        self._spawn(self._warm_affinity(), "affinity")
        self._spawn(self.membership.run(), "membership")
        self._spawn(self.quotes.run(), "quotes")
        self._spawn(self._measure_round_trips(), "round trips")
        # The first request must not meet a process that has not heard yet what there is.
        await self.until(bool, STORE_START_S)
        if prepare is not None:
            await prepare()
        try:
            self.port = await self.relay.listen(host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {config.listen}: {error.strerror or error}") from None
        await self._start_admin()
        advertised = config.advertise or ("127.0.0.1" if host in ("0.0.0.0", "::") else host)
        report_host, _ = _split(config.reports.listen)
        peer = Peer(
            self.id,
            f"http://{advertised}:{self.port}",
            f"{advertised if report_host in ('0.0.0.0', '::') else report_host}:{report_port}",
            f"http://{advertised if _split(config.admin)[0] in ('0.0.0.0', '::') else '127.0.0.1'}:{self.admin_port}",
        )
        await self.membership.register_balancer(self.node, peer)

    def _default_id(self) -> str:
        where = "-".join(self.node) or "global"
        return f"{where}-{gethostname().split('.')[0]}-{_split(self.config.listen)[1] or secrets.token_hex(3)}"

    async def _membership_store(self) -> MembershipStore:
        etcd = self.config.etcd
        if not etcd.urls:
            return MemoryMembershipStore()
        from common.store.etcd import EtcdMembershipStore, EtcdTls  # noqa: PLC0415 - gRPC is not needed without it

        store = EtcdMembershipStore(
            etcd.urls,
            user=etcd.user,
            password=etcd.password,
            tls=EtcdTls(etcd.ca_file, etcd.cert_file, etcd.key_file),
            check_interval_s=etcd.ttl_s / 5.0,
        )
        try:
            await store.ping(STORE_START_S)
        except StoreUnavailable as error:
            await store.close()
            raise ConfigError(f"etcd.urls: no etcd answers at {', '.join(etcd.urls)}: {error}") from None
        return store

    def _make_affinity_store(self) -> AffinityStore:
        redis = self.config.redis
        if not redis.url:
            return MemoryAffinityStore()
        from common.store.redis import RedisAffinityStore  # noqa: PLC0415

        return RedisAffinityStore(redis.url, budget_ms=redis.budget_ms)

    async def _warm_affinity(self) -> None:
        """Connect to the affinity store before the first request, whose budget a handshake would not fit into."""
        try:
            await self._affinity_store.ping(STORE_START_S)
        except StoreUnavailable as error:
            log.warning("affinity_store_unavailable", reason=str(error))

    async def _route_keys(self, store: MembershipStore) -> tuple[bytes, ...]:
        """Configured keys, or one that all tiers of this etcd share, made by whoever comes first."""
        if self.config.auth.route_keys:
            return tuple(key.encode() for key in self.config.auth.route_keys)
        try:
            return (await store.put_if_absent(f"{self.config.etcd.prefix}/route_key", secrets.token_hex(32).encode()),)
        except StoreUnavailable as error:
            raise ConfigError(f"etcd.urls: the route key cannot be read: {error}") from None

    def _policy(self, path: Path) -> Policy:
        policy = self.config.policy
        return policy_named(policy.name, policy.price_weight_s_per_usd, Tier.of(path))

    async def _start_admin(self) -> None:
        host, port = _split(self.config.admin)
        app = admin_app(self.id, self.node, self.balancing, self.telemetry, lambda: not self.draining, self._admin_urls)
        try:
            socket = create_server((host, port), family=AF_INET6 if ":" in host else AF_INET)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.config.admin} (admin): {error.strerror or error}") from None
        self.admin_port = int(socket.getsockname()[1])
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=int(ADMIN_STOP_S)
        )
        self._admin = _AdminServer(settings)
        self._spawn(self._admin.serve([socket]), "admin")

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
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
        self.quotes.update(pools)
        urls = {p.url for pool in pools.values() for e in pool.endpoints for p in e.balancers}
        self.relay.keep_only(urls | {e.url for pool in pools.values() for e in pool.endpoints if e.url})

    def _admin_urls(self) -> frozenset[str]:
        peers = [p for pool in self.pools.values() for e in pool.endpoints for p in e.balancers]
        peers += self.membership.balancers(())
        return frozenset(p.admin for p in peers if p.admin and p.id != self.id)

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
                with suppress(ConnectFailed, Saturated):
                    (await self.relay.pool(peer.url).connect(fresh=True)).put_back()
                    kept = self._round_trips.setdefault(endpoint.id, [])
                    kept.append(clock.now() - began)
                    del kept[:-ROUND_TRIPS_KEPT]
                    self.balancing.round_trip((endpoint.id,), min(kept))

    # -- the end -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then leave in good order; a second signal ends at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        log.info(
            "serving",
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
        """Leave: revoke the registration, finish what is under way, close everything."""
        self.draining = True
        log.info("draining", id=self.id, in_flight=len([c for c in self.relay.connections if c.current]))
        await self.membership.close()
        await self._close(self.config.drain.grace_s)
        log.info("stopped", id=self.id)

    def abort(self) -> None:
        """End as a crash would: every socket is reset, nothing is said to anybody."""
        self.relay.abort()
        for task in self._tasks:
            task.cancel()
        self._admin.should_exit = True

    async def _close(self, grace_s: float) -> None:
        await self.relay.close(grace_s)
        await self.quotes.close()
        await self.reports.close()
        if hasattr(self, "_admin"):
            self._admin.should_exit = True
        for task in self._tasks:
            if task.get_name() != "admin":
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ADMIN_STOP_S)
        await self._affinity_store.close()
        if self._store is not None:
            await self._store.close()
        self.telemetry.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close, 2.0)


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
