"""Measures a network's layers on images: one run through ONNX Runtime of the network that normalises by its batch."""

from __future__ import annotations

import onnxruntime

from rocserve.tools.untrained.layers import Floats, MeasuringLayers, SeededWeights, Statistics
from rocserve.tools.untrained.origin import untrained_model

_ERRORS_ONLY = 3


def measure(
    layers: MeasuringLayers, name: str, opset: int, weights: SeededWeights, images: dict[str, Floats]
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
