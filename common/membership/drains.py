"""What operators have told to take no new work: marks in the store that stay until they are taken away. Pure.

A mark stands beside its siblings' registrations, under no lease, so it outlives restarts of whatever it names and of
all tiers: `{root}/global/drains/{region}`, `{root}/regions/{region}/drains/{cluster}`, and
`{root}/regions/{region}/clusters/{cluster}/drains/{instance}`. What is marked is passed over by the stage that would
choose it; what runs there ends in peace, and what is below it stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from common.errors import ConfigError
from common.membership.records import NAME, SCHEMA, node_key, node_of
from common.types import Path

KIND: Final = "drains"
REASON_CHARS: Final = 200
BY_CHARS: Final = 64


@dataclass(frozen=True, slots=True)
class Drain:
    """One mark: what is drained, and for people why, by whom and since when (UTC, ISO 8601)."""

    path: Path  # (region,), (region, cluster) or (region, cluster, instance)
    reason: str = ""
    by: str = ""
    since: str = ""


class _Record(msgspec.Struct, kw_only=True):
    schema: int
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS)] = ""
    by: Annotated[str, msgspec.Meta(max_length=BY_CHARS)] = ""
    since: Annotated[str, msgspec.Meta(max_length=40)] = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Record).decode


def key_of_drain(root: str, path: Path) -> str:
    """The key of a mark. Raises ConfigError for a path that names no region, cluster or instance."""
    if not 1 <= len(path) <= 3 or not all(NAME.fullmatch(name) for name in path):
        raise ConfigError(f"{'/'.join(path)[:200]!r} is no REGION, REGION/CLUSTER or REGION/CLUSTER/INSTANCE")
    return f"{node_key(root, path[:-1])}/{KIND}/{path[-1]}"


def drain_path(root: str, key: str) -> Path | None:
    """What a key marks; None if it is no mark. Raises ValueError for a broken name."""
    node, kind, id_ = node_of(root, key)
    if kind != KIND or node is None:
        return None
    if not all(NAME.fullmatch(name) for name in (*node, id_)):
        raise ValueError("a name in the key must be 1 to 64 of letters, digits, '.', '_' and '-'")
    return (*node, id_)


def encode_drain(drain: Drain) -> bytes:
    """The value of a mark; what is too long for it is cut."""
    return _encode(
        _Record(schema=SCHEMA, reason=drain.reason[:REASON_CHARS], by=drain.by[:BY_CHARS], since=drain.since[:40])
    )


def decode_drain(path: Path, value: bytes) -> Drain:
    """The mark that a value describes. One that cannot be read still drains: somebody wanted it."""
    try:
        record = _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Drain(path)
    return Drain(path, record.reason, record.by, record.since)
