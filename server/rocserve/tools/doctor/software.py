"""What is installed, told without running any of it but by asking for versions."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator

from rocserve.backends.installed import is_installed
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.tools.doctor.findings import Finding, State

_SECTION = "software"

_CPU_EXTRA = "pip install 'rocserve[cpu]'"
_PACKAGES = (
    # module, the names of its distributions, what it is for, how to get it
    ("onnxruntime", ("onnxruntime", "onnxruntime-migraphx", "onnxruntime-rocm", "onnxruntime-gpu"), "", _CPU_EXTRA),
    ("onnx", ("onnx",), "MIGraphX's models", _CPU_EXTRA),
    ("cv2", ("opencv-python-headless", "opencv-python"), "rocAL pipelines on the CPU", _CPU_EXTRA),
    ("matplotlib", ("matplotlib",), "rocserve tune --plot", "pip install 'rocserve[tools]'"),
    ("torch", ("torch",), "rocserve bench --against torch", ""),
    (ROCAL_MODULE, ("amd-rocal",), "rocAL pipelines on a GPU", ""),
)


def examine_software() -> Iterator[Finding]:
    yield _grpc()
    for module, distributions, purpose, remedy in _PACKAGES:
        if not is_installed(module):
            text = "not installed" + (f" (for {purpose})" if purpose else "")
            advice = f"{module}: {remedy}" if remedy else ""
            yield Finding(_SECTION, module, State.ABSENT, text, advice)
        elif module == "onnxruntime":
            yield _onnxruntime(_version(distributions))
        else:
            yield Finding(_SECTION, module, State.FACT, _version(distributions))
    yield _libturbojpeg()


def _grpc() -> Finding:
    from rocserve.frontends.grpc.select import untested_version

    version = importlib.metadata.version("grpcio")
    fault = untested_version(version)
    if not fault:
        return Finding(_SECTION, "grpcio", State.FACT, f"{version}, with which the fast transport is tested")
    advice = "gRPC is served by grpc.aio, which is slower; install a grpcio of the tested range"
    return Finding(_SECTION, "grpcio", State.FACT, fault, advice)


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
