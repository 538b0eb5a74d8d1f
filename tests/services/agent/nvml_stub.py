"""A libnvidia-ml.so.1 of our own, built with the C compiler, that fails in the ways real ones do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pynvml

SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int init_code, count_code, figure_code, use_code, uuid_code, count = 2, lost = -1, removed = -1, inits, calls;
volatile int blocked;
char name[96] = "NVIDIA H100 80GB HBM3";
static int devices[64];
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Use;

static int at(int *device) { return (int)(device - devices); }
static int checked(int *device) { calls++; return at(device) == lost ? 15 : figure_code; }

int nvmlInitWithFlags(unsigned flags) { inits++; return init_code; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "some error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = removed >= 0 ? count - 1 : count; return count_code; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, int **device) {
  if (removed >= 0 && (int)i >= removed) i++;
  *device = &devices[i];
  return (int)i == lost ? 15 : 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, int **device) {
  if (strcmp(uuid, "MIG-1")) return 6;
  *device = &devices[63];
  return 0;
}
int nvmlDeviceGetUUID(int *device, char *out, unsigned n) {
  snprintf(out, n, at(device) == 63 ? "MIG-1" : "GPU-%d", at(device));
  return uuid_code;
}
int nvmlDeviceGetName(int *device, char *out, unsigned n) {
  snprintf(out, n, at(device) == 63 ? "%s MIG 1g.10gb" : "%s", name);
  return 0;
}
int nvmlDeviceGetMemoryInfo(int *device, Memory *m) {
  m->total = 80ULL << 30; m->used = 30ULL << 30; m->free = 50ULL << 30;
  return checked(device);
}
int nvmlDeviceGetUtilizationRates(int *device, Use *use) {
  while (blocked) usleep(5000);
  use->gpu = 40 + 5 * at(device); use->memory = 10;
  return use_code ? use_code : at(device) == 63 ? 3 : checked(device);
}
int nvmlDeviceGetPowerUsage(int *device, unsigned *mw) { *mw = 350500; return checked(device); }
int nvmlDeviceGetTemperature(int *device, int sensor, unsigned *c) { *c = 61; return checked(device); }
int nvmlDeviceGetClockInfo(int *device, int type, unsigned *mhz) {
  *mhz = type == 1 ? 1980 : 0;
  return checked(device);
}
"""


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> Path:
    """Compile it into `folder`."""
    source, library = folder / "stub.c", folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE)
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source)]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1"], check=True, capture_output=True)
    return library


class Stub:
    """The loaded library's switches, by name: `stub.lost = 1`."""

    DEFAULTS: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("init_code", "count_code", "figure_code", "use_code", "uuid_code", "inits", "calls"), 0),
        "count": 2,
        "lost": -1,
        "removed": -1,
        "blocked": 0,
    }

    def __init__(self, path: Path) -> None:
        object.__setattr__(self, "library", ctypes.CDLL(str(path)))
        for key, value in self.DEFAULTS.items():
            setattr(self, key, value)
        self.named(b"NVIDIA H100 80GB HBM3")

    def __getattr__(self, key: str) -> int:
        return ctypes.c_int.in_dll(self.library, key).value

    def __setattr__(self, key: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, key).value = value

    def named(self, name: bytes) -> None:
        """What all devices are called."""
        (ctypes.c_char * 96).in_dll(self.library, "name").value = name


@contextmanager
def loaded(path: Path) -> Iterator[Stub]:
    """The stub in the place of the real library, for as long as this lasts."""
    stub = Stub(path)
    before = pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = stub.library
    try:
        yield stub
    finally:
        stub.blocked = 0
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = before
