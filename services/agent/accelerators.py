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


class Accelerators(Protocol):
    """Looks an instance's accelerator up; quick, as it is asked for every report."""

    def of(self, instance: InstanceConfig, now: float) -> Accelerator:
        """The accelerator of a configured instance."""


class Unsampled:
    """For a process that is not beside the servers: only what the configuration says."""

    def of(self, instance: InstanceConfig, now: float) -> Accelerator:
        """The configured class."""
        return Accelerator(instance.gpu)


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
            return Accelerator("cpu", load.cpu_utilization, load.memory_available_bytes)
        uuids = self._uuids(instance)
        classes = {self._gpus.class_of(u) for u in uuids}
        gpu = instance.gpu or (classes.pop() if len(classes) == 1 else "")
        by_uuid = {d.uuid: d for d in self._gpus.devices(now)}
        devices = [by_uuid[u] for u in uuids if u in by_uuid]
        if not devices or len(devices) < len(uuids):
            return Accelerator(gpu)
        return Accelerator(gpu, _mean_use(devices), _free(devices))

    def _uuids(self, instance: InstanceConfig) -> list[str]:
        """Its devices; an index that was never seen stands for itself, so that the instance's figures are absent."""
        known = self._gpus.known()
        if not instance.devices:
            return list(known) if self.sole or len(known) == 1 else []
        return [self._gpus.uuid_of(d) or f"#{d}" if isinstance(d, int) else d for d in instance.devices]


def _mean_use(devices: list[Device]) -> float | None:
    uses = [d.utilization for d in devices if d.utilization is not None]
    return sum(uses) / len(uses) if len(uses) == len(devices) else None


def _free(devices: list[Device]) -> int | None:
    free = [d.memory_free_bytes for d in devices if d.memory_free_bytes is not None]
    return sum(free) if len(free) == len(devices) else None
