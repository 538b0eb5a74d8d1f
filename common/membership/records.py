"""What is stored of balancers and instances: keys by place in the tree, values in JSON with a schema version.

Readers skip what they do not know: fields are ignored, records of a later schema or of a wrong shape are refused one by
one. So versions may run beside each other as long as `schema` stays, and a bad record costs itself only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from common.errors import ConfigError
from common.types import Endpoint, Path, Peer, Phase, Speed

SCHEMA: Final = 1
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_URL: Final = r"^https?://[^/\s?#@]+(/[^\s?#]*)?$"
_ADDRESS: Final = r"^([^/\s?#@]+:\d{1,5})?$"  # host:port, or ""
_MODELS: Final = 4096  # of one instance; adapters are models too
_LABELS: Final = 64
_LABEL: Final = r"^[A-Za-z0-9._/-]{1,64}=[A-Za-z0-9._/-]{0,64}$"


@dataclass(frozen=True, slots=True)
class Place:
    """What a key names: a balancer of the node at `path`, or an instance of the cluster there."""

    path: Path
    id: str
    instance: bool = False


_Amount = Annotated[float, msgspec.Meta(ge=0.0)]


class _Record(msgspec.Struct, kw_only=True):
    schema: int
    id: str
    url: Annotated[str, msgspec.Meta(pattern=_URL)]
    phase: Phase = Phase.SERVING


class _Balancer(_Record):
    load: Annotated[str, msgspec.Meta(pattern=_ADDRESS)] = ""
    admin: Annotated[str, msgspec.Meta(pattern=f"{_URL}|^$")] = ""


class _Instance(_Record):
    agent: Annotated[str, msgspec.Meta(pattern=_ADDRESS)] = ""
    models: Annotated[list[str], msgspec.Meta(max_length=_MODELS)] = []
    engine: str = ""
    gpu: str = ""
    weight: _Amount = 1.0
    price_usd_per_hour: _Amount = 0.0
    boot: str = ""
    capacity: Speed | None = None
    memory_gb: _Amount | None = None
    labels: Annotated[list[Annotated[str, msgspec.Meta(pattern=_LABEL)]], msgspec.Meta(max_length=_LABELS)] = []
    loadable: Annotated[list[str], msgspec.Meta(max_length=_MODELS)] = []


_encode = msgspec.json.Encoder().encode
_balancer_decoder: Final = msgspec.json.Decoder(_Balancer)
_instance_decoder: Final = msgspec.json.Decoder(_Instance)


def key_of(root: str, place: Place) -> str:
    """The key, as in `/headwater/regions/eu/clusters/a/instances/i1`. Raises ConfigError for an impossible name."""
    for name in (*place.path, place.id):
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} must be 1 to 64 of letters, digits, '.', '_' and '-'")
    if place.instance and len(place.path) != 2:
        raise ConfigError("an instance belongs to a cluster: its path is (region, cluster)")
    return f"{node_key(root, place.path)}/{'instances' if place.instance else 'balancers'}/{place.id}"


def node_key(root: str, path: Path) -> str:
    """What the keys of all that belongs to a node begin with."""
    node = "".join(f"/{kind}/{name}" for kind, name in zip(("regions", "clusters"), path, strict=False))
    return f"{root}{node or '/global'}"


def node_of(root: str, key: str) -> tuple[Path | None, str, str]:
    """(node, kind, id) that a key is made of; the node is None where it has another shape."""
    match key.removeprefix(f"{root}/").split("/"):
        case ["global", kind, id_]:
            return (), kind, id_
        case ["regions", region, kind, id_]:
            return (region,), kind, id_
        case ["regions", region, "clusters", cluster, kind, id_]:
            return (region, cluster), kind, id_
    return None, "", ""


def place_of(root: str, key: str) -> Place | None:
    """What a key names; None if it names neither a balancer nor an instance. Raises ValueError for a broken name."""
    path, kind, id_ = node_of(root, key)
    if path is None or (kind != "balancers" and not (kind == "instances" and len(path) == 2)):
        return None
    if not all(NAME.fullmatch(name) for name in (*path, id_)):
        raise ValueError("a name in the key must be 1 to 64 of letters, digits, '.', '_' and '-'")
    return Place(path, id_, instance=kind == "instances")


def encode(member: Peer | Endpoint) -> bytes:
    """The value for a balancer (Peer) or an instance (Endpoint). Raises ConfigError for one that no reader takes."""
    record: _Balancer | _Instance
    if isinstance(member, Peer):
        record = _Balancer(
            schema=SCHEMA,
            id=member.id,
            url=member.url,
            phase=member.phase,
            load=member.load,
            admin=member.admin,
        )
    else:
        record = _Instance(
            schema=SCHEMA,
            id=member.id,
            url=member.url,
            phase=member.phase,
            agent=member.agent,
            models=sorted(member.models),
            engine=member.engine,
            gpu=member.gpu,
            weight=member.weight,
            price_usd_per_hour=member.price_usd_per_hour,
            boot=member.boot,
            capacity=member.capacity,
            memory_gb=member.memory_gb,
            labels=sorted(member.labels),
            loadable=sorted(member.loadable),
        )
    value = _encode(record)
    try:
        decode(Place((), member.id, instance=isinstance(member, Endpoint)), value)
    except ValueError as error:
        raise ConfigError(f"cannot register {member.id!r}: {error}") from None
    return value


def decode(place: Place, value: bytes) -> Peer | Endpoint:
    """The balancer or instance that a value describes. Raises ValueError, with a reason, for one to be skipped."""
    try:
        record = (_instance_decoder if place.instance else _balancer_decoder).decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if record.schema > SCHEMA:
        raise ValueError(f"schema {record.schema} is later than {SCHEMA}")
    if record.id != place.id:
        raise ValueError(f"it says it is {record.id!r}")
    if isinstance(record, _Balancer):
        return Peer(
            id=record.id,
            url=record.url.rstrip("/"),
            load=record.load,
            admin=record.admin.rstrip("/"),
            phase=record.phase,
        )
    return _endpoint(record)


def _endpoint(record: _Instance) -> Endpoint:
    speed = record.capacity
    if speed is not None and not _usable(speed):
        raise ValueError("capacity must be of positive, finite numbers")
    return Endpoint(
        id=record.id,
        url=record.url.rstrip("/"),
        agent=record.agent,
        models=frozenset(record.models),
        engine=record.engine,
        gpu=record.gpu,
        weight=record.weight,
        price_usd_per_hour=record.price_usd_per_hour,
        phase=record.phase,
        boot=record.boot,
        capacity=speed,
        memory_gb=record.memory_gb,
        labels=frozenset(record.labels),
        loadable=frozenset(record.loadable),
    )


def _usable(speed: Speed) -> bool:
    """Predictions divide by these."""
    positive = (
        speed.alpha_s,
        speed.prefill_tokens_per_s,
        speed.attention_tokens,
        speed.chunk_tokens,
        speed.slots,
        speed.kv_tokens,
    )
    return all(0.0 < x < math.inf for x in positive) and all(0.0 <= x < math.inf for x in (speed.beta_s, speed.gamma_s))
