"""MIGraphX's own errors come as it says them, over every binding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support import migraphx_models as models
from support.migraphx_programs import ProgramFactory, refusal

from rocserve.backends.migraphx.binding.interface import CompileFlags

pytestmark = pytest.mark.in_migraphx_process


def test_an_operator_that_migraphx_lacks(factory: ProgramFactory) -> None:
    message = refusal(lambda: factory.parse(models.unknown_operator("MyFancyOp")))
    assert message.startswith("src/onnx/onnx_parser.cpp:")
    assert message.endswith(": parse_graph: Unknown operator: MyFancyOp")


def test_tensors_of_text(factory: ProgramFactory) -> None:
    text = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "network",
        [text("x", TensorProto.STRING, [2])],
        [text("y", TensorProto.STRING, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    message = refusal(lambda: factory.parse(model.SerializeToString()))
    assert message.endswith("get_type: Prototensor data type 8 not supported")


@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_an_onnx_file_that_is_damaged(factory: ProgramFactory, damage: str) -> None:
    whole = models.mlp()
    content = b"garbage, no model" if damage == "garbage" else whole[: len(whole) // 2]
    message = refusal(lambda: factory.parse(content))
    assert message.endswith(f"parse_from: PARSE_FROM: Failed reading onnx file: {factory.folder / 'model.onnx'}")


def test_a_program_file_that_is_damaged(factory: ProgramFactory) -> None:
    content = saved(factory).read_bytes()
    garbage = factory.file(b"garbage, no program", "garbage.mxr")
    assert "Not an object for field: version" in refusal(lambda: factory.binding.load(garbage))
    cut = factory.file(content[: len(content) // 2], "cut.mxr")
    assert "insufficient bytes" in refusal(lambda: factory.binding.load(cut))


def test_a_program_file_of_another_format(factory: ProgramFactory) -> None:
    content = saved(factory).read_bytes()
    assert content[1:9] == b"\xa7version"
    other = factory.file(content[:9] + bytes([content[9] + 1]) + content[10:], "other.mxr")
    message = refusal(lambda: factory.binding.load(other))
    assert "Program version mismatch. MXR file was created using program file version: 8" in message
    assert "installed MIGraphX is using program file version: 7" in message


def test_a_program_file_of_another_migraphx_is_loaded_with_a_warning(factory: ProgramFactory) -> None:
    content = saved(factory).read_bytes()
    version = factory.binding.migraphx_version.encode()
    assert content.count(version) == 1
    program = factory.binding.load(factory.file(content.replace(version, b"1" * len(version)), "older.mxr"))
    assert program.run({"x": np.ones((1, 16), np.float32)})[0].shape == (1, 10)
    messages = factory.binding.take_messages()
    assert any(
        message.startswith("[WARNING]: MXR File was created using MIGraphX version: 11") for message in messages
    ), messages
    assert factory.binding.take_messages() == []


@pytest.mark.parametrize("target", ["gpu", "cpu", "none", "../../x"])
def test_a_target_that_is_not_there(factory: ProgramFactory, target: str) -> None:
    message = refusal(lambda: factory.binding.check_target(target))
    assert f"Dynamic loading or symbol lookup failed with libmigraphx_{target}.so: cannot open shared object" in message
    program = factory.parse(models.mlp())

    assert refusal(lambda: program.compile(target, CompileFlags())) == message
    assert not program.is_compiled
    program.compile("ref", CompileFlags())


def test_a_target_that_is_there(factory: ProgramFactory) -> None:
    factory.binding.check_target("ref")


def saved(factory: ProgramFactory) -> Path:
    path = factory.folder / "program.mxr"
    factory.compiled(models.mlp()).save(path)
    return path
