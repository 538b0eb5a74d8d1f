"""Configuration: one strict YAML file a process, every key overridable from the environment, all or nothing.

An unknown key or a bad value is a ConfigError that names the file, the line and the key. `limits.header_timeout_s` is
`HEADWATER_LIMITS__HEADER_TIMEOUT_S` in the environment; what is set there wins over the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path as FilePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    ValidationError,
    field_validator,
    model_validator,
)

from common.errors import ConfigError
from common.logs import LevelName
from common.policy.placement import Needs, Rule
from common.policy.regions import Region, Regions
from common.policy.versions import Shadow, Split, Target, Versions
from common.types import Priority

Key = tuple[str | int, ...]
"""Where a value stands: ("limits", "header_timeout_s")."""

ENV_PREFIX = "HEADWATER_"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 of letters, digits, '.', '_' and '-'")
    return value


def _host_port(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ValueError("must be HOST:PORT, as in 127.0.0.1:8080")
    return f"{host or '0.0.0.0'}:{port}"


def _url(value: str) -> str:
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", value):
        raise ValueError("must be a URL, as in http://127.0.0.1:8000")
    return value.rstrip("/")


def _network(value: str) -> str:
    try:
        return str(ip_network(value))
    except ValueError:
        raise ValueError("must be an address or a network, as in 10.0.0.0/8") from None


def _token(value: str) -> str:
    if not re.fullmatch(r"[!-~]{16,512}", value):
        raise ValueError("must be 16 to 512 visible characters")
    return value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
"""For integers of strict models: 5.0 is 5 in JSON, where "5" is none."""
NetworkAddress = Annotated[str, AfterValidator(_network)]
Token = Annotated[str, AfterValidator(_token)]
Name = Annotated[str, AfterValidator(_name)]
HostPort = Annotated[str, AfterValidator(_host_port)]
Url = Annotated[str, AfterValidator(_url)]


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Limits(Section):
    """What one client may ask of a listener."""

    header_timeout_s: Seconds = 10.0
    """Until a request's head is received whole."""
    body_timeout_s: Seconds = 60.0
    """Until its body is received whole."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    """Largest request body taken, bytes; a larger one is refused with 413."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024
    """Largest request head taken, bytes; a larger one is refused with 431 or 414."""
    write_timeout_s: Seconds = 30.0
    """A client that takes nothing for this long is dropped."""
    keepalive_timeout_s: Seconds = 75.0
    """A client's connection may be idle this long between requests."""
    max_connections: Count = 10_000
    """Client connections at once; further ones are closed."""
    max_connections_per_address: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Of these from one client address (of IPv6: one /64); further ones are closed; 0: as many as there may be."""
    requests_per_s_per_address: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Requests a second from one client address, two seconds' worth at once; more are refused with 429; 0: no limit."""
    unlimited_addresses: tuple[NetworkAddress, ...] = ()
    """Networks that these two do not concern: of proxies in front and of other tiers, as in 10.0.0.0/8."""


class Upstream(Section):
    """Towards servers and peers."""

    connect_timeout_s: Seconds = 2.0
    """Until a connection to a server or peer stands."""
    first_byte_timeout_s: Seconds = 600.0
    """Until the first byte of an answer."""
    stall_timeout_s: Seconds = 120.0
    """A stream that brings nothing for this long is broken."""
    total_timeout_s: Seconds = 3600.0
    """Until the last byte of an answer."""
    idle_timeout_s: Seconds = 4.0
    """Idle connections to servers are closed after this; below the five seconds of common servers."""
    max_connections: Count = 4096
    """Connections to one address."""
    max_in_flight: Count = 1024
    """Requests under way on one instance."""
    half_close: bool = False
    """Whether a client that closed its sending side still wants the answer; no: it has left, and its request ends."""


class Retry(Section):
    """How often one request may be sent to servers, over all tiers together."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 2
    """Servers that one request may be sent to, over all tiers together."""
    budget_ratio: Fraction = 0.2
    """Retries as a share of recent requests, on top of a few a second."""
    continue_streams: tuple[Literal["/v1/chat/completions", "/v1/completions"], ...] = ()
    """Routes whose streams are carried on by another server when theirs breaks; see docs/relay.md."""


class QueueSection(Section):
    """The waiting room, for requests that nobody has room for. The tier that a request enters by holds it."""

    max_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """Requests that may wait; further ones are refused at once, and 0 refuses all."""
    max_tokens: Annotated[int, Field(ge=1)] = 4_000_000
    """And tokens of them: prompts, and expected answers twice."""
    timeout_s: Annotated[float, Field(ge=1.0, le=86_400.0)] = 30.0
    """A request waits at most this long, then it is refused."""


class Health(Section):
    """When an endpoint is left alone for its answers."""

    eject_after: Count = 5
    """Failures in a row after which an endpoint is left alone."""
    cooldown_s: Seconds = 2.0
    """Until it gets one request on trial; doubles with each trial that fails."""
    max_ejected_ratio: Fraction = 0.5
    """Share of a pool that failures may eject, counted with the one that is to be; beyond it failing instances are
    used like the others. Where nobody listens, and what hangs while others do not, is left alone in any case."""
    stall_s: Annotated[float, Field(ge=0.0, le=600.0)] = 3.0
    """An instance with work, of which nothing comes for this long beyond what was predicted, hangs; 0: never."""
    quarantine_s: Annotated[float, Field(ge=0.0, le=86_400.0)] = 300.0
    """A prompt over which two servers ran out of memory or died is refused for this long; 0: none is."""
    event_url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    """Is told, by a POST of JSON, of instances that ran out of memory, died over a prompt, or hang."""


class Drain(Section):
    """Leaving."""

    notice_s: Annotated[float, Field(ge=0.0, le=600.0)] = 1.0
    """After SIGTERM requests of clients are still taken for this long, each the last of its connection, so that what
    balances in front notices; skipped while no client is connected."""
    grace_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 30.0
    """Requests under way may end within this after SIGTERM; then they are broken."""


class RegionTerms(Section):
    """What one region costs and takes, beside its servers' GPU hours."""

    usd_per_million_input_tokens: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Price of prompt tokens, $."""
    usd_per_million_output_tokens: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Price of output tokens, $."""
    egress_usd_per_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Price of answers to clients of another location, $ for 10^9 bytes."""
    max_in_flight: Count | None = None
    """Requests under way there, of all balancers together: a hard limit; none: what its servers take."""
    fallback_after_s: Annotated[float, Field(ge=0.0, le=3600.0)] | None = None
    """Makes it a fallback: it takes part only when no other region can begin to answer within this; none: always."""


class PolicySection(Section):
    """How a stage chooses."""

    name: str = "predicted_completion"
    """How every stage chooses: predicted_completion, or one to compare it with (earliest_completion, least_work_left,
    round_robin, weighted_round_robin, least_connections, weighted_least_connections, weighted_response_time,
    least_load, power_of_two, hash, prefix_affinity, model_aware)."""
    price_weight_s_per_usd: Annotated[float, Field(ge=0.0)] = 1e4
    """Seconds that a dollar weighs; a typical request costs about 1e-4 $, so that its price weighs about a second."""
    slo_ttft_s: Seconds | None = None
    """Service level of requests that name none (`x-slo-ttft-ms`), seconds to the first token; empty: none."""
    slo_tpot_s: Seconds | None = None
    """And seconds for each token after it (`x-slo-tpot-ms`). A predicted miss weighs 20 s in the cost."""
    share_cap: Annotated[float, Field(ge=0.0, le=100.0)] = 1.3
    """A region more than half full gets at most so many times its share of all regions' speed; 0: no cap."""
    regions: Annotated[Mapping[Name, RegionTerms], Field(max_length=256)] = {}
    """Terms of regions, by their names."""

    def terms(self) -> Regions:
        """The terms as policy has them."""
        return Regions({name: Region(**dict(terms)) for name, terms in self.regions.items()}, self.share_cap)


Globs = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=512)], ...], Field(max_length=256)]
GpuClasses = Annotated[frozenset[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]], Field(max_length=64)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{0,64}$")]
Labels = Annotated[Mapping[Annotated[Label, Field(min_length=1)], Label], Field(max_length=64)]


class PlacementRule(Section):
    """One rule: which requests it is for, and which servers those need. What is left out holds for all."""

    models: Globs = ()
    """Requests for these models; `*` and `?` stand for any text and any character."""
    apis: Annotated[
        tuple[Literal["openai", "anthropic", "kserve", "torchserve", "ollama"], ...], Field(max_length=5)
    ] = ()
    """Requests of these API families."""
    operations: Globs = ()
    """Requests of these kinds, as their paths name them: chat, embeddings, image_*, speech, transcription, …"""
    priorities: frozenset[Literal["critical", "standard", "batch"]] = frozenset()
    """Requests of these classes."""
    tenants: Globs = ()
    """Requests of these tenants."""
    min_memory_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Needed: accelerator memory of the server, 10^9 bytes."""
    gpus: GpuClasses = frozenset()
    """Needed: one of these classes."""
    labels: Labels = {}
    """Needed: all of these labels."""
    exclusive: bool = False
    """Whether servers with these labels are for these requests only."""
    prefer_gpus: GpuClasses = frozenset()
    """Preferred: these classes."""
    prefer_labels: Labels = {}
    """Preferred: servers with all of these labels."""
    avoid_gpus: GpuClasses = frozenset()
    """Avoided: these classes, unless one of them is idle."""
    fastest: bool = False
    """Whether they go where they are done first, whatever that costs others."""
    prefer_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 1.0
    """What a preference is worth: so many seconds they rather wait."""

    @model_validator(mode="after")
    def _has_labels(self) -> PlacementRule:
        if self.exclusive and not self.labels:
            raise ValueError("exclusive: labels say which servers")
        return self


class Placement(Section):
    """What requests need of servers. All rules that are for a request hold together."""

    rules: Annotated[tuple[PlacementRule, ...], Field(max_length=256)] = ()
    """The rules."""
    critical_to_fastest: bool = True
    """Whether requests of the class critical go where they are done first, as by a rule `fastest`."""
    adapter_load_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 1.0
    """What it costs to go to a server that has to load the LoRA adapter first, seconds."""

    def needs(self) -> Needs:
        """The rules as policy has them."""
        rules = [_rule(rule) for rule in self.rules]
        if self.critical_to_fastest:
            rules.append(Rule(priorities=frozenset({Priority.CRITICAL}), fastest=True))
        return Needs(rules)


def _rule(rule: PlacementRule) -> Rule:
    return Rule(
        rule.models,
        rule.apis,
        rule.operations,
        frozenset(Priority[name.upper()] for name in rule.priorities),
        rule.tenants,
        rule.min_memory_gb,
        rule.gpus,
        _pairs(rule.labels),
        rule.exclusive,
        rule.prefer_gpus,
        _pairs(rule.prefer_labels),
        rule.avoid_gpus,
        rule.fastest,
        rule.prefer_s,
    )


def _pairs(labels: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{key}={value}" for key, value in labels.items())


ModelName = Annotated[str, Field(min_length=1, max_length=512)]
Weights = Annotated[Mapping[ModelName, Annotated[float, Field(ge=0.0, le=1e6)]], Field(min_length=1, max_length=16)]


def _some_weight(weights: Mapping[str, float]) -> Mapping[str, float]:
    if not any(weights.values()):
        raise ValueError("one weight has to be above 0")
    return weights


Shares = Annotated[Weights, AfterValidator(_some_weight)]


class ShadowTo(Section):
    """Where copies of requests go: a model, a version, or both."""

    model: Annotated[str, Field(max_length=512)] = ""
    """Another model than the request's; none: the same."""
    version: Annotated[str, Field(max_length=256)] = ""
    """The `version` of instances; where nobody has it, nothing is sent."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the requests that are copied."""
    paths: Globs = ()
    """Of requests, as in /v1/chat/*; none: any."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> ShadowTo:
        if not self.model and not self.version:
            raise ValueError("names neither a model nor a version")
        return self


class Models(Section):
    """Names of models, and versions behind one name."""

    aliases: Annotated[Mapping[ModelName, ModelName | Shares], Field(max_length=1000)] = {}
    """Other names for models: the request goes on with the model's own. With weights, as in `{chat: {small: 9,
    large: 1}}`, the alias stands for several, sticky by session."""
    splits: Annotated[Mapping[ModelName, Shares], Field(max_length=1000)] = {}
    """Shares of a model's versions, as in `{llama: {v1: 95, v2: 5}}`, by `version` of the agents' instances."""
    on_demand: Globs = ()
    """Models that are started when asked for: requests for them wait (`queue`) while no instance has them."""
    shadows: Annotated[Mapping[ModelName, ShadowTo], Field(max_length=1000)] = {}
    """Copies of the requests for a name, as in `{llama: {version: v2, ratio: 0.1}}`: answered by another version or
    model as well, for nobody, beside what they are copies of."""
    shadow_requests: Count = 16
    """Copies under way at once in one process; further requests are not copied."""
    shadow_bytes: Annotated[int, Field(ge=1, le=2**40)] = 16 * 1024 * 1024
    """Bytes of their bodies together."""
    tokenizers: Annotated[Mapping[ModelName, str], Field(max_length=256)] = {}
    """`tokenizer.json` of models (a `*` at the end stands for anything), as in `{llama-8b: /m/tokenizer.json}`:
    their prompts are counted rather than estimated from bytes. Needs the extra `tokenizer`."""

    def versions(self) -> Versions:
        """The splits as policy has them."""
        aliases = {
            name: Split(name, tuple(Target(m, weight=w) for m, w in _shares(to).items()))
            for name, to in self.aliases.items()
        }
        splits = {
            model: Split(model, tuple(Target(model, version, weight) for version, weight in shares.items()))
            for model, shares in self.splits.items()
        }
        return Versions(aliases, splits)

    def copies(self) -> dict[str, Shadow]:
        """The shadows as policy has them."""
        return {name: Shadow(to.model, to.version, to.ratio, to.paths) for name, to in self.shadows.items()}


def _shares(to: str | Mapping[str, float]) -> Mapping[str, float]:
    return {to: 1.0} if isinstance(to, str) else to


AffinityMode = Literal["soft", "strict", "off"]


class AffinityRoute(Section):
    """Sessions of some requests; of several that match the first counts."""

    path: str = ""
    """Of the request, as in /v1/completions; none: any."""
    model: str = ""
    """Its model; a `*` at the end stands for anything; none: any."""
    mode: AffinityMode = "soft"
    """See `affinity.mode`."""
    timeout_s: Seconds = 600.0
    """See `affinity.timeout_s`."""


class ResidencyRule(Section):
    """Which regions some requests may be served in. All rules that are for a request hold together."""

    tenants: Globs = ()
    """Requests of these tenants; `*` and `?` as usual."""
    value: Annotated[str, Field(max_length=256)] = ""
    """Requests whose `residency.header` has this value."""
    locations: frozenset[Name] = frozenset()
    """Requests from these locations."""
    allow: frozenset[Name] = frozenset()
    """Regions they may be served in; none: all."""
    deny: frozenset[Name] = frozenset()
    """Regions they may not be served in."""

    @model_validator(mode="after")
    def _says_something(self) -> ResidencyRule:
        if not self.allow and not self.deny:
            raise ValueError("it allows and denies nothing")
        return self


class Residency(Section):
    """Where data may go. Every tier that clients call needs the same rules."""

    header: Annotated[str, Field(pattern=r"^(x-[a-z0-9-]{1,64})?$")] = ""
    """A client's header that rules go by, as in x-data-residency; a value that no rule knows is refused."""
    rules: Annotated[tuple[ResidencyRule, ...], Field(max_length=1024)] = ()
    """The rules."""

    @model_validator(mode="after")
    def _has_header(self) -> Residency:
        if any(rule.value for rule in self.rules) and not self.header:
            raise ValueError("a rule has a value, and no header is named that could have it")
        return self


class LocationNetworks(Section):
    """Clients of some networks."""

    location: Name
    """Where they are: the name of a region."""
    networks: Annotated[tuple[IPvAnyNetwork, ...], Field(min_length=1, max_length=4096)]
    """Their addresses, as in 10.1.0.0/16; the longest prefix that fits counts."""


class Clients(Section):
    """Where clients are."""

    locations: Annotated[tuple[LocationNetworks, ...], Field(max_length=1024)] = ()
    """By their addresses."""
    location_header: Annotated[str, Field(pattern=r"^(x-[a-z0-9-]{1,64})?$")] = ""
    """A header that says it, as in x-client-region; believed of trusted proxies alone."""
    trusted_proxies: Annotated[tuple[IPvAnyNetwork, ...], Field(max_length=1024)] = ()
    """Addresses of proxies whose `location_header` is believed, and whose X-Forwarded-For says who the client is."""
    default: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""
    """Where all others are; none: in the region of the tier they call, if it has one."""


class Affinity(Section):
    """Sessions that return to where they were served."""

    mode: AffinityMode = "soft"
    """soft: they return unless waiting there costs more than reading the prompt anew elsewhere; strict: as long as
    their server takes work; off: each request is chosen for by itself, but for what is cached."""
    timeout_s: Seconds = 600.0
    """How long after its last request a session is remembered."""
    routes: tuple[AffinityRoute, ...] = ()
    """Other modes and times for some paths or models: a list of `path`, `model`, `mode` and `timeout_s`."""
    max_sessions: Count = 100_000
    """Sessions remembered in this process."""
    held_timeout_s: Annotated[float, Field(ge=0.0, le=2_592_000.0)] = 86_400.0
    """How long it is remembered which server holds a response or conversation (`/v1/responses`, `/v1/conversations`);
    what builds on one goes there and nowhere else. 0: never, for servers that share what they store."""


class Etcd(Section):
    """Membership."""

    urls: tuple[Url, ...] = ()
    """Members of the etcd cluster; none: membership stays in this process."""
    ttl_s: Annotated[float, Field(ge=1.0, le=600.0)] = 5.0
    """How long this process is presented after it has died."""
    snapshot_file: str = ""
    """Where a tier keeps what etcd said last, for a start without etcd; none: it waits for etcd. It holds the key that
    tiers sign with."""
    prefix: str = "/headwater"
    """Under which all keys are."""
    user: str = ""
    """Name, where etcd asks for one."""
    password: Annotated[str, Field(repr=False)] = ""
    """Its password."""
    ca_file: str = ""
    """Certificate authority of etcd's TLS."""
    cert_file: str = ""
    """Client certificate for etcd."""
    key_file: str = ""
    """Its key."""


class Redis(Section):
    """Session affinity shared by balancers."""

    url: Annotated[str, Field(repr=False)] = ""
    """As in redis://host:6379/0; none: sessions are known to this process alone."""
    budget_ms: Annotated[float, Field(gt=0.0, le=1000.0)] = 10.0
    """A lookup that takes longer is given up, milliseconds."""


class Tracing(Section):
    """Where spans go, and how many."""

    otlp_endpoint: str = ""
    """Collector, http://host:4318 (OTLP over HTTP) or grpc://host:4317; none: spans are only kept here."""
    sample_ratio: Fraction = 0.01
    """Share of requests whose spans are exported, where the caller did not decide; errors always are."""
    recent: Annotated[int, Field(ge=0, le=100_000)] = 2000
    """Finished requests remembered for `headwater trace` and `explain`; at most 32 MiB of them."""
    recent_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 10.0
    """Those go back about so long: at higher rates only some ordinary ones are kept, but all that failed, were slow,
    tried again or sampled; 0: the latest, each."""
    decisions_file: str = ""
    """Every request's decision record is also appended to this file, a JSON line each; none: it is only remembered."""
    decisions_stream: str = ""
    """And added to this stream in Redis (`redis.url`), as JSON in the field `decision`."""
    decisions_stream_entries: Annotated[int, Field(ge=100, le=10_000_000)] = 10_000
    """About so many are kept there; one takes 5 to 10 KB."""


class Auth(Section):
    """Between tiers, and towards those who operate them."""

    route_keys: Annotated[tuple[str, ...], Field(repr=False)] = ()
    """Keys that sign the route header: the first signs, all verify; none: one that all tiers find in etcd."""
    admin_tokens: Annotated[tuple[Token, ...], Field(repr=False, max_length=16)] = ()
    """Tokens of which the admin listener wants one; off loopback it answers little without any are configured."""
    admin_open: bool = False
    """Whether the admin listener answers without tokens off loopback too: only where none but operators reach it."""
    open_metrics: bool = True
    """Whether /metrics is answered to anybody who reaches the admin listener; health is in any case."""


class Price(Section):
    """What a model's tokens cost, US dollars for a million."""

    input_usd: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Of a prompt."""
    cached_input_usd: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Of a prompt, where the server had them in its cache; default: as `input_usd`."""
    output_usd: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Of an answer."""


class OidcIssuer(Section):
    """A provider of tokens (OpenID Connect)."""

    issuer: Annotated[str, Field(pattern=r"^https?://[^\s?#]+$", max_length=1000)]
    """As it stands in the tokens' `iss`; an https URL."""
    audience: Annotated[tuple[str, ...], Field(min_length=1)]
    """What stands in the `aud` of tokens that are meant for here; one of these."""
    jwks_url: str = ""
    """Where its keys are; default: where its discovery document says."""
    algorithms: Annotated[
        tuple[Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"], ...],
        Field(min_length=1),
    ] = ("RS256", "ES256", "EdDSA")
    """Signatures that are taken."""
    tenant_claim: str = "tenant"
    """The claim that names the tenant."""
    tenant: str = ""
    """The tenant of all its tokens, instead of a claim."""
    leeway_s: Annotated[float, Field(ge=0.0, le=300.0)] = 30.0
    """By how much clocks may differ."""
    refresh_s: Annotated[float, Field(ge=10.0, le=86_400.0)] = 3600.0
    """Its keys are fetched anew this often, and at once for a token with a key that is new."""
    ca_file: str = ""
    """Authority of its certificate; default: the system's."""


class TenantsSection(Section):
    """Who may call, and what each may use; without `file` and `stored` everybody may do everything."""

    file: str = ""
    """A YAML file of tenants and hashes of their keys, read again when it changes."""
    stored: bool = False
    """Whether they are kept in etcd instead, where the admin API and `headwater tenant` change them."""
    anonymous: str = ""
    """The tenant of requests without a key; default: they are refused."""
    without_store: Literal["local", "open", "closed"] = "local"
    """While Redis is out of reach: each balancer keeps its share of all limits (local), none (open), or refuses."""
    budget_ms: Annotated[float, Field(gt=0.0, le=10_000.0)] = 100.0
    """A call to Redis about limits that takes longer counts as one that failed, milliseconds."""
    prices: Mapping[str, Price] = {}
    """Prices by model, for `monthly_usd` and usage records; `*`: of all others."""
    oidc: tuple[OidcIssuer, ...] = ()
    """Providers whose tokens are taken beside keys."""
    usage_file: str = ""
    """A file that gets a line of JSON for each request, for bills; with `workers` each process needs one of its own."""
    usage_stream: str = ""
    """A Redis stream that gets the same, by its key."""
    usage_stream_entries: Annotated[int, Field(ge=1000, le=1_000_000_000)] = 1_000_000
    """About so many are kept in it."""

    @property
    def enabled(self) -> bool:
        """Whether callers are asked who they are."""
        return bool(self.file) or self.stored


class CorsSection(Section):
    """Browsers on other origins."""

    allowed_origins: tuple[str, ...] = ()
    """Origins that may call, as in https://app.example.com; `*` allows all."""


class Streaming(Section):
    """Answers that come in pieces."""

    keepalive_comment_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 0.0
    """A stream of server-sent events in which nothing moves gets a comment this often; 0: never."""


class Forward(Section):
    """What goes on to servers."""

    drop_headers: tuple[str, ...] = (
        "x-gateway-destination-endpoint",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-data-parallel-host-port",
        "x-encoder-hosts-ports",
    )
    """Clients' headers that go no further, in any spelling: by these, sidecars of servers would let a client name the
    address they call. Each begins with `x-`."""

    @field_validator("drop_headers")
    @classmethod
    def _begin_with_x(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(re.fullmatch(r"[xX]-[A-Za-z0-9_-]{1,100}", name) for name in value):
            raise ValueError("names of headers that begin with x-")
        return value


class TlsSection(Section):
    """TLS of the data listener, towards peers, and towards instances whose URL is https."""

    cert_file: str = ""
    """Certificate chain of this process (PEM), shown to clients and peers; read anew when it changes."""
    key_file: str = ""
    """Its key."""
    ca_file: str = ""
    """Authority that signs all tiers' certificates: peers are checked against it, in both directions."""
    peers_required: bool = False
    """Whether a peer is believed only with a certificate of that authority, and not for its signature alone."""
    instances_ca_file: str = ""
    """Authority of instances' certificates; none: the system's."""
    instances_verify: bool = True
    """Whether instances' certificates are checked."""
    admin: bool = False
    """Whether the admin listener speaks TLS as well, with the same certificate."""


class Network(Section):
    """The network between tiers."""

    emulated_rtt_s: Mapping[Name, Annotated[float, Field(ge=0.0, le=10.0)]] = {}
    """Round trip to emulate towards peers of a region, by its name, seconds; for demos."""
    probe_interval_s: Seconds = 2.0
    """Round trips to other regions are measured this often."""


class Reports(Section):
    """Load reports between tiers (gRPC)."""

    listen: HostPort = "127.0.0.1:0"
    """Where load reports are offered (gRPC); port 0: any free one."""
    interval_s: Annotated[float, Field(ge=0.02, le=60.0)] = 0.2
    """A report is sent at least this often."""


class Log(Section):
    """Logs go to standard output, one line an event."""

    format: Literal["auto", "json", "pretty"] = "auto"
    """json, pretty, or auto: pretty on a terminal."""
    level: LevelName = "info"
    """The least severe that is written; `headwater log-level` changes it in a process that runs."""
    access: bool = True
    """Whether each request gets a line."""


class TierConfig(Section):
    """All settings of one tier process."""

    listen: HostPort = "0.0.0.0:8080"
    """Where clients and peers send requests."""
    admin: HostPort = "127.0.0.1:9080"
    """Metrics, health and the admin API; keep it out of clients' reach."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that share the port of `listen`; each has its own name, admin port and reports."""
    advertise: str = ""
    """Host under which peers reach this process; default: the host of `listen`."""
    id: Name | None = None
    """Name of this balancer, different from all others'; default: made of its node, host name and port."""
    log: Log = Log()
    limits: Limits = Limits()
    upstream: Upstream = Upstream()
    retry: Retry = Retry()
    queue: QueueSection = QueueSection()
    health: Health = Health()
    drain: Drain = Drain()
    policy: PolicySection = PolicySection()
    placement: Placement = Placement()
    residency: Residency = Residency()
    clients: Clients = Clients()
    models: Models = Models()
    affinity: Affinity = Affinity()
    etcd: Etcd = Etcd()
    redis: Redis = Redis()
    tracing: Tracing = Tracing()
    auth: Auth = Auth()
    tenants: TenantsSection = TenantsSection()
    cors: CorsSection = CorsSection()
    streaming: Streaming = Streaming()
    forward: Forward = Forward()
    tls: TlsSection = TlsSection()
    network: Network = Network()
    reports: Reports = Reports()


C = TypeVar("C", bound=BaseModel)


def load(
    model: type[C],
    file: str | FilePath | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> C:
    """Read a configuration: defaults, then the file, then the environment, then `overrides` (command-line flags).

    `environ` instead of this process' own, {} for a file that is no configuration of a process.

    Raises ConfigError naming the file, line and key at fault.
    """
    values: dict[str, Any] = {}
    lines: dict[Key, int] = {}
    given: dict[Key, str] = {}  # what was given elsewhere than in the file, and where
    name = str(file) if file else "configuration"
    if file:
        values = _read(FilePath(file), lines)
    _merge_environment(values, os.environ if environ is None else environ, model, given)
    for key, value in (overrides or {}).items():
        if value is not None:
            values[key] = value
            given[key,] = "command line"
    _read_secrets(values, model, (), lines, given)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, name, lines, given)) from None


def _read(file: FilePath, lines: dict[Key, int]) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        values = _plain(root, (), lines, file) if root is not None else {}
    except yaml.MarkedYAMLError as error:
        at = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{at}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}:1: expected keys and values, as in `listen: 127.0.0.1:8080`")
    return values


def _plain(node: yaml.Node, at: Key, lines: dict[Key, int], file: FilePath) -> Any:
    """A YAML node as plain data, noting the line of everything."""
    lines[at] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in result:
                raise ConfigError(f"{file}:{key_node.start_mark.line + 1}: the key '{key}' is given twice")
            result[key] = _plain(value_node, (*at, key), lines, file)
            lines[*at, key] = key_node.start_mark.line + 1
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*at, i), lines, file) for i, item in enumerate(node.value)]
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError) as error:  # a date that does not exist, a number that is none
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: not valid YAML: {error}") from None


def _read_secrets(
    values: dict[str, Any], model: type[BaseModel], at: Key, lines: dict[Key, int], given: dict[Key, str]
) -> None:
    """Put in the place of `password_file: FILE` a `password` with what stands in the file, for every secret key.

    Of several, as `route_keys` takes, each stands on a line. Secrets are the keys that are kept out of what is printed.
    """
    fields = model.model_fields
    for key, value in list(values.items()):
        if key in fields:
            kind = fields[key].annotation
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
                _read_secrets(value, kind, (*at, key), lines, given)
            continue
        name = key.removesuffix("_file")
        if name == key or name not in fields or fields[name].repr:
            continue
        where = given.get((*at, key)) or f"line {lines.get((*at, key), 0)}"
        dotted = ".".join(str(part) for part in (*at, key))
        if name in values:
            raise ConfigError(f"{where}: {dotted}: excludes {name}")
        try:
            text = FilePath(str(value)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{where}: {dotted}: {str(value)[:200]} cannot be read: {reason}") from None
        secrets = [line.strip() for line in text.splitlines() if line.strip()]
        if not secrets:
            raise ConfigError(f"{where}: {dotted}: {str(value)[:200]} is empty")
        del values[key]
        values[name] = secrets[0] if _is_text(model, (name,)) else secrets
        given[*at, name] = f"{where}, of {str(value)[:200]}"


def _merge_environment(
    values: dict[str, Any], environ: Mapping[str, str], model: type[BaseModel], given: dict[Key, str]
) -> None:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENVIRONMENT:
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        target = values
        given[*sections, key] = f"environment variable {name}"
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"environment variable {name}: '{section}' is not a section")
        try:
            target[key] = text if _is_text(model, (*sections, key)) else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            # Not the error's own words, which quote the text: it may be a key.
            raise ConfigError(f"environment variable {name}: not valid YAML") from None


def _is_text(model: type[BaseModel], path: tuple[str, ...]) -> bool:
    """Whether the key takes text, which stands in the environment as it is: `no`, `007` and `a #b` are no YAML then."""
    kind: Any = model
    for part in path:
        field = getattr(kind, "model_fields", {}).get(part)
        if field is None:
            return False
        kind = field.annotation
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return any((get_args(k)[0] if get_origin(k) is Annotated else k) is str for k in kinds)


RESERVED_ENVIRONMENT = frozenset(  # read by the command line, not by a tier
    {
        "HEADWATER_ADMIN_CA_FILE",
        "HEADWATER_ADMIN_TOKEN",
        "HEADWATER_ADMIN_TOKEN_FILE",
        "HEADWATER_ADMIN_URL",
        "HEADWATER_WORKER",
    }
)


def _explain(error: ValidationError, name: str, lines: Mapping[Key, int], given: Mapping[Key, str]) -> str:
    first = error.errors()[0]
    location = tuple(part for part in first["loc"] if not str(part).startswith("function-"))
    key = ".".join(str(part) for part in location) or "(whole file)"
    above = [location[:n] for n in range(len(location), 0, -1)]
    line = next((lines[at] for at in above if at in lines), None)
    where = next((given[at] for at in above if at in given), f"{name}:{line}" if line else name)
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'"
    message = first["msg"].removeprefix("Value error, ")
    value = first.get("input")
    secret = any(word in key for word in ("key", "password", "token", "redis.url"))
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) and not secret else ""
    return f"{where}: {key}: {message[0].lower()}{message[1:]}{shown}"
