"""Samples the GPUs in a thread of its own, so that a driver that hangs, fails or vanishes costs nobody anything.

A figure is there while NVML gives it and absent otherwise; nobody waits for one, and what an instance is (its class of
GPU, its registration) never depends on a figure that has gone. Everything comes back by itself. One log line a change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

import pynvml
import structlog

from common import clock
from services.agent.nvml import Device, Nvml, NvmlError

log = structlog.get_logger()

INTERVAL_S: Final = 1.0  # NVML's own utilisation figure covers the last 1/6 to 1 s
STALE_S: Final = 5.0  # a sample that is older is not shown: the call behind it hangs
RETRY_S: Final = 10.0  # between attempts to open NVML (reached by doubling), or to find a lost GPU again


class GpuSampler:
    """The newest sample of this host's GPUs, and the thread that takes it."""

    def __init__(
        self,
        slices: Iterable[str] = (),
        *,
        interval_s: float = INTERVAL_S,
        stale_s: float = STALE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """`slices`: UUIDs of MIG slices to sample besides the whole GPUs."""
        self.interval_s = interval_s
        self.stale_s = stale_s
        self.retry_s = retry_s
        self._nvml = Nvml(slices)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)  # a hung call must not hold up exit
        self._latest: tuple[float, tuple[Device, ...]] | None = None  # replaced whole, so readers need no lock
        self._pins: dict[int, str] = {}
        self._classes: dict[str, str] = {}
        self._memory: dict[str, int] = {}
        self._state = ""
        self._hung = False

    def start(self) -> None:
        """Begin to sample."""
        self._latest = (clock.now(), ())
        self._thread.start()

    def close(self) -> None:
        """Stop; does not wait for a call that hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(0.2)

    def devices(self, now: float) -> tuple[Device, ...]:
        """The devices as of the last sample; none if there is no NVML, or none that answers. Never blocks."""
        latest = self._latest
        hung = latest is not None and now - latest[0] > self.stale_s
        if hung != self._hung:
            self._hung = hung
            if hung:
                log.warning("gpu_telemetry_hung", for_s=round(self.stale_s, 1))
            else:
                log.info("gpu_telemetry_answers_again")
        return latest[1] if latest is not None and not hung else ()

    def uuid_of(self, index: int) -> str | None:
        """The UUID of the device that had this index when it was first seen; indices move when a GPU is lost."""
        return self._pins.get(index)

    def class_of(self, uuid: str) -> str:
        """The class of a device, known for good once it was seen; "" before."""
        return self._classes.get(uuid, "")

    def memory_of(self, uuid: str) -> int | None:
        """Bytes of memory a device has, known for good once it was seen; None before."""
        return self._memory.get(uuid)

    def known(self) -> tuple[str, ...]:
        """UUIDs of all whole GPUs seen so far, in the order of their first indices."""
        return tuple(self._pins[i] for i in sorted(self._pins))

    def _run(self) -> None:
        opened_at = clock.now()
        pause = self.interval_s
        while not self._stop.is_set():
            began = clock.now()
            devices, state = self._sample()
            now = clock.now()
            self._note(state)
            lost = any(d.lost for d in devices)
            # A call that hung leaves NVML in doubt, a lost GPU is found again only by a new session.
            if now - began > self.stale_s or (lost and now - opened_at > self.retry_s):
                self._nvml.close()
                opened_at = now
            pause = self.interval_s if devices else min(2.0 * pause, self.retry_s)
            self._latest = (now if devices else now + pause, devices)  # no figures are not stale while none are due
            self._stop.wait(pause)
        self._nvml.close()

    def _sample(self) -> tuple[tuple[Device, ...], str]:
        """The devices, and in words how NVML is; remembers whom it has seen."""
        try:
            devices = self._nvml.sample()
        except NvmlError as error:
            return (), f"unavailable: {error}"
        except Exception as error:  # a driver may do anything, and this thread may not end
            self._nvml.close()
            return (), f"failed: {error!r}"
        for d in devices:
            if d.gpu:
                self._classes[d.uuid] = d.gpu
            if d.memory_total_bytes is not None:
                self._memory[d.uuid] = d.memory_total_bytes
            if d.index >= 0 and self._pins.get(d.index, "#").startswith("#"):
                self._pins[d.index] = d.uuid
        lost = [d.uuid for d in devices if d.lost]
        return devices, f"{len(devices)} devices" + (f", lost: {', '.join(lost)}" if lost else "")

    def _note(self, state: str) -> None:
        if state == self._state:
            return
        before, self._state = self._state, state
        well = "devices" in state and "lost" not in state
        none_here = not before and f"({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})" in state  # a host without GPUs
        level = log.info if well or none_here else log.warning
        level("gpu_telemetry", state=state, before=before)
