"""A real Triton: the tritonserver in the PyPI wheel nvidia-pytriton, in its own virtual environment.

The wheel (Linux x86-64, glibc >= 2.35) contains the server, its Python backend with a stub for each Python version, and
the libraries that they need. Only pip is used, and nothing outside the cache folder is written.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import CACHE, PYTHON_VERSION, Environment, PeerUnavailable
from benchmarks.server_process import ServerProcess, http_flags

CACHE_VARIABLE = "ROCSERVE_TRITON_CACHE"
WHEEL = "nvidia-pytriton==0.7.0"
TRITON_VERSION = "2.51 (24.10)"
SHARED_MEMORY_PREFIX = "rocserve_bench_"
MEASURED_FLAGS = ("--allow-metrics=false",)


def default_cache_folder() -> Path:
    """Where Triton is kept between runs: $ROCSERVE_TRITON_CACHE, else ~/.cache/rocserve/triton-peer."""
    return Path(os.environ.get(CACHE_VARIABLE, CACHE / "triton-peer")).expanduser()


@dataclass(frozen=True, slots=True)
class TritonPeer:
    """An installed Triton that can be started."""

    environment: Environment

    @property
    def installation(self) -> Path:
        return self.environment.site_packages / "pytriton" / "tritonserver"

    def help(self) -> str:
        """What `tritonserver --help` prints."""
        command = [str(self.installation / "bin" / "tritonserver"), "--help"]
        environment = self._process_environment()
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        ).stdout

    def server(
        self,
        name: str,
        repository: Path,
        port: int,
        log_file: Path,
        flags: Sequence[str] = (*http_flags(None), *MEASURED_FLAGS),
        http_port: int | None = None,
    ) -> ServerProcess:
        """The server on a model repository. `flags`: further flags; these leave out HTTP and metrics. `http_port`: the
        port of HTTP in them."""
        shared_memory_prefix = f"{SHARED_MEMORY_PREFIX}{port}_"

        def remove_shared_memory() -> None:
            # A Python model that is ended during Triton's shutdown leaves its region behind.
            for region in Path("/dev/shm").glob(f"{shared_memory_prefix}*"):
                region.unlink(missing_ok=True)

        command = [
            str(self.installation / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={self.installation / 'backends'}",
            f"--cache-directory={self.installation / 'caches'}",
            # A separate prefix: two Tritons on one machine otherwise use the same names in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={port}",
            *flags,
        ]
        environment = self._process_environment()
        return ServerProcess(name, command, port, log_file, environment, remove_shared_memory, http_port)

    def _process_environment(self) -> dict[str, str]:
        site_packages = self.environment.site_packages
        libraries = [str(site_packages / "nvidia_pytriton.libs"), str(python_library_folder())]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PATH": f"{self.environment.programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(site_packages),
        }


def provision(cache_folder: Path) -> TritonPeer:
    """Install Triton below `cache_folder` unless a finished installation is there. Raises PeerUnavailable if this
    machine cannot run it, or pip cannot install it."""
    check_machine()
    python_library_folder()
    peer = TritonPeer(Environment(cache_folder / f"python{PYTHON_VERSION}"))
    # The wheel's dependencies are for its Python client, which is not used here.
    peer.environment.provision(model_requirements(), without_dependencies=[WHEEL], complete=lambda: put_stub(peer))
    return peer


def model_requirements() -> list[str]:
    """What the benchmarks' Python models import inside Triton, at rocserve's versions. numpy and OpenCV may be older
    than rocserve's: Triton's stub is built against numpy 1."""
    versions = {name: importlib.metadata.version(name) for name in ("onnxruntime", "PyTurboJPEG")}
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    return ["numpy<2", "opencv-python-headless>=4.9,<4.12", *pinned]


def check_machine() -> None:
    """Raise PeerUnavailable if the wheel cannot work here."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise PeerUnavailable(f"the Triton wheel is for Linux on x86_64, but this is {system} on {machine}")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        raise PeerUnavailable(f"the Triton wheel needs glibc 2.35 or later, but this machine has {version}")


def python_library_folder() -> Path:
    """The folder of libpython, to which Triton's Python stub is linked. Raises PeerUnavailable if this Python has no
    shared library."""
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    candidates = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"]
    for candidate in candidates:
        if candidate and (Path(candidate) / name).is_file():
            return Path(candidate)
    if ctypes.util.find_library(f"python{PYTHON_VERSION}"):
        return Path("/usr/lib")
    raise PeerUnavailable(
        f"Triton's Python backend needs {name}, which is in none of {', '.join(map(str, candidates))};"
        " run the benchmarks with a Python that was built with --enable-shared"
    )


def put_stub(peer: TritonPeer) -> None:
    """Put the stub of this Python version in its place. Raises PeerUnavailable if the wheel has none."""
    stub = peer.installation / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        versions = sorted(path.name for path in stub.parent.parent.iterdir())
        raise PeerUnavailable(
            f"{WHEEL} has Python backend stubs for {', '.join(versions)}, but this is Python {PYTHON_VERSION}"
        )
    target = peer.installation / "backends" / "python" / stub.name
    shutil.copy2(stub, target)
    for program in (target, peer.installation / "bin" / "tritonserver"):
        program.chmod(0o755)


if __name__ == "__main__":
    try:
        print(f"Triton {TRITON_VERSION} is in {provision(default_cache_folder()).installation}")
    except PeerUnavailable as error:
        sys.exit(f"no Triton here: {error}")
