"""A real Triton: the tritonserver inside the PyPI wheel nvidia-pytriton, in a virtual environment of its own.

The wheel (Linux x86-64, glibc >= 2.35) carries the server, its Python backend with a stub for each Python version, and
the libraries that they need. Nothing but pip is used, and nothing outside the cache folder is written.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server_process import ServerProcess, http_flags

CACHE_VARIABLE = "ROCSERVE_TRITON_CACHE"
WHEEL = "nvidia-pytriton==0.7.0"
TRITON_VERSION = "2.51 (24.10)"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SHARED_MEMORY_PREFIX = "rocserve_bench_"
MEASURED_FLAGS = ("--allow-metrics=false",)


class TritonUnavailable(RuntimeError):
    """There is no Triton to be had on this machine; the message says what is missing."""


def default_cache_folder() -> Path:
    """Where the peer is kept between runs: $ROCSERVE_TRITON_CACHE, else ~/.cache/rocserve/triton-peer."""
    return Path(os.environ.get(CACHE_VARIABLE, "~/.cache/rocserve/triton-peer")).expanduser()


@dataclass(frozen=True, slots=True)
class TritonPeer:
    """A Triton that is installed and can be started."""

    environment_folder: Path

    @property
    def site_packages(self) -> Path:
        return self.environment_folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages"

    @property
    def installation(self) -> Path:
        return self.site_packages / "pytriton" / "tritonserver"

    def versions(self) -> dict[str, str]:
        """Versions of the packages that the Python models import in Triton's environment."""
        found = importlib.metadata.distributions(path=[str(self.site_packages)])
        return {distribution.metadata["Name"].lower(): distribution.version for distribution in found}

    def server(
        self,
        name: str,
        repository: Path,
        port: int,
        log_file: Path,
        flags: Sequence[str] = (*http_flags(None), *MEASURED_FLAGS),
        http_port: int | None = None,
    ) -> ServerProcess:
        """The server on a model repository.

        Args:
            flags: further flags; these leave it without HTTP and metrics.
            http_port: the port of HTTP that they name.
        """
        shared_memory_prefix = f"{SHARED_MEMORY_PREFIX}{port}_"

        def remove_shared_memory() -> None:
            # A Python model that is ended while it shuts down leaves its region behind.
            for region in Path("/dev/shm").glob(f"{shared_memory_prefix}*"):
                region.unlink(missing_ok=True)

        command = [
            str(self.installation / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={self.installation / 'backends'}",
            f"--cache-directory={self.installation / 'caches'}",
            # A prefix of its own: two Tritons on one machine otherwise share names in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={port}",
            *flags,
        ]
        environment = self._process_environment()
        return ServerProcess(name, command, port, log_file, environment, remove_shared_memory, http_port)

    def _process_environment(self) -> dict[str, str]:
        libraries = [str(self.site_packages / "nvidia_pytriton.libs"), str(python_library_folder())]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PATH": f"{self.environment_folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(self.site_packages),
        }


def provision(cache_folder: Path) -> TritonPeer:
    """Install Triton below `cache_folder` unless a finished installation is there already.

    Raises:
        TritonUnavailable: this machine cannot run it, or pip could not get it.
    """
    check_machine()
    python_library_folder()
    peer = TritonPeer(cache_folder / f"python{PYTHON_VERSION}")
    wanted = json.dumps([WHEEL, *model_requirements()])
    stamp = peer.environment_folder / "provisioned.json"
    with folder_lock(cache_folder):
        if stamp.is_file() and stamp.read_text() == wanted:
            return peer
        # What an interrupted run left is no base to build on.
        shutil.rmtree(peer.environment_folder, ignore_errors=True)
        install(peer)
        stamp.write_text(wanted)
    return peer


def model_requirements() -> list[str]:
    """What the Python models of the harness import inside Triton, at the versions that rocserve runs on.

    numpy and OpenCV may be older than rocserve's: Triton's stub is built against numpy 1.
    """
    versions = {name: importlib.metadata.version(name) for name in ("onnxruntime", "PyTurboJPEG")}
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    return ["numpy<2", "opencv-python-headless>=4.9,<4.12", *pinned]


def check_machine() -> None:
    """Raise TritonUnavailable where the wheel cannot work."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise TritonUnavailable(f"the Triton wheel is for Linux on x86_64, but this is {system} on {machine}")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        raise TritonUnavailable(f"the Triton wheel needs glibc 2.35 or later, but this machine has {version}")


def python_library_folder() -> Path:
    """The folder of libpython, which Triton's Python stub is linked to.

    Raises:
        TritonUnavailable: this Python has no shared library.
    """
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    candidates = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib"]
    for candidate in candidates:
        if candidate and (Path(candidate) / name).is_file():
            return Path(candidate)
    if ctypes.util.find_library(f"python{PYTHON_VERSION}"):
        return Path("/usr/lib")
    raise TritonUnavailable(
        f"Triton's Python backend needs {name}, which is in none of {', '.join(map(str, candidates))};"
        " run the benchmarks with a Python that was built with --enable-shared"
    )


def install(peer: TritonPeer) -> None:
    """Make the virtual environment, fill it by pip, and put the stub of this Python version in its place.

    Raises:
        TritonUnavailable: a step failed, or the wheel has no stub for this Python.
    """
    environment_folder = peer.environment_folder
    environment_folder.parent.mkdir(parents=True, exist_ok=True)
    run_step([sys.executable, "-m", "venv", str(environment_folder)])
    pip = [str(environment_folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    # The wheel's own dependencies serve its Python client, which is not used here.
    run_step([*pip, "--no-deps", WHEEL])
    run_step([*pip, *model_requirements()])
    stub = peer.installation / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    if not stub.is_file():
        versions = sorted(path.name for path in stub.parent.parent.iterdir())
        raise TritonUnavailable(
            f"{WHEEL} has Python backend stubs for {', '.join(versions)}, but this is Python {PYTHON_VERSION}"
        )
    target = peer.installation / "backends" / "python" / stub.name
    shutil.copy2(stub, target)
    for program in (target, peer.installation / "bin" / "tritonserver"):
        program.chmod(0o755)


def run_step(command: list[str]) -> None:
    """Run one installation command; TritonUnavailable carries the end of what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if finished.returncode:
        output = "\n".join((finished.stdout + finished.stderr).splitlines()[-15:])
        raise TritonUnavailable(f"`{' '.join(command)}` ended with status {finished.returncode}:\n{output}")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep a second run from installing into the same folder at once; it waits and finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(f"Triton {TRITON_VERSION} is in {provision(default_cache_folder()).installation}")
    except TritonUnavailable as error:
        sys.exit(f"no Triton here: {error}")
