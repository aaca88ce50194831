from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from support.full_disk import full_disk

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import ModelDefinition, find_model_file
from rocserve.config.pbtxt import parse_model_config
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.requests import Signature, TensorSpec
from rocserve.verbs.config import ConfigOptions, run
from rocserve.verbs.verb import guarded

_REGISTRY = BackendRegistry(
    [
        BackendSpec(
            name="onnx",
            platforms=("onnx_onnxv1", "onnxruntime"),
            engines=(EngineSpec("onnxruntime", "none", thread_safe=True, forks_from_zygote=True),),
            model_filenames=("model.onnx",),
        )
    ]
)
_SIGNATURE = Signature(
    (TensorSpec("x", DataType.FP32, (-1, 4)),), (TensorSpec("y", DataType.FP32, (-1, 2)),), supports_batching=True
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    for version in ("1", "3"):
        (folder / version).mkdir(parents=True)
        (folder / version / "model.onnx").touch()
    return folder


def _run(
    folder: Path, describe: Callable[[ModelDefinition, int], Signature] = lambda *_: _SIGNATURE, strict: bool = False
) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = guarded("config", str(folder), lambda: run(ConfigOptions(folder, strict=strict), _REGISTRY, describe))
    return status, out.getvalue(), err.getvalue()


def test_prints_what_can_be_read_back(folder: Path) -> None:
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 2')
    status, text, err = _run(folder)
    assert (status, err) == (0, "")
    assert text.startswith(
        "# The effective configuration of model 'm' (config.pbtxt).\n"
        "# Completed: name, platform, version_policy, input, output, instance_group, default_model_filename,"
        " dynamic_batching, optimization.\n"
    )
    message = parse_model_config(text, "printed")
    assert (message.backend, message.max_batch_size, list(message.input[0].dims)) == ("onnxruntime", 2, [4])
    (folder / "config.pbtxt").write_text(text)
    assert _run(folder) == (0, text.replace(text.splitlines()[1] + "\n", ""), "")


def test_warnings_and_notes_are_comments(folder: Path) -> None:
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" runtime: "r"')
    _, text, _ = _run(folder)
    assert "# Warning: model 'm': settings without effect in this version of rocserve: runtime\n" in text
    assert "# Note: autofilled max_batch_size to 64 for model 'm'" in text


def test_highest_served_version_is_described(folder: Path) -> None:
    described: list[int] = []

    def describe(definition: ModelDefinition, version: int) -> Signature:
        described.append(version)
        return _SIGNATURE

    _run(folder, describe)
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" version_policy { specific { versions: 1 } }')
    _run(folder, describe)
    assert described == [3, 1]


def test_bad_configuration(folder: Path) -> None:
    (folder / "config.pbtxt").write_text("\nmax_batch_sise: 2")
    status, text, err = _run(folder)
    assert (status, text) == (1, "")
    assert err == (
        f"rocserve config: {folder}: config.pbtxt:2:1: unknown field 'max_batch_sise' of ModelConfig; did you mean"
        " 'max_batch_size'?\n"
    )


def test_model_that_does_not_load(folder: Path) -> None:
    def describe(definition: ModelDefinition, version: int) -> Signature:
        raise invalid_argument("broken graph")

    assert _run(folder, describe) == (1, "", f"rocserve config: {folder}: broken graph\n")


def test_strict(folder: Path) -> None:
    status, _, err = _run(folder, strict=True)
    assert status == 1
    assert "without auto-complete every model needs it" in err


def test_no_folder_and_no_version(tmp_path: Path) -> None:
    assert _run(tmp_path / "absent")[0] == 1
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "onnxruntime"')
    status, _, err = _run(tmp_path / "m")
    assert status == 1
    assert "at least one version must be available under the version policy of model 'm'" in err


def test_without_a_version_folder_the_commands_that_repair_it_are_named(folder: Path) -> None:
    (folder / "config.pbtxt").write_text('backend: "onnxruntime"')
    (folder / "1" / "model.onnx").write_text("the model")
    (folder / "1" / "model.onnx").rename(folder / "net.onnx")
    for version in ("1", "3"):
        shutil.rmtree(folder / version)
    status, _, err = _run(folder)
    assert status == 1
    message, _, commands = err.partition("; repair it with: ")
    assert message == (
        f"rocserve config: {folder}: at least one version must be available under the version policy of model 'm';"
        f" '{folder}' has no version folder (1, 2, ...), and its model lies at '{folder}/net.onnx'"
    )
    subprocess.run(commands, shell=True, check=True)
    assert (folder / "1" / "model.onnx").read_text() == "the model"
    assert _run(folder)[0] == 0


def test_the_repair_renames_a_version_folder_of_another_name(folder: Path) -> None:
    shutil.rmtree(folder / "1")
    (folder / "3").rename(folder / "v3")
    status, _, err = _run(folder)
    assert status == 1
    assert "must specify 'platform' or 'backend' for 'm'" in err
    assert err.endswith(f"; repair it with: mv {folder}/v3 {folder}/3\n")


_DETECTOR = Signature(
    (TensorSpec("images", DataType.FP32, (-1, 3, 64, 64)),),
    (TensorSpec("output0", DataType.FP32, (-1, 84, 84)),),
    supports_batching=True,
)


def test_what_is_saved_is_whole_or_not_there(folder: Path, tmp_path: Path) -> None:
    (folder / "config.pbtxt").write_text(
        'backend: "onnxruntime" parameters { key: "preprocess" value { string_value: "yolov8" } }'
    )
    saved = tmp_path / "saved"
    options = ConfigOptions(folder, save=saved)

    def save() -> tuple[int, str]:
        err = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            status = guarded("config", str(folder), lambda: run(options, _REGISTRY, lambda *_: _DETECTOR))
        return status, err.getvalue()

    with full_disk():
        status, err = save()
    assert status == 1 and "File too large" in err
    assert list(saved.iterdir()) == []
    assert save() == (0, "")
    made = {path.relative_to(saved): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    assert sorted({path.parts[0] for path in made}) == ["m_image", "m_postprocess", "m_preprocess"]
    # Somebody may have edited them.
    (saved / "m_image").rename(tmp_path / "gone")
    status, err = save()
    assert (status, "File exists" in err) == (1, True)
    assert sorted(path.name for path in saved.iterdir()) == ["m_postprocess", "m_preprocess"]


def test_a_folder_whose_name_no_model_can_have(folder: Path) -> None:
    status, out, err = _run(folder.rename(folder.with_name("caf\udce9")))
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "the name of the folder 'caf\\xe9' has bytes that are not UTF-8, or unprintable characters" in err


def test_ensemble_needs_no_engine(tmp_path: Path) -> None:
    text = """
    platform: "ensemble"
    input { name: "in" data_type: TYPE_FP32 dims: 2 }
    output { name: "out" data_type: TYPE_FP32 dims: 2 }
    ensemble_scheduling { step { model_name: "a" model_version: -1
      input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } } }
    """
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "config.pbtxt").write_text(text)
    status, printed, _ = _run(tmp_path / "e")
    assert status == 0
    assert parse_model_config(printed, "printed").ensemble_scheduling.step[0].model_name == "a"


def test_a_model_s_file_may_be_a_link_to_a_neighbour_s_but_not_further(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "neighbour" / "1").mkdir(parents=True)
    (tmp_path / "neighbour" / "1" / "model.onnx").touch()

    def describe(definition: ModelDefinition, version: int) -> Signature:
        find_model_file(definition, definition.folder / str(version))
        return _SIGNATURE

    linked = folder / "3" / "model.onnx"
    linked.unlink()
    linked.symlink_to("../../neighbour/1/model.onnx")
    assert _run(folder, describe)[0] == 0
    linked.unlink()
    linked.symlink_to("/etc/hostname")
    status, _, err = _run(folder, describe)
    assert status == 1
    assert "is a link that leads out of the model repository" in err
