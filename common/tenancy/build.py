"""The gate of one process, made as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter

from common import backing
from common.config import TierConfig
from common.errors import ConfigError
from common.outbox import Outbox
from common.policy.window import Span
from common.store.base import MembershipStore, QuotaStore
from common.store.memory import MemoryMembershipStore
from common.tenancy.admin import tenants_router
from common.tenancy.gate import Gate
from common.tenancy.sources import FileTenants, StoredTenants
from common.tenancy.usage import FileWriter

if TYPE_CHECKING:
    from common.tenancy.oidc import Oidc


@dataclass(frozen=True, slots=True)
class Tenants:
    """The gate, and where its tenants come from."""

    gate: Gate
    source: FileTenants | StoredTenants
    own_store: MembershipStore | None = None  # opened for them alone

    @property
    def router(self) -> APIRouter:
        """Their part of the admin API."""
        if isinstance(self.source, StoredTenants):
            return tenants_router(self.gate, self.source, "etcd")
        return tenants_router(self.gate, None, str(self.source.file))

    async def run(self) -> None:
        """Follow what there is to follow, until cancelled."""
        await self.gate.run()

    async def close(self) -> None:
        """Settle, and let go of stores; `run` has to have ended."""
        await self.gate.close()
        if self.own_store is not None:
            await self.own_store.close()


async def tenants_of(config: TierConfig, store: MembershipStore, replicas: Callable[[], int]) -> Tenants | None:
    """None where callers are not asked who they are. Raises ConfigError.

    `replicas`: how many balancers share the limits while they cannot tell each other.
    """
    wanted = config.tenants
    _check(config)
    if not wanted.enabled:
        return None
    own_store = None
    source: FileTenants | StoredTenants
    if wanted.file:
        source = FileTenants(wanted.file)
        source.read()  # so that a file that is of no use ends start-up
    else:
        if isinstance(store, MemoryMembershipStore):  # `headwater up` keeps its members to itself
            store = own_store = await backing.membership_store(config.etcd)
        source = StoredTenants(store, config.etcd.prefix)
    span = Span()
    gate = Gate(
        source,
        shared=_quota_store(config, span),
        oidc=_oidc(config),
        anonymous=wanted.anonymous,
        without_store=wanted.without_store,
        replicas=replicas,
        prices=wanted.prices,
        usage=_usage(config),
        span=span,
    )
    return Tenants(gate, source, own_store)


def _check(config: TierConfig) -> None:
    wanted = config.tenants
    if wanted.file and wanted.stored:
        raise ConfigError("tenants: file and stored exclude each other")
    if not wanted.enabled and (wanted.anonymous or wanted.oidc or wanted.usage_file or wanted.usage_stream):
        raise ConfigError("tenants: needs file or stored: without tenants nobody is asked who he is")
    if wanted.stored and not config.etcd.urls:
        raise ConfigError("tenants.stored: needs etcd.urls")
    if wanted.usage_stream and not config.redis.url:
        raise ConfigError("tenants.usage_stream: needs redis.url")
    if wanted.usage_file and config.workers > 1:
        raise ConfigError("tenants.usage_file: workers would write over each other; use tenants.usage_stream")


def _quota_store(config: TierConfig, span: Span) -> QuotaStore | None:
    if not config.redis.url:
        return None
    from common.store.redis_quota import RedisQuotaStore  # noqa: PLC0415 - costs where it is not needed

    return RedisQuotaStore(config.redis.url, budget_ms=config.tenants.budget_ms, span=span)


def _usage(config: TierConfig) -> list[Outbox]:
    wanted, sinks = config.tenants, []
    if wanted.usage_file:
        sinks.append(Outbox(FileWriter(wanted.usage_file)))
    if wanted.usage_stream:
        from common.store.redis_stream import StreamWriter  # noqa: PLC0415 - costs where it is not needed

        writer = StreamWriter(config.redis.url, wanted.usage_stream, wanted.usage_stream_entries, field="usage")
        sinks.append(Outbox(writer))
    return sinks


def _oidc(config: TierConfig) -> Oidc | None:
    if not config.tenants.oidc:
        return None
    try:
        from common.tenancy.oidc import Oidc  # noqa: PLC0415 - an extra, and not needed by most
    except ImportError as error:
        raise ConfigError(f"tenants.oidc: needs `pip install 'headwater[security]'` ({error})") from None
    return Oidc(config.tenants.oidc)
