"""What a tier learns of a request before it routes it: from the body where it enters, from a peer's word below.

Only what is signed is believed. A request that has been through this system and comes back as a client's has met an
instance that is one of our own listeners, and is refused before it goes round again.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

from common import apis, clock
from common.affinity import Affinity
from common.balancing import Balancing
from common.config import Clients, Residency
from common.errors import BadRequest, Draining, Forbidden, ModelNotFound, NoEndpoints, QuotaExceeded, StoreUnavailable
from common.policy.addresses import AddressRates, client_of, within
from common.policy.input_length import BYTES_PER_TOKEN, InputLength
from common.policy.output_length import OutputLength
from common.policy.versions import Versions
from common.records import RequestRecord
from common.relay.coding import decoded
from common.relay.exchange import Exchange
from common.route import HEADER, MAX_HOPS, OtherVersion, Route, RouteSigner
from common.tenancy.gate import Admission, Gate
from common.tenancy.keys import without_credentials, without_query_credentials
from common.tokenizer import Tokenizers
from common.types import NO_SLO, InferenceRequest, Path, Priority, Slo
from common.whereabouts import Whereabouts

COUNTED_HERE_BYTES = 8192  # prompts above this are tokenized by a thread
DECODED_HERE_BYTES = 65_536  # compressed bodies above this are decoded by a thread
UNDERSTOOD_HERE_BYTES = 262_144  # and bodies above this are read by one: about half a millisecond's work


class Intake:
    """Reads requests for one tier."""

    def __init__(
        self,
        balancing: Balancing,
        affinity: Affinity,
        signer: RouteSigner,
        lengths: OutputLength,
        versions: Versions,
        *,
        slo: Slo = NO_SLO,
        verified_peers: bool = False,
        gate: Gate | None = None,
    ) -> None:
        self.whereabouts = Whereabouts(Clients(), Residency(), "")
        self.leaving = False  # peers are told to go elsewhere
        self.inputs = InputLength()
        self.tokenizers = Tokenizers({})
        self._balancing = balancing
        self._affinity = affinity
        self._signer = signer
        self._lengths = lengths
        self._gate = gate
        self._addresses = AddressRates()
        self.slo = slo  # of requests that name none
        self._versions = versions
        self._verified_peers = verified_peers  # a peer has to show a certificate as well
        # Says in `Via` that a request went from this system to a server; nobody without the key can say so.
        self.pseudonym = b"headwater-" + hashlib.sha256(b"via" + signer.keys[0]).hexdigest()[:12].encode()

    async def read(
        self, exchange: Exchange, matched: apis.Match, record: RequestRecord
    ) -> tuple[Route, Admission | None]:
        """What policy needs to know, and what the request's tenant has been charged with, to be ended with it.

        Raises BadRequest, ModelNotFound, NoEndpoints, Draining or AccessError.
        """
        header = exchange.fields.get(HEADER)
        told = self._told(exchange, header, record) if header is not None else None
        admission = None
        if told is None:
            node = exchange.carrier.node if exchange.carrier is not None else ()
            admission, request = await self._enter(exchange, matched, record, node)
            told = Route(request, node)
        request = told.request
        record.model, record.stream, record.tenant = request.model, request.stream, request.tenant
        record.input_tokens, record.has_session = request.input_tokens, bool(request.session)
        record.predicted_output_tokens = request.output_tokens
        record.executions = told.attempts
        if request.shadow_of:
            record.shadow_of, record.version = request.shadow_of, request.version
        return told, admission

    async def _enter(
        self, exchange: Exchange, matched: apis.Match, record: RequestRecord, node: Path
    ) -> tuple[Admission | None, InferenceRequest]:
        """A client's request. Where callers are asked who they are, that comes before anything is read for them."""
        self.count(exchange)
        if self._gate is None:
            request, asked = await self._understand(exchange, matched, record, "")
            return None, request if asked is None else replace(request, priority=asked)
        caller = self._gate.identify(exchange.headers)
        if node and caller.tenant.spec.regions and node[0] not in caller.tenant.spec.regions:
            raise Forbidden("this tenant is served in other regions", code="region_not_allowed")
        record.tenant = caller.tenant.name
        exchange.headers = without_credentials(exchange.headers)
        exchange.target = without_query_credentials(exchange.target)
        request, asked = await self._understand(exchange, matched, record, caller.tenant.name)
        admission = await self._gate.admit(caller, request, asked)
        return admission, admission.request

    def count(self, exchange: Exchange) -> None:
        """Count a client's request for its address. Raises QuotaExceeded for one of too many."""
        client, limits = exchange.client, exchange.client.limits
        rate = limits.requests_per_s_per_address
        if not rate or exchange.carrier is not None or within(client.peername, limits.unlimited_addresses):
            return  # what a gateway carries comes from its address, and is for it to limit
        wait_s = self._addresses.take(client_of(client.peername), rate, clock.now())
        if wait_s:
            raise QuotaExceeded("too many requests come from your address", retry_after_s=wait_s)

    def _told(self, exchange: Exchange, header: bytes, record: RequestRecord) -> Route | None:
        """A peer's word on a request; None when it is no peer's."""
        if self._verified_peers and not exchange.client.verified:
            return None
        try:
            told = self._signer.verify(header)
        except OtherVersion as error:
            record.from_peer = True
            raise NoEndpoints(str(error)) from None
        if told is None:
            return None
        record.from_peer = True
        record.executions = told.attempts
        if len(told.visited) >= MAX_HOPS:
            raise NoEndpoints("the request has passed too many tiers")
        if told.visited.count(self._balancing.process_id) > 1:
            raise NoEndpoints("the request has been here before")  # once is honest: it came in here, and down again
        if self.leaving:
            raise Draining("this balancer is leaving")
        return told

    async def _understand(
        self, exchange: Exchange, matched: apis.Match, record: RequestRecord, tenant: str
    ) -> tuple[InferenceRequest, Priority | None]:
        """What is in it, and the class its header asks for."""
        if b"via" in exchange.fields and any(
            key == b"via" and self.pseudonym in value for key, value in exchange.headers
        ):
            message = (
                "the request comes back from what was taken for a server: an instance is a balancer of this system"
            )
            raise BadRequest(message, status=508, code="loop_detected")
        coding = exchange.header(b"content-encoding")
        if coding is not None:
            await self._decode(exchange, coding)
        api, body = matched.api, exchange.body
        if len(body) > UNDERSTOOD_HERE_BYTES:
            ask = await asyncio.to_thread(apis.understand, matched, exchange.header, body)
        else:
            ask = apis.understand(matched, exchange.header, body)
        target = self._versions.target(ask.model, ask.session or record.id)
        if target.model != ask.model:
            exchange.body = apis.renamed(exchange.body, ask.model, target.model, api.kind)
            record.alias = ask.model
        model = record.model = ask.model = target.model
        record.version = target.version
        balancing = self._balancing
        on_demand = balancing.on_demand(model)
        if balancing.empty and not on_demand:
            raise NoEndpoints("no instance is registered yet", retry_after_s=1.0)
        if not api.model_optional and not balancing.known(model) and not (balancing.any_model() or on_demand):
            raise ModelNotFound(f"The model `{model[:200]}` does not exist.", param="model")
        if self.tokenizers.has(model) and api.kind is apis.Kind.JSON:
            ask.size = await self._counted(model, body) or ask.size
        record.input_bytes, record.input_items = ask.size, ask.items
        hints = apis.NO_HINTS if apis.HINTS.isdisjoint(exchange.fields) else apis.read_hints(exchange.header)
        input_tokens = self.inputs.expect(model, ask.size, ask.items)
        request = InferenceRequest(
            record.id,
            model,
            api.family.value,
            ask.stream,
            input_tokens,
            ask.cap,
            self._output_tokens(api, ask, input_tokens, hints, tenant),
            ask.prefix_hashes,
            ask.session,
            tenant=tenant,
            deadline_s=hints.deadline_s,
            slo=self.slo if hints.slo == NO_SLO else hints.slo,
            version=target.version,
            fingerprint=ask.fingerprint,
            operation=api.operation,
        )
        location = self.whereabouts.location(exchange.client.peername, exchange.headers)
        only, never = self.whereabouts.regions(request.tenant, location, exchange.headers)
        if location or only or never:
            request = replace(request, location=location, only=only, never=never)
        if ask.held and (owner := await self._owner(ask.held)):
            return replace(request, owner=owner), hints.priority
        mode, _ = self._affinity.sticks(exchange.path, model)
        placement = await self._affinity.lookup(ask.session) if ask.session and mode != "off" else None
        if placement is not None:
            sticky = mode == "strict"
            request = replace(request, warm=placement.path, warm_tokens=placement.tokens, sticky=sticky)
        return request, hints.priority

    async def _counted(self, model: str, body: bytes) -> int:
        """The prompt's tokens by the model's own tokenizer, as so many bytes of common text; 0: cannot be told."""

        def count() -> int:
            return round((self.tokenizers.count(model, apis.prose(body)) or 0) * BYTES_PER_TOKEN)

        return await asyncio.to_thread(count) if len(body) > COUNTED_HERE_BYTES else count()

    async def _owner(self, held: tuple[str, ...]) -> Path:
        """The instance that holds what a request builds on; () when that is not known. Raises NoEndpoints."""
        if not self._affinity.rules.held_timeout_s:
            return ()
        for id_ in held:
            try:
                placement = await self._affinity.holder(apis.held_key(id_))
            except StoreUnavailable:
                # Another server would say that there is no such thing, which is not so.
                message = f"which server holds `{id_[:100]}` cannot be told now: the store of sessions does not answer"
                raise NoEndpoints(message, retry_after_s=1.0) from None
            if placement is not None:
                return placement.path
        return ()

    def learn(self, record: RequestRecord, input_tokens: int) -> None:
        """A server counted the prompt tokens of a request that was read here."""
        if record.input_bytes:
            self.inputs.learn(record.model, record.input_bytes, record.input_items, input_tokens)

    def _output_tokens(self, api: apis.Api, ask: apis.Ask, input_tokens: int, hints: apis.Hints, tenant: str) -> float:
        """As the client expects, or as learned; 0 for what does not generate."""
        if not api.generates:
            return 0.0
        if hints.output_tokens is not None:
            return min(hints.output_tokens, ask.cap or hints.output_tokens)
        return self._lengths.expect(ask.model, tenant, input_tokens, ask.cap)

    @staticmethod
    async def _decode(exchange: Exchange, codings: str) -> None:
        """Take a request's content codings off: routing has to read the body, and few servers could."""
        limit = exchange.client.limits.max_body_bytes
        if len(exchange.body) > DECODED_HERE_BYTES:
            exchange.body = await asyncio.to_thread(decoded, exchange.body, codings, limit)
        else:
            exchange.body = decoded(exchange.body, codings, limit)
        exchange.drop(b"content-encoding")
