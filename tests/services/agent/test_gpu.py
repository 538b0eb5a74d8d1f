"""NVML in all its moods: absent, mismatched, MIG, lost, hung, unknown (case C50)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from common import clock
from services.agent.accelerators import Accelerator, LocalAccelerators
from services.agent.config import InstanceConfig
from services.agent.gpu import GpuSampler
from services.agent.host import HostSampler
from services.agent.nvml import Device, Nvml, NvmlError, gpu_class
from tests.services.agent.nvml_stub import Stub, build, compiler, loaded

GB = 1 << 30


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("needs a C compiler")
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path) -> Iterator[Stub]:
    with loaded(library) as stub:
        yield stub


@pytest.fixture
def sampler(stub: Stub) -> Iterator[GpuSampler]:
    sampler = GpuSampler(interval_s=0.02, stale_s=0.3, retry_s=0.1)
    sampler.start()
    yield sampler
    stub.blocked = 0
    sampler.close()
    sampler._thread.join(2.0)


def shown(sampler: GpuSampler, condition: Callable[[tuple[Device, ...]], Any], within_s: float = 2.0) -> None:
    """Wait until the sampler shows devices for which this is so; asking never takes long."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        devices = sampler.devices(clock.now())
        assert time.monotonic() - began < 0.05
        if condition(devices):
            return
        assert time.monotonic() < deadline, devices
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-mig"),
        ("A100-PCIE-40GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("GRID T4-16Q", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA TITAN Xp", "titan-xp"),
        ("", ""),
    ],
)
def test_product_names_have_classes(name: str, expected: str) -> None:
    assert gpu_class(name) == expected


def test_all_figures(stub: Stub) -> None:
    first, second = Nvml().sample()
    assert first == Device(
        0,
        "GPU-0",
        "NVIDIA H100 80GB HBM3",
        "h100",
        80 * GB,
        30 * GB,
        50 * GB,
        pytest.approx(0.4),
        pytest.approx(350.5),
        61.0,
        1980.0,
    )
    assert (second.index, second.uuid, second.utilization) == (1, "GPU-1", pytest.approx(0.45))


@pytest.mark.parametrize("code", [9, 18, 12, 999, 1, 12345])
def test_no_nvml_then_one_later(stub: Stub, code: int) -> None:
    nvml = Nvml()
    stub.init_code = code
    for _ in range(3):
        with pytest.raises(NvmlError, match=rf"\({code}\)"):
            nvml.sample()
    stub.init_code = 0
    assert len(nvml.sample()) == 2


def test_library_missing_then_installed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    nvml = Nvml()
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", None)
        patch.setattr(pynvml, "CDLL", missing)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        with pytest.raises(NvmlError, match="Library Not Found"):
            nvml.sample()
    with loaded(library):
        assert len(nvml.sample()) == 2


@pytest.mark.parametrize("code", [3, 4, 13, 21, 999])
def test_a_figure_that_is_not_supported_is_absent(stub: Stub, code: int) -> None:
    stub.use_code = code
    first, _ = Nvml().sample()
    assert first.utilization is None
    assert first.memory_free_bytes == 50 * GB
    assert not first.lost


def test_mig_slices_by_uuid(stub: Stub) -> None:
    *_, slice_, unknown = Nvml(["MIG-1", "MIG-2"]).sample()
    assert (slice_.index, slice_.uuid, slice_.gpu) == (-1, "MIG-1", "h100-mig")
    assert slice_.utilization is None
    assert slice_.memory_total_bytes == 80 * GB
    assert unknown.uuid == "MIG-2"
    assert unknown.lost


def test_unknown_error_then_fine(stub: Stub) -> None:
    nvml = Nvml()
    nvml.sample()
    stub.figure_code = 999
    assert all(d.memory_free_bytes is None and d.utilization is None for d in nvml.sample())
    stub.figure_code = 0
    assert nvml.sample()[0].utilization == pytest.approx(0.4)
    assert stub.inits == 1


def test_a_lost_gpu_is_lost_alone(stub: Stub) -> None:
    nvml = Nvml()
    nvml.sample()
    stub.lost = 1
    first, second = nvml.sample()
    assert first.utilization == pytest.approx(0.4)
    assert second == Device(1, "GPU-1", "NVIDIA H100 80GB HBM3", "h100", lost=True)
    nvml.close()  # a new session cannot even open it, and still knows who it was
    assert nvml.sample()[1] == second


def test_driver_gone_mid_run_is_opened_again(stub: Stub) -> None:
    nvml = Nvml()
    nvml.sample()
    stub.figure_code = 9
    with pytest.raises(NvmlError, match=r"\(9\)"):
        nvml.sample()
    stub.figure_code = 0
    assert len(nvml.sample()) == 2
    assert stub.inits == 2


@pytest.mark.parametrize("name", [b"Tesla T4", "Tesla T4"])
def test_names_as_bytes_and_as_text(stub: Stub, name: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: name)
    assert Nvml().sample()[0].gpu == "t4"


def test_a_name_that_is_no_text(stub: Stub) -> None:
    stub.named(b"\xff\xfe")
    first, _ = Nvml().sample()
    assert (first.name, first.gpu, first.utilization) == ("", "", pytest.approx(0.4))


def test_a_device_without_uuid_goes_by_its_index(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    stub.uuid_code = 3
    stub.count = 3  # a new session
    shown(sampler, lambda d: len(d) == 3)
    assert [d.uuid for d in sampler.devices(clock.now())] == ["GPU-0", "GPU-1", "#2"]
    third = InstanceConfig(url="http://h:1", devices=(2,))
    assert accelerators(sampler).of(third, clock.now()).gpu == "h100"
    stub.uuid_code = 0
    stub.count = 4
    shown(sampler, lambda d: len(d) == 4)
    assert sampler.uuid_of(2) == "GPU-2"


def test_no_devices_at_all(stub: Stub) -> None:
    stub.count = 0
    assert Nvml().sample() == ()


# -- the thread ------------------------------------------------------------------------------------------------------


def accelerators(sampler: GpuSampler, *, sole: bool = False) -> LocalAccelerators:
    return LocalAccelerators(sampler, HostSampler(clock.now()), sole=sole)


def test_count_changes_and_indices_keep_their_meaning(stub: Stub, sampler: GpuSampler) -> None:
    stub.count = 8
    shown(sampler, lambda d: len(d) == 8)
    mine = InstanceConfig(url="http://h:1", devices=(4,))
    with capture_logs() as logs:
        stub.removed = 3  # what was 4 to 7 is now 3 to 6
        shown(sampler, lambda d: len(d) == 7)
        joined = accelerators(sampler)
        assert joined.of(mine, clock.now()).utilization == pytest.approx(0.6)  # GPU-4 still
        gone = joined.of(InstanceConfig(url="http://h:1", devices=(3,)), clock.now())
        assert gone == Accelerator("h100", memory_gb=85.9)  # its class and size stay, its figures are absent
        stub.removed = -1
        shown(sampler, lambda d: len(d) == 8)
    assert [log["state"] for log in logs] == ["7 devices", "8 devices"]


def test_a_call_that_hangs_costs_figures_and_nobody_waits(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    with capture_logs() as logs:
        stub.blocked = 1
        shown(sampler, lambda d: d == ())
        time.sleep(0.2)
        assert sampler.devices(clock.now()) == ()
        stub.blocked = 0
        shown(sampler, len)
    assert [log["event"] for log in logs] == ["gpu_telemetry_hung", "gpu_telemetry_answers_again"]
    shown(sampler, lambda d: stub.inits == 2)  # a session that hung is not trusted


def test_a_host_without_a_driver_is_not_taken_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked less and less often, and each of these pauses is longer than a sample may be old."""

    def sample(_: Nvml) -> tuple[Device, ...]:
        asked.append(clock.now())
        raise NvmlError("unavailable (12)")

    asked: list[float] = []
    monkeypatch.setattr(Nvml, "sample", sample)
    sampler = GpuSampler(interval_s=0.02, stale_s=0.1, retry_s=0.4)
    with capture_logs() as logs:
        sampler.start()
        deadline = time.monotonic() + 10.0
        while len(asked) < 8:
            assert time.monotonic() < deadline
            assert sampler.devices(clock.now()) == ()
            time.sleep(0.01)
        sampler.close()
    assert [log["event"] for log in logs] == ["gpu_telemetry"]


def test_closing_does_not_wait_for_a_call_that_hangs(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    stub.blocked = 1
    time.sleep(0.1)
    began = time.monotonic()
    sampler.close()
    assert time.monotonic() - began < 0.5


def test_one_line_a_change(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    with capture_logs() as logs:
        stub.lost = 1
        shown(sampler, lambda d: any(x.lost for x in d))
        time.sleep(0.4)  # several attempts to find it again
        stub.lost = -1
        shown(sampler, lambda d: d and not any(x.lost for x in d))
        stub.count_code = 18
        shown(sampler, lambda d: d == ())
        time.sleep(0.3)
        stub.count_code = 0
        shown(sampler, len)
    assert [log["state"] for log in logs] == [
        "2 devices, lost: GPU-1",
        "2 devices",
        "unavailable: RM has detected an NVML/RM version mismatch. (18)",
        "2 devices",
    ]
    assert [log["log_level"] for log in logs] == ["warning", "info", "warning", "info"]


def test_anything_at_all_goes_wrong_and_it_goes_on(
    stub: Stub, sampler: GpuSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(sampler, len)
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1 / 0)
        shown(sampler, lambda d: d == ())
    shown(sampler, len)


# -- whose GPU it is -------------------------------------------------------------------------------------------------


def test_an_instance_has_its_devices(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    both = InstanceConfig(url="http://h:1", devices=(0, "GPU-1"))
    joined = accelerators(sampler)
    assert joined.of(both, clock.now()) == Accelerator("h100", pytest.approx(0.425), 100 * GB, 171.8)
    second = InstanceConfig(url="http://h:1", devices=("GPU-1",), gpu="special")
    assert joined.of(second, clock.now()) == Accelerator("special", pytest.approx(0.45), 50 * GB, 85.9)
    assert joined.of(InstanceConfig(url="http://h:1", devices=(7,)), clock.now()) == Accelerator()
    anyone = InstanceConfig(url="http://h:1")
    assert joined.of(anyone, clock.now()) == Accelerator()  # two GPUs, and nobody says whose
    assert accelerators(sampler, sole=True).of(anyone, clock.now()) == Accelerator(
        "h100", pytest.approx(0.425), 100 * GB, 171.8
    )
    told = InstanceConfig(url="http://h:1", devices=(0, 1), memory_gb=60.0)
    assert joined.of(told, clock.now()).memory_gb == 60.0


def test_a_lost_gpu_marks_only_its_instance(stub: Stub, sampler: GpuSampler) -> None:
    shown(sampler, len)
    stub.lost = 1
    shown(sampler, lambda d: any(x.lost for x in d))
    joined = accelerators(sampler)
    assert joined.of(InstanceConfig(url="http://h:1", devices=(0,)), clock.now()).utilization == pytest.approx(0.4)
    assert joined.of(InstanceConfig(url="http://h:1", devices=(1,)), clock.now()) == Accelerator("h100", memory_gb=85.9)
    both = InstanceConfig(url="http://h:1", devices=(0, 1))
    assert joined.of(both, clock.now()) == Accelerator("h100", memory_gb=171.8)


def test_a_host_without_gpus_computes_on_its_cpu_if_told_so() -> None:
    sampler = GpuSampler()  # never started: nothing known
    host = HostSampler(clock.now() - 1.0)
    joined = LocalAccelerators(sampler, host, sole=True)
    cpu = joined.of(InstanceConfig(url="http://h:1", gpu="cpu"), clock.now())
    assert cpu.gpu == "cpu"
    assert cpu.utilization is not None
    assert 0.0 <= cpu.utilization <= 1.0
    assert (cpu.memory_free_bytes or 0) > 1_000_000
    assert joined.of(InstanceConfig(url="http://h:1"), clock.now()) == Accelerator()
    assert host.at(clock.now()).cpu_cores >= 1
