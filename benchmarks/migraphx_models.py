"""The small networks of the group migraphx, which rocserve serves on MIGraphX's reference target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import onnx
from numpy.typing import NDArray

from benchmarks.cases import SEED
from benchmarks.networks.layers import untrained_model
from rocserve_tools.get.onnx_graph import Graph

MAX_BATCH_SIZE = 32
OPSET = 12
INPUT, OUTPUT = "INPUT0", "OUTPUT0"
IDENTITY_ROW = 1 << 18
"""FP32 elements: 1 MiB."""

_CONFIG = """\
name: "{name}"
backend: "onnxruntime"
max_batch_size: {max_batch_size}
input {{ name: "{input}" data_type: TYPE_FP32 dims: {input_dims} }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: {output_dims} }}
parameters {{ key: "engine" value {{ string_value: "migraphx" }} }}
parameters {{ key: "target" value {{ string_value: "ref" }} }}
"""
_ONE_ROW = 'parameters { key: "batch_sizes" value { string_value: "1" } }\n'
"""Without dynamic batching a batch never has more rows."""
_BATCHING = "dynamic_batching { }\n"


@dataclass(frozen=True, slots=True)
class Network:
    """One ONNX model and its request."""

    name: str
    title: str
    model: onnx.ModelProto
    row: tuple[int, ...]
    """The shape of a request's one row."""
    answer: tuple[int, ...]
    """The shape of its output's row."""

    def request(self) -> NDArray[numpy.float32]:
        """The input of each request, [1, *row]."""
        return numpy.random.default_rng(SEED).random((1, *self.row), dtype=numpy.float32)

    def served_name(self, batching: bool) -> str:
        return f"{self.name}_batched" if batching else self.name

    def write(self, repository: Path) -> None:
        """Write two models, without and with dynamic batching."""
        for batching in (False, True):
            name = self.served_name(batching)
            version = repository / name / "1"
            version.mkdir(parents=True)
            onnx.save(self.model, version / "model.onnx")
            config = _CONFIG.format(
                name=name,
                max_batch_size=MAX_BATCH_SIZE,
                input=INPUT,
                input_dims=list(self.row),
                output=OUTPUT,
                output_dims=list(self.answer),
            )
            (version.parent / "config.pbtxt").write_text(config + (_BATCHING if batching else _ONE_ROW))


def networks() -> Sequence[Network]:
    """All of them."""
    return [
        Network("mlp", "MLP 16-32-10", mlp(), (16,), (10,)),
        Network("mini_resnet", "mini-ResNet 3x8x8", mini_resnet(), (3, 8, 8), (8, 1, 1)),
        Network("identity", "identity of 1 MiB FP32", identity(), (IDENTITY_ROW,), (IDENTITY_ROW,)),
    ]


def mlp() -> onnx.ModelProto:
    """Two dense layers and a softmax."""
    layers = _Layers((16,))
    hidden = layers.relu(layers.dense(INPUT, 16, 32))
    return layers.model("mlp", "Softmax", layers.dense(hidden, 32, 10), (10,), axis=-1)


def mini_resnet() -> onnx.ModelProto:
    """A stem, two residual blocks of which the second halves the image, pooling."""
    layers = _Layers((3, 8, 8))
    stem = layers.relu(layers.convolution(INPUT, 3, 4))
    branch = layers.convolution(layers.relu(layers.convolution(stem, 4, 4)), 4, 4)
    joined = layers.relu(layers.node("Add", branch, stem))
    branch = layers.convolution(layers.relu(layers.convolution(joined, 4, 8, stride=2)), 8, 8)
    halved = layers.relu(layers.node("Add", branch, layers.convolution(joined, 4, 8, stride=2)))
    return layers.model("mini_resnet", "GlobalAveragePool", halved, (8, 1, 1))


def identity() -> onnx.ModelProto:
    """MIGraphX does nothing in it: its output lies in its input's memory."""
    return _Layers((IDENTITY_ROW,)).model("identity", "Identity", INPUT, (IDENTITY_ROW,))


class _Layers:
    """Builds a network with seeded weights."""

    def __init__(self, row: Sequence[int]) -> None:
        self._graph = Graph()
        self._graph.add_input(INPUT, ["batch", *row])
        self._random = numpy.random.default_rng(SEED)

    def node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"{operator.lower()}_{len(self._graph.nodes)}"
        return self._graph.add_node(operator, inputs, name, **attributes)

    def relu(self, tensor: str) -> str:
        return self.node("Relu", tensor)

    def dense(self, tensor: str, columns: int, outputs: int) -> str:
        return self.node("Gemm", tensor, self._weights(columns, outputs), self._weights(outputs))

    def convolution(self, tensor: str, channels: int, outputs: int, stride: int = 1) -> str:
        """3 x 3, padded."""
        weights = self._weights(outputs, channels, 3, 3)
        return self.node("Conv", tensor, weights, pads=[1, 1, 1, 1], strides=[stride, stride])

    def model(self, name: str, operator: str, tensor: str, row: Sequence[int], **attributes: object) -> onnx.ModelProto:
        """Finish the model: its output is the operator's of the tensor."""
        self._graph.add_node(operator, [tensor], OUTPUT, **attributes)
        self._graph.add_output(OUTPUT, ["batch", *row])
        return untrained_model(self._graph, name, OPSET)

    def _weights(self, *shape: int) -> str:
        values = self._random.normal(0.0, 0.2, shape).astype(numpy.float32)
        return self._graph.add_constant(f"weights_{len(self._graph.initializers)}", values)
