"""Builds a /sys tree as the kernel's amdgpu driver fills it, in a test's folder."""

from __future__ import annotations

from pathlib import Path


class GpuTree:
    """Writes the files of GPUs in the kernel's formats: kfd_topology.c (properties: a name and a decimal number a line)
    and amdgpu_vram_mgr.c (mem_info_*: bytes as a decimal number)."""

    def __init__(self, system: Path) -> None:
        self.system = system
        self.topology = system / "class/kfd/kfd/topology/nodes"
        self.topology.mkdir(parents=True)
        self._nodes = 0
        self._gpus = 0

    def add_cpu(self) -> Path:
        return self._add_node({"cpu_cores_count": 16, "simd_count": 0, "gfx_target_version": 0, "location_id": 0})

    def add_gpu(
        self,
        *,
        version: int,
        domain: int = 0,
        bus: int = 1,
        partition: int = 0,
        unique_id: int = 0,
        memory: int = 16 << 30,
        used: int = 0,
        host_memory: int = 0,
        host_memory_used: int = 0,
    ) -> Path:
        """Add a GPU with `memory` bytes, of which `used` are taken. `host_memory` above 0: the bytes of host memory
        that the GPU may map. ROCm allocates there if that is more."""
        node = self._add_node(
            {
                "cpu_cores_count": 0,
                "simd_count": 304,
                "gfx_target_version": version,
                "vendor_id": 4098,
                "location_id": bus << 8 | partition,
                "domain": domain,
                "unique_id": unique_id,
            }
        )
        bank = node / "mem_banks/0"
        bank.mkdir(parents=True)
        size = max(memory, host_memory)
        bank.joinpath("properties").write_text(f"heap_type 1\nsize_in_bytes {size}\nflags 0\nwidth 4096\n")
        device = self.system / f"devices/pci{domain:04x}:00" / f"{domain:04x}:{bus:02x}:00.0"
        device.mkdir(parents=True, exist_ok=True)
        for name, figure in {
            "mem_info_vram_total": memory,
            "mem_info_vram_used": used,
            "mem_info_gtt_total": host_memory or 32 << 30,
            "mem_info_gtt_used": host_memory_used,
        }.items():
            (device / name).write_text(f"{figure}\n")
        card = self.system / f"class/drm/card{self._gpus}"
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
        self._gpus += 1
        return node

    def _add_node(self, fields: dict[str, int]) -> Path:
        node = self.topology / str(self._nodes)
        node.mkdir()
        (node / "properties").write_text("".join(f"{name} {value}\n" for name, value in fields.items()))
        self._nodes += 1
        return node
