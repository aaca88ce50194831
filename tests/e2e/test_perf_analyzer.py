"""Triton's own load generator against the server, with the server-side figures that it reads from the statistics."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.server import RocserveProcess, Start
from support.simple_models import drop_simple_models

from benchmarks.environments import PeerUnavailable, folder_lock
from benchmarks.triton_peer import default_cache_folder, provision

WHEEL = "tritonclient==2.50.0"
"""The last version that contains it."""
_MEMBER = "bin/perf_analyzer"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
"""The library that the binary needs -> the wheel's name for it."""

_ANY_STABILITY = "99999"
"""Allowed difference between windows, in percent: for an unstable level perf_analyzer writes no row, and on a busy
machine one window may take a hundred times as long as another."""

_NO_ANSWER = "No valid requests recorded within time interval"
"""What it says if the machine did something else during a whole window: it is run again."""

Row = dict[str, float]
"""One level of a sweep, by the names in perf_analyzer's table."""


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    binary: Path
    libraries: tuple[Path, ...]

    def run(self, url: str, protocol: str, model: str, *options: str, table: Path) -> list[Row]:
        """Measure for a short time. A failure shows what perf_analyzer printed."""
        command = [str(self.binary), "-m", model, "-i", protocol, "-u", url, "-p", "200", "-s", _ANY_STABILITY]
        command += ["--max-trials", "3", "-f", str(table), "--verbose-csv", *options]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, self.libraries))}
        done = None
        while done is None or _NO_ANSWER in done.stdout + done.stderr:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        with table.open() as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def provision_perf_analyzer() -> PerfAnalyzer:
    """Install perf_analyzer next to Triton unless it is there. Raises PeerUnavailable if this machine cannot run it, or
    pip cannot install it."""
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


SERVER_SIDE = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")
SWEEP = ("--concurrency-range", "1:3:2")
THREE = ("--concurrency-range", "3")
RATES = ("--request-rate-range", "100:200:100")
SHARED = ("--shared-memory", "system", "--output-shared-memory-size", "64")
SEQUENCES = ("--num-of-sequences", "3", "--sequence-length", "8", "--input-data", "zero")


@pytest.fixture(scope="module")
def perf_analyzer() -> PerfAnalyzer:
    try:
        return provision_perf_analyzer()
    except PeerUnavailable as error:
        pytest.skip(f"no Triton here: {error}")


@pytest.fixture(scope="module")
def server(start: Start, perf_analyzer: PerfAnalyzer, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("perf-analyzer")
    drop_simple_models(repository)
    flags = ("--http-address=127.0.0.1", "--http-port=0", "--allow-client-shm=true")
    return start(repository, *flags)


CASES = [
    pytest.param("grpc", "simple", SWEEP, 2, id="gRPC: concurrency"),
    pytest.param("grpc", "simple", (*THREE, "--async"), 1, id="gRPC: concurrency, asynchronous"),
    pytest.param("grpc", "simple", RATES, 2, id="gRPC: request rates"),
    pytest.param("grpc", "simple", (*THREE, "--async", "--streaming"), 1, id="gRPC: streams"),
    pytest.param("grpc", "simple", (*THREE, *SHARED), 1, id="gRPC: shared memory"),
    pytest.param("grpc", "simple", (*THREE, "-b", "4"), 1, id="gRPC: batches of four"),
    pytest.param("grpc", "simple_dyna_sequence", (*THREE, *SEQUENCES), 1, id="gRPC: sequences"),
    pytest.param("grpc", "simple_sequence", (*SEQUENCES, "--async", "--streaming"), 1, id="gRPC: streams of sequences"),
    pytest.param("http", "simple", SWEEP, 2, id="HTTP: concurrency"),
    pytest.param("http", "simple", (*THREE, "--async"), 1, id="HTTP: concurrency, asynchronous"),
    pytest.param("http", "simple", RATES, 2, id="HTTP: request rates"),
    pytest.param("http", "simple", (*THREE, *SHARED), 1, id="HTTP: shared memory"),
    pytest.param("http", "simple_dyna_sequence", (*THREE, *SEQUENCES), 1, id="HTTP: sequences"),
]


@pytest.mark.parametrize(("protocol", "model", "options", "levels"), CASES)
def test_a_run(
    server: RocserveProcess,
    perf_analyzer: PerfAnalyzer,
    tmp_path: Path,
    protocol: str,
    model: str,
    options: tuple[str, ...],
    levels: int,
) -> None:
    url = server.address if protocol == "grpc" else server.http_address
    before = counts(server, model)
    rows = perf_analyzer.run(url, protocol, model, *options, table=tmp_path / "table.csv")
    assert len(rows) == levels
    for row in rows:
        check_level(row)
    inferences, executions, successes = (now - then for now, then in zip(counts(server, model), before, strict=True))
    assert inferences >= successes >= executions > 0


def check_level(row: Row) -> None:
    """The server's own figures are there."""
    assert row["Inferences/Second"] > 0
    assert row["Server Compute Infer"] > 0
    assert all(row[name] >= 0 for name in SERVER_SIDE)
    assert row["p50 latency"] <= row["p99 latency"]


def counts(server: RocserveProcess, model: str) -> tuple[int, int, int]:
    """Inferences, executions, successful requests."""
    row = server.client().get_inference_statistics(model).model_stats[0]
    return row.inference_count, row.execution_count, row.inference_stats.success.count
