"""The GPUs and the free memory of a machine, read from trees as kernels write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.gpu_tree import GpuTree

from rocserve.backends.host import FreeMemory, Gpu, Host, architecture_name
from rocserve.backends.parameters import usable_cpus

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> GpuTree:
    return GpuTree(tmp_path / "sys")


@pytest.fixture
def host(tmp_path: Path, tree: GpuTree) -> Host:
    """A machine with 64 GiB, of which 48 are free, without control groups."""
    processes = tmp_path / "proc"
    (processes / "self").mkdir(parents=True)
    kibibytes = GIB // 1024
    (processes / "meminfo").write_text(
        f"MemTotal:       {64 * kibibytes} kB\nMemFree:  1 kB\nMemAvailable:   {48 * kibibytes} kB\n"
    )
    (processes / "self/cgroup").write_text("0::/\n")
    return Host(system=tree.system, processes=processes, variables={})


def group(host: Host, name: str, **files: object) -> None:
    folder = host.system / "fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / f"memory.{file}").write_text(f"{content}\n")


def of_gpu(host: Host, number: int = 0) -> FreeMemory | None:
    gpu = host.gpu(number)
    assert gpu is not None
    return host.free_gpu_memory(gpu)


def test_a_machine_without_limits(host: Host) -> None:
    assert host.free_memory() == FreeMemory("this machine", 64 * GIB, 48 * GIB)
    group(host, "", max="max", current=GIB)
    assert host.free_memory() == FreeMemory("this machine", 64 * GIB, 48 * GIB)


def test_this_machine() -> None:
    found = Host().free_memory()
    assert found is not None and 0 < found.free_bytes <= found.total_bytes


def test_a_container_with_a_limit(host: Host) -> None:
    group(host, "", max=8 * GIB, current=6 * GIB, stat=f"anon 1\ninactive_file {GIB}\nactive_file {2 * GIB}")
    assert host.free_memory() == FreeMemory("the memory limit of this container or service", 8 * GIB, 5 * GIB)


def test_of_the_groups_around_the_least_limit_counts_and_what_is_free_in_the_narrowest(host: Host) -> None:
    assert host.memory_limit() == 64 * GIB
    (host.processes / "self/cgroup").write_text("0::/system.slice/rocserve.service\n")
    group(host, "system.slice", max=20 * GIB, current=19 * GIB)
    group(host, "system.slice/rocserve.service", max=16 * GIB, current=2 * GIB)
    found = host.free_memory()
    assert found is not None and (found.total_bytes, found.free_bytes) == (20 * GIB, GIB)
    assert host.memory_limit() == 16 * GIB


def cpu_group(host: Host, name: str, **files: str) -> None:
    folder = host.system / "fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / f"cpu.{file}").write_text(f"{content}\n")


MANY = {0, 1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 8), ("100000 100000", 1), ("150000 100000", 2), ("10000 100000", 1), ("900000 100000", 8), ("", 8)],
)
def test_a_quota_of_cpus(host: Host, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: MANY)
    cpu_group(host, "", max=quota)
    assert usable_cpus(host) == cpus


def test_the_least_quota_of_the_groups_around_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: MANY)
    (host.processes / "self/cgroup").write_text("0::/system.slice/rocserve.service/server\n")
    cpu_group(host, "system.slice/rocserve.service/server", max="max 100000")
    cpu_group(host, "system.slice/rocserve.service", max="300000 100000")
    cpu_group(host, "system.slice", max="50000 10000")
    assert usable_cpus(host) == 3
    cpu_group(host, "system.slice", max="20000 10000")
    assert usable_cpus(host) == 2
    # A group beside is not around this process.
    cpu_group(host, "system.slice/other.service", max="10000 10000")
    assert usable_cpus(host) == 2


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("own", ["", "/docker/abc"], ids=["container", "host"])
def test_a_quota_of_version_1(host: Host, monkeypatch: pytest.MonkeyPatch, folder: str, own: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: MANY)
    (host.processes / "self/cgroup").write_text("5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    cpu_group(host, "unified")
    cpu_group(host, folder, cfs_quota_us="-1", cfs_period_us="100000")
    assert usable_cpus(host) == 8
    cpu_group(host, folder + own, cfs_quota_us="250000", cfs_period_us="100000")
    assert usable_cpus(host) == 3


def test_version_1_of_control_groups(host: Host) -> None:
    (host.processes / "self/cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    # In the container the host's name of the group leads nowhere.
    group(host, "memory", limit_in_bytes=4 * GIB, usage_in_bytes=3 * GIB, stat=f"total_inactive_file {GIB}")
    found = host.free_memory()
    assert found is not None and (found.total_bytes, found.free_bytes) == (4 * GIB, 2 * GIB)
    group(host, "memory", limit_in_bytes=9223372036854771712)
    assert host.free_memory() == FreeMemory("this machine", 64 * GIB, 48 * GIB)


def test_a_group_over_its_limit_has_nothing_free(host: Host) -> None:
    group(host, "", max=GIB, current=2 * GIB, stat="")
    found = host.free_memory()
    assert found is not None and found.free_bytes == 0


def test_nothing_is_known(tmp_path: Path) -> None:
    nowhere = Host(system=tmp_path, processes=tmp_path, variables={})
    assert nowhere.free_memory() is None
    assert nowhere.memory_limit() is None


def test_gpus_are_distinguished_by_their_place(tree: GpuTree, host: Host) -> None:
    tree.add_cpu()
    tree.add_gpu(version=90010, bus=0xC1, memory=64 * GIB, used=60 * GIB)
    tree.add_gpu(version=110000, domain=1, bus=0x03, memory=24 * GIB, used=GIB)
    tree.add_gpu(version=90402, domain=1, bus=0x04, partition=5, memory=192 * GIB, used=0)
    assert of_gpu(host, 0) == FreeMemory("GPU 0 (gfx90a)", 64 * GIB, 4 * GIB)
    assert of_gpu(host, 1) == FreeMemory("GPU 1 (gfx1100)", 24 * GIB, 23 * GIB)
    assert of_gpu(host, 2) == FreeMemory("GPU 2 (gfx942)", 192 * GIB, 192 * GIB)


def test_a_gpu_in_the_host_s_memory(tree: GpuTree, host: Host) -> None:
    tree.add_gpu(version=110501, memory=GIB // 2, used=GIB // 4, host_memory=60 * GIB, host_memory_used=4 * GIB)
    assert of_gpu(host) == FreeMemory("GPU 0 (gfx1151)", 60 * GIB, 48 * GIB)
    group(host, "", max=8 * GIB, current=0, stat="")
    assert of_gpu(host) == FreeMemory("GPU 0 (gfx1151)", 60 * GIB, 8 * GIB)


def test_a_gpu_whose_driver_reports_nothing(tree: GpuTree, host: Host) -> None:
    tree.add_gpu(version=90010)
    (tree.system / "class/drm/card0/device").unlink()
    assert of_gpu(host) is None


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (100300, "gfx1030"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (90006, "gfx906"),
        (0, ""),
    ],
)
def test_architectures(version: int, name: str) -> None:
    assert architecture_name(version) == name


def test_gpus_are_numbered_in_the_order_of_their_nodes(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_cpu()
    for place in range(11):
        tree.add_gpu(version=90010 + place * 100, bus=place + 1, memory=64 << 30)
    assert list(Host(tree.system, variables={}).gpus) == list(range(11))
    assert Host(tree.system, variables={}).gpu(0) == Gpu(0, "gfx90a", "0000:01:00", 64 << 30)
    tenth = Host(tree.system, variables={}).gpu(10)
    assert tenth is not None and tenth.pci_slot == "0000:0b:00"
    assert Host(tree.system, variables={}).gpu(11) is None
    assert Host(tree.system, variables={}).gpu(-1) is None


def test_what_a_container_may_not_use_is_not_counted(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    hidden, seen = tree.add_gpu(version=90010), tree.add_gpu(version=110000)
    (hidden / "properties").write_text("")
    assert list(Host(tree.system, variables={}).gpus) == [0]
    gpu = Host(tree.system, variables={}).gpu(0)
    assert gpu is not None and gpu.architecture == "gfx1100"
    assert seen.name == "1"


def test_rocr_visible_devices_renumbers(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_cpu()
    tree.add_gpu(version=90010, unique_id=0xABC)
    tree.add_gpu(version=110000, unique_id=0xDEADBEEFDEADBEEF)

    def architectures(chosen: str) -> list[str]:
        host = Host(tree.system, variables={"ROCR_VISIBLE_DEVICES": chosen})
        gpus = [host.gpu(number) for number in host.gpus]
        return [gpu.architecture for gpu in gpus if gpu is not None]

    assert architectures("1") == ["gfx1100"]
    assert architectures("1,0") == ["gfx1100", "gfx90a"]
    assert architectures("GPU-DEADBEEFDEADBEEF, GPU-0000000000000abc") == ["gfx1100", "gfx90a"]
    assert architectures("0,7,1") == ["gfx90a"]
    assert architectures("") == []


def test_an_overridden_architecture_is_what_rocm_sees(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_gpu(version=100302)

    def architecture(value: str) -> str:
        gpu = Host(tree.system, variables={"HSA_OVERRIDE_GFX_VERSION": value}).gpu(0)
        assert gpu is not None
        return gpu.architecture

    assert architecture("10.3.0") == "gfx1030"
    assert architecture("nonsense") == architecture("") == "gfx1032"


def test_a_partition_of_a_gpu_has_its_place_on_the_bus(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_gpu(version=90402, domain=1, bus=0xC1, partition=3)
    gpu = Host(tree.system, variables={}).gpu(0)
    assert gpu is not None and gpu.pci_slot == "0001:c1:00"
