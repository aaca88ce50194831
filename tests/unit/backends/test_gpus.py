"""The GPUs of a machine, read from trees as the kernel driver writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gpu_tree import GpuTree

from rocserve.backends.gpus import Gpu, architecture_name, find_gpu, visible_gpus


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
    assert list(visible_gpus({}, tree.topology)) == list(range(11))
    assert find_gpu(0, {}, tree.topology) == Gpu(0, "gfx90a", "0000:01:00", 64 << 30)
    tenth = find_gpu(10, {}, tree.topology)
    assert tenth is not None and tenth.pci_slot == "0000:0b:00"
    assert find_gpu(11, {}, tree.topology) is None
    assert find_gpu(-1, {}, tree.topology) is None


def test_what_a_container_may_not_use_is_not_counted(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    hidden, seen = tree.add_gpu(version=90010), tree.add_gpu(version=110000)
    (hidden / "properties").write_text("")
    assert list(visible_gpus({}, tree.topology)) == [0]
    gpu = find_gpu(0, {}, tree.topology)
    assert gpu is not None and gpu.architecture == "gfx1100"
    assert seen.name == "1"


def test_rocr_visible_devices_renumbers(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_cpu()
    tree.add_gpu(version=90010, unique_id=0xABC)
    tree.add_gpu(version=110000, unique_id=0xDEADBEEFDEADBEEF)

    def architectures(chosen: str) -> list[str]:
        environment = {"ROCR_VISIBLE_DEVICES": chosen}
        gpus = [find_gpu(number, environment, tree.topology) for number in visible_gpus(environment, tree.topology)]
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
        gpu = find_gpu(0, {"HSA_OVERRIDE_GFX_VERSION": value}, tree.topology)
        assert gpu is not None
        return gpu.architecture

    assert architecture("10.3.0") == "gfx1030"
    assert architecture("nonsense") == architecture("") == "gfx1032"


def test_a_partition_of_a_gpu_has_its_place_on_the_bus(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path)
    tree.add_gpu(version=90402, domain=1, bus=0xC1, partition=3)
    gpu = find_gpu(0, {}, tree.topology)
    assert gpu is not None and gpu.pci_slot == "0001:c1:00"
