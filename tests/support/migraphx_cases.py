"""One model for each failure of MIGraphX, written as a user would drop it into a repository. The cases have the names
of support/migraphx_error_texts.py."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from support import migraphx_models
from support.graphdef import GraphDef
from support.migraphx_serving import config, place

_MLP = migraphx_models.mlp()
_OPSET = [helper.make_opsetid("", 17)]


@dataclass(frozen=True, slots=True)
class Case:
    content: bytes
    """The model file's content."""
    text: str
    """The text of config.pbtxt."""
    filename: str = "model.onnx"
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Path in the model's folder -> content of a further file."""

    def place(self, repository: Path, name: str) -> None:
        """Write the complete model into a repository."""
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        for path, content in self.beside.items():
            (folder / path).write_bytes(content)
        place(repository, name, self.filename, self.content, self.text)


def onnx_cases() -> dict[str, Case]:
    """ONNX models with which MIGraphX fails, and configurations that it cannot follow."""
    batching = config(4)

    def configured(**parameters: object) -> Case:
        return Case(_MLP, config(4, **parameters))

    fixed, mixing = migraphx_models.reshaped_to_constant(), migraphx_models.mixing_rows()
    within_a_second = config(1, compile_timeout_secs="1", fast_math="false", load_check="off")
    named_gpu = "instance_group [ { kind: KIND_GPU gpus: [0] } ]"
    return {
        "an operator that MIGraphX lacks": Case(migraphx_models.unknown_operator(), batching),
        "strings within the graph": Case(_strings_within(), config()),
        "a file of 0 bytes": Case(b"", batching),
        "a graph that asks for more memory than there can be": Case(_padded_below_nothing(), config()),
        "a graph that crashes MIGraphX": Case(_index_out_of_range(), config()),
        "a dimension without a size": Case(migraphx_models.mean_of_any_length(), batching),
        "another batch size than the file's, which a Reshape names": Case(fixed, config(4, batch_sizes="2, 4")),
        "another batch size than the file's, whose rows depend on each other": Case(mixing, config(4, batch_sizes="4")),
        "calibration samples for another name": _calibrated(picture=np.zeros((4, 16), np.float32)),
        "target gpu on a machine without one": configured(target="gpu"),
        "KIND_GPU on a machine without one": configured(target="gpu", tensors="instance_group [ { kind: KIND_GPU } ]"),
        "the library of target gpu is not installed": configured(target="gpu", tensors=named_gpu),
        "a compile that takes longer than it may": Case(slow(), within_a_second),
    }


def tensorflow_cases() -> dict[str, Case]:
    """Frozen TensorFlow graphs with which MIGraphX fails."""
    lacking = GraphDef()
    lacking.node("MyFancyOp", "y", lacking.placeholder("x", [2, 4]))
    text = config(platform="tensorflow_graphdef")
    return {
        "an operator that MIGraphX lacks, in a TensorFlow graph": Case(lacking.serialized(), text, "model.graphdef")
    }


def program_cases(program: bytes) -> dict[str, Case]:
    """Compiled programs that MIGraphX cannot load. `program`: the compiled `mlp`."""

    def case(content: bytes) -> Case:
        return Case(content, config(1, "migraphx_mxr"), "model.mxr")

    unknown = _replaced(program, b"\xa6@param", b"\xa6@\x1bar\xe9m")
    dangling = _replaced(program, b"\xa6output\xa1x", b"\xa6output\xa1y")
    return {
        "a program file cut behind its head": case(program[: len(program) // 2]),
        "flipped bytes": case(unknown),
        "flipped bytes that crash MIGraphX": case(dangling),
        "another version of the format": case(_replaced(program, b"\xa7version\x07", b"\xa7version\x08")),
    }


def rebuilt_case(program: bytes) -> Case:
    """A program of another MIGraphX version, next to the ONNX file that it was compiled from."""
    other_version = _replaced(program, b"2.14.0", b"2.13.0")
    return Case(other_version, config(1, "migraphx_mxr"), "model.mxr", {"1/model.onnx": _MLP})


def slow() -> bytes:
    """A model that takes minutes to compile."""
    return migraphx_models.slow_to_compile()


def _replaced(program: bytes, old: bytes, new: bytes) -> bytes:
    assert old in program, f"a program without {old!r}"
    return program.replace(old, new)


def _calibrated(**arrays: np.ndarray[Any, Any]) -> Case:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    text = config(4, precision="int8", calibration_data="samples.npz")
    return Case(_MLP, text, beside={"samples.npz": stream.getvalue()})


def _strings_within() -> bytes:
    """`y` is `x` times the number of words."""
    words = numpy_helper.from_array(np.array([b"a", b"b"], object), "words")
    nodes = [
        helper.make_node("Constant", [], ["words"], value=words),
        helper.make_node("Shape", ["words"], ["count"]),
        helper.make_node("Cast", ["count"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    return _model(nodes)


def _index_out_of_range() -> bytes:
    """`y` is `x` times the hundredth of two constants: MIGraphX computes constants when it compiles."""
    nodes = [
        helper.make_node("Gather", ["numbers", "index"], ["number"]),
        helper.make_node("Mul", ["x", "number"], ["y"]),
    ]
    numbers = numpy_helper.from_array(np.ones(2, np.float32), "numbers")
    return _model(nodes, numbers, numpy_helper.from_array(np.array([99]), "index"))


def _padded_below_nothing() -> bytes:
    """`y` is `x`, which has two elements, padded by -9: MIGraphX reads a negative size as a very large one."""
    node = helper.make_node("Pad", ["x", "pads"], ["y"])
    return _model([node], numpy_helper.from_array(np.array([-9, 0]), "pads"))


def _model(nodes: list[onnx.NodeProto], *weights: onnx.TensorProto) -> bytes:
    """`x` [2] -> `y` [2]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph(nodes, "network", [x], [y], list(weights))
    data: bytes = helper.make_model(graph, opset_imports=_OPSET, ir_version=8).SerializeToString()
    return data
