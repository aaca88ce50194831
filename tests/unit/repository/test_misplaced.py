"""Model files in the wrong place: the warnings, and that the named commands repair it. Models without their files,
which somebody may fetch later: never loaded, and no failure of the server."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from pathlib import Path

import pytest

from rocserve.core.private_paths import PrivatePaths
from rocserve.settings import ControlMode

from .conftest import Folders, Served, Start, make_scanner


def write(root: Path, *paths: str) -> None:
    for path in paths:
        if path.endswith("/"):
            (root / path).mkdir(parents=True)
            continue
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
        (
            ["m/2/", "m/resnet.onnx", "m/resnet.onnx.data"],
            "the version folders of 'm' are empty, and its model lies at '{}/m/resnet.onnx'",
            "m/2/model.onnx",
        ),
        (["m/1/n/model.onnx", "m/1/check.npz"], "the model file of 'm' is one folder too deep", "m/1/model.onnx"),
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


@pytest.mark.parametrize("name", ["models", "my models"])
@pytest.mark.parametrize("path", ["m/n/1/model.onnx", "m/n/model.onnx", "m/1/n/model.onnx", "my m/v2/model.onnx"])
async def test_the_commands_in_the_index_repair_it_in_the_repository(
    start: Start, tmp_path: Path, path: str, name: str
) -> None:
    root = tmp_path / name
    write(root, path)
    served: Served = await start(root)
    (row,) = served.index()
    command = PrivatePaths([root]).hide(row.reason).partition("; repair it with: ")[2].partition(" (failed ")[0]
    assert str(tmp_path) not in command
    await asyncio.to_thread(subprocess.run, command, shell=True, check=True, cwd=root)
    await served.until(lambda: "READY" in {row.state for row in served.index()})


@pytest.mark.parametrize(
    ("paths", "what"),
    [
        (
            ["m/config.pbtxt", "m/1/model.onnx", "m/2/config.pbtxt", "m/2/1/model.onnx"],
            "'{}/m/2' is a whole model (config.pbtxt, 1/model.onnx), not a version of 'm'",
        ),
        (
            ["m/model.onnx", "m/2/model.onnx"],
            "'{}/m/model.onnx' is not served, because version folder 2 lies beside it",
        ),
    ],
)
def test_a_version_that_a_store_made_of_another_model_is_named(root: Path, paths: list[str], what: str) -> None:
    write(root, *paths)
    end = "; if it is model 'm2', copied from a store, end the URI of 'm' with '/'"
    assert advice(root) == [what.format(root) + end]


@pytest.mark.parametrize(
    "paths",
    [
        ["m/1/model.onnx", "m/2/model.onnx", "m/2/config.pbtxt"],
        ["m/config.pbtxt", "m/labels.txt", "m/1/model.onnx", "m/2/1/note.txt", "m/2/model.onnx"],
    ],
)
def test_what_is_no_other_model_is_not_named(root: Path, paths: list[str]) -> None:
    write(root, *paths)
    assert advice(root) == []


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


COMMAND = 'parameters { key: "get_with" value: { string_value: "rocserve get m" } }'
REASON = "at least one version must be available under the version policy of model 'm'; get one with: rocserve get m"
MISSING = f"ensemble e contains models that are not available or ambiguous: m; m: {REASON}"


async def test_a_model_without_any_version_harms_nobody_and_is_served_when_one_comes(
    start: Start, folders: Folders
) -> None:
    folders.model("m", more=COMMAND)
    folders.model("other", 1)
    served: Served = await start()
    assert served.rows("m") == {"": ("", REASON)}
    assert served.repository.failed_models() == {}
    assert served.repository.is_ready()
    assert served.data("m") == "Request for unknown model: 'm' has no available versions"
    folders.version("m", 1)
    await served.until(lambda: served.data("m") == "good")


async def test_an_ensemble_that_misses_only_such_models_harms_nobody_either(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    folders.ensemble("a_outer", "e")
    served: Served = await start()
    assert served.rows("e") == {"1": ("UNAVAILABLE", MISSING)}
    assert MISSING in served.reason("a_outer")
    assert served.repository.failed_models() == {}
    assert served.repository.is_ready()
    folders.version("m", 1)
    await served.until(lambda: served.state("e", "1") == "READY")


async def test_a_new_version_that_fails_is_reported_and_harms_no_other(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    served: Served = await start()
    folders.version("m", 1, "broken")
    await served.until(lambda: served.state("m", "1") == "UNAVAILABLE")
    assert served.repository.is_ready()
    assert set(served.repository.failed_models()) == {"m", "e"}


async def test_a_policy_that_misses_the_versions_there_are_is_a_fault(start: Start, folders: Folders) -> None:
    folders.model("m", 1, more="version_policy { specific { versions: 9 } }")
    served: Served = await start()
    assert served.state("m", "") == "UNAVAILABLE"
    assert not served.repository.is_ready()


async def test_an_ensemble_that_misses_another_model_too_is_a_fault(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    folders.ensemble("f", "absent")
    served: Served = await start()
    assert set(served.repository.failed_models()) == {"f"}
    assert not served.repository.is_ready()
