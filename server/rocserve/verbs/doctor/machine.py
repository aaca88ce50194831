"""Examines the machine (CPUs, memory, GPUs, ROCm, variables that engines read) and the installed software."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rocserve.backends.host import Host
from rocserve.backends.installed import is_installed
from rocserve.backends.onnx.distributions import OnnxRuntimes, empty_packages, installed_onnx_runtimes
from rocserve.backends.parameters import usable_cpus
from rocserve.backends.pytorch.installing import torch_command
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.core.extras import install_command
from rocserve.core.printable import readable_size as size
from rocserve.settings import default_front_ends


class State(enum.Enum):
    FACT = "fact"
    WORKS = "works"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    section: str
    name: str
    state: State
    text: str
    advice: str = ""
    """What the user should do; "" = nothing."""
    is_for_gpus: bool = False
    """Only a machine with a GPU needs what is absent."""


_MACHINE, _SOFTWARE = partial(Finding, "machine"), partial(Finding, "software")
NO_GPUS, GPU_DRIVER = "GPUs", "GPU driver"
"""Names of findings: that there are no GPUs, and what is wrong with the driver of those that there are."""


def examine_machine(host: Host) -> Iterator[Finding]:
    cpus = usable_cpus()
    front_ends = default_front_ends(cpus)
    more = f", and by {front_ends} processes while it is busy" if front_ends else ""
    facts = {
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {cpus} CPUs may be used",
        "gRPC and HTTP": f"served by the server's own process{more}, unless --front-ends says otherwise",
    }
    if memory := host.free_memory():
        facts["memory"] = f"{size(memory.free_bytes)} of {size(memory.total_bytes)} free ({memory.place})"
    for name, text in facts.items():
        yield _MACHINE(name, State.FACT, text)
    if host.rocm_version:
        yield _MACHINE("ROCm", State.FACT, host.rocm_version)
    else:
        text = f"no {host.rocm} with a version, and no $ROCM_PATH"
        advice = (
            "ROCm (for AMD GPUs): apt-get install amdrocm10.1 (with MIGraphX 2.18) or amdrocm10.2 (2.19), from AMD's"
            " repository stable.repo.amd.com/rocm/core"
        )
        yield _MACHINE("ROCm", State.ABSENT, text, advice, is_for_gpus=True)
    yield from _gpus(host)
    for name in sorted(host.environment):
        if name in (
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "HSA_OVERRIDE_GFX_VERSION",
            "LD_LIBRARY_PATH",
            "ROCM_PATH",
        ) or name.startswith(("MIGRAPHX_", "MIOPEN_", "ROCSERVE_")):
            yield _MACHINE(f"${name}", State.FACT, host.environment[name])


def _gpus(host: Host) -> Iterator[Finding]:
    numbers = host.gpus
    if not numbers:
        yield _MACHINE(NO_GPUS, State.ABSENT, "no AMD GPU that this process may use")
    # An AMD GPU on the PCI bus is idle if no driver uses it.
    idle = not numbers and not (host.system / "module/amdgpu").exists()
    for device in sorted((host.system / "bus/pci/devices").glob("*")) if idle else ():
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        # A display controller of AMD.
        if vendor == "0x1002" and kind.startswith("0x03"):
            text = f"the GPU at PCI {device.name} has no driver: the kernel module amdgpu is not loaded"
            advice = "amdgpu: modprobe amdgpu; where there is none, apt-get install amdgpu-dkms and restart the machine"
            yield _MACHINE(GPU_DRIVER, State.BROKEN, text, advice)
    for number in numbers:
        gpu = host.gpu(number)
        if gpu is None:
            advice = "check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES"
            yield _MACHINE(f"GPU {number}", State.BROKEN, "configured, but this machine has no such GPU", advice)
            continue
        memory = host.free_gpu_memory(gpu)
        amount = size(gpu.memory_bytes) if memory is None else f"{size(memory.free_bytes)} of {size(gpu.memory_bytes)}"
        text = f"{gpu.architecture or 'architecture unknown'}, {amount} free, PCI {gpu.pci_slot}"
        yield _MACHINE(f"GPU {number}", State.FACT, text)
    driver = Path("/dev/kfd")
    if numbers and not os.access(driver, os.R_OK | os.W_OK):
        text = f"{driver} may not be read and written by this user" if driver.exists() else f"there is no {driver}"
        advice = (
            "usermod --append --groups render,video USER, and log in again; in a container pass --device=/dev/kfd"
            " --device=/dev/dri --group-add=video --group-add=$(getent group render | cut -d: -f3)"
        )
        yield _MACHINE(GPU_DRIVER, State.BROKEN, text, advice)


def _packages(host: Host) -> Sequence[tuple[str, Sequence[str], str, str]]:
    """Return for each module: its name, the names of its distributions, its purpose, how to install it."""
    cpu_extra = install_command("cpu")
    on_gpus = "; for AMD GPUs: pip install onnxruntime-migraphx" if host.gpus else ""
    return (
        ("onnxruntime", (), "", f"{cpu_extra}{on_gpus}"),
        ("onnx", ("onnx",), "MIGraphX's models", cpu_extra),
        ("cv2", ("opencv-python-headless", "opencv-python"), "rocAL pipelines on the CPU", cpu_extra),
        ("matplotlib", ("matplotlib",), "rocserve tune --plot, bench --plot", install_command("tools")),
        ("tokenizers", ("tokenizers",), "preprocess: text", install_command("text")),
        ("torch", ("torch",), "PyTorch's models; rocserve bench --against torch", torch_command(host)),
        (
            "amdsmi",
            ("amdsmi",),
            "metrics of AMD GPUs",
            "pip install /opt/rocm/core/share/amd_smi (ROCm 10) or /opt/rocm/share/amd_smi (ROCm 7)",
        ),
        (
            ROCAL_MODULE,
            ("amd-rocal",),
            "rocAL pipelines on AMD GPUs",
            "apt-get install rocal rocal-dev (ROCm 7; ROCm 10 has no release of it), and start with"
            " PYTHONPATH=/opt/rocm/lib LD_LIBRARY_PATH=/opt/rocm/lib",
        ),
    )


def examine_software(host: Host) -> Iterator[Finding]:
    version = importlib.metadata.version("grpcio")
    requirement = next(line for line in importlib.metadata.requires("rocserve") or () if line.startswith("grpcio"))
    # From "grpcio<1.90,>=1.62": the lowest tested version, and the first one above the tested range.
    least, end = (_major_minor(re.findall(sign + r"([\d.]+)", requirement)[0]) for sign in (">=", "<"))
    if least <= _major_minor(version) < end:
        yield _SOFTWARE("grpcio", State.FACT, f"{version}, with which the transport is tested")
    else:
        advice = f"the transport relies on grpcio's internals; install one with which it is tested: {requirement}"
        yield _SOFTWARE("grpcio", State.BROKEN, f"{version} is outside the tested range", advice)
    for module, distributions, purpose, remedy in _packages(host):
        if not is_installed(module):
            text = "not installed" + (f" (for {purpose})" if purpose else "")
            is_for_gpus = module in ("amdsmi", ROCAL_MODULE)
            yield _SOFTWARE(module, State.ABSENT, text, f"{module}: {remedy}", is_for_gpus=is_for_gpus)
        elif module == "onnxruntime":
            yield _onnx_runtime(installed_onnx_runtimes())
        else:
            yield _SOFTWARE(module, State.FACT, _version(distributions))
    for name in empty_packages():
        advice = f"pip uninstall {name}: PyPI has only the name; take the package from AMD's index (install-rocm.md)"
        yield _SOFTWARE(name, State.BROKEN, "an empty package", advice)
    from rocserve.backends.rocal.decoding.libturbojpeg import TurboJpeg

    try:
        TurboJpeg()
    except RuntimeError as error:
        advice = "install libturbojpeg (Debian, Ubuntu: apt-get install libturbojpeg0; Fedora: dnf install turbojpeg)"
        yield _SOFTWARE("libturbojpeg", State.ABSENT, " ".join(str(error).split()), advice)
    else:
        yield _SOFTWARE("libturbojpeg", State.FACT, "2.0 or newer")


def _onnx_runtime(runtimes: OnnxRuntimes) -> Finding:
    name, found = "onnxruntime", runtimes.names or "installed, version unknown"
    try:
        providers = importlib.import_module(name).get_available_providers()
    except Exception as error:
        text = f"{found}: {type(error).__name__}: {error}"
        again = f"{name}: {runtimes.remedy if runtimes.problem else 'install it again'}"
        return _SOFTWARE(name, State.BROKEN, text, again)
    text = f"{found}, providers: {', '.join(providers)}"
    if problem := runtimes.problem:
        return _SOFTWARE(name, State.BROKEN, f"{text}; {problem}", f"{name}: {runtimes.remedy}")
    return _SOFTWARE(name, State.FACT, text)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _version(distributions: Sequence[str]) -> str:
    found = []
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or "installed, version unknown"
