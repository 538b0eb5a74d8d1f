"""Reads a fleet: a built-in name, or a YAML file that lists servers by class.

    - {gpu: h100, count: 2, price_usd_per_hour: 4.0}
    - {gpu: a100, count: 4, speed: 0.9}                # a tenth slower than its class
    - {gpu: l4, count: 6, slots: 16, kv_tokens: 80000, models: [llama-8b]}
    - {gpu: mine, count: 1, alpha_s: 0.02, beta_s: 2e-4, gamma_s: 1e-7, prefill_tokens_per_s: 6000, weight: 2}

`speed` is a factor on the class's constants that nobody tells the balancers; `slots`, `kv_tokens` and `chunk_tokens`
are limits, which an agent would tell them. `alpha_s`, `beta_s`, `gamma_s`, `prefill_tokens_per_s` and
`attention_tokens` replace constants of the class. `weight` is for the weighted policies, by default the measured
saturated throughput.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import yaml

from common.policy.prediction import class_speed
from common.sim.fleet import FLEETS, Machine, classes
from common.sim.instance import as_fast_as

_LIMITS = ("slots", "kv_tokens", "chunk_tokens")
_CONSTANTS = ("alpha_s", "beta_s", "gamma_s", "prefill_tokens_per_s", "attention_tokens")
_NEEDED = _CONSTANTS[:4]  # of a class without a prior
_OTHER = ("gpu", "count", "speed", "price_usd_per_hour", "weight", "models")
MOST_SERVERS = 10_000


def read_fleet(name: str) -> tuple[Machine, ...]:
    """The fleet of that built-in name, or of the file at that path. Raises ValueError or OSError."""
    if name in FLEETS:
        return FLEETS[name]
    path = Path(name)
    if not path.exists():
        raise ValueError(f"--fleet {name}: neither a file nor one of {', '.join(FLEETS)}")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a list of servers, such as - {{gpu: h100, count: 2}}")
    fleet = tuple(_machine(f"{path}: entry {number}", entry) for number, entry in enumerate(entries, start=1))
    if sum(kind.count for kind in fleet) > MOST_SERVERS:
        raise ValueError(f"{path}: more than {MOST_SERVERS} servers")
    return fleet


def _machine(where: str, entry: Any) -> Machine:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not a mapping")
    unknown = sorted(str(key) for key in entry.keys() - {*_LIMITS, *_CONSTANTS, *_OTHER})
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]} (known: {', '.join((*_OTHER, *_LIMITS, *_CONSTANTS))})")
    gpu = entry.get("gpu", "")
    if not isinstance(gpu, str):
        raise ValueError(f"{where}: gpu: {gpu!r} is no name")
    missing = [key for key in _NEEDED if key not in entry]
    if gpu not in classes() and missing:
        raise ValueError(f"{where}: gpu {gpu!r} is none of {', '.join(classes())}, so it also needs {missing[0]}")
    prior = class_speed(gpu)
    limits = {key: _number(where, entry, key) for key in _LIMITS if key in entry}
    constants = {key: _number(where, entry, key) for key in _CONSTANTS if key in entry}
    speed = as_fast_as(replace(prior, **limits, **constants), _number(where, entry, "speed", 1.0))
    return Machine(
        gpu,
        speed,
        _count(where, entry),
        _number(where, entry, "weight") if "weight" in entry else None,
        _number(where, entry, "price_usd_per_hour", 0.0, least=0.0),
        replace(prior, **limits) if limits else None,
        frozenset(_models(where, entry)),
    )


def _number(where: str, entry: dict[str, Any], key: str, default: float = 0.0, least: float | None = None) -> float:
    value = entry.get(key, default)
    try:
        number = nan if isinstance(value, bool) else float(value)  # YAML 1.1 takes 2e-4 for a string
    except (TypeError, ValueError):
        number = nan
    if not (number > 0.0 if least is None else number >= least) or number > 1e12:
        raise ValueError(f"{where}: {key}: {value!r} is no number {'above 0' if least is None else f'from {least:g}'}")
    return number


def _count(where: str, entry: dict[str, Any]) -> int:
    value = entry.get("count", 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: count: {value!r} is no whole number from 1")
    return value


def _models(where: str, entry: dict[str, Any]) -> list[str]:
    value = entry.get("models", [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}: models: {value!r} is no list of names")
    return value
