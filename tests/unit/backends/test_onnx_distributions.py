"""Several packages that each bring the whole module onnxruntime."""

from __future__ import annotations

import hashlib
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocserve.backends.onnx.distributions import installed_onnx_runtimes

ENGINE = "onnxruntime/capi/onnxruntime_pybind11_state.so"


def install(folder: Path, name: str, version: str, engine: bytes, file: str = ENGINE) -> Path:
    """Write what pip writes; return the engine's file."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(engine)
    digest = urlsafe_b64encode(hashlib.sha256(engine).digest()).rstrip(b"=").decode()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"onnxruntime/__init__.py,,\n{file},sha256={digest},{len(engine)}\n")
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def load(monkeypatch: pytest.MonkeyPatch, engine: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime.capi.onnxruntime_pybind11_state", SimpleNamespace(__file__=engine))


def test_one_package_is_no_problem(packages: Path) -> None:
    install(packages, "onnxruntime", "1.32.0", b"cpu")
    info = packages / "onnxruntime_extensions-0.14.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-extensions\nVersion: 0.14\n")
    assert (installed_onnx_runtimes().names, installed_onnx_runtimes().problem) == ("onnxruntime 1.32.0", "")


def test_the_engine_that_python_takes_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_name = ENGINE.replace(".so", ".cpython-311-x86_64-linux-gnu.so")
    load(monkeypatch, install(packages, "onnxruntime", "1.32.0", b"cpu", own_name))
    install(packages, "onnxruntime-migraphx", "1.27.1", b"amd")
    found = installed_onnx_runtimes()
    assert found.names == "onnxruntime 1.32.0, onnxruntime-migraphx 1.27.1"
    assert found.problem.endswith(": onnxruntime 1.32.0 runs, and the others do not")
    assert "pip uninstall onnxruntime onnxruntime-migraphx, then pip install only one" in found.remedy
    assert "onnxruntime-migraphx (AMD GPUs)" in found.remedy


@pytest.mark.parametrize("last", ["onnxruntime-gpu", "onnxruntime-training"])
def test_of_two_that_write_the_same_file_the_last_one_runs(
    packages: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    install(packages, "onnxruntime", "1.32.0", b"first")
    load(monkeypatch, install(packages, last, "1.31.0", b"second"))
    assert f": {last} 1.31.0 runs" in installed_onnx_runtimes().problem


def test_without_lists_of_files_no_winner_is_made_up(packages: Path) -> None:
    for name in ("onnxruntime", "onnxruntime-rocm"):
        install(packages, name, "1.20.0", name.encode())
    for record in packages.glob("*/RECORD"):
        record.unlink()
    problem = installed_onnx_runtimes().problem
    assert problem == "each of these packages contains the whole module onnxruntime, so only one can be used"
