"""PyTorch programs for tests, which skip if PyTorch is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

NO_PYTORCH = "no PyTorch here; `make pytorch` installs it"
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
    from filelock import FileLock  # PyTorch depends on it.

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "pytorch"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            new = folder.with_suffix(".new")
            new.mkdir(exist_ok=True)
            command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("pytorch_files.py")), str(new)]
            subprocess.run(command, check=True, timeout=110)
            new.rename(folder)
    return TorchFiles(folder)
