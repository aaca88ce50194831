"""Says how to install the build of PyTorch for this machine."""

from __future__ import annotations

from rocserve.backends.host import Host


def torch_command(host: Host) -> str:
    """Return the command. PyPI's own torch for Linux is the build for NVIDIA GPUs, with gigabytes of libraries."""
    index = "https://download.pytorch.org/whl"
    if host.rocm_version or host.gpus:
        version = ".".join((host.rocm_version or "7.2").split(".")[:2])
        # PyTorch's index has builds for older ones, AMD's for ROCm 10.
        if int(version.partition(".")[0]) >= 10:
            return "pip install torch --index-url https://stable.repo.amd.com/rocm/whl-next/ (AMD's build for ROCm)"
        return f"pip install torch --index-url {index}/rocm{version} (pytorch.org says which versions of ROCm it has)"
    if (host.processes / "driver/nvidia/version").exists():
        return "pip install torch (the build for NVIDIA GPUs)"
    return f"pip install torch --index-url {index}/cpu (the build for CPUs)"
