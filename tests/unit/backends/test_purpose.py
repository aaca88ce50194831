"""What a file's metadata say that the model does."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
from support.models import add_constant

from rocserve.backends.migraphx.compiling.onnx_graph import read_onnx_graph
from rocserve.backends.onnx.model_file import ModelFile
from rocserve.backends.onnx.signature import session_signature
from rocserve.backends.purpose import read_purpose
from rocserve.core.model_config import ModelConfig, Purpose

NAMES = {0: "person", 1: "traffic light", 2: "baker's cap", 3: 'the "3"', 4: "both ' and \"", 5: "a: b, 6: c"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (str(NAMES), tuple(NAMES.values())),
        ("{0: 'a'}", ("a",)),
        ("{1: 'b', 0: 'a'}", ("a", "b")),
        ("{1: 'b'}", ()),
        ("{0: 'a\nb'}", ()),
        ("['a', 'b']", ()),
        ("{" * 100_000, ()),
        ("", ()),
    ],
)
def test_names_are_those_of_a_numbered_dict(text: str, names: tuple[str, ...]) -> None:
    assert read_purpose({"names": text}).class_names == names


@pytest.mark.parametrize(("task", "read"), [("detect", "detect"), ("pose", "pose"), ("two\nlines", ""), ("x" * 99, "")])
def test_a_task_is_a_word(task: str, read: str) -> None:
    assert read_purpose({"task": task}) == Purpose(read)


def test_both_engines_read_it_in_the_file(tmp_path: Path) -> None:
    model = onnx.load_from_string(add_constant(1.0))
    for key, value in {"task": "segment", "names": str(NAMES), "stride": "32"}.items():
        model.metadata_props.add(key=key, value=value)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    expected = Purpose("segment", tuple(NAMES.values()))
    assert read_onnx_graph(path).purpose == expected
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert session_signature(session, ModelConfig("m"), ModelFile(path)).purpose == expected
