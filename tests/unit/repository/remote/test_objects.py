"""Which model an object belongs to, and which may become a file."""

from __future__ import annotations

import pytest

from rocserve.repository.remote.objects import WHOLE, RemoteObject, arrange


def objects(*keys: str, size: int = 1) -> list[RemoteObject]:
    return [RemoteObject(key, size, "tag") for key in keys]


def test_each_folder_is_a_unit() -> None:
    units = arrange(objects("a/config.pbtxt", "a/1/model.onnx", "b/1/model.onnx", "README.md"))
    assert {name: len(unit.objects) for name, unit in units.items()} == {"a": 2, "b": 1, WHOLE: 1}


@pytest.mark.parametrize("key", ["config.pbtxt", "1/model.onnx"])
def test_a_repository_that_is_one_model_is_one_unit(key: str) -> None:
    assert set(arrange(objects(key, "configs/other.pbtxt"))) == {WHOLE}


def test_temporary_names_and_marks_of_folders_are_left_out() -> None:
    units = arrange([*objects("a/1/model.onnx", "a/.git/x", "a/1/model.onnx.tmp"), *objects("a", "a/1", size=0)])
    assert set(units["a"].objects) == {"a/1/model.onnx"}
    assert not units["a"].refusal


def test_an_empty_file_keeps_the_folder_that_it_is_in() -> None:
    assert set(arrange(objects("a/config.pbtxt", "a/1/.gitkeep", size=0))["a"].objects) == {
        "a/config.pbtxt",
        "a/1/.gitkeep",
    }


@pytest.mark.parametrize("key", ["a/../../etc/passwd", "a//b", "a/\0", f"a/{'x' * 256}", "a/.."])
def test_what_is_no_path_within_the_folder_is_refused(key: str) -> None:
    units = arrange(objects("b/1/model.onnx", key))
    assert "no path within a folder" in units["a"].refusal
    assert not units["b"].refusal


@pytest.mark.parametrize("key", ["../x", "/etc/passwd"])
def test_what_leads_out_belongs_to_no_model(key: str) -> None:
    units = arrange(objects("b/1/model.onnx", key))
    refused = [unit for unit in units.values() if unit.refusal]
    assert len(refused) == 1
    assert not units["b"].refusal


def test_an_object_that_is_a_folder_too_is_refused() -> None:
    assert "at once" in arrange(objects("a/x", "a/x/y"))["a"].refusal
