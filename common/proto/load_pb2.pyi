from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_LOADING: _ClassVar[Phase]
    PHASE_SERVING: _ClassVar[Phase]
    PHASE_DRAINING: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_LOADING: Phase
PHASE_SERVING: Phase
PHASE_DRAINING: Phase

class WatchRequest(_message.Message):
    __slots__ = ("subscriber", "endpoints", "min_interval_s", "max_interval_s")
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    subscriber: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    min_interval_s: float
    max_interval_s: float
    def __init__(self, subscriber: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., min_interval_s: _Optional[float] = ..., max_interval_s: _Optional[float] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("endpoint", "age_s", "servers", "running", "waiting", "kv_utilization", "gpu_utilization", "gpu_memory_free_bytes", "generated_tokens", "phase", "elapsed_s", "progress")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    GPU_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    age_s: float
    servers: _containers.RepeatedCompositeFieldContainer[ServerLoad]
    running: float
    waiting: float
    kv_utilization: float
    gpu_utilization: float
    gpu_memory_free_bytes: int
    generated_tokens: float
    phase: Phase
    elapsed_s: float
    progress: float
    def __init__(self, endpoint: _Optional[str] = ..., age_s: _Optional[float] = ..., servers: _Optional[_Iterable[_Union[ServerLoad, _Mapping]]] = ..., running: _Optional[float] = ..., waiting: _Optional[float] = ..., kv_utilization: _Optional[float] = ..., gpu_utilization: _Optional[float] = ..., gpu_memory_free_bytes: _Optional[int] = ..., generated_tokens: _Optional[float] = ..., phase: _Optional[_Union[Phase, str]] = ..., elapsed_s: _Optional[float] = ..., progress: _Optional[float] = ...) -> None: ...

class ServerLoad(_message.Message):
    __slots__ = ("speed", "gpu", "count", "decoding", "waiting", "prompt_tokens", "context_tokens", "remaining_tokens", "prefill_share", "price_usd_per_hour", "models")
    SPEED_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    PRICE_USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    speed: Speed
    gpu: str
    count: int
    decoding: float
    waiting: float
    prompt_tokens: float
    context_tokens: float
    remaining_tokens: float
    prefill_share: float
    price_usd_per_hour: float
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, speed: _Optional[_Union[Speed, _Mapping]] = ..., gpu: _Optional[str] = ..., count: _Optional[int] = ..., decoding: _Optional[float] = ..., waiting: _Optional[float] = ..., prompt_tokens: _Optional[float] = ..., context_tokens: _Optional[float] = ..., remaining_tokens: _Optional[float] = ..., prefill_share: _Optional[float] = ..., price_usd_per_hour: _Optional[float] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("alpha_s", "beta_s", "gamma_s", "prefill_tokens_per_s", "attention_tokens", "chunk_tokens", "slots", "kv_tokens")
    ALPHA_S_FIELD_NUMBER: _ClassVar[int]
    BETA_S_FIELD_NUMBER: _ClassVar[int]
    GAMMA_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    alpha_s: float
    beta_s: float
    gamma_s: float
    prefill_tokens_per_s: float
    attention_tokens: float
    chunk_tokens: float
    slots: float
    kv_tokens: float
    def __init__(self, alpha_s: _Optional[float] = ..., beta_s: _Optional[float] = ..., gamma_s: _Optional[float] = ..., prefill_tokens_per_s: _Optional[float] = ..., attention_tokens: _Optional[float] = ..., chunk_tokens: _Optional[float] = ..., slots: _Optional[float] = ..., kv_tokens: _Optional[float] = ...) -> None: ...
