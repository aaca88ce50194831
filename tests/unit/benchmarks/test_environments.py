"""Environments of peers, filled with a small wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from benchmarks.environments import Environment, PeerUnavailable

pytestmark = pytest.mark.long


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: Tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    return path


def test_an_environment_is_filled_once(tmp_path: Path, wheel: Path) -> None:
    environment = Environment(tmp_path / "cache" / "tiny")
    completed: list[str] = []
    for _ in range(2):
        environment.provision([str(wheel)], complete=lambda: completed.append(environment.versions()["tiny"]))
    assert completed == ["1.0"]
    assert (environment.programs / "python").exists()
    with pytest.raises(PeerUnavailable, match="ended with status"):
        environment.provision([str(tmp_path / "missing.whl")])
