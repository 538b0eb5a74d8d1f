"""Reads GPUs through NVML: what each one says, nothing invented for what it does not say.

Blocking and not thread safe; `gpu.py` runs it in a thread of its own. Sources of trouble: a driver that was upgraded
under the running process (18), a GPU that fell off the bus (15), figures that MIG has not (3), codes nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pynvml

T = TypeVar("T")

ABSENT_ABOVE: Final = 2**60  # NVML says "not available" with all bits set; no GPU has an exabyte
_GONE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
_ALL_GONE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)


class NvmlError(Exception):
    """NVML as a whole does not work now; the message says why, with NVML's code."""


class _Lost(Exception):  # noqa: N818 - a condition of one device
    """This device is gone."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG slice of it (`index` -1). None is what it does not say, or cannot while it is lost."""

    index: int
    uuid: str  # "#3" where NVML tells none of the device with index 3
    name: str = ""
    gpu: str = ""  # its class, see `gpu_class`
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilization: float | None = None  # fraction of the last sample period with a kernel running, 0…1
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _Handle:
    index: int
    uuid: str
    name: str
    raw: Any  # None: it was lost before it could be opened


class Nvml:
    """One session with NVML: opened at the first sample, and again by itself after it broke."""

    def __init__(self, slices: Iterable[str] = ()) -> None:
        """`slices`: UUIDs of MIG slices to sample as well (`MIG-…`)."""
        self._slices = tuple(slices)
        self._handles: tuple[_Handle, ...] = ()
        self._open = False
        self._count = 0

    def sample(self) -> tuple[Device, ...]:
        """All devices now. Raises NvmlError; the next call then begins anew. May block for as long as a driver does."""
        try:
            if self._open and pynvml.nvmlDeviceGetCount() != self._count:
                self.close()
            if not self._open:
                self._begin()
            return tuple(self._read(h) for h in self._handles)
        except pynvml.NVMLError as error:
            self.close()
            raise NvmlError(_text(error)) from error

    def close(self) -> None:
        """End the session; the library stays loaded."""
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                return  # it is broken, which is why it is closed

    def _begin(self) -> None:
        pynvml.nvmlInit()
        self._open = True
        before, self._count = self._count, pynvml.nvmlDeviceGetCount()
        # With fewer than before the indices have moved; else a device that cannot be opened is the one known there.
        known = {h.index: h for h in self._handles} if self._count >= before else {}
        whole = [self._handle(i, known.get(i), pynvml.nvmlDeviceGetHandleByIndex, i) for i in range(self._count)]
        slices = [self._handle(-1, None, pynvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in self._slices]
        self._handles = (*whole, *slices)

    @staticmethod
    def _handle(index: int, before: _Handle | None, opening: Callable[..., Any], key: int | str) -> _Handle:
        uuid, name = (before.uuid, before.name) if before else (key if isinstance(key, str) else f"#{key}", "")
        try:
            raw = opening(key)
            return _Handle(
                index, _string(pynvml.nvmlDeviceGetUUID, raw) or uuid, _string(pynvml.nvmlDeviceGetName, raw), raw
            )
        except _Lost:
            return _Handle(index, uuid, name, None)
        except pynvml.NVMLError as error:
            if error.value in _ALL_GONE:
                raise
            return _Handle(index, uuid, name, None)

    @staticmethod
    def _read(handle: _Handle) -> Device:
        named = Device(handle.index, handle.uuid, handle.name, gpu_class(handle.name), lost=True)
        if handle.raw is None:
            return named
        raw = handle.raw
        try:
            memory = _value(pynvml.nvmlDeviceGetMemoryInfo, raw)
            use = _value(pynvml.nvmlDeviceGetUtilizationRates, raw)
            milliwatts = _value(pynvml.nvmlDeviceGetPowerUsage, raw)
            clock = _value(pynvml.nvmlDeviceGetClockInfo, raw, pynvml.NVML_CLOCK_SM)
            return Device(
                handle.index,
                handle.uuid,
                handle.name,
                gpu_class(handle.name),
                _within(memory and memory.total, ABSENT_ABOVE),
                _within(memory and memory.used, ABSENT_ABOVE),
                _within(memory and memory.free, ABSENT_ABOVE),
                _scaled(use and use.gpu, 100, 0.01),
                _scaled(milliwatts, 10_000_000, 0.001),
                _scaled(_temperature(raw), 200, 1.0),
                _scaled(clock, 100_000, 1.0),
            )
        except _Lost:
            return named


def _value(call: Callable[..., T], *args: Any) -> T | None:
    """What a call returns; None where NVML has no such figure now. Raises _Lost, or NVMLError if all of it is gone."""
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise _Lost from error
        if error.value in _ALL_GONE:
            raise
        return None
    except UnicodeDecodeError:  # a name that is no text
        return None


def _temperature(raw: Any) -> int | None:
    # The older call goes away with CUDA 14, the newer one is not in drivers before 570.
    value = _value(pynvml.nvmlDeviceGetTemperatureV, raw, pynvml.NVML_TEMPERATURE_GPU)
    return value if value is not None else _value(pynvml.nvmlDeviceGetTemperature, raw, pynvml.NVML_TEMPERATURE_GPU)


def _string(call: Callable[[Any], str | bytes], raw: Any) -> str:
    """Bindings before 11.5 return bytes."""
    value = _value(call, raw) or ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _within(value: int | None, most: int) -> int | None:
    return value if value is not None and 0 <= value <= most else None


def _scaled(value: int | None, most: int, unit: float) -> float | None:
    value = _within(value, most)
    return None if value is None else value * unit


def _text(error: pynvml.NVMLError) -> str:
    return f"{error} ({error.value})"


_RTX = re.compile(r"\b(RTX|GTX)\s*(PRO\s*)?(A?)(\d{4})\s*(Ti|SUPER|Ada)?\b", re.IGNORECASE)
_CHIP = re.compile(r"\b((?:GH|GB|[ABHLPTV])\d{1,4}[A-Z]?)\b")


def gpu_class(name: str) -> str:
    """The class of a product, as in `policy.prediction.CLASS_SPEED`: "NVIDIA H100 80GB HBM3" is an h100.

    Memory size and form factor make no class of their own. A MIG slice is its GPU's class with "-mig", as it is far
    slower. Products without such a name keep theirs, in lower case with dashes.
    """
    suffix = "-mig" if re.search(r"\bMIG\b", name) else ""
    consumer = _RTX.search(name)
    if consumer is not None:
        line, pro, a, number, more = consumer.groups()
        if a:
            return f"a{number}{suffix}"
        return f"{line}{pro or ''}{number}{more or ''}".replace(" ", "").lower() + suffix
    chip = _CHIP.search(name)
    if chip is not None:
        return chip[1].lower() + suffix
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-")[:32]
