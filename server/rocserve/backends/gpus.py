"""Which AMD GPUs this process may use, found out without loading a GPU library.

The amdgpu kernel driver lists what computes in /sys/class/kfd/kfd/topology/nodes: a folder a node, CPUs among them,
whose file `properties` holds a name and a decimal number a line (libhsakmt/src/topology.c of ROCm/ROCR-Runtime reads
the same). What a container may not use cannot be read there. HIP numbers the GPUs in the nodes' order, of those that
ROCR_VISIBLE_DEVICES leaves (rocm.docs.amd.com, "GPU isolation techniques").
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")

_HIP = "HIP_VISIBLE_DEVICES"
_ROCR = "ROCR_VISIBLE_DEVICES"
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"

_FRAME_BUFFERS = (1, 2)
"""The types of memory bank that are a GPU's own: public and private."""


@dataclass(frozen=True, slots=True)
class Gpu:
    number: int
    """As HIP_VISIBLE_DEVICES of a worker takes it."""
    architecture: str
    """E.g. "gfx90a", as ROCm sees it; "" where an old driver does not tell."""
    pci_slot: str
    """Domain, bus and device, e.g. "0000:c1:00"."""
    memory_bytes: int
    """What ROCm may allocate; of a GPU without memory of its own a part of the host's. 0 where it cannot be told."""


def visible_gpus(environment: Mapping[str, str] = os.environ, topology: Path = _TOPOLOGY) -> Sequence[int]:
    """Their numbers, as HIP_VISIBLE_DEVICES of a worker takes them: those in this process' own variable, else all."""
    chosen = environment.get(_HIP)
    if chosen is not None:
        return tuple(int(number) for number in chosen.split(",") if number.strip().isdecimal())
    return range(len(_gpu_nodes(environment, topology)))


def find_gpu(number: int, environment: Mapping[str, str] = os.environ, topology: Path = _TOPOLOGY) -> Gpu | None:
    """The GPU that HIP_VISIBLE_DEVICES calls `number`; None where there is none."""
    nodes = _gpu_nodes(environment, topology)
    if not 0 <= number < len(nodes):
        return None
    node, fields = nodes[number]
    version = fields.get("gfx_target_version", 0)
    return Gpu(
        number=number,
        architecture=_overridden(environment.get(_OVERRIDE, "")) or architecture_name(version),
        pci_slot=_pci_slot(fields.get("domain", 0), fields.get("location_id", 0)),
        memory_bytes=_own_memory(node),
    )


def architecture_name(gfx_target_version: int) -> str:
    """90010 -> "gfx90a": major, minor and stepping in two decimal digits each, printed in one hexadecimal digit each
    after the major version. "" for 0, as of CPUs."""
    if gfx_target_version <= 0:
        return ""
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _overridden(text: str) -> str:
    """HSA_OVERRIDE_GFX_VERSION, "10.3.0", which makes ROCm take the GPU for another; "" for what it would not take."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return ""
    major, minor, stepping = (int(part) for part in parts)
    return architecture_name(major * 10_000 + minor * 100 + stepping)


def _gpu_nodes(environment: Mapping[str, str], topology: Path) -> Sequence[tuple[Path, Mapping[str, int]]]:
    """The folders and properties of the GPUs in HIP's order."""
    folders = [path for path in topology.glob("*") if path.name.isdecimal()]
    nodes = [
        (folder, _read_fields(folder / "properties")) for folder in sorted(folders, key=lambda path: int(path.name))
    ]
    # CPUs are listed without SIMD units.
    gpus = [(folder, fields) for folder, fields in nodes if fields.get("simd_count", 0) > 0]
    chosen = environment.get(_ROCR)
    if chosen is None:
        return gpus
    return _chosen_by_rocr(chosen, gpus)


def _chosen_by_rocr(
    chosen: str, gpus: Sequence[tuple[Path, Mapping[str, int]]]
) -> Sequence[tuple[Path, Mapping[str, int]]]:
    """Those that the list names by their place or by "GPU-" and their unique id in hexadecimal digits; the list ends
    for ROCm at the first that is neither."""
    names = {
        f"gpu-{fields['unique_id']:016x}": place for place, (_, fields) in enumerate(gpus) if "unique_id" in fields
    }
    left: list[tuple[Path, Mapping[str, int]]] = []
    for entry in chosen.lower().split(","):
        word = entry.strip()
        place = int(word) if word.isdecimal() else names.get(word, -1)
        if not 0 <= place < len(gpus):
            break
        left.append(gpus[place])
    return left


def _own_memory(node: Path) -> int:
    banks = (_read_fields(file) for file in node.glob("mem_banks/*/properties"))
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _FRAME_BUFFERS)


def _pci_slot(domain: int, location: int) -> str:
    """Bus and device of a location id. Its function bits, and those above 16, hold the partition's number on GPUs that
    are divided into several nodes (kfd_topology_add_device of the kernel)."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"


def _read_fields(file: Path) -> Mapping[str, int]:
    """Its names and numbers; none where it cannot be read."""
    try:
        pairs = [line.split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
