"""Packages of AOTInductor: what they need and this machine lacks, the folder that they are unpacked into, and trials of
the C++ compiler that makes them."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.pytorch import NO_PYTORCH

from rocserve.backends.base import ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings

# Importing PyTorch takes seconds.
pytestmark = [pytest.mark.long, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason=NO_PYTORCH)]

HERE = {"AOTI_PLATFORM": "linux", "AOTI_MACHINE": platform.machine(), "AOTI_CPU_ISA": "", "AOTI_COMPUTE_CAPABILITY": ""}


@pytest.fixture(autouse=True)
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX2 and nothing newer."""
    import torch

    for name in ("avx2", "avx512", "vnni", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda own=name: own == "avx2", raising=False)


@pytest.mark.parametrize(
    ("metadata", "lacking"),
    [
        ({}, []),
        (HERE, []),
        ({**HERE, "AOTI_CPU_ISA": "AVX2"}, []),
        ({**HERE, "AOTI_CPU_ISA": "AVX512 AVX512_VNNI AMX_TILE"}, ["AVX512", "AVX512_VNNI", "AMX_TILE"]),
        ({**HERE, "AOTI_CPU_ISA": "OF_TOMORROW"}, []),
        ({**HERE, "AOTI_PLATFORM": "win32", "AOTI_MACHINE": "riscv64", "AOTI_CPU_ISA": "AVX512"}, ["win32", "riscv64"]),
    ],
)
def test_of_the_processor(metadata: dict[str, str], lacking: list[str]) -> None:
    from rocserve.backends.pytorch.package import missing_features

    assert missing_features(metadata, -1) == lacking


@pytest.mark.parametrize(("hip", "own"), [(None, "90"), ("7.2", "gfx942")])
def test_of_the_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None, own: str) -> None:
    import torch

    from rocserve.backends.pytorch.package import missing_features

    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _gpu: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _gpu: properties)
    assert missing_features({**HERE, "AOTI_COMPUTE_CAPABILITY": own}, -1) == []
    assert missing_features({**HERE, "AOTI_COMPUTE_CAPABILITY": "80"}, 1) == ["compute capability 80"]


def test_an_error_names_missing_instructions_before_the_code_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading such code may end the process, and its last line is then a part of the reason."""
    import torch

    from rocserve.backends.pytorch.package import open_package

    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        entry = "m/data/aotinductor/model/a.wrapper_metadata.json"
        archive.writestr(entry, json.dumps({**HERE, "AOTI_CPU_ISA": "AVX2 AVX512"}))
    told: list[str] = []

    def load(*_arguments: object) -> None:
        told.append(caplog.text)
        raise RuntimeError("not loaded")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    with pytest.raises(ServeError, match=r"cannot read model\.pt2: not loaded"):
        open_package(path, torch.device("cpu"))
    assert "model.pt2 is compiled for AVX512, which this machine lacks" in told[0]


@pytest.mark.parametrize("content", [b"no archive", b"[1]", b'{"AOTI_CPU_ISA": ', b"\xff"])
def test_metadata_that_cannot_be_read_are_no_fault_of_their_own(tmp_path: Path, content: bytes) -> None:
    from rocserve.backends.pytorch.package_source import read_metadata

    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    assert read_metadata(path, "model") == {}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/aotinductor/model/a.wrapper_metadata.json", content)
    assert read_metadata(path, "model") == {}


def test_the_folder_of_a_package_goes_with_it_and_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocserve.backends.pytorch.package import unpacked

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    killed = f"""
import os, signal, tempfile
from rocserve.backends.pytorch.package import unpacked
tempfile.tempdir = {str(tmp_path)!r}
kept = unpacked(lambda: open(os.environ["TMPDIR"] + "/file", "w"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", killed], check=False)
    (left,) = tmp_path.iterdir()

    class Package:
        folder = Path()

    def load() -> Package:
        package = Package()
        package.folder = Path(os.environ["TMPDIR"])
        (package.folder / "file").touch()
        return package

    one, other = unpacked(load), unpacked(load)
    assert not left.exists() and os.environ["TMPDIR"] == "/elsewhere"
    assert set(tmp_path.iterdir()) == {one.folder, other.folder} and one.folder != other.folder
    del one
    assert set(tmp_path.iterdir()) == {other.folder} and (other.folder / "file").exists()
    with pytest.raises(ZeroDivisionError):
        unpacked(lambda: 1 // 0)
    assert set(tmp_path.iterdir()) == {other.folder}


@pytest.fixture(autouse=True)
def folder_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


def test_work_begins_with_them(tmp_path: Path) -> None:
    from rocserve.backends.pytorch.inductor import use_trials

    (tmp_path / "trials" / "ab").mkdir(parents=True)
    (tmp_path / "trials" / "ab" / "trial.so").write_bytes(b"compiled")
    (tmp_path / "trials" / ".sha256").touch()
    use_trials(str(tmp_path / "trials"), tmp_path / "work")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").rglob("*.*")] == ["trial.so"]


@pytest.mark.parametrize("trials", ["", "gone"])
def test_work_begins_without_them(tmp_path: Path, trials: str) -> None:
    from rocserve.backends.pytorch.inductor import use_trials

    use_trials(str(tmp_path / trials) if trials else "", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_cache_that_cannot_be_written_leaves_them_out(
    model_source: Callable[..., ModelSource], tmp_path: Path
) -> None:
    from rocserve.backends.pytorch.inductor import trials_folder

    file = tmp_path / "file"
    file.touch()
    model = replace(model_source("model.pt2", b""), settings=EngineSettings(cache_directory=str(file)))
    assert trials_folder(model, Path(sys.executable), ("2.13",)) is None


def test_inputs_have_the_sizes_that_the_source_relates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils import _pytree as pytree

    from rocserve.backends.pytorch import package
    from rocserve.backends.pytorch.open_sizes import OpenSize
    from rocserve.backends.pytorch.package_source import PackageSource
    from rocserve.backends.pytorch.program import ProgramTensor

    sizes = (OpenSize("s0", 1, 0, 0, None), OpenSize("s1", 1, 0, 0, 40))
    described = ProgramTensor((), DataType.INT64, (-1, -1), (2, 5), open_sizes=sizes)

    class Loader:
        def __init__(self, *_arguments: object) -> None: ...

        def get_metadata(self) -> dict[str, str]:
            return {}

        def get_call_spec(self) -> list[str]:
            return [pytree.treespec_dumps(pytree.tree_structure(tree)) for tree in (((0, 0), {}), 0)]

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Loader)
    monkeypatch.setattr(package, "package_name", lambda _path: "model")
    monkeypatch.setattr(package, "read_metadata", lambda _path, _name: {})
    monkeypatch.setattr(package, "read_source", lambda _path, _name: PackageSource((described, described), ()))
    program = package.open_package(tmp_path / "model.pt2", torch.device("cpu"))
    assert [tensor.open_sizes for tensor in program.signature.inputs] == [sizes, sizes]
