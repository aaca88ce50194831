"""The checksum agent: the model is loaded only if its files have the configuration's checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading
from rocserve.core.errors import ServeError, StatusCode

DATA = b"some weights"
DIGEST = hashlib.md5(DATA, usedforsecurity=False).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(DATA)
    (tmp_path / "secret").write_bytes(DATA)
    return folder


def read(folder: Path, parameters: str, agent: str = "checksum") -> None:
    (folder / "config.pbtxt").write_text(
        f'backend: "onnxruntime" model_repository_agents {{ agents {{ name: "{agent}" {parameters} }} }}'
    )
    FolderReading(folder, discover_backends(), repository=folder.parent).definitions()


def fault(folder: Path, parameters: str, agent: str = "checksum") -> ServeError:
    with pytest.raises(ServeError) as raised:
        read(folder, parameters, agent)
    return raised.value


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: "{value}" }}'


@pytest.mark.parametrize("algorithm", ["MD5", "md5"])
def test_files_that_are_what_they_should_be(folder: Path, algorithm: str) -> None:
    read(folder, parameter(f"{algorithm}:1/model.onnx", DIGEST))
    read(folder, "")


def test_a_file_that_is_another(folder: Path) -> None:
    error = fault(folder, parameter("MD5:1/model.onnx", "0" * 32))
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert error.text == f"Mismatched MD5 hash for file 1/model.onnx, expect: {'0' * 32}, got: {DIGEST}"


def test_a_refused_model_can_be_told_of(folder: Path) -> None:
    fault(folder, parameter("MD5:1/model.onnx", "0"))
    (definition,) = FolderReading(folder, discover_backends()).definitions(keep_refused=True)
    assert definition.refusal is not None and definition.refusal.text.startswith("Mismatched MD5 hash")
    assert definition.config.name == "m" and not definition.is_ensemble


def test_a_file_that_is_not_there(folder: Path) -> None:
    error = fault(folder, parameter("MD5:absent", DIGEST))
    assert error.text == "failed to open text file for read absent: No such file or directory"


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_files_elsewhere_are_not_read(folder: Path, name: str) -> None:
    assert "must be a path within the folder m" in fault(folder, parameter(f"MD5:{name}", DIGEST)).text


def test_other_keys_and_digests(folder: Path) -> None:
    assert fault(folder, parameter("1/model.onnx", DIGEST)).text == (
        "failed to parse key: 1/model.onnx; expected MD5:<path in the model's folder>"
    )
    error = fault(folder, parameter("SHA256:1/model.onnx", DIGEST))
    assert (error.code, error.text) == (
        StatusCode.UNIMPLEMENTED,
        "Unsupported checksum algorithm: SHA256; expected MD5",
    )


def test_an_agent_that_there_is_none_of(folder: Path) -> None:
    assert fault(folder, "", agent="unpack").text.startswith(
        "unable to find 'libtritonrepoagent_unpack.so' for repo agent 'unpack'; the only agent of rocserve is"
    )
