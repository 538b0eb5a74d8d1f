"""The gate: who may, over balancers that share a real Redis, and while that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from common import clock
from common.errors import AccessError, Forbidden, QuotaExceeded, Unauthenticated
from common.policy.window import Span
from common.store.redis_quota import RedisQuotaStore
from common.tenancy import gate as gate_module
from common.tenancy.directory import Directory, TenantSpec
from common.tenancy.gate import Admission, Caller, Gate, Used, running
from common.tenancy.keys import make
from common.tenancy.oidc import Oidc
from common.types import InferenceRequest, Priority
from tests.common.tenancy.issuer import Provider, Settings
from tests.servers import RedisServer, eventually

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHORT = Span(window_s=3.0, lease_s=0.2, bucket_s=0.05)
DONE = Used(status=200, ending="complete")


class Fixed:
    """A directory that changes when the test says so."""

    def __init__(self, **tenants: dict[str, Any]) -> None:
        self.changed = asyncio.Event()
        self.keys: dict[str, Any] = {}
        self.secrets: dict[str, str] = {}
        self.set(**tenants)

    def set(self, **tenants: dict[str, Any]) -> None:
        self.tenants = {name: TenantSpec.model_validate(spec) for name, spec in tenants.items()}
        for name in tenants:
            if name not in self.keys:
                self.secrets[name], spec = make(NOW)
                self.keys[name] = (spec,)
        self.changed.set()

    async def watch(self) -> AsyncGenerator[Directory, None]:
        while True:
            self.changed.clear()
            yield Directory.of(self.tenants, self.keys)
            await self.changed.wait()


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


@asynccontextmanager
async def gated(source: Fixed, *, redis: str = "", budget_ms: float = 2000.0, **settings: Any) -> AsyncIterator[Gate]:
    span = settings.get("span") or Span()
    shared = RedisQuotaStore(redis, budget_ms=budget_ms, span=span) if redis else None
    async with running(Gate(source, shared=shared, **settings)) as gate:
        await eventually(lambda: gate.directory is not None, 20.0)
        yield gate


def request(model: str = "m", **fields: Any) -> InferenceRequest:
    return InferenceRequest("0" * 32, model, **fields)


async def admit(gate: Gate, source: Fixed, tenant: str = "acme", **fields: Any) -> Admission:
    caller = gate.identify(bearer(source.secrets[tenant]))
    return await gate.admit(caller, request(**fields))


async def refused(gate: Gate, source: Fixed, tenant: str = "acme", **fields: Any) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        await admit(gate, source, tenant, **fields)
    return caught.value


# -- who ---------------------------------------------------------------------------------------------------------------


async def test_a_key_names_its_tenant() -> None:
    source = Fixed(acme={}, other={})
    async with gated(source) as gate:
        caller = gate.identify(bearer(source.secrets["acme"]))
        assert caller.tenant.name == "acme"
        assert caller.credential == f"key:{source.keys['acme'][0].id}"
        assert gate.identify([(b"x-api-key", source.secrets["other"].encode())]).tenant.name == "other"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "invalid_api_key"),
        (bearer("hw-" + "A" * 43), "invalid_api_key"),
        (bearer("a.b.c"), "invalid_api_key"),
        ([(b"authorization", b"Basic eDp5")], "invalid_api_key"),
    ],
)
async def test_nobody_else_gets_in(headers: list[tuple[bytes, bytes]], code: str) -> None:
    async with gated(Fixed(acme={})) as gate:
        with pytest.raises(Unauthenticated) as caught:
            gate.identify(headers)
        assert (caught.value.status, caught.value.code) == (401, code)
        assert caught.value.headers == ((b"www-authenticate", b'Bearer realm="headwater"'),)


async def test_keys_expire_and_are_rotated() -> None:
    source = Fixed(acme={})
    old, spec = make(NOW, datetime(2026, 1, 2, tzinfo=UTC))
    new, other = make(NOW, datetime(2100, 1, 1, tzinfo=UTC))
    source.keys["acme"] = (spec, other)
    async with gated(source) as gate:
        with pytest.raises(Unauthenticated, match="expired"):
            gate.identify(bearer(old))
        assert gate.identify(bearer(new)).tenant.name == "acme"
        source.keys["acme"] = (spec,)
        source.changed.set()
        await eventually(lambda: gate.directory is not None and len(gate.directory.keys) == 1, 20.0)
        with pytest.raises(Unauthenticated, match="not known"):
            gate.identify(bearer(new))


async def test_a_disabled_tenant_and_one_that_is_gone_are_forbidden() -> None:
    source = Fixed(acme={"disabled": True}, gone={})
    del source.tenants["gone"]
    async with gated(source) as gate:
        for name, code in (("acme", "tenant_disabled"), ("gone", "unknown_tenant")):
            with pytest.raises(Forbidden) as caught:
                gate.identify(bearer(source.secrets[name]))
            assert (caught.value.status, caught.value.code) == (403, code)


async def test_without_a_credential_one_may_be_let_in_as_somebody() -> None:
    source = Fixed(everybody={})
    async with gated(source, anonymous="everybody") as gate:
        assert gate.identify([]) == Caller(gate.directory.tenants["everybody"], "anonymous")  # type: ignore[union-attr]
        with pytest.raises(Unauthenticated):
            gate.identify(bearer("hw-wrong"))


async def test_before_the_tenants_are_known_nobody_is_refused_for_good() -> None:
    gate = Gate(Fixed(acme={}))
    with pytest.raises(AccessError) as caught:
        gate.identify([])
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)


async def test_a_token_of_a_provider_names_a_tenant() -> None:
    source = Fixed(acme={})
    async with Provider() as provider, gated(source, oidc=Oidc([Settings(provider.url)])) as gate:
        await eventually(lambda: gate._oidc.ready, 20.0)  # type: ignore[union-attr]
        caller = gate.identify(bearer(provider.token()))
        assert caller.tenant.name == "acme"
        assert caller.credential.startswith("jwt:")
        assert gate.identify(bearer(source.secrets["acme"])).credential.startswith("key:")
        with pytest.raises(Forbidden, match="does not exist"):
            gate.identify(bearer(provider.token(tenant="nobody")))
        with pytest.raises(Unauthenticated) as caught:
            gate.identify(bearer(provider.token(exp=1.0)))
        assert caught.value.headers


# -- what they may -----------------------------------------------------------------------------------------------------


async def test_what_goes_on_with_a_request() -> None:
    source = Fixed(acme={"priority": "batch", "ceiling": "standard", "regions": ["eu", "us"], "models": ["m"]})
    async with gated(source) as gate:
        caller = gate.identify(bearer(source.secrets["acme"]))
        plain = (await gate.admit(caller, request())).request
        assert (plain.tenant, plain.priority, plain.regions) == ("acme", Priority.BATCH, ("eu", "us"))
        raised = (await gate.admit(caller, request(), Priority.CRITICAL)).request
        assert raised.priority is Priority.STANDARD
        for model in ("other", ""):
            with pytest.raises(Forbidden) as caught:
                await gate.admit(caller, request(model))
            assert caught.value.code == "model_not_allowed"


async def test_a_change_of_limits_counts_at_once() -> None:
    source = Fixed(acme={"requests_per_minute": 1})
    async with gated(source) as gate:
        (await admit(gate, source)).end(DONE)
        await refused(gate, source)
        source.set(acme={"requests_per_minute": 3})
        await eventually(lambda: gate.directory.tenants["acme"].spec.requests_per_minute == 3, 20.0)  # type: ignore[union-attr]
        await asyncio.sleep(0.3)
        (await admit(gate, source)).end(DONE)


# -- how much ----------------------------------------------------------------------------------------------------------


async def test_limits_are_told_as_openai_tells_them() -> None:
    source = Fixed(acme={"requests_per_minute": 10, "tokens_per_minute": 1000}, free={})
    async with gated(source) as gate:
        admission = await admit(gate, source, input_tokens=100, output_tokens=30.0, max_output_tokens=50)
        assert dict(admission.headers) == {
            b"x-ratelimit-limit-requests": b"10",
            b"x-ratelimit-remaining-requests": b"9",
            b"x-ratelimit-reset-requests": b"1m0s",
            b"x-ratelimit-limit-tokens": b"1000",
            b"x-ratelimit-remaining-tokens": b"850",
            b"x-ratelimit-reset-tokens": b"1m0s",
        }
        assert (await admit(gate, source, "free")).headers == []


async def test_a_refusal_says_which_limit_and_when_to_come_back() -> None:
    source = Fixed(acme={"requests_per_minute": 2, "tokens_per_minute": 10_000})
    async with gated(source) as gate:
        for _ in range(2):
            (await admit(gate, source)).end(DONE)
        error = await refused(gate, source)
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        assert error.retry_after_s is not None
        assert 55.0 < error.retry_after_s < 62.0
        headers = dict(error.headers)
        assert headers[b"x-ratelimit-remaining-requests"] == b"0"
        assert headers[b"x-ratelimit-reset-requests"].startswith(b"1m")
        too_large = await refused(gate, source, input_tokens=10_001)
        assert (too_large.code, too_large.retry_after_s) == ("request_too_large", None)
        assert (b"x-should-retry", b"false") in too_large.headers


async def test_an_answer_that_could_be_long_needs_a_minutes_worth_at_most() -> None:
    source = Fixed(acme={"tokens_per_minute": 1000})
    async with gated(source) as gate:
        admission = await admit(gate, source, input_tokens=10, output_tokens=200.0, max_output_tokens=100_000)
        await refused(gate, source, input_tokens=10)
        admission.end(Used(10, 0, 90, 200))
        await eventually(lambda: gate._ledgers["acme"].remaining(gate.directory.tenants["acme"].spec)[1] == 900, 20.0)  # type: ignore[union-attr]


async def test_a_budget_that_is_used_up_is_an_insufficient_quota() -> None:
    source = Fixed(acme={"monthly_tokens": 1000})
    async with gated(source) as gate:
        (await admit(gate, source, input_tokens=900)).end(Used(900, 0, 100, 200))
        error = await refused(gate, source)
        assert (error.status, error.code, error.retry_after_s) == (429, "insufficient_quota", None)
        assert (b"x-should-retry", b"false") in error.headers


@dataclass
class PriceOf:
    input_usd: float
    output_usd: float
    cached_input_usd: float | None = None


async def test_a_budget_in_dollars_goes_by_the_prices() -> None:
    source = Fixed(acme={"monthly_usd": 0.01})
    prices = {"m": PriceOf(2.0, 8.0, 0.5), "*": PriceOf(0.0, 0.0)}
    async with gated(source, prices=prices) as gate:
        (await admit(gate, source, input_tokens=1000)).end(Used(1000, 400, 1000, 200))
        assert gate.month_of("acme")[1] == pytest.approx(0.0012 + 0.0002 + 0.008)
        (await admit(gate, source, model="free", input_tokens=10**6)).end(DONE)
        assert (await refused(gate, source, input_tokens=500)).code == "insufficient_quota"


async def test_concurrent_requests_are_bounded_and_a_cancelled_one_leaves_nothing() -> None:
    source = Fixed(acme={"concurrent_requests": 1})
    async with gated(source) as gate:
        for _ in range(100):
            (await admit(gate, source)).end(Used(ending="client_left"))
        first = await admit(gate, source)
        error = await refused(gate, source)
        assert (error.code, error.retry_after_s) == ("concurrency_limit_exceeded", 1.0)
        task = asyncio.create_task(admit(gate, source))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        first.end(DONE)
        first.end(DONE)
        (await admit(gate, source)).end(DONE)
        assert gate.under_way("acme") == 0


async def test_who_comes_just_as_a_round_trip_ends_has_one_of_his_own() -> None:
    source = Fixed(acme={"concurrent_requests": 10})
    async with gated(source) as gate:
        (await admit(gate, source)).end(DONE)
        ledger, tenant = gate._ledgers["acme"], gate.identify(bearer(source.secrets["acme"])).tenant
        ended = gate._begin_round(ledger, tenant)
        await asyncio.sleep(0)
        assert ended.done()
        assert gate._rounds  # nobody has taken note of that yet
        ledger.held = 0
        (await admit(gate, source)).end(DONE)


async def test_many_at_once_share_round_trips(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 1000, "tokens_per_minute": 100_000, "concurrent_requests": 1000})
    async with gated(source, redis=redis_server.url) as gate:
        admissions = await asyncio.gather(*(admit(gate, source, input_tokens=10) for _ in range(200)))
        assert gate._trips.values[("answered",)] < 20
        for admission in admissions:
            admission.end(Used(10, 0, 0, 200))


async def test_when_many_come_at_once_as_many_get_in_as_may(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 50})
    async with AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(gated(source, redis=redis_server.url)) for _ in range(3)]
        results = await asyncio.gather(*(admit(gates[n % 3], source) for n in range(300)), return_exceptions=True)
        assert sum(isinstance(r, Admission) for r in results) == 50
        assert all(isinstance(r, Admission | QuotaExceeded) for r in results)


# -- over balancers ----------------------------------------------------------------------------------------------------


async def test_no_window_holds_more_than_the_limit_over_three_balancers(redis_server: RedisServer) -> None:
    """All ask as fast as they can for three windows; requests and tokens; bursts, pauses, leases that expire."""
    source = Fixed(acme={"requests_per_minute": 600, "tokens_per_minute": 30_000})
    times: list[float] = []
    async with AsyncExitStack() as stack:
        gates = [await stack.enter_async_context(gated(source, redis=redis_server.url, span=SHORT)) for _ in range(3)]
        until = clock.now() + 3.0 * SHORT.window_s

        async def press(gate: Gate, pause_s: float) -> None:
            while clock.now() < until:
                try:
                    admission = await admit(gate, source, input_tokens=40, output_tokens=20.0)
                except QuotaExceeded:
                    await asyncio.sleep(0.01)
                    continue
                times.append(clock.now())
                await asyncio.sleep(pause_s)
                admission.end(Used(40, 0, 10, 200))

        await asyncio.gather(*(press(gate, pause) for gate in gates for pause in (0.0, 0.002, 0.05)))
    most = max(sum(begin <= t < begin + SHORT.window_s for t in times) for begin in times)
    assert most <= 600  # of 50 tokens each: as many as the tokens allow
    assert len(times) > 2.0 * 600  # and not for asking too little


async def test_places_and_budgets_are_shared(redis_server: RedisServer) -> None:
    source = Fixed(acme={"concurrent_requests": 4, "monthly_tokens": 1000})
    async with gated(source, redis=redis_server.url) as one, gated(source, redis=redis_server.url) as two:
        held = [await admit(one, source) for _ in range(3)] + [await admit(two, source)]
        assert (await refused(two, source)).code == "concurrency_limit_exceeded"
        held[0].end(Used(500, 0, 499, 200))
        for each in held[1:]:
            each.end(Used(0, 0, 0, 200))

        async def told() -> bool:
            try:
                (await admit(two, source, input_tokens=5)).end(Used(0, 0, 0, 200))
            except QuotaExceeded as error:
                return error.code == "insufficient_quota"
            return False

        await eventually(told, 20.0, step_s=0.1)


async def test_a_client_that_goes_from_one_balancer_to_the_next_finds_its_place(redis_server: RedisServer) -> None:
    source = Fixed(acme={"concurrent_requests": 1})
    async with gated(source, redis=redis_server.url) as one, gated(source, redis=redis_server.url) as two:
        for n in range(40):
            (await admit((one, two)[n % 2], source)).end(DONE)


# -- Redis is gone -----------------------------------------------------------------------------------------------------


async def test_without_redis_each_balancer_keeps_its_share_of_what_is_left(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 100, "monthly_tokens": 10**6})
    async with gated(source, redis=redis_server.url, budget_ms=200.0, replicas=lambda: 2) as gate:
        for _ in range(30):
            (await admit(gate, source)).end(Used(10, 0, 0, 200))
        redis_server.kill()
        admitted = 0
        for _ in range(100):
            try:
                (await admit(gate, source)).end(Used(10, 0, 0, 200))
            except QuotaExceeded:
                break
            admitted += 1
        # Leases that it still had may go first; then half the limit, of which it has used 30.
        assert 15 <= admitted <= 25
        await redis_server.start()

        async def told() -> bool:
            return gate._ledgers["acme"].month_tokens == 10 * (30 + admitted)

        await eventually(told, 30.0, step_s=0.1)


async def test_without_redis_everybody_may_if_so_configured(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 5, "tokens_per_minute": 10, "concurrent_requests": 1})
    async with gated(source, redis=redis_server.url, budget_ms=200.0, without_store="open") as gate:
        redis_server.kill()
        for _ in range(50):
            await admit(gate, source)


async def test_without_redis_nobody_may_if_so_configured(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 5}, free={})
    async with gated(source, redis=redis_server.url, budget_ms=200.0, without_store="closed") as gate:
        redis_server.kill()
        with pytest.raises(AccessError) as caught:
            await admit(gate, source)
        assert (caught.value.status, caught.value.code) == (503, "tenants_unavailable")
        await admit(gate, source, "free")
        await redis_server.start()

        async def admitted() -> bool:
            try:
                await admit(gate, source)
            except AccessError:
                return False
            return True

        await eventually(admitted, 30.0, step_s=0.1)


async def test_a_frozen_redis_delays_by_its_budget_and_no_more(redis_server: RedisServer) -> None:
    source = Fixed(acme={"requests_per_minute": 1000})
    async with gated(source, redis=redis_server.url, budget_ms=100.0) as gate:
        await admit(gate, source)
        redis_server.pause()
        await asyncio.sleep(0.6)  # leases are over
        began = clock.now()
        await asyncio.gather(*(admit(gate, source) for _ in range(50)))
        assert clock.now() - began < 2.0
        redis_server.resume()


# -- what is told ------------------------------------------------------------------------------------------------------


async def test_metrics_count_by_tenant_and_bound_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "TENANT_LABELS", 2)
    source = Fixed(a={}, b={}, c={"requests_per_minute": 1})
    async with gated(source) as gate:
        for tenant in ("a", "b", "c"):
            (await admit(gate, source, tenant)).end(Used(7, 0, 3, 200))
        await refused(gate, source, "c")
        families = {family.name: family for family in gate.metrics.collect()}
        requests = {s.labels["tenant"]: s.value for s in families["headwater_tenant_requests"].samples}
        assert requests == {"a": 1.0, "b": 1.0, "other": 1.0}
        assert {tuple(s.labels.values()) for s in families["headwater_tenant_refusals"].samples} == {
            ("other", "rate_limit_exceeded")
        }
