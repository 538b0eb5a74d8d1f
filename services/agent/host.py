"""The host's own figures, which stand in for a GPU's where the accelerator is the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil

PERIOD_S: Final = 1.0  # utilisation is the mean since the last sample; over much less it is noise


@dataclass(frozen=True, slots=True)
class HostLoad:
    """CPU and memory of this host. `cpu_utilization` is a fraction of all cores, None until a period has passed."""

    cpu_cores: int
    cpu_utilization: float | None
    memory_total_bytes: int
    memory_available_bytes: int


class HostSampler:
    """Samples at most once a period; a sample reads two small files of /proc."""

    def __init__(self, now: float) -> None:
        psutil.cpu_percent(None)  # the first call only sets the mark from which the next one counts
        self._at = now
        self._load = self._sample(None)

    def at(self, now: float) -> HostLoad:
        """The newest figures, at most a period old."""
        if now - self._at >= PERIOD_S:
            self._at = now
            self._load = self._sample(min(max(psutil.cpu_percent(None) / 100.0, 0.0), 1.0))
        return self._load

    @staticmethod
    def _sample(cpu: float | None) -> HostLoad:
        memory = psutil.virtual_memory()
        return HostLoad(psutil.cpu_count() or 1, cpu, int(memory.total), int(memory.available))
