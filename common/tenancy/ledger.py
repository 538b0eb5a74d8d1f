"""What one balancer knows of one tenant's limits between two round trips to the store: leases, places, and the month.

Plain synchronous code, with `now` passed in. `take` decides at once wherever a lease suffices; where it does not, the
gate makes one round trip for all who wait (`call`, `answered`) and asks again. What is settled is told under one number
until it is known to have arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from typing import Final, NamedTuple

from common.policy.window import Allowance, Draw, Grant, Span
from common.store.base import QuotaCall, QuotaReply, SlotCall, WindowCall
from common.tenancy.directory import TenantSpec

AHEAD: Final = 100  # a lease in advance is at most this fraction of a limit: what lies unused here others cannot have
SPARE_PLACES: Final = 16  # likewise of places for requests under way
PLACES_TTL_S: Final = 5.0  # a balancer that died gives up its places after this
LOOK_S: Final = 0.25  # while a tenant is over its limit, the store is asked no more often than this
PLACES_LOOK_S: Final = 0.05  # places come free at any moment
SETTLE_S: Final = 1.0  # amounts spent are told this often
MONTH_S: Final = 1.0  # what others have spent this month is asked for this often, while it matters
LOCAL: Final = "local"  # the source that this process is to itself while the store is gone
RECENT_S: Final = 10.0  # a tenant without a request for so long does not matter


class Refusal(NamedTuple):
    """Which limit is in the way, and when it may not be, seconds (inf: never)."""

    limit: str  # a field of TenantSpec
    retry_after_s: float


@dataclass(slots=True)
class Taken:
    """What one admitted request holds: a place, and tokens reserved for it in these buckets."""

    tokens: int
    micro_usd: int
    draws: list[Draw]
    source: str
    place: bool


class _Block(NamedTuple):
    """A refusal that holds for a moment: for whoever needs as much, until the store is looked at again."""

    need: int
    until: float
    fits_at: float


@dataclass(slots=True)
class _Window:
    """A window as seen from here."""

    allowance: Allowance = field(default_factory=Allowance)
    returns: Counter[int] = field(default_factory=Counter)  # bucket -> units to give back
    charge: int = 0
    block: _Block | None = None
    taken: int = 0  # since the last call
    rate: float = 0.0  # units a second, of late
    used: int = 0  # as the store told last, our leases included

    def returned(self, draws: Iterable[Draw]) -> None:
        for bucket, amount in draws:
            self.returns[bucket] += amount

    def reset(self) -> None:
        """Another store answers: what was leased by the last one means nothing to it."""
        self.allowance, self.block, self.charge = Allowance(), None, 0
        self.returns.clear()


@dataclass(slots=True)
class _Spent:
    """Amounts of one month."""

    month: str
    tokens: int = 0
    micro_usd: int = 0


@dataclass(frozen=True, slots=True)
class _Settling:
    """What the store is told for good, under one number."""

    number: int
    source: str
    spent: _Spent
    charge: int
    returned_requests: tuple[Draw, ...]
    returned_tokens: tuple[Draw, ...]

    def __bool__(self) -> bool:
        amounts = (self.spent.tokens, self.spent.micro_usd, self.charge)
        return any(amounts) or bool(self.returned_requests or self.returned_tokens)


class _Asking(NamedTuple):
    """The call under way."""

    source: str
    at: float
    requests: int  # taken since the last call that was answered
    tokens: int


class Ledger:
    """One tenant at one balancer. `source` names the store that answered: leases of one are nothing to another.

    A store that is asked in vain changes nothing: what the one before has leased goes on being used meanwhile.
    """

    def __init__(self, tenant: str, balancer: str, span: Span) -> None:
        self.tenant = tenant
        self.balancer = balancer
        self.span = span
        self.source = ""
        self.in_use = 0  # places
        self.held = 0
        self.held_until = -inf
        self.month = ""
        self.month_tokens = 0  # of all balancers, as told last
        self.month_micro_usd = 0
        self.used_at = -inf
        self.needs: list[int] = []  # tokens, of those who wait for a round trip
        self.requests, self.tokens = _Window(), _Window()
        self._places_blocked_until = -inf
        self._reserved_tokens = self._reserved_micro_usd = 0  # of requests under way
        self._spent: deque[_Spent] = deque()  # one a month, the oldest first
        self._sending: _Settling | None = None  # until it is known to have arrived
        self._called_at = self._month_at = self._rated_at = -inf
        self._asking = _Asking("", -inf, 0, 0)

    # -- requests ----------------------------------------------------------------------------------------------------

    def take(
        self, spec: TenantSpec, tokens: int, likely: tuple[int, int], month: str, now: float
    ) -> Taken | Refusal | None:
        """Admit a request: None when the store has to be asked first.

        `tokens` are the most it may use, `likely` what it will probably: (tokens, micro-dollars), for the budgets.
        """
        self.used_at = now
        refusal = self._over_budget(spec, likely, month) or self._blocked(spec, tokens, now)
        if refusal is not None:
            return refusal
        if (spec.monthly_tokens or spec.monthly_usd) and self._month_at < 0.0:
            return None
        self._expire(now)
        rpm, tpm, places = spec.requests_per_minute, spec.tokens_per_minute, spec.concurrent_requests
        if places and not (self.in_use < self.held and now < self.held_until):
            return None
        if (rpm and self.requests.allowance.left < 1) or (tpm and self.tokens.allowance.left < tokens):
            return None
        draws: list[Draw] = []
        if rpm:
            self.requests.allowance.spend(1)
            self.requests.taken += 1
        if tpm:
            draws = self.tokens.allowance.spend(tokens)
            self.tokens.taken += tokens
        self.in_use += 1
        self._reserved_tokens += likely[0]
        self._reserved_micro_usd += likely[1]
        return Taken(*likely, draws, self.source, place=True)

    def end(self, taken: Taken, tokens: int, micro_usd: int, month: str) -> None:
        """A request ended, after using so much."""
        assert taken.place, "ended twice"
        taken.place = False
        self.in_use -= 1
        self._reserved_tokens -= taken.tokens
        self._reserved_micro_usd -= taken.micro_usd
        self._places_blocked_until = -inf
        if tokens or micro_usd:
            if not self._spent or self._spent[-1].month != month:
                self._spent.append(_Spent(month))
            self._spent[-1].tokens += tokens
            self._spent[-1].micro_usd += micro_usd
        if taken.draws and taken.source == self.source:
            self._settle_tokens(taken.draws, tokens)

    def _settle_tokens(self, draws: list[Draw], used: int) -> None:
        """Give back what was reserved for nothing, the last first, or charge what came on top."""
        surplus = sum(amount for _, amount in draws) - used
        if surplus < 0:
            self.tokens.charge -= surplus
        for bucket, amount in reversed(draws):
            part = min(surplus, amount)
            if part <= 0:
                break
            self.tokens.returns[bucket] += part
            surplus -= part

    def _over_budget(self, spec: TenantSpec, likely: tuple[int, int], month: str) -> Refusal | None:
        if not (spec.monthly_tokens or spec.monthly_usd):
            return None
        if month != self.month:
            self.month, self.month_tokens, self.month_micro_usd, self._month_at = month, 0, 0, -inf
        tokens, micro_usd = self.month_so_far()
        if spec.monthly_tokens and tokens + self._reserved_tokens + likely[0] > spec.monthly_tokens:
            return Refusal("monthly_tokens", inf)
        if spec.monthly_usd and micro_usd + self._reserved_micro_usd + likely[1] > spec.monthly_usd * 1e6:
            return Refusal("monthly_usd", inf)
        return None

    def month_so_far(self) -> tuple[int, int]:
        """Tokens and micro-dollars spent this month, as far as is known here."""
        ours = [s for s in self._spent if s.month == self.month]
        if self._sending is not None and self._sending.spent.month == self.month:
            ours.append(self._sending.spent)
        return (
            self.month_tokens + sum(s.tokens for s in ours),
            self.month_micro_usd + sum(s.micro_usd for s in ours),
        )

    def _blocked(self, spec: TenantSpec, tokens: int, now: float) -> Refusal | None:
        windows = (
            ("requests_per_minute", spec.requests_per_minute, self.requests, 1),
            ("tokens_per_minute", spec.tokens_per_minute, self.tokens, tokens),
        )
        for name, limit, _, need in windows:
            if limit and need > limit:
                return Refusal(name, inf)
        for name, limit, window, need in windows:
            block = window.block
            if limit and block is not None and now < block.until and need >= block.need:
                return Refusal(name, max(0.0, block.fits_at - now))
        if spec.concurrent_requests and now < self._places_blocked_until:
            return Refusal("concurrent_requests", 1.0)
        return None

    def remaining(self, spec: TenantSpec) -> tuple[int, int]:
        """Requests and tokens that this tenant could still use now, as far as is known here."""
        return (
            max(0, (spec.requests_per_minute or 0) - self.requests.used + self.requests.allowance.left),
            max(0, (spec.tokens_per_minute or 0) - self.tokens.used + self.tokens.allowance.left),
        )

    # -- the store ---------------------------------------------------------------------------------------------------

    def wants_more(self, spec: TenantSpec) -> bool:
        """Whether leases run low, so that the next requests would have to wait for the store."""
        pairs = ((self.requests, spec.requests_per_minute), (self.tokens, spec.tokens_per_minute))
        return any(
            limit and window.block is None and window.allowance.left < 0.5 * self._ahead(window, limit)
            for window, limit in pairs
        ) or bool(spec.concurrent_requests and self.held > self.in_use + 2 * self._spare(spec.concurrent_requests))

    def due(self, spec: TenantSpec, now: float) -> bool:
        """Whether something has to be told or renewed although nobody waits."""
        self._expire(now)
        settle = now - self._called_at >= SETTLE_S and bool(self._spent or self._sending)
        month = now - self._month_at >= MONTH_S and now - self.used_at < RECENT_S
        return (
            settle
            or bool(self.requests.returns or self.tokens.returns or self.tokens.charge)
            or (self.held > 0 and (self.in_use == 0 or self.held_until - now < 0.5 * PLACES_TTL_S))
            or (month and bool(spec.monthly_tokens or spec.monthly_usd))
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is lost by forgetting it."""
        return not (self.in_use or self.held or self.needs or self._spent or self._sending)

    def call(self, spec: TenantSpec, source: str, settles: int, month: str, now: float, share: int = 1) -> QuotaCall:
        """Everything there is to tell and to ask. `share`: this balancer keeps one part in so many of each limit."""
        self._expire(now)
        elapsed = max(now - self._rated_at, self.span.bucket_s)
        for window in (self.requests, self.tokens):
            window.rate = window.taken / elapsed
        self._asking = _Asking(source, now, self.requests.taken, self.tokens.taken)
        self._called_at = now
        if not spec.concurrent_requests:
            self.held = 0
        settling = self._settling(settles, month)
        return QuotaCall(
            self.tenant,
            self.balancer,
            settling.number,
            settling.spent.month,
            settling.spent.tokens,
            settling.spent.micro_usd,
            self._want(self.requests, spec.requests_per_minute, [1] * len(self.needs), share, settling),
            self._want(self.tokens, spec.tokens_per_minute, self.needs, share, settling),
            self._want_places(spec.concurrent_requests, share),
        )

    def _settling(self, number: int, month: str) -> _Settling:
        """What there is to settle; what is not known to have arrived first, once more."""
        source = self._asking.source
        local = source == LOCAL  # it has no say on the month
        if self._sending is not None and not local:
            return self._sending
        spent = self._spent.popleft() if self._spent and not local else _Spent(month)
        if source != self.source:
            settling = _Settling(number, source, spent, 0, (), ())
        else:
            settling = _Settling(
                number,
                source,
                spent,
                self.tokens.charge,
                tuple(Draw(*item) for item in self.requests.returns.items()),
                tuple(Draw(*item) for item in self.tokens.returns.items()),
            )
            self.tokens.charge = 0
            self.requests.returns.clear()
            self.tokens.returns.clear()
        if settling and not local:
            self._sending = settling
        return settling

    def _want(
        self, window: _Window, limit: int | None, needs: list[int], share: int, settling: _Settling
    ) -> WindowCall | None:
        if not limit:
            return None
        first = min(needs, default=0)
        limit = max(1, limit // share, first)  # one request may be larger than a share
        source = self._asking.source
        left = window.allowance.left if source == self.source else 0
        least = max(0, first - left)
        most = max(least, sum(needs) + self._ahead(window, limit) - left)
        if settling.source != source:
            return WindowCall(limit, least, most)
        requests = window is self.requests
        returned = settling.returned_requests if requests else settling.returned_tokens
        return WindowCall(limit, least, most, 0 if requests else settling.charge, returned)

    def _ahead(self, window: _Window, limit: int) -> int:
        """Units to have in advance: what the coming lease will probably use."""
        return min(ceil(1.5 * window.rate * self.span.lease_s), limit // AHEAD)

    def _want_places(self, limit: int | None, share: int) -> SlotCall | None:
        if not limit:
            return None
        limit = max(1, limit // share)
        least = self.in_use + (1 if self.needs else 0)
        spare = self._spare(limit) if self.in_use or self.needs else 0
        return SlotCall(limit, self.in_use, least, max(least, self.in_use + len(self.needs) + spare), PLACES_TTL_S)

    def _spare(self, limit: int) -> int:
        return min(self.in_use // 4 + 1, limit // SPARE_PLACES)

    def answered(self, call: QuotaCall, reply: QuotaReply, sent_at: float, now: float) -> None:
        """The reply to the last call, made at `sent_at`; leases run from then, which is before they were granted."""
        asking = self._asking
        if asking.source != self.source:
            self.requests.reset()
            self.tokens.reset()
            self.source, self.held, self.held_until = asking.source, 0, -inf
        self.requests.taken -= asking.requests
        self.tokens.taken -= asking.tokens
        self._rated_at = asking.at
        if self.source == LOCAL:
            self._month_at = max(self._month_at, now - MONTH_S)  # it need not be waited for
        else:
            if self._sending is not None and self._sending.number == call.settles:
                self._sending = None
            if call.month == self.month or not self.month:
                self.month, self._month_at = call.month, now
                self.month_tokens, self.month_micro_usd = reply.month_tokens, reply.month_micro_usd
        expires_at = sent_at + self.span.lease_s
        self._granted(self.requests, call.requests, reply.requests, expires_at, now)
        self._granted(self.tokens, call.tokens, reply.tokens, expires_at, now)
        if call.slots is not None:
            self.held, self.held_until = reply.slots, sent_at + PLACES_TTL_S
            if reply.slots < call.slots.least and not self._windows_refused(reply):
                self._places_blocked_until = now + PLACES_LOOK_S

    @staticmethod
    def _windows_refused(reply: QuotaReply) -> bool:
        return any(grant is not None and grant.wait_s > 0.0 for grant in (reply.requests, reply.tokens))

    def _granted(
        self, window: _Window, call: WindowCall | None, grant: Grant | None, expires_at: float, now: float
    ) -> None:
        if call is None or grant is None:
            return
        window.used = grant.used
        window.allowance.add(grant.amount, grant.bucket, expires_at)
        window.block = None
        if grant.wait_s > 0.0:
            fits_at = now + grant.wait_s
            need = call.least + window.allowance.left
            window.block = _Block(need, min(fits_at, now + LOOK_S) if isfinite(fits_at) else now + LOOK_S, fits_at)

    def _expire(self, now: float) -> None:
        for window in (self.requests, self.tokens):
            over = window.allowance.expired(now)
            if over:
                window.returned(over)
