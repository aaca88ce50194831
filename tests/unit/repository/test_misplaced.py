"""Model files in the wrong place: what is said of them, and that the commands that are named repair it."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from rocserve.settings import ControlMode

from .conftest import Folders, Served, Start, make_scanner


def write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("good")


def advice(root: Path) -> list[str]:
    scans = make_scanner(root).scan().models
    return [text for scan in scans.values() for text in scan.advice]


@pytest.mark.parametrize(
    ("paths", "what", "served"),
    [
        (["stray.onnx"], "'{}/stray.onnx' is not served: each model has a folder", "stray/1/model.onnx"),
        (
            ["m/resnet.onnx", "m/resnet.onnx.data"],
            "'{0}/m' has no version folder (1, 2, ...), and its model lies at '{0}/m/resnet.onnx'",
            "m/1/model.onnx",
        ),
        (["a b/v02/model.onnx"], "and its model lies at '{}/a b/v02/model.onnx'", "a b/2/model.onnx"),
        (["m/n/model.onnx"], "'{0}/m' has no version folder (1, 2, ...)", "m/1/model.onnx"),
        (["m/n/1/model.onnx"], "'{0}/m/n/1/model.onnx', one folder too deep", "n/1/model.onnx"),
        (["m/1/n/model.onnx", "m/1/n/labels.txt"], "the model file of 'm' is one folder too deep", "m/1/model.onnx"),
        (["m/onnx/model.onnx", "m/tokenizer.json"], "'{0}/m' has no version folder", "m/1/model.onnx"),
    ],
)
def test_the_commands_repair_it(tmp_path: Path, paths: list[str], what: str, served: str) -> None:
    root = tmp_path / "repository"
    write(root, "other/1/model.onnx", *paths)
    [text] = advice(root)
    assert what.format(root) in text
    subprocess.run(text.partition("; repair it with: ")[2], shell=True, check=True)
    assert (root / served).read_text() == "good"
    if any(path.endswith(".data") for path in paths):
        assert (root / served).with_name("resnet.onnx.data").is_file()
    scans = make_scanner(root).scan().models
    assert int(served.split("/")[1]) in scans[served.split("/")[0]].versions


def test_a_hugging_face_folder_is_to_be_exported(root: Path) -> None:
    write(root, "bert/config.json", "bert/model.safetensors")
    assert advice(root)[0] == (
        f"'{root}/bert' is a Hugging Face folder without a model that is served; export it with:"
        f" optimum-cli export onnx --model {root}/bert {root}/bert/1"
    )


@pytest.mark.parametrize("name", ["config.yaml", "config.yml", "config.json"])
def test_configurations_that_nobody_reads(root: Path, name: str) -> None:
    write(root, "m/1/model.onnx", f"m/{name}")
    assert advice(root) == [f"'{root}/m/{name}' is not read; a model's configuration is config.pbtxt, or none at all"]
    write(root, "m/config.pbtxt")
    assert advice(root) == []


async def test_the_log_tells_it_once_and_the_index_too(
    start: Start, folders: Folders, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("good", 1)
    write(root, "stray.onnx", "m/model.onnx")
    write(root, "late/model.onnx")
    folders.config("late")
    served: Served = await start()
    await served.settle()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(told) == sorted(advice(root))
    assert len(told) == 3
    assert served.rows("stray.onnx")[""] == ("UNKNOWN", next(text for text in told if "stray" in text))
    assert "repair it with: " in served.reason("m", "")
    assert "repair it with: " in served.reason("late", "")
    assert served.repository.is_ready()


async def test_under_explicit_control_only_folders_are_models(start: Start, root: Path) -> None:
    write(root, "m/1/model.onnx", "stray.onnx")
    served: Served = await start(control_mode=ControlMode.EXPLICIT)
    assert [row.name for row in served.index()] == ["m"]
