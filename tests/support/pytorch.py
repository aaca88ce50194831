"""PyTorch programs for tests, which skip if PyTorch is not installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.shared_folder import shared_folder

NO_PYTORCH = "no PyTorch here; `make pytorch` installs it"
NO_COMPILER = "no C++ compiler here"
_PACKAGE = """
import os, sys
files, folder = sys.argv[1:]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder + "/work"
# Trials of the processor's instruction sets would take longer than a program; these programs do not use them.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
import torch
settings = {"cpp.dynamic_threads": True, "aot_inductor.precompile_headers": False}
settings["aot_inductor.compile_wrapper_opt_level"] = "O0"
program = torch.export.load(f"{files}/encoders.pt2")
torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/encoders.pt2", inductor_configs=settings)
"""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TorchFiles:
    """The files that pytorch_files.py has written."""

    folder: Path

    def path(self, name: str) -> Path:
        """A file, by its name without the ending."""
        return next(path for path in self.folder.glob(f"{name}.*") if path.suffix in (".pt", ".pt2"))

    def data(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def values(self, name: str) -> tuple[Arrays, Arrays]:
        """The program's inputs, and the outputs that PyTorch itself returned for them."""
        with np.load(self.folder / f"{name}.npz") as stored:
            inputs, outputs = (
                {key.partition(":")[2]: stored[key] for key in stored if key.startswith(kind)}
                for kind in ("in:", "out:")
            )
        return inputs, outputs


@pytest.fixture(scope="session")
def torch_files(tmp_path_factory: pytest.TempPathFactory) -> TorchFiles:
    """The files, written once for all pytest processes by a separate process."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip(NO_PYTORCH)
    script = str(Path(__file__).with_name("pytorch_files.py"))
    return TorchFiles(_written(tmp_path_factory, "pytorch", script))


@pytest.fixture(scope="session")
def torch_packages(torch_files: TorchFiles, tmp_path_factory: pytest.TempPathFactory) -> TorchFiles:
    """A package of AOTInductor of `encoders`, compiled once for all pytest processes by a separate process."""
    if not has_compiler():
        pytest.skip(NO_COMPILER)
    return TorchFiles(_written(tmp_path_factory, "pytorch-packages", "-c", _PACKAGE, str(torch_files.folder)))


def has_compiler() -> bool:
    """Whether Inductor can compile for the CPU here."""
    return any(map(shutil.which, ("g++", "clang++")))


def _written(tmp_path_factory: pytest.TempPathFactory, name: str, *command: str) -> Path:
    """Return the folder into which `python COMMAND FOLDER` has written, once for all pytest processes."""
    words = (sys.executable, "-W", "ignore", *command)
    return shared_folder(tmp_path_factory, name, lambda folder: subprocess.run([*words, str(folder)], check=True))
