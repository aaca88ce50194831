"""Reports what a machine has: its AMD GPUs, free memory of machine and GPUs, quotas of its CPUs, its ROCm version.

No GPU library is loaded for it:

- GPUs: the amdgpu kernel driver lists compute nodes, CPUs among them, in /sys/class/kfd/kfd/topology/nodes, one folder
  each. Each line of a folder's file `properties` is a name and a decimal number (libhsakmt/src/topology.c of
  ROCm/ROCR-Runtime reads the same). In a container, the folders of GPUs that it may not use cannot be read. HIP numbers
  the GPUs in the order of nodes, among those that ROCR_VISIBLE_DEVICES leaves (rocm.docs.amd.com, "GPU isolation
  techniques").
- Memory: MemAvailable in /proc/meminfo (proc_meminfo(5)). For control groups, which limit containers: in version 2
  memory.max, memory.current, and inactive_file and active_file in memory.stat (kernel.org, "Control Group v2"); in
  version 1 memory.limit_in_bytes, memory.usage_in_bytes, and total_inactive_file and total_active_file. For GPUs:
  mem_info_vram_total, mem_info_vram_used, mem_info_gtt_total and mem_info_gtt_used of the card's device, in bytes
  (kernel.org, "AMDGPU driver, misc").
- CPUs that control groups allow, in microseconds of a period: in version 2 cpu.max, in version 1 cpu.cfs_quota_us and
  cpu.cfs_period_us (kernel.org, "CFS Bandwidth Control").
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_Node = tuple[Path, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Gpu:
    """An AMD GPU of this machine."""

    number: int
    """The number in a worker's HIP_VISIBLE_DEVICES."""
    architecture: str
    """ROCm's name, such as "gfx90a"; "" = an old driver does not report it."""
    pci_slot: str
    """Domain, bus and device, such as "0000:c1:00"."""
    memory_bytes: int
    """The memory that ROCm may allocate: a part of the host's memory if the GPU has no memory; 0 = not known."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory of a GPU or of this machine that is free now."""

    place: str
    """Where the memory is, such as "GPU 0 (gfx90a)" or "this machine"."""
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, or a test's substitute."""

    system: Path = Path("/sys")
    processes: Path = Path("/proc")
    rocm: Path = Path("/opt/rocm")
    variables: Mapping[str, str] | None = None
    """None = this process' environment."""

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ if self.variables is None else self.variables

    @property
    def rocm_version(self) -> str:
        """The version of ROCm, such as "7.1.1", without a build number ("7.1.1-38"); "" = not installed. ROCm's
        packages write it to their folder, which $ROCM_PATH names."""
        folder = Path(self.environment.get("ROCM_PATH") or self.rocm)
        # Of ROCm 7 and of ROCm 10.
        for name in (".info/version", "core/.info/version"):
            try:
                return (folder / name).read_text().strip().partition("-")[0]
            except (OSError, UnicodeDecodeError):
                continue
        return ""

    @property
    def gpus(self) -> Sequence[int]:
        """Usable GPUs by number in a worker's HIP_VISIBLE_DEVICES: the numbers in this process' variable, else all."""
        chosen = self.environment.get("HIP_VISIBLE_DEVICES")
        if chosen is not None:
            return tuple(int(number) for number in chosen.split(",") if number.strip().isdecimal())
        return range(len(self._gpu_nodes()))

    def gpu(self, number: int) -> Gpu | None:
        """Return the GPU that has this number in a worker's HIP_VISIBLE_DEVICES; None if there is none."""
        nodes = self._gpu_nodes()
        if not 0 <= number < len(nodes):
            return None
        node, fields = nodes[number]
        version = fields.get("gfx_target_version", 0)
        # "10.3.0", for example, makes ROCm treat the GPU as another model of GPU. ROCm ignores invalid values.
        parts = self.environment.get("HSA_OVERRIDE_GFX_VERSION", "").split(".")
        if len(parts) == 3 and all(part.isdecimal() for part in parts):
            major, minor, stepping = (int(part) for part in parts)
            version = major * 10_000 + minor * 100 + stepping or version
        # On GPUs that are divided into several nodes, the function bits of a location id, and the bits above 16, hold
        # the partition's number (kfd_topology_add_device of the kernel).
        domain, location = fields.get("domain", 0), fields.get("location_id", 0)
        return Gpu(
            number=number,
            architecture=architecture_name(version),
            pci_slot=f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}",
            memory_bytes=sum(
                bank.get("size_in_bytes", 0)
                for bank in map(_fields, node.glob("mem_banks/*/properties"))
                # The GPU's own memory is public (1) or private (2).
                if bank.get("heap_type") in (1, 2)
            ),
        )

    def free_memory(self) -> FreeMemory | None:
        """Return the least free memory of the machine and the control groups around this process; None = not known."""
        return min(self._memories(), key=lambda memory: memory.free_bytes, default=None)

    def memory_limit(self) -> int | None:
        """Return the least memory limit of the machine and the control groups around this process; None = not known."""
        return min((memory.total_bytes for memory in self._memories()), default=None)

    def cpu_quota(self) -> float | None:
        """Return the least CPU time per time that the control groups around this process allow; None = no limit."""
        quotas = [quota for folder in self._groups("cpu") if (quota := _cpu_quota(folder)) is not None]
        return min(quotas, default=None)

    def free_gpu_memory(self, gpu: Gpu) -> FreeMemory | None:
        """Return the free memory of one GPU; None = not known. If ROCm may allocate more than the GPU's own memory, the
        driver allocates in the host's memory, and the result is the part of that memory that is free for the GPU."""
        devices = (link.resolve() for link in sorted((self.system / "class/drm").glob("card*/device")))
        device = next((device for device in devices if device.name.rpartition(".")[0] == gpu.pci_slot), None)
        if device is None:
            return None
        own_total, own_used = _number(device / "mem_info_vram_total"), _number(device / "mem_info_vram_used")
        place = f"GPU {gpu.number} ({gpu.architecture})" if gpu.architecture else f"GPU {gpu.number}"
        if own_total is None or own_used is None:
            return None
        if gpu.memory_bytes <= own_total:
            return FreeMemory(place, own_total, max(own_total - own_used, 0))
        shared_used = _number(device / "mem_info_gtt_used") or 0
        host_memory = self.free_memory()
        free = max(gpu.memory_bytes - shared_used, 0)
        return FreeMemory(place, gpu.memory_bytes, min(free, host_memory.free_bytes) if host_memory else free)

    def _gpu_nodes(self) -> Sequence[_Node]:
        folders = [path for path in (self.system / "class/kfd/kfd/topology/nodes").glob("*") if path.name.isdecimal()]
        nodes = [
            (folder, _fields(folder / "properties")) for folder in sorted(folders, key=lambda path: int(path.name))
        ]
        # Nodes without SIMD units are CPUs.
        gpus = [(folder, fields) for folder, fields in nodes if fields.get("simd_count", 0) > 0]
        chosen = self.environment.get("ROCR_VISIBLE_DEVICES")
        if chosen is None:
            return gpus
        # Entries are indices, or "GPU-" and the unique id in hexadecimal digits. ROCm stops at the first other entry.
        names = {f"gpu-{one['unique_id']:016x}": place for place, (_, one) in enumerate(gpus) if "unique_id" in one}
        left: list[_Node] = []
        for entry in chosen.lower().split(","):
            word = entry.strip()
            place = int(word) if word.isdecimal() else names.get(word, -1)
            if not 0 <= place < len(gpus):
                break
            left.append(gpus[place])
        return left

    def _memories(self) -> Iterator[FreeMemory]:
        fields = _fields(self.processes / "meminfo")
        total, free = fields.get("MemTotal:"), fields.get("MemAvailable:")
        if total is not None and free is not None:
            yield FreeMemory("this machine", total * 1024, free * 1024)
        for folder in self._groups("memory"):
            # A group has the files of its version.
            yield from _limit(folder, "memory.max", "memory.current", "")
            yield from _limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the control groups around this process, of both versions, whose limits apply."""
        try:
            lines = (self.processes / "self/cgroup").read_text().splitlines()
        except OSError:
            return
        mounted = self.system / "fs/cgroup"
        for line in lines:
            hierarchy, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if hierarchy == "0" and not controllers:
                names = ["", "unified"]
            elif controller in controllers.split(","):
                # A hierarchy of several controllers has one folder, and usually links with the single names.
                names = list(dict.fromkeys((controller, controllers)))
            else:
                continue
            for name in names:
                yield from _with_parents(mounted / name, group)


def architecture_name(gfx_target_version: int) -> str:
    """Return the name for a version, such as "gfx90a" for 90010; "" for 0 (a CPU). Minor and stepping are two decimal
    digits each in the version, and one hexadecimal digit each in the name."""
    if gfx_target_version <= 0:
        return ""
    major, rest = divmod(gfx_target_version, 10_000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _with_parents(mounted: Path, group: str) -> Iterator[Path]:
    """Yield the group's folder and the folders above it, whose limits apply too. In a container the group's name may be
    the host's name for it; then only the container's outermost folder exists."""
    inner = PurePosixPath(group.lstrip("/"))
    if ".." in inner.parts:
        inner = PurePosixPath()
    for part in (inner, *inner.parents):
        folder = mounted / part
        if folder.is_dir():
            yield folder


def _limit(folder: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[FreeMemory]:
    limit, used = _number(folder / limit_file), _number(folder / usage_file)
    # Version 1 of control groups writes a number of about 1 << 60 for "no limit".
    if limit is None or used is None or limit >= 1 << 60:
        return
    statistics = _fields(folder / "memory.stat")
    # The kernel frees the group's page cache when the memory is needed.
    cached = sum(statistics.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
    yield FreeMemory("the memory limit of this container or service", limit, max(limit - max(used - cached, 0), 0))


def _cpu_quota(folder: Path) -> float | None:
    """Return how many CPUs a group may use on average; None = no limit, which is "max" or -1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = (str(_number(folder / name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)


def _number(file: Path) -> int | None:
    """Read a number; None if the file has no number, as memory.max of a group without a limit."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> Mapping[str, int]:
    """Read lines of a name and a number, without units; empty if the file cannot be read."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdecimal()}
