"""The parameters of load requests: their types, and paths that stay within the model's folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.repository.content import ContentReader, LoadParameters, parse_load_parameters
from rocserve.repository.scan import ModelScan
from rocserve.settings import RepositorySettings

from .conftest import REGISTRY


def test_a_configuration_and_files() -> None:
    found = parse_load_parameters("m", {"config": "{}", "file:1/model.onnx": b"x", "file:1/data/weights": b"y"})
    assert found.config == "{}"
    assert found.files == {PurePosixPath("1/model.onnx"): b"x", PurePosixPath("1/data/weights"): b"y"}


def test_files_need_a_configuration() -> None:
    with pytest.raises(ServeError) as caught:
        parse_load_parameters("m", {"file:1/model.onnx": b"x"})
    assert (caught.value.code, caught.value.text) == (
        StatusCode.INTERNAL,
        "failed to load 'm', failed to poll from model repository: files are given (1/model.onnx) without 'config';"
        " add the configuration of these files",
    )


def test_of_many_files_without_a_configuration_the_first_are_named() -> None:
    parameters = {f"file:{number}/model.onnx": b"x" for number in reversed(range(100, 1000))}
    with pytest.raises(ServeError) as caught:
        parse_load_parameters("m", parameters)
    named = ", ".join(f"{number}/model.onnx" for number in range(100, 108))
    assert f"files are given ({named}, and 892 more) without 'config'" in caught.value.text


def test_recorded_answers_may_come_with_the_files(tmp_path: Path) -> None:
    config = """{"backend": "onnx", "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}]}"""
    files = {PurePosixPath("1/model.onnx"): b"model", PurePosixPath("1/check.npz"): b"answers"}
    reader = ContentReader(REGISTRY, RepositorySettings((tmp_path,)))
    (content,) = reader.read(ModelScan("m", tmp_path / "m", tmp_path), LoadParameters(config, files))
    file = content.definition.recorded_answers(content.definition.folder / "1")
    assert file is not None
    assert file.read_bytes() == b"answers"


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../1/m", "1/../../m", "1/./m", "1//m", "1/", "1/a\\b", "1/\0", "1/\ud800"]
)
def test_paths_stay_in_the_models_folder(path: str) -> None:
    with pytest.raises(ServeError, match="'file:<version>/<path>', or another path that stays in") as caught:
        parse_load_parameters("m", {"config": "{}", f"file:{path}": b"x"})
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
