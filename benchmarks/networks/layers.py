"""Builds layers with seeded random weights whose outputs have a chosen mean and deviation.

Random weights alone make activations vanish, explode, or be the same for every image. A trained network's
normalisations prevent that with statistics of its training images. Here the statistics come from a few images, in one
run that normalises each layer by its outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from rocserve_tools.get.onnx_graph import IR_VERSION, Floats, Graph

_EPSILON = 1e-5
"""Added to a variance, so that a constant channel causes no division by zero."""
_MEASURING_OPSET = 15
"""The first opset whose BatchNormalization outputs the batch's statistics."""
_ERRORS_ONLY = 3


@dataclass(frozen=True, slots=True)
class Target:
    """Holds the wanted mean and standard deviation of each channel of a layer; one number applies to all channels."""

    mean: Floats | float
    deviation: Floats | float


_MOSTLY_POSITIVE = Target(1.0, 0.5)
"""Most values pass a ReLU unchanged. With a mean of 0 each layer would amplify an image's differences from the others,
and after a hundred layers a few images would dominate."""


def untrained_model(graph: Graph, name: str, opset: int) -> onnx.ModelProto:
    """Return the model, which names itself untrained."""
    note = f"{name} with seeded random weights: its speed and shapes are real, its answers mean nothing"
    return graph.model(name, opset, "rocserve untrained", note)


def seeded_weights(seed: int, name: str, shape: tuple[int, ...]) -> Floats:
    """Return normal weights with variance 2 / fan-in (He et al., 2015), which keeps the size of activations through
    ReLUs. Each name has a separate random stream, so that a layer's weights do not depend on the layers before."""
    generator = np.random.default_rng([seed, *name.encode()])
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(np.sqrt(2.0 / np.prod(shape[1:])))
    return values


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    weighted: onnx.NodeProto
    normalisation: onnx.NodeProto
    target: Target
    weights: Floats

    def parameters(self, mean: Floats, variance: Floats) -> dict[str, Floats]:
        values = (self.target.deviation, self.target.mean, mean, variance)
        shape = self.weights.shape[:1]
        names = self.normalisation.input[1:]
        return {
            name: np.broadcast_to(value, shape).astype(np.float32) for name, value in zip(names, values, strict=True)
        }


class Layers:
    """Adds layers to a graph, and weights at the end. Tensors are FP32, NCHW."""

    def __init__(self, seed: int) -> None:
        self.graph = Graph()
        self.channels: dict[str, int] = {}
        self._seed = seed
        self._layers: list[_Layer] = []

    def convolution(
        self,
        name: str,
        source: str,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        pads: tuple[int, int, int, int] | None = None,
        target: Target = _MOSTLY_POSITIVE,
    ) -> str:
        """Add a normalised convolution. `pads`: top, left, bottom, right; None = keep the image's size."""
        padding = kernel // 2
        attributes: dict[str, object] = {
            "kernel_shape": [kernel, kernel],
            "strides": [stride, stride],
            "pads": list(pads or (padding, padding, padding, padding)),
        }
        return self._normalised(
            "Conv", name, source, (channels, self.channels[source], kernel, kernel), target, attributes
        )

    def dense(self, name: str, source: str, outputs: int, target: Target) -> str:
        return self._normalised("Gemm", name, source, (outputs, self.channels[source]), target, {"transB": 1})

    def node(self, operator: str, sources: list[str], name: str, **attributes: object) -> str:
        """Add a node whose output has as many channels as its first input."""
        return self._remember(self.graph.add_node(operator, sources, name, **attributes), self.channels[sources[0]])

    def concatenation(self, name: str, *sources: str) -> str:
        joined = self.graph.add_node("Concat", sources, name, axis=1)
        return self._remember(joined, sum(self.channels[source] for source in sources))

    def normalise(self, images: Mapping[str, Floats], fused: Collection[str]) -> None:
        """Set the weights of all layers, with normalisations computed from these images. `fused`: operators whose
        normalisation is folded into weights and bias, the fastest form for inference; for other operators it stays a
        node. The result is the same for each run on one machine. Another processor sums in another order, so that the
        last digits of its weights differ."""
        measured = iter(self._measured(images))
        for layer in self._layers:
            parameters = layer.parameters(next(measured), next(measured))
            weights = layer.weights
            if layer.weighted.op_type in fused:
                gamma, beta, mean, variance = parameters.values()
                scale = gamma / np.sqrt(variance + np.float32(_EPSILON))
                weights = weights * scale.reshape(-1, *(1,) * (weights.ndim - 1))
                parameters = {f"{layer.name}_bias": beta - mean * scale}
                layer.weighted.input.extend(parameters)
                layer.weighted.name = layer.weighted.output[0] = layer.name
                self.graph.nodes.remove(layer.normalisation)
            self.graph.add_constant(layer.weighted.input[1], weights)
            for name, values in parameters.items():
                self.graph.add_constant(name, values)
        self._layers.clear()

    def _normalised(
        self,
        operator: str,
        name: str,
        source: str,
        shape: tuple[int, ...],
        target: Target,
        attributes: dict[str, object],
    ) -> str:
        weight = f"{name}_weight"
        plain = self.graph.add_node(operator, [source, weight], f"{name}_plain", **attributes)
        parts = [f"{name}_{part}" for part in ("gamma", "beta", "running_mean", "running_variance")]
        self.graph.add_node("BatchNormalization", [plain, *parts], name, epsilon=_EPSILON)
        weights = seeded_weights(self._seed, weight, shape)
        self._layers.append(_Layer(name, self.graph.nodes[-2], self.graph.nodes[-1], target, weights))
        return self._remember(name, shape[0])

    def _remember(self, tensor: str, channels: int) -> str:
        self.channels[tensor] = channels
        return tensor

    def _measured(self, images: Mapping[str, Floats]) -> Sequence[Floats]:
        """Return mean and variance of each channel over images, rows and columns, for each layer before its
        normalisation. Weights are passed as inputs, so that none is copied."""
        inputs = dict(images)
        outputs: list[str] = []
        in_training: dict[str, onnx.NodeProto] = {}
        zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
        for layer in self._layers:
            inputs |= {layer.weighted.input[1]: layer.weights, **layer.parameters(zero, one)}
            statistics = [f"{layer.name}_measured_mean", f"{layer.name}_measured_variance"]
            outputs += statistics
            in_training[layer.name] = helper.make_node(
                "BatchNormalization",
                layer.normalisation.input,
                [layer.name, *statistics],
                epsilon=_EPSILON,
                momentum=0.0,
                training_mode=1,
            )
        graph = helper.make_graph(
            [in_training.get(node.name, node) for node in self.graph.nodes],
            "measuring",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, values.shape) for name, values in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.graph.initializers,
        )
        opsets = [helper.make_opsetid("", _MEASURING_OPSET)]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        # The model runs once, so searching for a faster plan would cost more than it saves.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        measured: Sequence[Floats] = session.run(outputs, inputs)
        return measured


def photo_like_images(count: int, side: int, seed: int) -> Floats:
    """Return synthetic images: FP32 [count, side, side, 3], RGB, 0..1. Random squares of all sizes, the larger the
    stronger, give them what photographs have: large areas, sharp edges, and more contrast in them than in details."""
    generator = np.random.default_rng(seed)
    images = np.zeros((count, side, side, 3))
    for cells in 2 ** np.arange(1, side.bit_length()):
        squares = generator.standard_normal((count, cells, cells, 3)) / np.sqrt(cells)
        squares += generator.standard_normal((count, cells, cells, 1)) / np.sqrt(cells)
        places = np.arange(side) * cells // side
        images += squares[:, places][:, :, places]
    images -= images.min(axis=(1, 2, 3), keepdims=True)
    levels: Floats = (images / images.max(axis=(1, 2, 3), keepdims=True)).astype(np.float32)
    return levels
