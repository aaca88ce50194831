"""Layers whose outputs have a wanted mean and spread: first measured on images, then written with what was found.

Random weights alone make activations vanish, explode, or come out the same for every image. A trained network's
normalisation prevents that with statistics of its training images, so these networks get theirs from a few images too:

1. The network is built with normalisation over the batch that it is run on (mean and variance of each channel over
   images, rows and columns) and hands those out: one run finds the statistics of all layers.
2. It is built again with these as constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rocserve.tools.onnx_graph import Graph
from rocserve.tools.untrained.origin import untrained_model

EPSILON = 1e-5
"""Added to a variance, so that a channel that never changes divides by no zero."""
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


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was measured of a layer before its normalisation, a number a channel."""

    mean: Floats
    variance: Floats

    def scale_and_shift(self, target: Target) -> tuple[Floats, Floats]:
        """`a` and `b` of the a * x + b that has the target's mean and deviation."""
        scale = target.deviation / np.sqrt(self.variance + np.float32(EPSILON))
        return scale, target.mean - self.mean * scale


class SeededWeights:
    """Draws each layer's weights from its own stream, so that they do not depend on the layers before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[str, Floats] = {}

    def draw(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Normal with variance 2 / fan-in (He et al., 2015: keeps the size of activations through ReLUs)."""
        if name not in self._drawn:
            generator = np.random.default_rng([self._seed, *name.encode()])
            values = generator.standard_normal(shape, dtype=np.float32)
            values *= np.float32(np.sqrt(2.0 / np.prod(shape[1:])))
            self._drawn[name] = values
        return self._drawn[name]

    def take(self, name: str, shape: tuple[int, ...]) -> Floats:
        """As `draw`, for the last time: the memory is the caller's."""
        values = self.draw(name, shape)
        del self._drawn[name]
        return values

    def drawn(self) -> dict[str, Floats]:
        return dict(self._drawn)


@dataclass(frozen=True)
class WeightedLayer:
    """A Conv or Gemm that is followed by its normalisation."""

    operator: str
    name: str
    source: str
    shape: tuple[int, ...]
    """Of the weights, outputs first."""
    target: Target
    attributes: dict[str, object]


class Layers:
    """Adds layers to a graph. Tensors are FP32, NCHW; how many channels each has is remembered.

    Without statistics each layer normalises by those of the batch, and hands them out; its weights are inputs, so that
    none is copied. With them they are constants: in the weights where `fused`, else in a BatchNormalization node behind
    each convolution.
    """

    def __init__(
        self, weights: SeededWeights, statistics: Mapping[str, Statistics] | None = None, *, fused: bool = True
    ) -> None:
        self.graph = Graph()
        self.channels: dict[str, int] = {}
        self._weights = weights
        self._statistics = statistics
        self._fuses = fused

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
        shape = (channels, self.channels[source], kernel, kernel)
        layer = WeightedLayer("Conv", name, source, shape, target, attributes)
        return self._remember(self._normalised(layer), channels)

    def dense(self, name: str, source: str, outputs: int, target: Target) -> str:
        """A normalised layer over [images, values]."""
        shape = (outputs, self.channels[source])
        layer = WeightedLayer("Gemm", name, source, shape, target, {"transB": 1})
        return self._remember(self._normalised(layer), outputs)

    def node(self, operator: str, sources: list[str], name: str, **attributes: object) -> str:
        """A node whose output has as many channels as its first input."""
        return self._remember(self.graph.add_node(operator, sources, name, **attributes), self.channels[sources[0]])

    def concatenation(self, name: str, *sources: str) -> str:
        joined = self.graph.add_node("Concat", sources, name, axis=1)
        return self._remember(joined, sum(self.channels[source] for source in sources))

    def _remember(self, tensor: str, channels: int) -> str:
        self.channels[tensor] = channels
        return tensor

    def _normalised(self, layer: WeightedLayer) -> str:
        """The layer and its normalisation; the name of its output."""
        if self._statistics is None:
            return self._measured(layer)
        found = self._statistics[layer.name]
        if self._fuses or layer.operator != "Conv":
            return self._fused(layer, found)
        return self._with_node(layer, found)

    def _measured(self, layer: WeightedLayer) -> str:
        graph, name, is_convolution = self.graph, layer.name, layer.operator == "Conv"
        weight = f"{name}_weight"
        self._weights.draw(weight, layer.shape)
        graph.add_input(weight, layer.shape)
        axes = [0, 2, 3] if is_convolution else [0]
        plain = graph.add_node(layer.operator, [layer.source, weight], f"{name}_plain", **layer.attributes)
        mean = graph.add_node("ReduceMean", [plain], f"{name}_mean", axes=axes, keepdims=1)
        centred = graph.add_node("Sub", [plain, mean], f"{name}_centred")
        square = graph.add_node("Mul", [centred, centred], f"{name}_square")
        variance = graph.add_node("ReduceMean", [square], f"{name}_variance", axes=[*axes, 1], keepdims=1)
        graph.add_output(mean)
        graph.add_output(variance)
        epsilon = graph.add_constant(f"{name}_epsilon", np.array([EPSILON], dtype=np.float32))
        padded = graph.add_node("Add", [variance, epsilon], f"{name}_padded")
        deviation = graph.add_node("Sqrt", [padded], f"{name}_deviation")
        standard = graph.add_node("Div", [centred, deviation], f"{name}_standard")
        as_channels = (-1, 1, 1) if is_convolution else (-1,)
        wanted = graph.add_constant(f"{name}_wanted_deviation", layer.target.deviation.reshape(as_channels))
        level = graph.add_constant(f"{name}_wanted_mean", layer.target.mean.reshape(as_channels))
        scaled = graph.add_node("Mul", [standard, wanted], f"{name}_scaled")
        return graph.add_node("Add", [scaled, level], name)

    def _fused(self, layer: WeightedLayer, statistics: Statistics) -> str:
        """With the normalisation multiplied into weights and bias, which is how inference runs it fastest."""
        name, shape = layer.name, layer.shape
        scale, shift = statistics.scale_and_shift(layer.target)
        weight = self._weights.take(f"{name}_weight", shape)
        weight *= scale.reshape(-1, *(1,) * (len(shape) - 1))
        inputs = [
            layer.source,
            self.graph.add_constant(f"{name}_weight", weight),
            self.graph.add_constant(f"{name}_bias", np.broadcast_to(shift, shape[:1]).astype(np.float32)),
        ]
        return self.graph.add_node(layer.operator, inputs, name, **layer.attributes)

    def _with_node(self, layer: WeightedLayer, statistics: Statistics) -> str:
        graph, name, shape = self.graph, layer.name, layer.shape
        weight = graph.add_constant(f"{name}_weight", self._weights.take(f"{name}_weight", shape))
        plain = graph.add_node("Conv", [layer.source, weight], f"{name}_plain", **layer.attributes)
        parts = {
            "gamma": layer.target.deviation,
            "beta": layer.target.mean,
            "running_mean": statistics.mean,
            "running_variance": statistics.variance,
        }
        constants = [
            graph.add_constant(f"{name}_{part}", np.broadcast_to(values, shape[:1]).astype(np.float32))
            for part, values in parts.items()
        ]
        return graph.add_node("BatchNormalization", [plain, *constants], name, epsilon=EPSILON)


def measure(
    layers: Layers, name: str, opset: int, weights: SeededWeights, images: dict[str, Floats]
) -> dict[str, Statistics]:
    """The statistics of each layer, by its name, on images that the network takes.

    The outcome is the same each time on one machine. Another processor sums in another order, and gives weights that
    differ in their last digits.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    # Nothing is run twice, so to search for a faster plan costs more than it brings.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    serialized = untrained_model(layers.graph, name, opset).SerializeToString()
    session = onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    measured = [output.name for output in layers.graph.outputs]
    values = dict(zip(measured, session.run(measured, {**images, **weights.drawn()}), strict=True))
    return {
        output.removesuffix("_mean"): Statistics(
            values[output].reshape(-1), values[f"{output.removesuffix('_mean')}_variance"].reshape(-1)
        )
        for output in measured
        if output.endswith("_mean")
    }
