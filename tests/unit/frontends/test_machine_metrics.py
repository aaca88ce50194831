"""The gauges of processors and memory from a fake /proc, and of GPUs from a stand-in for amdsmi."""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rocserve.core.custom_metrics import MetricFamily, Sample
from rocserve.frontends.metrics.collection import GpuGauges, MachineMetrics, ProcessorGauges
from rocserve.frontends.metrics.exposition import exposition

LOG = logging.getLogger("test")


def lines(families: Sequence[MetricFamily]) -> list[str]:
    return [line for line in exposition(families).splitlines() if not line.startswith("#")]


def write_proc(folder: Path, ticks: str) -> None:
    (folder / "stat").write_text(f"cpu  {ticks}\ncpu0 {ticks}\nintr 5\n")
    (folder / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    300 kB\nHugePages: 0\n")


def test_processors_and_memory(tmp_path: Path) -> None:
    write_proc(tmp_path, "100 0 100 800 0 0 0 0 0 0")
    gauges = ProcessorGauges(tmp_path)
    write_proc(tmp_path, "150 0 125 815 10 0 0 0 70 0")
    assert lines(gauges.families()) == [
        "nv_cpu_utilization 0.75",
        "nv_cpu_memory_total_bytes 1024000",
        "nv_cpu_memory_used_bytes 716800",
    ]
    # No time has passed.
    assert lines(gauges.families())[0] == "nv_cpu_utilization 0.0"


def test_this_machine_has_them() -> None:
    names = [family.name for family in ProcessorGauges().families()]
    assert names == ["nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"]


def stand_in(**replaced: Any) -> Any:
    """A module like amdsmi, with two GPUs."""
    functions: dict[str, Any] = {
        "AmdSmiMemoryType": types.SimpleNamespace(VRAM=0),
        "amdsmi_init": lambda: None,
        "amdsmi_get_processor_handles": lambda: [0, 1],
        "amdsmi_get_gpu_device_uuid": lambda handle: f"uuid-{handle}",
        "amdsmi_get_gpu_activity": lambda handle: {"gfx_activity": 25 + handle, "umc_activity": "N/A"},
        "amdsmi_get_gpu_memory_total": lambda handle, kind: 64 << 30,
        "amdsmi_get_gpu_memory_usage": lambda handle, kind: handle << 20,
        "amdsmi_get_power_info": lambda handle: {
            "current_socket_power": 300 if handle else "N/A",
            "average_socket_power": 120,
            "power_limit": 750_000_000 if handle else 500,
        },
    }
    return types.SimpleNamespace(**(functions | replaced))


def test_gpus() -> None:
    assert lines(GpuGauges(LOG, lambda name: stand_in()).families()) == [
        'nv_gpu_utilization{gpu_uuid="uuid-0"} 0.25',
        'nv_gpu_utilization{gpu_uuid="uuid-1"} 0.26',
        f'nv_gpu_memory_total_bytes{{gpu_uuid="uuid-0"}} {64 << 30}',
        f'nv_gpu_memory_total_bytes{{gpu_uuid="uuid-1"}} {64 << 30}',
        'nv_gpu_memory_used_bytes{gpu_uuid="uuid-0"} 0',
        'nv_gpu_memory_used_bytes{gpu_uuid="uuid-1"} 1048576',
        'nv_gpu_power_usage{gpu_uuid="uuid-0"} 120',
        'nv_gpu_power_usage{gpu_uuid="uuid-1"} 300',
        'nv_gpu_power_limit{gpu_uuid="uuid-0"} 500',
        'nv_gpu_power_limit{gpu_uuid="uuid-1"} 750.0',
    ]


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    def refuse(handle: int) -> None:
        raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")

    library = stand_in(
        amdsmi_get_processor_handles=lambda: [0],
        amdsmi_get_power_info=refuse,
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
    )
    names = [family.name for family in GpuGauges(LOG, lambda name: library).families()]
    assert names == ["nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"]


def test_without_the_library_or_its_driver_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    assert not GpuGauges(LOG, missing).families()
    assert not caplog.records

    def fail() -> None:
        raise RuntimeError("AMDSMI_STATUS_DRIVER_NOT_LOADED")

    gauges = GpuGauges(LOG, lambda name: stand_in(amdsmi_init=fail))
    assert not gauges.families()
    assert not gauges.families()
    (record,) = caplog.records
    assert record.getMessage() == ("no GPU metrics: amdsmi raised RuntimeError: AMDSMI_STATUS_DRIVER_NOT_LOADED")


def test_they_are_read_at_most_once_an_interval() -> None:
    count = 0

    def read() -> Sequence[MetricFamily]:
        nonlocal count
        count += 1
        return [MetricFamily("n", "gauge", "", (Sample({}, count),))]

    def broken() -> Sequence[MetricFamily]:
        raise OSError("no /proc")

    slow = MachineMetrics([broken, read], 3600, LOG)
    assert [lines(slow.families()) for _ in range(3)] == [["n 1"]] * 3
    quick = MachineMetrics([read], 0, LOG)
    assert [lines(quick.families()) for _ in range(2)] == [["n 2"], ["n 3"]]
