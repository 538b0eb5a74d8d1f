"""What a simulated server is told at start. A bad value is a ConfigError of one line that names the option."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from common.errors import ConfigError
from common.policy.prediction import CLASS_SPEED
from common.sim.engine import PREFIX_FRACTION
from common.types import Speed

CONTEXT_TOKENS = 131_072  # of Llama 3.1; a server with less KV memory than that offers what it has
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MODEL = re.compile(r"[A-Za-z0-9._/:@+-]{1,200}")

# option: (least, most), both allowed
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "speed": (0.01, 10_000.0),
    "tick_s": (0.001, 1.0),
    "load_time_s": (0.0, 86_400.0),
    "kv_tokens": (64, 100_000_000),
    "slots": (1, 4_096),
    "max_queue": (0, 1_000_000),
    "max_model_len": (16, 100_000_000),
    "prefix_fraction": (0.0, 1.0),
    "mean_output_tokens": (1.0, 100_000.0),
    "retry_after_s": (0, 3_600),
    "seed": (0, 2**63 - 1),
    "max_body_bytes": (1_024, 2**30),
    "max_connections": (1, 1_000_000),
    "keepalive_timeout_s": (0.1, 86_400.0),
    "record_requests": (0, 1_000_000),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One simulated server. `None` and 0 where the comment says so mean: the GPU class's own."""

    profile: str = "h100"  # GPU class of common.policy.prediction.CLASS_SPEED
    model: str = "llama-8b"
    adapters: tuple[str, ...] = ()  # LoRA adapters of it that are loaded
    loadable: tuple[str, ...] = ()  # LoRA adapters that it loads when a request names one
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    name: str = ""  # "": PROFILE-PORT
    speed: float = 1.0  # times faster than life
    tick_s: float = 0.002  # least time between two writes to a stream: steps shorter than this share one
    load_time_s: float = 0.0  # real seconds of "Loading model" at start
    kv_tokens: int = 0  # 0: the class's
    slots: int = 0  # 0: the class's
    max_queue: int = 1_024  # requests that wait for a slot or memory; vLLM itself has no bound
    queue_full_status: int = 503  # or 429
    retry_after_s: int = 1  # with that status; 0: no Retry-After
    max_model_len: int = 0  # tokens of prompt and answer together; 0: CONTEXT_TOKENS or what KV memory holds
    prefix_fraction: float = PREFIX_FRACTION  # of KV memory; 0: no prefix cache
    mean_output_tokens: float = 200.0  # of answers whose length nobody asked for
    seed: int = 0  # of those lengths
    max_body_bytes: int = 64 * 2**20
    max_connections: int = 8_192
    keepalive_timeout_s: float = 5.0  # vLLM's default
    record_requests: int = 1_000  # remembered for /sim/requests

    def __post_init__(self) -> None:
        if self.profile not in CLASS_SPEED:
            raise ConfigError(f"profile: unknown GPU class {self.profile!r}, one of {', '.join(CLASS_SPEED)}")
        if self.name and not NAME.fullmatch(self.name):
            raise ConfigError(f"name: {self.name!r} is not 1 to 64 of letters, digits, '.', '_' and '-'")
        for name in (self.model, *self.adapters, *self.loadable):
            if not MODEL.fullmatch(name):
                raise ConfigError(f"model: {name!r} is no model name")
        if self.queue_full_status not in (429, 503):
            raise ConfigError(f"queue_full_status: {self.queue_full_status} is neither 429 nor 503")
        for option, (least, most) in RANGES.items():
            value = getattr(self, option)
            unset = value == 0 and option in ("kv_tokens", "slots", "max_model_len")
            if not unset and not least <= value <= most:
                raise ConfigError(f"{option}: {value} is not within {least:g} and {most:g}")
        if self.max_model_len > self.kv_capacity:
            raise ConfigError(f"max_model_len: {self.max_model_len} exceeds KV memory of {self.kv_capacity} tokens")

    @property
    def names(self) -> tuple[str, ...]:
        """What it lists: the model and its loaded adapters."""
        return (self.model, *self.adapters)

    @property
    def kv_capacity(self) -> int:
        """KV memory, tokens."""
        return self.kv_tokens or int(CLASS_SPEED[self.profile].kv_tokens)

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.max_model_len or min(CONTEXT_TOKENS, self.kv_capacity)

    def engine_speed(self) -> Speed:
        """The constants of the engine model: the GPU class's, with this server's limits."""
        speed = CLASS_SPEED[self.profile]
        return replace(speed, kv_tokens=self.kv_capacity, slots=self.slots or speed.slots)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All the servers of one process."""

    engines: tuple[EngineConfig, ...]
    grace_s: float = 30.0  # after SIGTERM, for streams to end

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("engine: none given")
        if not 0.0 <= self.grace_s <= 86_400.0:
            raise ConfigError(f"grace_s: {self.grace_s} is not within 0 and 86400")
        ports = [str(e.port) for e in self.engines if e.port]
        names = [e.name for e in self.engines if e.name]
        for option, values in (("port", ports), ("name", names)):
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice is not None:
                raise ConfigError(f"{option}: {twice} is given twice")


def engine_from(text: str, base: EngineConfig) -> EngineConfig:
    """`PROFILE:PORT` or `PROFILE:PORT:NAME`, the rest as in `base`."""
    profile, _, rest = text.partition(":")
    port, _, name = rest.partition(":")
    if not port.isdigit():
        raise ConfigError(f"engine: {text!r} is not PROFILE:PORT or PROFILE:PORT:NAME")
    return replace(base, profile=profile, port=int(port), name=name)


def engines_from(base: EngineConfig, engines: list[str], count: int) -> tuple[EngineConfig, ...]:
    """The servers that `--engine …` (repeated) or `--count N --port P` ask for; ports go up from P unless it is 0."""
    if engines:
        if count != 1 or base.name:
            raise ConfigError("engine: goes with neither count nor name")
        return tuple(engine_from(text, base) for text in engines)
    if not 1 <= count <= 1_000:
        raise ConfigError(f"count: {count} is not within 1 and 1000")
    if count > 1 and base.name:
        return tuple(replace(base, port=base.port and base.port + i, name=f"{base.name}-{i}") for i in range(count))
    return tuple(replace(base, port=base.port and base.port + i) for i in range(count))
