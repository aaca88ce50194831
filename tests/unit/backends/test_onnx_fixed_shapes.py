"""Models on providers that compile each shape: a session for each batch size. The sessions here are the CPU provider's,
which takes fixed dimensions like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.models import add_sub, graph, identity

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_properties
from rocserve.backends.onnx.backend import load_fixed_shapes
from rocserve.backends.onnx.opener import SessionOpener
from rocserve.backends.onnx.providers import MIGRAPHX_PROVIDER, Provider, ProviderPlan
from rocserve.backends.onnx.signature import fixed_dimensions
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.tensors import Tensor, tensor_from_numpy

SourceMaker = Callable[..., ModelSource]

FLOAT = TensorProto.FLOAT


class CountingOpener(SessionOpener):
    """Records the batch sizes of its sessions."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model, ProviderPlan((), accepts_cpu=False))
        self.opened: list[Mapping[str, int]] = []

    def open(self, dimensions: Mapping[str, int] | None = None) -> Any:
        self.opened.append(dict(dimensions or {}))
        return super().open(dimensions)


def load_sized(source: ModelSource, **accelerator: str) -> tuple[LoadedModel, CountingOpener]:
    opener = CountingOpener(source)
    provider = Provider(MIGRAPHX_PROVIDER, {}, accelerator)
    return load_fixed_shapes(source, opener, provider), opener


def run(model: LoadedModel, wanted: tuple[str, ...], **inputs: np.ndarray[Any, Any]) -> Mapping[str, Any]:
    tensors = {name: tensor_from_numpy(name, array) for name, array in inputs.items()}
    return model.execute(Batch(tensors, wanted, (len(next(iter(inputs.values()))),))).outputs


def config_of(shape: tuple[int, ...], datatype: DataType = DataType.FP32) -> dict[str, Any]:
    return {"inputs": [InputConfig("X", datatype, shape)], "outputs": [OutputConfig("Y", datatype, shape)]}


def test_a_session_for_each_batch_size(model_source: SourceMaker) -> None:
    messages: list[str] = []
    spec = [InputConfig(name, DataType.INT32, (16,)) for name in ("INPUT0", "INPUT1")]
    outputs = [OutputConfig(name, DataType.INT32, (16,)) for name in ("OUTPUT0", "OUTPUT1")]
    source = model_source("model.onnx", add_sub(), max_batch_size=6, inputs=spec, outputs=outputs)
    model, opener = load_sized(replace(source, report=messages.append))
    assert opener.opened == [{"batch": 1}, {"batch": 2}, {"batch": 4}, {"batch": 6}]
    assert messages == [
        "MIGraphXExecutionProvider compiles the model for batch size 1 (1 of 4)",
        "MIGraphXExecutionProvider compiles the model for batch size 2 (2 of 4)",
        "MIGraphXExecutionProvider compiles the model for batch size 4 (3 of 4)",
        "MIGraphXExecutionProvider compiles the model for batch size 6 (4 of 4)",
        "",
    ]
    assert model.signature.supports_batching
    assert model_properties(model) == {
        "onnxruntime_version": onnxruntime.__version__,
        "execution_providers": "CPUExecutionProvider",
        "batch_sizes": "1, 2, 4, 6",
    }
    assert model.signature.inputs[0].shape == (-1, 16)
    model.warm_up([])
    for rows in range(1, 15):
        left = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
        outputs = run(model, ("OUTPUT1", "OUTPUT0"), INPUT0=left, INPUT1=left[::-1].copy())
        np.testing.assert_array_equal(outputs["OUTPUT0"], left + left[::-1])
        np.testing.assert_array_equal(outputs["OUTPUT1"], left - left[::-1])
        assert set(run(model, ("OUTPUT1",), INPUT0=left, INPUT1=left)) == {"OUTPUT1"}


def test_sizes_of_the_configuration(model_source: SourceMaker) -> None:
    net = graph([helper.make_node("Neg", ["X"], ["Y"])], {"X": (FLOAT, ["n", 2])}, {"Y": (FLOAT, ["n", 2])})
    source = model_source("model.onnx", net, max_batch_size=8, parameters={"batch_sizes": "3, 8"}, **config_of((2,)))
    model, opener = load_sized(source, migraphx_max_dynamic_batch="4")
    assert opener.opened == [{"n": 3}, {"n": 8}]
    for rows in (1, 3, 5, 8):
        array = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
        np.testing.assert_array_equal(run(model, ("Y",), X=array)["Y"], -array)
    model, opener = load_sized(
        replace(source, config=replace(source.config, parameters={})), migraphx_max_dynamic_batch="4"
    )
    assert opener.opened == [{"n": 1}, {"n": 2}, {"n": 4}]


def test_a_configuration_that_is_yet_to_be_completed(model_source: SourceMaker) -> None:
    _, opener = load_sized(model_source("model.onnx", identity(FLOAT, ["batch", 2])))
    assert opener.opened == [{"batch": 1}, {"batch": 2}, {"batch": 4}]


def test_a_model_without_a_batch_dimension(model_source: SourceMaker) -> None:
    net = graph([helper.make_node("Neg", ["X"], ["Y"])], {"X": (FLOAT, ["h", "w"])}, {"Y": (FLOAT, ["h", "w"])})
    model, opener = load_sized(model_source("model.onnx", net, **config_of((3, 5))))
    assert opener.opened == [{"h": 3, "w": 5}]
    model.warm_up([])
    array = np.ones((3, 5), np.float32)
    np.testing.assert_array_equal(run(model, ("Y",), X=array)["Y"], -array)


def test_dimensions_without_a_name(model_source: SourceMaker) -> None:
    net = graph([helper.make_node("Neg", ["X"], ["Y"])], {"X": (FLOAT, [None, None])}, {"Y": (FLOAT, [None, None])})
    model, opener = load_sized(model_source("model.onnx", net, max_batch_size=2, **config_of((3,))))
    assert opener.opened == [{}, {}]
    array = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(run(model, ("Y",), X=array)["Y"], -array)


def test_bfloat16_at_fixed_sizes(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", identity(TensorProto.BFLOAT16, ["batch", 3]))
    model, _ = load_sized(source, batch_sizes="2, 4")
    model.warm_up([])
    for rows in range(1, 8):
        bits = np.arange(rows * 3, dtype=np.uint16).reshape(rows, 3) + 0x3F80
        given = Tensor("INPUT0", DataType.BF16, bits.shape, bits.tobytes())
        result = model.execute(Batch({"INPUT0": given}, ("OUTPUT0",), (rows,))).outputs["OUTPUT0"]
        assert isinstance(result, Tensor)
        assert (result.datatype, result.shape) == (DataType.BF16, bits.shape)
        np.testing.assert_array_equal(result.numpy(), bits)


def test_text_at_fixed_sizes(model_source: SourceMaker) -> None:
    model, _ = load_sized(model_source("model.onnx", identity(TensorProto.STRING, ["batch", 1])), batch_sizes="4")
    result = run(model, ("OUTPUT0",), INPUT0=np.array([[b"a"], [b"b"], [b"c"]], dtype=object))["OUTPUT0"]
    assert result.tolist() == [[b"a"], [b"b"], [b"c"]]


def test_an_output_without_the_batch(model_source: SourceMaker) -> None:
    first = helper.make_tensor("first", TensorProto.BOOL, [1], [True])
    nodes = [
        helper.make_node("Constant", [], ["kept"], value=first),
        helper.make_node("Compress", ["X", "kept"], ["Y"], axis=0),
    ]
    net = graph(nodes, {"X": (FLOAT, ["n", 2])}, {"Y": (FLOAT, ["m", 2])})
    model, _ = load_sized(model_source("model.onnx", net, max_batch_size=2, **config_of((2,))))
    with pytest.raises(ServeError, match=r"output 'Y' has shape \[1, 2\] for a batch of 2") as caught:
        run(model, ("Y",), X=np.ones((2, 2), np.float32))
    assert caught.value.code is StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("dims", "declared", "batch_size", "place", "name"),
    [
        (("n", "length"), (-1,), 2, 1, "length"),
        (("n", None), (-1,), 2, 1, "?"),
        (("n", 3, "w"), (3, -1), 1, 2, "w"),
        (("h",), (-1,), 0, 0, "h"),
        (("n", "length"), None, 2, 1, "length"),
    ],
)
def test_dimensions_that_stay_open_are_refused(
    dims: tuple[int | str | None, ...], declared: tuple[int, ...] | None, batch_size: int, place: int, name: str
) -> None:
    inputs = () if declared is None else (InputConfig("X", DataType.FP32, declared),)
    with pytest.raises(ServeError) as caught:
        fixed_dimensions({"X": dims}, ModelConfig("m", inputs=inputs), "SomeProvider", batch_size)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    assert caught.value.text == (
        f"model 'm': dimension {place} of input 'X' may have any size ({name}), but SomeProvider compiles each shape in"
        " advance; give all dims of the input in config.pbtxt, each as a"
        " number"
    )


def test_a_name_that_means_two_sizes_is_left_alone() -> None:
    config = ModelConfig("m", inputs=(InputConfig("X", DataType.FP32, (7, 3)),))
    assert fixed_dimensions({"X": ("n", "n", "k")}, config, "SomeProvider", 2) == {"k": 3}
