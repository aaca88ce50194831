"""Facts that the numbers depend on, for the head of the results: machine, versions, other load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from benchmarks.load_generator import h2load_program
from benchmarks.triton_peer import TRITON_VERSION, WHEEL, TritonPeer

OUR_PACKAGES = ("rocserve", "grpcio", "onnxruntime", "numpy", "opencv-python-headless", "PyTurboJPEG")
TRITON_PACKAGES = ("onnxruntime", "numpy", "opencv-python-headless", "pyturbojpeg")


def machine_facts(triton: TritonPeer | None) -> list[str]:
    """One fact a line, without a full stop."""
    now = datetime.datetime.now(datetime.UTC)
    one, five, _ = os.getloadavg()
    facts = [
        f"{now:%Y-%m-%d %H:%M} UTC, commit {commit()}",
        f"{processor()}, {os.cpu_count()} cores; load average before the run {one:.2f} (1 min), {five:.2f} (5 min)",
        f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in OUR_PACKAGES),
    ]
    if triton is not None:
        versions = triton.environment.versions()
        packages = ", ".join(f"{name} {versions.get(name, 'missing')}" for name in TRITON_PACKAGES)
        facts.append(f"Triton {TRITON_VERSION} out of {WHEEL}, its Python backend with {packages}")
    facts.append(f"load generator on the same cores: {h2load_version()}")
    return facts


def processor() -> str:
    """The processor's name in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> str:
    """The short hash of the checkout, with a plus if files differ from it; "unknown" outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def h2load_version() -> str:
    return subprocess.run([h2load_program(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
