"""Which model, and which version of it, a request goes to: aliases, splits by weight, sticky by session. Pure.

A split gives each session a point in [0, 1) by a hash, and each target the stretch of its weight, the first one from 0
on. So a session stays where it is while weights stand, and as one target grows at the expense of the others, sessions
move to it and never to and fro.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

ANY = ""
NOT = "!"  # before a version: any other one


class Target(NamedTuple):
    """What a request may be sent to: a model by the name its servers list, and a version of it.

    `version`: "v2", "!v2" for any but that, or "" for whichever there is.
    """

    model: str
    version: str = ANY
    weight: float = 1.0


class Shadow(NamedTuple):
    """Where copies of the requests for one name go as well. `ratio`: of them, 0 … 1; `paths`: globs, none: any."""

    model: str = ""  # "": the one the request goes to itself
    version: str = ANY
    ratio: float = 1.0
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """Targets of one name. A target of weight 0 gets nothing; at least one has more."""

    name: str
    targets: tuple[Target, ...]

    def of(self, key: str) -> Target:
        """Where a session (or a single request, by its id) goes."""
        digest = blake2b(f"{self.name}\n{key}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest, "big") / 2.0**64 * sum(target.weight for target in self.targets)
        chosen = None
        for target in self.targets:
            if target.weight > 0.0:
                chosen = target
                if point < target.weight:
                    break
                point -= target.weight
        assert chosen is not None, "a split needs a weight above 0"
        return chosen


def matches(version: str, labels: Iterable[str]) -> bool:
    """Whether a server with these labels is of the version a request asks for."""
    if not version:
        return True
    if version.startswith(NOT):
        return label_of(version[len(NOT) :]) not in labels
    return label_of(version) in labels


def label_of(version: str) -> str:
    """The label by which a server shows its version."""
    return f"version={version}"


def version_of(labels: Iterable[str]) -> str:
    """The version that a server shows, "" without one."""
    return next((label.removeprefix(label_of("")) for label in labels if label.startswith(label_of(""))), ANY)


class Versions:
    """All splits: those of the configuration, and those of rollouts, which come first."""

    def __init__(self, aliases: Mapping[str, Split], splits: Mapping[str, Split]) -> None:
        self.aliases = dict(aliases)
        self._splits = dict(splits)
        self.rollouts: dict[str, Split] = {}

    def adopt(self, other: Versions) -> None:
        """Go by another configuration's from now on; rollouts stay."""
        self.aliases.clear()  # it is looked at by others
        self.aliases.update(other.aliases)
        self._splits = other._splits

    def target(self, model: str, key: str) -> Target:
        """Where a request for `model` goes: by alias first, then by the split of what that names."""
        alias = self.aliases.get(model)
        if alias is not None:
            model = alias.of(key).model
        split = self.rollouts.get(model) or self._splits.get(model)
        return split.of(key) if split is not None else Target(model)
