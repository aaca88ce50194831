"""How much memory is free, on the machine and on its GPUs, as the kernel tells.

/proc/meminfo: MemAvailable (proc_meminfo(5)). Control groups, where containers have their limits: memory.max,
memory.current and inactive_file and active_file of memory.stat, version 2 (kernel.org, "Control Group v2"), or
memory.limit_in_bytes, memory.usage_in_bytes and total_inactive_file and total_active_file, version 1. GPUs:
mem_info_vram_total and _used, mem_info_gtt_total and _used of the card's device, in bytes (kernel.org, "AMDGPU driver,
misc").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rocserve.backends.gpus import Gpu
from rocserve.backends.host import Host

_NO_LIMIT = 1 << 60
"""Version 1 has no word for none, but a number of about this size."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    place: str
    """E.g. "GPU 0 (gfx90a)", "this machine"."""
    total_bytes: int
    free_bytes: int


def free_host_memory(host: Host) -> FreeMemory | None:
    """The least of what the machine and each control group around this process leave; None where nothing is told."""
    found = [*_of_machine(host), *_of_groups(host)]
    return min(found, key=lambda memory: memory.free_bytes, default=None)


def host_memory_limit(host: Host) -> int | None:
    """The least of what the machine has and each control group around this process may take; None where nothing is
    told."""
    found = [*_of_machine(host), *_of_groups(host)]
    return min((memory.total_bytes for memory in found), default=None)


def free_gpu_memory(gpu: Gpu, host: Host) -> FreeMemory | None:
    """Of one GPU; None where nothing is told. A part of the host's memory where the GPU has no, or less, of its own:
    the driver then allocates there."""
    device = _device(gpu, host)
    if device is None:
        return None
    own_total, own_used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
    place = f"GPU {gpu.number} ({gpu.architecture})" if gpu.architecture else f"GPU {gpu.number}"
    if own_total is None or own_used is None:
        return None
    if gpu.memory_bytes <= own_total:
        return FreeMemory(place, own_total, max(own_total - own_used, 0))
    shared_used = _number(device / "mem_info_gtt_used") or 0
    around = free_host_memory(host)
    free = max(gpu.memory_bytes - shared_used, 0)
    return FreeMemory(place, gpu.memory_bytes, min(free, around.free_bytes) if around else free)


def _of_machine(host: Host) -> Iterator[FreeMemory]:
    fields = _fields(host.processes / "meminfo")
    total, free = fields.get("MemTotal:"), fields.get("MemAvailable:")
    if total is not None and free is not None:
        yield FreeMemory("this machine", total * 1024, free * 1024)


def _of_groups(host: Host) -> Iterator[FreeMemory]:
    try:
        lines = (host.processes / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = host.system / "fs/cgroup"
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy == "0" and not controllers:
            for folder in (*_with_parents(mounted, group), *_with_parents(mounted / "unified", group)):
                yield from _limit(folder, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            for folder in _with_parents(mounted / "memory", group):
                yield from _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _with_parents(mounted: Path, group: str) -> Iterator[Path]:
    """The group's folder and those around it, which limit it too. In a container the name may be the host's, and only
    the outermost folder be there: it is the container's own."""
    inner = PurePosixPath(group.lstrip("/"))
    if ".." in inner.parts:
        inner = PurePosixPath()
    for part in (inner, *inner.parents):
        folder = mounted / part
        if folder.is_dir():
            yield folder


def _limit(folder: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[FreeMemory]:
    limit, used = _number(folder / limit_file), _number(folder / usage_file)
    if limit is None or used is None or limit >= _NO_LIMIT:
        return
    statistics = _fields(folder / "memory.stat")
    # What the group's files take in the page cache is given up where it is needed.
    cached = sum(statistics.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
    yield FreeMemory("the memory limit of this container or service", limit, max(limit - max(used - cached, 0), 0))


def _device(gpu: Gpu, host: Host) -> Path | None:
    for link in sorted((host.system / "class/drm").glob("card*/device")):
        device = link.resolve()
        if device.name.rpartition(".")[0] == gpu.pci_slot:
            return device
    return None


def _number(file: Path) -> int | None:
    """None where there is none, as in memory.max of a group without a limit."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> Mapping[str, int]:
    """Names and numbers, a line each; what follows the number is its unit."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdecimal()}
