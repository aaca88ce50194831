"""Small models of ONNX and of Python, written into a repository as a user would drop them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent

import onnx
from onnx import TensorProto, helper

# Old enough for every ONNX Runtime that the package allows.
_OPSET_VERSION = 17
_IR_VERSION = 8

ADD_CONSTANT_CONFIG = """
platform: "onnx_onnxv1"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
dynamic_batching { }
"""
"""The config.pbtxt of `add_constant`, with the dynamic batcher."""

_ANSWERING = """
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
%s
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "%s").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("%s", %s)])
"""


def graph(nodes: list[onnx.NodeProto], inputs: dict[str, tuple], outputs: dict[str, tuple]) -> bytes:
    """A model's bytes; inputs and outputs are name -> (element type, shape)."""
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
            [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        ),
        opset_imports=[helper.make_opsetid("", _OPSET_VERSION)],
        ir_version=_IR_VERSION,
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()


def add_sub(length: int = 16) -> bytes:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, INT32 [batch, length]."""
    spec = (TensorProto.INT32, ["batch", length])
    return graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        {"INPUT0": spec, "INPUT1": spec},
        {"OUTPUT0": spec, "OUTPUT1": spec},
    )


def identity(element_type: int, shape: list) -> bytes:
    """OUTPUT0 = INPUT0."""
    spec = (element_type, shape)
    return graph([helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])], {"INPUT0": spec}, {"OUTPUT0": spec})


def add_constant(value: float) -> bytes:
    """Y = X + value, FP32 [batch, 2]: versions of a model that differ in their answers."""
    spec = (TensorProto.FLOAT, ["batch", 2])
    constant = helper.make_node(
        "Constant", [], ["value"], value=helper.make_tensor("value", TensorProto.FLOAT, [], [value])
    )
    return graph([constant, helper.make_node("Add", ["X", "value"], ["Y"])], {"X": spec}, {"Y": spec})


def answering(given: str, output: str, value: str = "x", first: str = "") -> str:
    """A model.py that answers each request with the tensor `output`. `value`: an expression of `x`, the array of the
    input `given`, and of the `request`. `first`: statements that handle the list `requests` before."""
    return _ANSWERING % (indent(first, " " * 8), given, output, value)


def map_classifier(
    classes: list[int] | list[str], label_shape: Sequence[int | None] = (None,), other_outputs: Sequence[str] = ()
) -> bytes:
    """A classifier as scikit-learn's exporter ends it: X [rows, 2] -> label, and maps from class to score. The scores
    of three classes are the two values of a row, and their sum. Only ai.onnx.ml's operators are imported, as in files
    of XGBoost. `other_outputs`: "scores", the tensor of which the maps are made."""
    kind = "string" if isinstance(classes[0], str) else "int64"
    attribute = {f"classlabels_{kind}s": classes}
    label_type = TensorProto.STRING if kind == "string" else TensorProto.INT64
    domain, maps = "ai.onnx.ml", onnx.ValueInfoProto(name="maps")
    maps.type.sequence_type.elem_type.map_type.key_type = label_type
    maps.type.sequence_type.elem_type.map_type.value_type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    nodes = [
        helper.make_node(
            "LinearClassifier",
            ["X"],
            ["label", "scores"],
            domain=domain,
            coefficients=[1.0, 0, 0, 1, 1, 1],
            intercepts=[0.0, 0, 0],
            **{"classlabels_ints" if kind == "int64" else "classlabels_strings": classes},
        ),
        helper.make_node("ZipMap", ["scores"], ["maps"], domain=domain, **attribute),
    ]
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [None, 2])],
        [
            helper.make_tensor_value_info("label", label_type, label_shape),
            maps,
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 3]) for name in other_outputs),
        ],
    )
    content: bytes = helper.make_model(
        made, opset_imports=[helper.make_opsetid(domain, 1)], ir_version=_IR_VERSION
    ).SerializeToString()
    return content


def drop(
    repository: Path,
    name: str,
    model: bytes | str | None,
    config: str = "",
    version: int = 1,
    filename: str = "model.onnx",
) -> Path:
    """Write a model with its file, a Python model's script, or None for an ensemble; returns the model's folder. A new
    folder, of a model or of a version, appears with all of its files; a file that exists is replaced as a whole."""
    folder = repository / name
    files: dict[str, bytes] = {}
    if model is not None:
        is_script = isinstance(model, str)
        files[f"{version}/{'model.py' if is_script else filename}"] = model.encode() if is_script else model
    if config:
        files["config.pbtxt"] = config.encode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not within the repository, where a server may look.
    with TemporaryDirectory(dir=repository.resolve().parent) as beside:
        made = Path(beside, "model")
        (made / str(version)).mkdir(parents=True)
        for path, content in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_bytes(content)
        _move_in(made, folder)
    return folder


def _move_in(made: Path, place: Path) -> None:
    """Move a file or a folder; the entries of a folder that exists are moved in one by one, in the order
    of their names."""
    if made.is_dir() and place.is_dir():
        for entry in sorted(made.iterdir()):
            _move_in(entry, place / entry.name)
    else:
        # A file behind a link is replaced behind it.
        made.rename(place.resolve())
