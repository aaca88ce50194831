"""The parameters of load requests: their types, and paths that stay within the model's folder."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.repository.content import parse_load_parameters


def test_a_configuration_and_files() -> None:
    found = parse_load_parameters("m", {"config": "{}", "file:1/model.onnx": b"x", "file:1/data/weights": b"y"})
    assert found.config == "{}"
    assert found.files == {PurePosixPath("1/model.onnx"): b"x", PurePosixPath("1/data/weights"): b"y"}


def test_files_need_a_configuration() -> None:
    with pytest.raises(ServeError) as caught:
        parse_load_parameters("m", {"file:1/model.onnx": b"x"})
    assert (caught.value.code, caught.value.text) == (
        StatusCode.INTERNAL,
        "failed to load 'm', failed to poll from model repository: files are given (1/model.onnx) but no 'config'; give"
        " the configuration that goes with them too",
    )


def test_of_many_files_without_a_configuration_the_first_are_named() -> None:
    parameters = {f"file:{number}/model.onnx": b"x" for number in reversed(range(100, 1000))}
    with pytest.raises(ServeError) as caught:
        parse_load_parameters("m", parameters)
    named = ", ".join(f"{number}/model.onnx" for number in range(100, 108))
    assert f"files are given ({named}, and 892 more) but no 'config'" in caught.value.text


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../1/m", "1/../../m", "1/./m", "1//m", "1/", "1/a\\b", "1/\0", "1/\ud800"]
)
def test_paths_stay_in_the_models_folder(path: str) -> None:
    with pytest.raises(ServeError, match="'file:<version>/<path>', or another path that stays in") as caught:
        parse_load_parameters("m", {"config": "{}", f"file:{path}": b"x"})
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
