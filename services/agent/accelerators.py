"""Which GPUs are an instance's, and what they amount to: the join of configuration, NVML and the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.agent.config import InstanceConfig
from services.agent.gpu import GpuSampler
from services.agent.host import HostSampler
from services.agent.nvml import Device


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What an instance computes on: its class ("" unknown), and its figures now, None where one is not known."""

    gpu: str = ""
    utilization: float | None = None  # mean over its devices, 0…1
    memory_free_bytes: int | None = None  # sum over its devices
    memory_gb: float | None = None  # all of it, free or not, in 10^9 bytes; rounded to 0.1


class Accelerators(Protocol):
    """Looks an instance's accelerator up; quick, as it is asked for every report."""

    def of(self, instance: InstanceConfig, now: float) -> Accelerator:
        """The accelerator of a configured instance."""


class Unsampled:
    """For a process that is not beside the servers: only what the configuration says."""

    def of(self, instance: InstanceConfig, now: float) -> Accelerator:
        """The configured class and memory."""
        return Accelerator(instance.gpu, memory_gb=instance.memory_gb)


class LocalAccelerators:
    """Of the host this process runs on."""

    def __init__(self, gpus: GpuSampler, host: HostSampler, *, sole: bool) -> None:
        """`sole`: only one instance is configured, so without named devices it has all of them."""
        self._gpus = gpus
        self._host = host
        self.sole = sole

    def of(self, instance: InstanceConfig, now: float) -> Accelerator:
        """Figures only if each of its devices has them: part of the truth would make a lost GPU look idle."""
        if instance.gpu == "cpu":
            load = self._host.at(now)
            total = instance.memory_gb or _gb(load.memory_total_bytes)
            return Accelerator("cpu", load.cpu_utilization, load.memory_available_bytes, total)
        uuids = self._uuids(instance)
        classes = {self._gpus.class_of(u) for u in uuids}
        gpu = instance.gpu or (classes.pop() if len(classes) == 1 else "")
        memory_gb = instance.memory_gb or self._memory_gb(uuids)
        by_uuid = {d.uuid: d for d in self._gpus.devices(now)}
        devices = [by_uuid[u] for u in uuids if u in by_uuid]
        if not devices or len(devices) < len(uuids):
            return Accelerator(gpu, memory_gb=memory_gb)
        return Accelerator(gpu, _mean_use(devices), _free(devices), memory_gb)

    def _memory_gb(self, uuids: list[str]) -> float | None:
        """Of all its devices, lost ones included: what an instance is does not change with what NVML can say of it."""
        sizes = [self._gpus.memory_of(u) for u in uuids]
        known = [size for size in sizes if size is not None]
        return _gb(sum(known)) if known and len(known) == len(sizes) else None

    def _uuids(self, instance: InstanceConfig) -> list[str]:
        """Its devices; an index that was never seen stands for itself, so that the instance's figures are absent."""
        known = self._gpus.known()
        if not instance.devices:
            return list(known) if self.sole or len(known) == 1 else []
        return [self._gpus.uuid_of(d) or f"#{d}" if isinstance(d, int) else d for d in instance.devices]


def _mean_use(devices: list[Device]) -> float | None:
    uses = [d.utilization for d in devices if d.utilization is not None]
    return sum(uses) / len(uses) if len(uses) == len(devices) else None


def _gb(size: int) -> float:
    return round(size / 1e9, 1)


def _free(devices: list[Device]) -> int | None:
    free = [d.memory_free_bytes for d in devices if d.memory_free_bytes is not None]
    return sum(free) if len(free) == len(devices) else None
