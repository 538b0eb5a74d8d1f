"""The gate: who calls, whether they may, and what they used. `serving` asks it once at each end of a client's request.

Where a lease on the tenant's limits suffices, admitting waits for nothing. Otherwise all who wait for one tenant share
one round trip to the store; while that is gone, this balancer goes on by what it knows, as configured.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf
from time import gmtime, strftime
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import structlog

from common import clock
from common.config import Price
from common.errors import AccessError, Forbidden, QuotaExceeded, StoreUnavailable, Unauthenticated
from common.metrics import Counts, Level, Scrape
from common.outbox import Outbox
from common.policy.window import Grant, Span
from common.store.base import QuotaCall, QuotaReply, QuotaStore, WindowCall
from common.store.memory_quota import MemoryQuotaStore
from common.tenancy.directory import Directory, Tenant, TenantSpec
from common.tenancy.keys import Headers, credential, hashed
from common.tenancy.ledger import LOCAL, Ledger, Refusal, Taken
from common.tenancy.sources import TenantSource
from common.tenancy.usage import UsageRecord, cost_micro_usd
from common.types import InferenceRequest, Priority

if TYPE_CHECKING:
    from common.tenancy.oidc import Oidc

log = structlog.get_logger()

ROUNDS: Final = 20  # to the store for one request, at most; each grants or refuses somebody
SWEEP_S: Final = 0.25  # what nobody waits for is told to the store this often
SWEPT_AT_ONCE: Final = 64  # tenants, of those that have something to tell
PLACE_WAIT_S: Final = 0.05  # a place that another balancer gives up is free this soon
START_RETRY_S: Final = 1.0
TENANT_LABELS: Final = 200  # further tenants are counted as "other"
_CHALLENGE = ((b"www-authenticate", b'Bearer realm="headwater"'),)
_NO_RETRY = ((b"x-should-retry", b"false"),)  # the OpenAI clients' way to be told that trying again is in vain
_encode = msgspec.json.Encoder().encode

WithoutStore = Literal["local", "open", "closed"]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from. `credential` names the key, and is none."""

    tenant: Tenant
    credential: str


class Used(NamedTuple):
    """What became of an admitted request. Token counts that the server did not give are None."""

    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    status: int = 0
    ending: str = ""
    served_by: str = ""
    operation: str = ""
    began_wall_ns: int = 0
    duration_s: float = 0.0


class Admission:
    """One admitted request; ended once, whatever became of it."""

    __slots__ = ("_gate", "_ledger", "_taken", "caller", "headers", "request")

    def __init__(
        self, gate: Gate, caller: Caller, request: InferenceRequest, ledger: Ledger, taken: Taken, headers: Headers
    ) -> None:
        self.caller = caller
        self.request = request  # with tenant, priority and regions, as it goes on
        self.headers = headers  # for the answer
        self._gate = gate
        self._ledger = ledger
        self._taken: Taken | None = taken

    def end(self, used: Used) -> None:
        """The request is over; a second call changes nothing."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._gate.ended(self, self._ledger, taken, used)


class Gate:
    """Tenants at one balancer. `run` has to run beside."""

    def __init__(
        self,
        source: TenantSource,
        *,
        shared: QuotaStore | None = None,
        oidc: Oidc | None = None,
        anonymous: str = "",
        without_store: WithoutStore = "local",
        replicas: Callable[[], int] = lambda: 1,
        prices: Mapping[str, Price] | None = None,
        usage: Sequence[Outbox] = (),
        span: Span | None = None,
    ) -> None:
        self.directory: Directory | None = None  # until it was read for the first time
        self._source = source
        self._shared = shared
        self._oidc = oidc
        self._anonymous = anonymous
        self._without = without_store
        self._replicas = replicas
        self._prices = prices or {}
        self._usage = usage
        self._span = span or Span()
        self._local = MemoryQuotaStore(self._span)
        self._id = secrets.token_hex(8)
        self._numbers = count(1)
        self._ledgers: dict[str, Ledger] = {}
        self._rounds: dict[str, asyncio.Task[None]] = {}  # under way, by tenant
        self._labels: set[str] = set()
        self._told = asyncio.Event()  # set whenever the directory changes
        self._make_metrics()

    def _make_metrics(self) -> None:
        self._admitted = Counts("headwater_tenant_requests", "Requests admitted", ("tenant",))
        self._refused = Counts("headwater_tenant_refusals", "Requests refused, and why", ("tenant", "reason"))
        self._tokens = Counts("headwater_tenant_tokens", "Tokens used", ("tenant", "kind"))
        self._trips = Counts("headwater_quota_calls", "Calls to the store of quotas", ("outcome",))
        self._lost = Level("headwater_usage_records_dropped", "Usage records that could not be written")
        self._pending = Level("headwater_usage_records_pending", "Usage records that are not written yet")
        self.metrics = Scrape(self._admitted, self._refused, self._tokens, self._trips, self._lost, self._pending)

    # -- who ---------------------------------------------------------------------------------------------------------

    def identify(self, headers: Headers) -> Caller:
        """Who a request is from, at once. Raises Unauthenticated, Forbidden, or an AccessError of status 503."""
        try:
            return self._identify(headers)
        except AccessError as error:
            self._refused.add(("", error.code))
            raise

    def _identify(self, headers: Headers) -> Caller:
        directory = self.directory
        if directory is None:
            raise _unavailable("the tenants are not known yet")
        given = credential(headers)
        if given is None:
            if not self._anonymous:
                raise Unauthenticated("a key is needed: send it as `Authorization: Bearer KEY`", headers=_CHALLENGE)
            name, who = self._anonymous, "anonymous"
        elif self._oidc is not None and given.count(".") == 2:
            try:
                verified = self._oidc.verify(given)
            except Unauthenticated as error:
                error.headers = _CHALLENGE
                raise
            name, who = verified.tenant, f"jwt:{verified.subject}"
        else:
            key = directory.keys.get(hashed(given)) if given else None
            if key is None:
                raise Unauthenticated("the key is not known here", headers=_CHALLENGE)
            if key.expires_at <= clock.wall_ns() / 1e9:
                raise Unauthenticated("the key has expired", code="expired_api_key", headers=_CHALLENGE)
            name, who = key.tenant, f"key:{key.spec.id}"
        tenant = directory.tenants.get(name)
        if tenant is None:
            raise Forbidden("the credential is of a tenant that does not exist", code="unknown_tenant")
        if tenant.spec.disabled:
            raise Forbidden(f"the tenant '{name}' is disabled", code="tenant_disabled")
        return Caller(tenant, who)

    # -- whether -----------------------------------------------------------------------------------------------------

    async def admit(self, caller: Caller, request: InferenceRequest, asked: Priority | None = None) -> Admission:
        """Let a request in, or refuse it. `asked`: the class that its header asks for.

        Raises Forbidden, QuotaExceeded, or an AccessError of status 503.
        """
        tenant = caller.tenant
        try:
            if not tenant.may_use(request.model):
                what = f"the model `{request.model[:200]}`" if request.model else "requests that name no model"
                raise Forbidden(f"the tenant '{tenant.name}' may not use {what}", code="model_not_allowed")
            ledger, taken = await self._take(tenant, request)
        except AccessError as error:
            self._refused.add((self._label(tenant.name), error.code))
            raise
        self._admitted.add((self._label(tenant.name),))
        admitted = replace(
            request, tenant=tenant.name, priority=tenant.priority_for(asked), regions=tenant.spec.regions
        )
        return Admission(self, caller, admitted, ledger, taken, _limit_headers(tenant.spec, ledger, self._span))

    async def _take(self, tenant: Tenant, request: InferenceRequest) -> tuple[Ledger, Taken]:
        spec = tenant.spec
        ledger = self._ledgers.get(tenant.name)
        if ledger is None:
            ledger = self._ledgers[tenant.name] = Ledger(tenant.name, self._id, self._span)
        most, likely = self._needs(request, spec)
        waited = False
        for _ in range(ROUNDS):
            month = _month()
            got = ledger.take(spec, most, likely, month, clock.now())
            if isinstance(got, Taken):
                if ledger.source not in ("", LOCAL) and self._shared is not None:
                    self._local.note(tenant.name, requests=1)
                if ledger.wants_more(spec):
                    self._begin_round(ledger, tenant)
                return ledger, got
            if isinstance(got, Refusal):
                if got.limit == "concurrent_requests" and not waited:
                    waited = True  # another balancer may just be giving one up
                    await asyncio.sleep(PLACE_WAIT_S)
                    continue
                raise _refusal(got, spec, ledger, most, self._span)
            await self._round(ledger, tenant, most)
        raise QuotaExceeded("too many requests of this tenant arrive at once", retry_after_s=1.0)

    def _needs(self, request: InferenceRequest, spec: TenantSpec) -> tuple[int, tuple[int, int]]:
        """Tokens that a request may use at most, and (tokens, micro-dollars) that it will probably use."""
        output = ceil(request.output_tokens)
        likely = request.input_tokens + output
        most = request.input_tokens + (request.max_output_tokens or output if output else 0)
        if spec.tokens_per_minute and request.input_tokens <= spec.tokens_per_minute:
            most = min(most, spec.tokens_per_minute)  # what it may write is not what it will: a minute's worth will do
        cost = cost_micro_usd(self._prices, request.model, request.input_tokens, 0, output)
        return most, (likely, cost)

    async def _round(self, ledger: Ledger, tenant: Tenant, need: int) -> None:
        """Wait for one round trip that this request's need is part of."""
        ledger.needs.append(need)
        try:
            running = self._rounds.get(ledger.tenant)
            if running is not None and not running.done():
                await asyncio.shield(running)  # it may have been sent without this need, and leave enough all the same
                return
            await asyncio.shield(self._begin_round(ledger, tenant))
        finally:
            ledger.needs.remove(need)

    def _begin_round(self, ledger: Ledger, tenant: Tenant) -> asyncio.Task[None]:
        running = self._rounds.get(ledger.tenant)
        if running is None or running.done():  # what is done stays until its callback has run, and answers nobody new
            running = asyncio.get_running_loop().create_task(self._exchange(ledger, tenant.spec))
            self._rounds[ledger.tenant] = running
            running.add_done_callback(lambda task: self._round_over(ledger.tenant, task))
        return running

    def _round_over(self, tenant: str, task: asyncio.Task[None]) -> None:
        if self._rounds.get(tenant) is task:
            del self._rounds[tenant]
        if not task.cancelled():
            task.exception()  # those who wait are told; one that nobody waits for is tried again by the sweep

    async def _exchange(self, ledger: Ledger, spec: TenantSpec) -> None:
        """One round trip, to the store that all share or to what is known here. Raises an AccessError of status 503."""
        sent_at = clock.now()
        if self._shared is not None:
            call = ledger.call(spec, "shared", next(self._numbers), _month(), sent_at)
            try:
                reply = await self._shared.exchange(call)
            except StoreUnavailable:
                self._trips.add(("unavailable",))
                if self._without == "closed":
                    raise _unavailable("the store of quotas is out of reach") from None
            else:
                self._trips.add(("answered",))
                ledger.answered(call, reply, sent_at, clock.now())
                return
            sent_at = clock.now()
            call = ledger.call(spec, LOCAL, next(self._numbers), _month(), sent_at, max(1, self._replicas()))
            reply = _all(call) if self._without == "open" else await self._local.exchange(call)
        else:
            call = ledger.call(spec, "memory", next(self._numbers), _month(), sent_at, max(1, self._replicas()))
            reply = await self._local.exchange(call)
        ledger.answered(call, reply, sent_at, clock.now())

    # -- what was used -----------------------------------------------------------------------------------------------

    def ended(self, admission: Admission, ledger: Ledger, taken: Taken, used: Used) -> None:
        """See Admission.end."""
        request, tenant = admission.request, admission.caller.tenant
        served = used.status < 400 and used.status > 0
        input_tokens = used.input_tokens if used.input_tokens is not None else request.input_tokens if served else 0
        output_tokens = used.output_tokens or 0
        cached = min(used.cached_tokens or 0, input_tokens)
        cost = cost_micro_usd(self._prices, request.model, input_tokens, cached, output_tokens)
        tokens = input_tokens + output_tokens
        ledger.end(taken, tokens, cost, _month())
        if taken.source == "shared":
            self._local.note(tenant.name, tokens=tokens)
        label = self._label(tenant.name)
        self._tokens.add((label, "input"), input_tokens)
        self._tokens.add((label, "output"), output_tokens)
        if ledger.wants_more(tenant.spec):
            self._begin_round(ledger, tenant)
        if not self._usage:
            return
        record = UsageRecord(
            record=f"{self._id}-{next(self._numbers)}",
            time=used.began_wall_ns // 1000 / 1e6,
            trace_id=request.id,
            tenant=tenant.name,
            credential=admission.caller.credential,
            operation=used.operation,
            model=request.model,
            input_tokens=input_tokens,
            cached_tokens=cached,
            output_tokens=output_tokens,
            estimated=used.input_tokens is None or used.output_tokens is None,
            usd=cost / 1e6,
            status=used.status,
            ending=used.ending,
            served_by=used.served_by,
            duration_s=round(used.duration_s, 6),
        )
        line = _encode(record)
        for sink in self._usage:
            sink.add(line)

    def month_of(self, tenant: str) -> tuple[int, float]:
        """Tokens and US dollars that a tenant has used this month, as far as is known here."""
        ledger = self._ledgers.get(tenant)
        tokens, micro_usd = ledger.month_so_far() if ledger is not None and ledger.month == _month() else (0, 0)
        return tokens, micro_usd / 1e6

    async def look_up_month(self, tenant: Tenant) -> tuple[int, float]:
        """The same, by the store's word. Without the store what is known here."""
        ledger = self._ledgers.setdefault(tenant.name, Ledger(tenant.name, self._id, self._span))
        with suppress(AccessError):
            await asyncio.shield(self._begin_round(ledger, tenant))
        return self.month_of(tenant.name)

    def under_way(self, tenant: str) -> int:
        """Requests of a tenant that are under way here."""
        ledger = self._ledgers.get(tenant)
        return ledger.in_use if ledger is not None else 0

    def _label(self, tenant: str) -> str:
        """Tenants come from the directory, but there may be more of them than a metric should have labels."""
        if tenant not in self._labels:
            if len(self._labels) >= TENANT_LABELS:
                return "other"
            self._labels.add(tenant)
        return tenant

    # -- beside requests ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the directory and the providers' keys, tell the store what nobody waits for; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._sweep())
            if self._oidc is not None:
                group.create_task(self._oidc.run())
            for sink in self._usage:
                group.create_task(sink.run())

    async def until(self, seen: Callable[[Directory], bool], timeout_s: float) -> bool:
        """Wait until the directory is such, or the time is over; whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.directory is None or not seen(self.directory):
                    self._told.clear()
                    await self._told.wait()
                return True
        return False

    async def _follow(self) -> None:
        async with aclosing(self._source.watch()) as directories:
            async for directory in directories:
                self.directory = directory
                self._told.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now, begun = clock.now(), 0
            tenants = self.directory.tenants if self.directory is not None else {}
            for name, ledger in list(self._ledgers.items()):
                tenant = tenants.get(name) or Tenant(name)  # one that was deleted still has something to settle
                if begun < SWEPT_AT_ONCE and name not in self._rounds and ledger.due(tenant.spec, now):
                    self._begin_round(ledger, tenant)
                    begun += 1
                elif name not in tenants and ledger.idle and name not in self._rounds:
                    del self._ledgers[name]
            self._lost.value = float(sum(sink.dropped for sink in self._usage))
            self._pending.value = float(sum(sink.pending for sink in self._usage))

    async def close(self) -> None:
        """Settle what is left and let go of the stores; `run` has to have ended."""
        tenants = self.directory.tenants if self.directory is not None else {}
        for name, ledger in self._ledgers.items():
            if name not in self._rounds and not ledger.idle:
                self._begin_round(ledger, tenants.get(name) or Tenant(name))
        if self._rounds:
            await asyncio.wait(list(self._rounds.values()), timeout=1.0)
        for sink in self._usage:
            await sink.close()
        if self._shared is not None:
            await self._shared.close()


@asynccontextmanager
async def running(gate: Gate) -> AsyncIterator[Gate]:
    """A gate with its background work, closed at the end."""
    task = asyncio.get_running_loop().create_task(gate.run(), name="tenants")
    try:
        yield gate
    finally:
        task.cancel()
        await asyncio.wait({task})
        await gate.close()


def _month() -> str:
    """This month in UTC, as in 2026-11."""
    return strftime("%Y-%m", gmtime(clock.wall_ns() // 1_000_000_000))


def _all(call: QuotaCall) -> QuotaReply:
    """Everything that is asked for: the store is gone, and limits do not hold then, as configured."""

    def grant(wanted: WindowCall | None) -> Grant | None:
        return None if wanted is None else Grant(wanted.most, -1, 0)

    return QuotaReply(0, 0, grant(call.requests), grant(call.tokens), call.slots.most if call.slots else 0)


def _unavailable(message: str) -> AccessError:
    error = AccessError(message, code="tenants_unavailable", retry_after_s=1.0)
    error.status = 503
    return error


def _refusal(refusal: Refusal, spec: TenantSpec, ledger: Ledger, need: int, span: Span) -> QuotaExceeded:
    headers = tuple(_limit_headers(spec, ledger, span, refusal))
    limit = getattr(spec, refusal.limit)
    if refusal.limit in ("monthly_tokens", "monthly_usd"):
        what = f"{limit} tokens" if refusal.limit == "monthly_tokens" else f"{limit:.2f} US dollars"
        message = f"the tenant '{ledger.tenant}' has used up its budget of {what} for this month"
        return QuotaExceeded(message, code="insufficient_quota", headers=(*headers, *_NO_RETRY))
    if refusal.limit == "concurrent_requests":
        message = f"the tenant '{ledger.tenant}' has {limit} requests under way, and may have no more"
        return QuotaExceeded(message, code="concurrency_limit_exceeded", retry_after_s=1.0, headers=headers)
    what = "tokens" if refusal.limit == "tokens_per_minute" else "requests"
    if refusal.retry_after_s == inf:
        message = f"the request needs {need} {what}, and the tenant '{ledger.tenant}' may use {limit} a minute"
        return QuotaExceeded(message, code="request_too_large", headers=(*headers, *_NO_RETRY))
    message = f"the tenant '{ledger.tenant}' has reached its limit of {limit} {what} a minute"
    return QuotaExceeded(message, retry_after_s=max(1.0, refusal.retry_after_s), headers=headers)


def _limit_headers(spec: TenantSpec, ledger: Ledger, span: Span, refusal: Refusal | None = None) -> Headers:
    """As OpenAI has them. `reset` is when all that counts now counts no more, of what was refused when it would fit."""
    remaining = ledger.remaining(spec)
    headers: Headers = []
    for name, limit, left in (
        (b"requests", spec.requests_per_minute, remaining[0]),
        (b"tokens", spec.tokens_per_minute, remaining[1]),
    ):
        if limit:
            reset_s = span.window_s if left < limit else 0.0
            if refusal is not None and refusal.limit == f"{name.decode()}_per_minute" and refusal.retry_after_s < inf:
                reset_s = refusal.retry_after_s
            headers.append((b"x-ratelimit-limit-" + name, b"%d" % limit))
            headers.append((b"x-ratelimit-remaining-" + name, b"%d" % left))
            headers.append((b"x-ratelimit-reset-" + name, _duration(reset_s)))
    return headers


def _duration(seconds: float) -> bytes:
    """As in 1m0s, 12.5s or 250ms."""
    if seconds < 1.0:
        return b"%dms" % ceil(seconds * 1000.0)
    minutes, rest = divmod(round(seconds, 1), 60.0)
    text = f"{rest:.1f}".rstrip("0").rstrip(".").encode()
    return (b"%dm" % minutes if minutes else b"") + text + b"s"
