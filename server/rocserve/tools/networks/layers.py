"""Layers whose outputs have a wanted mean and spread.

Random weights alone make activations vanish, explode, or come out the same for every image. A trained network's
normalisation prevents that with statistics of its training images, so these networks get theirs from a few images too,
in one run that normalises each layer by its own outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from rocserve.tools.networks.graph import IR_VERSION, Graph

_EPSILON = 1e-5
"""Added to a variance, so that a channel that never changes divides by no zero."""
_MEASURING_OPSET = 15
"""The first ones whose BatchNormalization hands out the statistics of its batch."""
_ERRORS_ONLY = 3
"""ONNX Runtime's number for it."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Target:
    """The mean and the standard deviation that each channel of a layer is to have; one number counts for all."""

    mean: Floats
    deviation: Floats

    @staticmethod
    def of(mean: float, deviation: float) -> Target:
        return Target(np.array([mean], dtype=np.float32), np.array([deviation], dtype=np.float32))


EASY = Target.of(1.0, 0.5)
"""Most values lie where a rectifier lets them pass unchanged. With a mean of 0 each layer would stretch what sets an
image apart from the others, and after a hundred layers some images would drown all the rest."""


def seeded_weights(seed: int, name: str, shape: tuple[int, ...]) -> Floats:
    """Normal with variance 2 / fan-in (He et al., 2015: keeps the size of activations through ReLUs); each name has a
    stream of its own, so that no layer's weights depend on the layers before."""
    generator = np.random.default_rng([seed, *name.encode()])
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(np.sqrt(2.0 / np.prod(shape[1:])))
    return values


@dataclass(frozen=True, slots=True)
class _Layer:
    """A Conv or Gemm, and the normalisation behind it."""

    name: str
    weighted: onnx.NodeProto
    normalisation: onnx.NodeProto
    target: Target
    weights: Floats

    def parameters(self, mean: Floats, variance: Floats) -> dict[str, Floats]:
        """Of the normalisation, by the names of its inputs."""
        values = (self.target.deviation, self.target.mean, mean, variance)
        shape = self.weights.shape[:1]
        names = self.normalisation.input[1:]
        return {
            name: np.broadcast_to(value, shape).astype(np.float32) for name, value in zip(names, values, strict=True)
        }


class Layers:
    """Adds layers to a graph, then their weights. Tensors are FP32, NCHW; how many channels each has is remembered."""

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
        target: Target = EASY,
    ) -> str:
        """A normalised convolution; without `pads` (top, left, bottom, right) the output is as large as the input."""
        around = kernel // 2
        attributes: dict[str, object] = {
            "kernel_shape": [kernel, kernel],
            "strides": [stride, stride],
            "pads": list(pads or (around, around, around, around)),
        }
        return self._normalised(
            "Conv", name, source, (channels, self.channels[source], kernel, kernel), target, attributes
        )

    def dense(self, name: str, source: str, outputs: int, target: Target) -> str:
        """A normalised layer over [images, values]."""
        return self._normalised("Gemm", name, source, (outputs, self.channels[source]), target, {"transB": 1})

    def node(self, operator: str, sources: list[str], name: str, **attributes: object) -> str:
        """A node whose output has as many channels as its first input."""
        return self._remember(self.graph.add_node(operator, sources, name, **attributes), self.channels[sources[0]])

    def concatenation(self, name: str, *sources: str) -> str:
        joined = self.graph.add_node("Concat", sources, name, axis=1)
        return self._remember(joined, sum(self.channels[source] for source in sources))

    def normalise(self, images: Mapping[str, Floats], fused: Collection[str]) -> None:
        """Give all layers their weights, and normalisations by what they make of these images.

        `fused`: the operators that have it multiplied into weights and bias, which is how inference runs it fastest;
        behind the others it stays a node. The outcome is the same each time on one machine. Another processor sums in
        another order, and gives weights that differ in their last digits.
        """
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
        """Mean and variance of each channel over images, rows and columns, of each layer before its normalisation.
        Weights are inputs, so that none is copied."""
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
        # Nothing is run twice, so to search for a faster plan costs more than it brings.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        measured: Sequence[Floats] = session.run(outputs, inputs)
        return measured
