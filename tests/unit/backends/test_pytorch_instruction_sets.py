"""Trials of the C++ compiler, which Inductor uses if it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocserve.backends.base import ModelSource
from rocserve.backends.pytorch.instruction_sets import trials_folder, use_trials
from rocserve.settings import EngineSettings


@pytest.fixture(autouse=True)
def folder_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


def test_work_begins_with_them(tmp_path: Path) -> None:
    (tmp_path / "trials" / "ab").mkdir(parents=True)
    (tmp_path / "trials" / "ab" / "trial.so").write_bytes(b"compiled")
    (tmp_path / "trials" / ".sha256").touch()
    use_trials(str(tmp_path / "trials"), tmp_path / "work")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").rglob("*.*")] == ["trial.so"]


@pytest.mark.parametrize("trials", ["", "gone"])
def test_work_begins_without_them(tmp_path: Path, trials: str) -> None:
    use_trials(str(tmp_path / trials) if trials else "", tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_cache_that_cannot_be_written_leaves_them_out(
    model_source: Callable[..., ModelSource], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    model = replace(model_source("model.pt2", b""), settings=EngineSettings(cache_directory=str(file)))
    assert trials_folder(model, Path(sys.executable), ("2.13",)) is None
