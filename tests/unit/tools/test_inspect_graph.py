"""`rocserve inspect ENSEMBLE --graph`, which needs no engine."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from rocserve.cli import main

SAMPLE = Path(__file__).parents[3] / "model_repository"
SVG = "{http://www.w3.org/2000/svg}"
FAULTY = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
ensemble_scheduling { step {
  model_name: "a<b>&c" model_version: 3 input_map { key: "x" value: "NOWHERE" } output_map { key: "y" value: "OUT" }
} }
"""


def texts(file: Path) -> list[str]:
    found = ElementTree.parse(file).getroot().iter(f"{SVG}text")
    return ["".join(title.text or "" for title in text.iter(f"{SVG}title")) for text in found]


def test_the_steps_of_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.svg"
    assert main(["inspect", str(SAMPLE / "detect_shapes"), "--graph", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 3 steps\n"
    found = texts(file)
    assert [text for text in found if text.startswith("detect_shapes_")] == [
        "detect_shapes_preprocess",
        "detect_shapes_network",
        "detect_shapes_postprocess",
    ]
    assert {"ENCODED BYTES [1]", "prepared_image FP32 [-1,3,192,192]", "request", "answer"} <= set(found)
    # The reader of the file needs nothing else.
    assert "http" not in file.read_text().replace("http://www.w3.org/2000/svg", "")


def test_an_ensemble_that_a_server_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / "faulty", tmp_path / "out.svg"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(FAULTY)
    assert main(["inspect", str(folder), "--graph", str(file)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "not in the repository, so the types of their outputs are unknown: a<b>&c" in output
    assert "a server would not serve it: ensemble input 'IN' for ensemble faulty' is not used" in output
    assert texts(file) == ["NOWHERE", "OUT", "request", "a<b>&c version 3", "answer", "written by no step"]


def test_only_ensembles_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.svg"
    for model, expected in (("detect_shapes_network", "is not an ensemble"), ("nothing", "is not a folder")):
        assert main(["inspect", str(SAMPLE / model), "--graph", str(file)]) == 1
        assert expected in capsys.readouterr().err
    assert not file.exists()
