"""What is installed, told without running any of it but by asking for versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator

from rocserve.backends.installed import is_installed
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.tools.doctor.machine import Finding, State

_SECTION = "software"

_CPU_EXTRA = "pip install 'rocserve[cpu]'"
_PACKAGES = (
    # module, the names of its distributions, what it is for, how to get it
    ("onnxruntime", ("onnxruntime", "onnxruntime-migraphx", "onnxruntime-rocm", "onnxruntime-gpu"), "", _CPU_EXTRA),
    ("onnx", ("onnx",), "MIGraphX's models", _CPU_EXTRA),
    ("cv2", ("opencv-python-headless", "opencv-python"), "rocAL pipelines on the CPU", _CPU_EXTRA),
    ("matplotlib", ("matplotlib",), "rocserve tune --plot", "pip install 'rocserve[tools]'"),
    ("torch", ("torch",), "PyTorch's models; rocserve bench --against torch", "pip install torch"),
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


def examine_software() -> Iterator[Finding]:
    yield _grpc()
    for module, distributions, purpose, remedy in _PACKAGES:
        if not is_installed(module):
            text = "not installed" + (f" (for {purpose})" if purpose else "")
            yield Finding(_SECTION, module, State.ABSENT, text, f"{module}: {remedy}")
        elif module == "onnxruntime":
            yield _onnxruntime(_version(distributions))
        else:
            yield Finding(_SECTION, module, State.FACT, _version(distributions))
    yield _libturbojpeg()


def _grpc() -> Finding:
    version = importlib.metadata.version("grpcio")
    requirement = next(line for line in importlib.metadata.requires("rocserve") or () if line.startswith("grpcio"))
    if is_in_range(version, requirement):
        return Finding(_SECTION, "grpcio", State.FACT, f"{version}, with which the transport is tested")
    advice = f"the transport relies on grpcio's internals; install one with which it is tested: {requirement}"
    return Finding(_SECTION, "grpcio", State.BROKEN, f"{version} is outside the tested range", advice)


def is_in_range(version: str, requirement: str) -> bool:
    """Whether a version is one of a requirement such as "grpcio<1.90,>=1.62"."""
    numbers = _numbers(version)
    at_least, below = (_numbers(re.findall(sign + r"([\d.]+)", requirement)[0]) for sign in (">=", "<"))
    return at_least <= numbers < below


def _numbers(version: str) -> tuple[int, ...]:
    """The first two."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _onnxruntime(version: str) -> Finding:
    try:
        providers = importlib.import_module("onnxruntime").get_available_providers()
    except Exception as error:
        advice = "install it anew; two distributions of onnxruntime in one environment overwrite each other"
        return Finding(_SECTION, "onnxruntime", State.BROKEN, f"{version}: {type(error).__name__}: {error}", advice)
    return Finding(_SECTION, "onnxruntime", State.FACT, f"{version}, providers: {', '.join(providers)}")


def _libturbojpeg() -> Finding:
    from rocserve.backends.rocal.decoding.libturbojpeg import TurboJpeg

    try:
        TurboJpeg()
    except RuntimeError as error:
        advice = "install libturbojpeg (Debian, Ubuntu: apt-get install libturbojpeg0; Fedora: dnf install turbojpeg)"
        return Finding(_SECTION, "libturbojpeg", State.ABSENT, " ".join(str(error).split()), advice)
    return Finding(_SECTION, "libturbojpeg", State.FACT, "2.0 or newer")


def _version(distributions: tuple[str, ...]) -> str:
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "installed, version unknown"
