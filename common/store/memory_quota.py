"""Quotas inside one process: for one balancer alone, and while the store that several share is out of reach."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Final

from common import clock
from common.policy.window import Grant, SlidingWindow, Span, granted
from common.store.base import QuotaCall, QuotaReply, SlotCall, WindowCall

MAX_TENANTS: Final = 10_000  # remembered; the one that was heard of longest ago goes first


class _Tenant:
    """What is known of one tenant."""

    def __init__(self, span: Span) -> None:
        self.requests = SlidingWindow(span)
        self.tokens = SlidingWindow(span)
        self.slots: dict[str, tuple[int, float]] = {}  # balancer -> (held, until)
        self.settled: dict[str, int] = {}
        self.month = ""
        self.spent: dict[str, int] = defaultdict(int)


class MemoryQuotaStore:
    """Quotas in this process. `now`: monotonic seconds."""

    def __init__(self, span: Span, now: Callable[[], float] = clock.now) -> None:
        self._span = span
        self._now = now
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    async def exchange(self, call: QuotaCall) -> QuotaReply:
        """See QuotaStore; raises nothing."""
        now = self._now()
        tenant = self._tenants.setdefault(call.tenant, _Tenant(self._span))
        self._tenants.move_to_end(call.tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        if call.month > tenant.month:
            tenant.month = call.month
            tenant.spent.clear()
        pairs = ((tenant.requests, call.requests), (tenant.tokens, call.tokens))
        if tenant.settled.get(call.balancer, 0) < call.settles:
            tenant.settled[call.balancer] = call.settles
            tenant.spent["tokens"] += call.tokens_spent
            tenant.spent["micro_usd"] += call.micro_usd_spent
            for window, wanted in pairs:
                _settle(window, wanted, now)
        free = _free_slots(tenant, call, now)
        allowed = free >= (call.slots.least if call.slots else 0)
        for window, wanted in pairs:
            if wanted is not None and granted(wanted.limit - window.used(now), wanted.least, wanted.most) < 0:
                allowed = False
        requests, tokens = (_take(window, wanted, allowed, now) for window, wanted in pairs)
        held = _hold(tenant, call.balancer, call.slots, free if allowed else 0, now) if call.slots else 0
        return QuotaReply(tenant.spent["tokens"], tenant.spent["micro_usd"], requests, tokens, held)

    def note(self, tenant: str, *, requests: int = 0, tokens: int = 0) -> None:
        """What this balancer used by another store's leave: it counts, should that one be gone soon."""
        known = self._tenants.setdefault(tenant, _Tenant(self._span))
        known.requests.charge(self._now(), requests)
        known.tokens.charge(self._now(), tokens)

    async def close(self) -> None:
        """Forget everything."""
        self._tenants.clear()


def _settle(window: SlidingWindow, wanted: WindowCall | None, now: float) -> None:
    if wanted is not None:
        window.charge(now, wanted.charge)
        for bucket, amount in wanted.returned:
            window.give_back(now, bucket, amount)


def _take(window: SlidingWindow, wanted: WindowCall | None, allowed: bool, now: float) -> Grant | None:
    if wanted is None:
        return None
    if allowed:
        return window.take(now, wanted.limit, wanted.least, wanted.most)
    return window.take(now, wanted.limit, 0, 0)._replace(wait_s=window.wait_s(now, wanted.limit, wanted.least))


def _free_slots(tenant: _Tenant, call: QuotaCall, now: float) -> int:
    for balancer in [b for b, (_, until) in tenant.slots.items() if until <= now]:
        del tenant.slots[balancer]
    others = sum(held for balancer, (held, _) in tenant.slots.items() if balancer != call.balancer)
    return call.slots.limit - others if call.slots else 0


def _hold(tenant: _Tenant, balancer: str, slots: SlotCall, free: int, now: float) -> int:
    held = max(slots.in_use, granted(free, slots.least, slots.most))
    if held > 0:
        tenant.slots[balancer] = (held, now + slots.ttl_s)
    else:
        tenant.slots.pop(balancer, None)
    return held
