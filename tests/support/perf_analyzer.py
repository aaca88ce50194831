"""Triton's perf_analyzer: the binary out of an old wheel of tritonclient, with libraries of the real Triton's wheel."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import PeerUnavailable, folder_lock
from benchmarks.triton_peer import default_cache_folder, provision

WHEEL = "tritonclient==2.50.0"
"""The last one that carries it."""
_MEMBER = "bin/perf_analyzer"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
"""What the binary asks for -> what the wheel calls it."""

Row = dict[str, float]
"""One level of a sweep, by the names of perf_analyzer's table."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    binary: Path
    libraries: tuple[Path, ...]

    def run(self, url: str, protocol: str, model: str, *options: str, table: Path) -> list[Row]:
        """Measure for a short while; what it printed is in the AssertionError when it fails."""
        command = [str(self.binary), "-m", model, "-i", protocol, "-u", url, "-p", "400", "-s", "999"]
        command += ["--max-trials", "3", "-f", str(table), "--verbose-csv", *options]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, self.libraries))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        with table.open() as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def provision_perf_analyzer() -> PerfAnalyzer:
    """Install it beside Triton unless it is there.

    Raises:
        PeerUnavailable: this machine cannot run it, or pip could not get it.
    """
    cache = default_cache_folder()
    peer = provision(cache)
    folder = cache / "perf-analyzer"
    with folder_lock(cache):
        if not (folder / "perf_analyzer").is_file():
            _install(folder, peer.environment.site_packages / "nvidia_pytriton.libs")
    return PerfAnalyzer(folder / "perf_analyzer", (folder, peer.environment.site_packages / "nvidia_pytriton.libs"))


def _install(folder: Path, libraries: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--platform=manylinux1_x86_64", f"--dest={folder}", WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise PeerUnavailable(f"pip could not get {WHEEL}: {done.stderr.strip()[-300:]}")
    for name, pattern in _LIBRARIES.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(_only(libraries, pattern))
    with zipfile.ZipFile(_only(folder, "*.whl")) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(_MEMBER))
        unfinished = folder / "perf_analyzer.part"
        unfinished.write_bytes(wheel.read(member))
    unfinished.chmod(0o755)
    unfinished.rename(folder / "perf_analyzer")


def _only(folder: Path, pattern: str) -> Path:
    found: Sequence[Path] = sorted(folder.glob(pattern))
    if not found:
        raise PeerUnavailable(f"there is no {pattern} in {folder}")
    return found[0]
