"""Label files of the Python models that `preprocess` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.config.model_folder import ModelFolder, read_names
from rocserve.presets.class_names import read_class_names


@pytest.mark.parametrize(
    "text", ["a\nb\n", "a\nb", "a\r\nb\r\n", "a\n\n", "one\x0b\x0cand\x85\u2028more\x1c\nb\rc\n", "\ufeffé\nb\n"]
)
def test_lines_are_those_that_the_server_reads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(text.encode())
    names = read_names(ModelFolder(tmp_path, tmp_path), path.name)
    assert len(names) == 2
    assert read_class_names(path).tolist() == [name.encode() for name in names]
