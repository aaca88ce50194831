"""What an ONNX file says of its tensors, and what it leaves open: maps, ranks, defaults, rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import map_classifier

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_load_check
from rocserve.backends.onnx import backend, external_weights
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.model_config import InputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import tensor_from_numpy

SourceMaker = Callable[..., ModelSource]
Array = np.ndarray[Any, Any]

FLOAT = TensorProto.FLOAT
FP32 = DataType.FP32


def load(source: ModelSource) -> LoadedModel:
    return backend.load(replace(source, config=replace(source.config, parameters={"engine": "cpu"})))


def run(model: LoadedModel, wanted: Sequence[str], **inputs: Array) -> list[Any]:
    tensors = {name: tensor_from_numpy(name, array) for name, array in inputs.items()}
    outputs = model.execute(Batch(tensors, tuple(wanted), (1,))).outputs
    return [outputs[name] for name in wanted]


def info(name: str, shape: Sequence[Any] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_bytes(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    defaults: dict[str, Array] | None = None,
    ir_version: int = 8,
) -> bytes:
    tensors = [numpy_helper.from_array(array, name) for name, array in (defaults or {}).items()]
    made = helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    opset = helper.make_opsetid("", 17)
    content: bytes = helper.make_model(made, opset_imports=[opset], ir_version=ir_version).SerializeToString()
    return content


X = np.array([[3, 1], [2, 5]], np.float32)
SCORES = [[3, 1, 4], [2, 5, 7]]
"""Of `map_classifier` for X: both values of a row, and their sum."""


@pytest.mark.parametrize(
    ("classes", "datatype", "labels"),
    [([3, 5, -8], DataType.INT64, ("3", "5", "-8")), (["a", "b b", "ß"], DataType.BYTES, ("a", "b b", "ß"))],
)
def test_maps_are_served_as_the_tensor_that_they_were_made_of(
    model_source: SourceMaker,
    caplog: pytest.LogCaptureFixture,
    classes: list[int] | list[str],
    datatype: DataType,
    labels: tuple[str, ...],
) -> None:
    caplog.set_level("DEBUG")
    model = load(model_source("model.onnx", map_classifier(classes)))
    assert model.signature.outputs == (
        TensorSpec("label", datatype, (-1,)),
        TensorSpec("maps", FP32, (-1, 3), labels=labels),
    )
    assert model.signature.supports_batching
    label, scores = run(model, ("label", "maps"), X=X)
    assert scores.tolist() == SCORES
    assert label.tolist() == [classes[2]] * 2
    assert "output 'maps' is served as the tensor of its 3 classes' values" in caplog.text


def test_maps_of_several_labels_are_served_as_the_tensor_that_they_were_made_of(model_source: SourceMaker) -> None:
    """scikit-learn's exporter writes a ZipMap of [labels, rows, classes], which ONNX Runtime itself does not load."""
    message = onnx.load_from_string(map_classifier([0, 1, 2]))
    message.opset_import.add(version=13)
    axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [0])
    message.graph.initializer.append(axes)
    message.graph.node.insert(1, helper.make_node("Unsqueeze", ["scores", "axes"], ["of labels"]))
    message.graph.node[2].input[0] = "of labels"
    del message.graph.node[2].attribute[:]
    model = load(model_source("model.onnx", message.SerializeToString()))
    assert model.signature.outputs[1] == TensorSpec("maps", FP32, (1, -1, 3))
    (scores,) = run(model, ("maps",), X=X)
    assert scores.tolist() == [SCORES]


@pytest.mark.parametrize(("rows", "expected", "batching"), [(None, -1, True), (1, 1, False)])
def test_a_label_that_is_said_to_be_single_has_the_inputs_rows(
    model_source: SourceMaker, rows: int | None, expected: int, batching: bool
) -> None:
    """LightGBM's exporter declares one label for any number of rows."""
    message = onnx.load_from_string(map_classifier([0, 1, 2], label_shape=[1]))
    message.graph.node[0].output[0] = "own label"
    message.graph.node.append(helper.make_node("Identity", ["own label"], ["label"]))
    if rows:
        message.graph.input[0].type.tensor_type.shape.dim[0].dim_value = rows
    model = load(model_source("model.onnx", message.SerializeToString()))
    assert model.signature.outputs[0] == TensorSpec("label", DataType.INT64, (expected,))
    assert model.signature.supports_batching is batching
    (label,) = run(model, ("label",), X=X[: rows or 2])
    assert label.tolist() == [2, 2][: rows or 2]


@pytest.mark.parametrize(
    ("params", "warning"),
    [
        ('{"loss_function": {"type": "RMSE"}}', ""),
        ('{"loss_function": {"type": "Poisson"}}', "with loss 'Poisson' CatBoost's exporter leaves out exp of"),
        ('{"loss_function": {"type": "MultiLogloss"}}', "leaves out the sigmoid of each class"),
        ('{"loss_function": "Poisson"}', ""),
        ("cut off", ""),
    ],
)
def test_what_catboosts_exporter_leaves_out_is_named_once(
    model_source: SourceMaker, caplog: pytest.LogCaptureFixture, params: str, warning: str
) -> None:
    """Some losses apply a function to the sum of the trees, which the exporter does not write."""
    trees = helper.make_node("LinearRegressor", ["X"], ["Y"], domain="ai.onnx.ml", coefficients=[1.0, 1.0])
    message = onnx.ModelProto.FromString(model_bytes([trees], [info("X", ["N", 2])], [info("Y", ["N"])]))
    message.producer_name = "CatBoost"
    message.opset_import.add(domain="ai.onnx.ml", version=2)
    message.metadata_props.add(key="params", value=params)
    load(model_source("model.onnx", message.SerializeToString(), max_batch_size=8))
    assert caplog.text.count("exporter leaves out") == bool(warning)
    assert warning in caplog.text


def test_the_tensor_may_be_an_output_itself(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", map_classifier([0, 1, 2], other_outputs=("scores",))))
    assert [spec.name for spec in model.signature.outputs] == ["label", "maps", "scores"]
    assert [array.tolist() for array in run(model, ("maps", "scores"), X=X)] == [SCORES, SCORES]


def test_a_configuration_that_batches_fits_the_tensor(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", map_classifier([0, 1, 2]), max_batch_size=8))
    assert model.signature.supports_batching
    assert run(model, ("maps",), X=X)[0].tolist() == SCORES


@pytest.mark.parametrize("in_memory", [True, False])
def test_maps_beside_weights_in_another_file(
    model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    source = model_source("model.onnx", b"")
    message = onnx.load_from_string(map_classifier([0, 1, 2]))
    message.graph.node.insert(0, helper.make_node("Mul", ["X", "twice"], ["scaled"]))
    message.graph.node[1].input[0] = "scaled"
    message.graph.initializer.append(numpy_helper.from_array(np.full(2, 2, np.float32), "twice"))
    onnx.save(message, source.model_file, save_as_external_data=True, location="weights", size_threshold=0)
    if not in_memory:
        found = external_weights.ExternalWeights({"weights": source.version_folder / "weights"}, in_memory=False)
        monkeypatch.setattr(backend, "find_external_weights", lambda _: found)
    model = load(source)
    assert run(model, ("maps",), X=X)[0].tolist() == [[6, 2, 8], [4, 10, 14]]


def squeeze(declared: Sequence[Any] | None) -> bytes:
    """Y = X [n, 1, 2] without its dimensions of size 1, whose number only a request decides."""
    return model_bytes([helper.make_node("Squeeze", ["X"], ["Y"])], [info("X", ["n", 1, 2])], [info("Y", declared)])


@pytest.mark.parametrize("declared", [None, ["n", 1, 2]], ids=["no shape", "another rank than inferred"])
def test_an_output_of_unknown_rank_is_no_scalar(model_source: SourceMaker, declared: Sequence[Any] | None) -> None:
    content = squeeze(declared)
    if declared:
        # onnxruntime infers the rank from axes that it knows.
        message = onnx.load_from_string(content)
        message.graph.node[0].input.append("axes")
        message.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
        content = message.SerializeToString()
    model = load(model_source("model.onnx", content))
    assert model.signature.outputs == (TensorSpec("Y", FP32, (-1,), any_rank=True),)
    assert not model.signature.supports_batching
    rows = np.array([[[1, 2]], [[3, 4]]], np.float32)
    assert run(model, ("Y",), X=rows)[0].tolist() == [[1, 2], [3, 4]]
    if not declared:
        assert run(model, ("Y",), X=rows[:1])[0].tolist() == [1, 2]


def test_rows_that_run_one_by_one_keep_the_declared_shape(model_source: SourceMaker) -> None:
    """The file fixes the batch to one row, and squeezes it away."""
    ends = [info("X", [1, "n"])], [info("Y", [1, "n"])]
    content = model_bytes([helper.make_node("Squeeze", ["X"], ["Y"])], *ends)
    model = load(model_source("model.onnx", content, max_batch_size=4))
    rows = np.array([[1, 2], [3, 4]], np.float32)
    batch = Batch({"X": tensor_from_numpy("X", rows)}, ("Y",), (2,))
    assert model.execute(batch).outputs["Y"].tolist() == rows.tolist()


def test_an_input_of_unknown_rank_takes_any_shape_and_a_scalar_stays_one(model_source: SourceMaker) -> None:
    content = model_bytes(
        [helper.make_node("Mul", ["X", "factor"], ["Y"])], [info("X", None), info("factor", [])], [info("Y", None)]
    )
    model = load(model_source("model.onnx", content))
    assert model.signature.inputs == (TensorSpec("X", FP32, (-1,), any_rank=True), TensorSpec("factor", FP32, ()))
    for shape in ((), (2,), (1, 2, 3)):
        array = np.ones(shape, np.float32)
        assert run(model, ("Y",), X=array, factor=np.array(3, np.float32))[0].tolist() == (array * 3).tolist()


def test_dims_of_the_configuration_decide_an_unknown_rank(model_source: SourceMaker) -> None:
    content = model_bytes([helper.make_node("Relu", ["X"], ["Y"])], [info("X", None)], [info("Y", [])])
    declared = [InputConfig("X", FP32, (-1, 3))]
    model = load(model_source("model.onnx", content, inputs=declared))
    assert model.signature.inputs == (TensorSpec("X", FP32, (-1, 3)),)
    # The next worker gets the completed configuration.
    completed = [InputConfig("X", FP32, (-1,), any_rank=True)]
    model = load(model_source("model.onnx", content, inputs=completed))
    assert model.signature.inputs == (TensorSpec("X", FP32, (-1,), any_rank=True),)


def scaled(default: Array, ir_version: int = 8, shape: Sequence[Any] | None = None) -> bytes:
    """Y = X * k, where k has a default."""
    columns = max(2, len(default))
    return model_bytes(
        [helper.make_node("Mul", ["X", "k"], ["Y"])],
        [info("X", ["rows", columns]), info("k", shape or default.shape)],
        [info("Y", ["rows", columns])],
        {"k": default},
        ir_version,
    )


TWO = np.array([2], np.float32)


def test_an_input_with_a_default_may_be_left_out(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", scaled(TWO)))
    rows = TensorSpec("X", FP32, (-1, 2), dimension_names=("rows", ""))
    assert model.signature.inputs == (rows, TensorSpec("k", FP32, (1,)))
    assert model.signature.optional_inputs == {"k"}
    # A batch of several requests could have only one k.
    assert model.signature.dependent_rows.startswith(
        "input 'k' has a default in the file, and requests may override it"
    )
    model.warm_up([])
    assert run(model, ("Y",), X=X)[0].tolist() == [[6, 2], [4, 10]]
    assert run(model, ("Y",), X=X, k=np.array([5], np.float32))[0].tolist() == [[15, 5], [10, 25]]


@pytest.mark.parametrize(
    ("content", "options", "optional"),
    [
        pytest.param(scaled(TWO), {"max_batch_size": 8}, set(), id="a batch has no place for it"),
        pytest.param(scaled(TWO, ir_version=3), {}, set(), id="fixed before IR version 4"),
        pytest.param(scaled(np.ones(1025, np.float32)), {}, set(), id="weights"),
        pytest.param(
            scaled(np.ones(1025, np.float32)),
            {"inputs": [InputConfig("k", FP32, (1025,), optional=True)]},
            {"k"},
            id="weights that the configuration names",
        ),
    ],
)
def test_which_defaults_are_inputs(
    model_source: SourceMaker, content: bytes, options: dict[str, Any], optional: set[str]
) -> None:
    model = load(model_source("model.onnx", content, **options))
    assert model.signature.optional_inputs == optional
    assert [spec.name for spec in model.signature.inputs] == ["X", *optional]
    assert bool(model.signature.dependent_rows) is bool(optional)


@pytest.mark.parametrize(("shape", "batching"), [(["rows", 2], True), (["m", 2], False)])
def test_an_input_with_a_default_may_have_a_row_for_each_row(
    model_source: SourceMaker, shape: list[Any], batching: bool
) -> None:
    source = model_source("model.onnx", scaled(np.array([[2, 3]], np.float32), shape=shape))
    model = load(source)
    assert model.signature.optional_inputs == {"k"}
    assert bool(model.signature.dependent_rows) is not batching
    assert run(model, ("Y",), X=X)[0].tolist() == [[6, 3], [4, 15]]
    assert run(model, ("Y",), X=X, k=X)[0].tolist() == [[9, 1], [4, 25]]
    batched = load(replace(source, config=replace(source.config, max_batch_size=8)))
    assert batched.signature.optional_inputs == ({"k"} if batching else set())


def places(rows: str, found: str) -> bytes:
    """Y [values of X that are not 0, 2]: their places."""
    nodes = [helper.make_node("NonZero", ["X"], ["found"]), helper.make_node("Transpose", ["found"], ["Y"])]
    return model_bytes(nodes, [info("X", [rows, 2])], [info("Y", [found, 2], TensorProto.INT64)])


@pytest.mark.parametrize(
    ("rows", "found", "reason"),
    [
        ("batch", "places", "output 'Y' has 'places' rows, input 'X' has 'batch'"),
        ("unk__1", "unk__2", "1 row gives output 'Y' of shape [2, 2]"),
        ("n", "n", "1 row gives output 'Y' of shape [2, 2]"),
    ],
)
def test_outputs_with_other_rows_than_the_inputs_are_not_batched(
    model_source: SourceMaker, rows: str, found: str, reason: str
) -> None:
    model = load(model_source("model.onnx", places(rows, found)))
    assert model.signature.dependent_rows == f"rows depend on each other: {reason}"
    assert model_load_check(model).parts == (model.signature.dependent_rows,)
    assert run(model, ("Y",), X=X)[0].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_rows_that_only_zeros_keep_are_not_batched(model_source: SourceMaker) -> None:
    """Y = the rows of X whose first number is not negative."""
    nodes = [
        helper.make_node("Gather", ["X", "index"], ["first"], axis=1),
        helper.make_node("GreaterOrEqual", ["first", "zero"], ["kept"]),
        helper.make_node("Compress", ["X", "kept"], ["Y"], axis=0),
    ]
    constants = {"index": np.array(0), "zero": np.array(0, np.float32)}
    content = model_bytes(nodes, [info("X", ["n", 2])], [info("Y", ["n", 2])], constants)
    model = load(model_source("model.onnx", content))
    assert "output 'Y' of shape" in model.signature.dependent_rows
    rows = np.array([[-1, 2], [3, 4], [0, 5]], np.float32)
    assert run(model, ("Y",), X=rows)[0].tolist() == [[3, 4], [0, 5]]


def test_numbered_names_and_a_written_batch_size_say_nothing_against_batches(model_source: SourceMaker) -> None:
    neg = model_bytes([helper.make_node("Neg", ["X"], ["Y"])], [info("X", ["unk__1", 2])], [info("Y", ["unk__2", 2])])
    assert not load(model_source("model.onnx", neg)).signature.dependent_rows
    named = helper.make_node("Neg", ["X"], ["Y"])
    content = model_bytes([named], [info("X", ["batch", 2])], [info("Y", ["places", 2])])
    assert load(model_source("model.onnx", content)).signature.dependent_rows
    assert not load(model_source("model.onnx", content, max_batch_size=8)).signature.dependent_rows


def test_the_error_of_a_damaged_file_with_maps_has_the_engines_text(model_source: SourceMaker, tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="it looks cut short"):
        load(model_source("model.onnx", map_classifier([0, 1, 2])[:-40]))
