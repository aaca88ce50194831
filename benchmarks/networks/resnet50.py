"""Builds ResNet-50 version 1 (He et al., 2015; a stage's stride is in its first 1 x 1), like the ONNX Model Zoo's."""

from __future__ import annotations

import numpy as np
import onnx

from benchmarks.networks.layers import Layers, Target, photo_like_images, untrained_model

INPUT, OUTPUT = "data", "resnetv17_dense0_fwd"
"""Tensor names of the published file: FP32 [N, 3, 224, 224], and the scores, FP32 [N, 1000]."""
SIDE = 224
CLASSES = 1000
OPSET = 12
_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
_DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)
"""Mean and deviation of ImageNet's pixels, RGB, 0..1, which the published preprocessing subtracts and divides by."""

_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Number of blocks, and channels inside them. A block's output has four times as many channels."""
_EXPANSION = 4
_SCORES = Target(0.0, 2.0)
"""Spread so that the best of 1000 classes gets a visible probability."""
_SEED = 50
_IMAGES = 8


def build() -> onnx.ModelProto:
    """Build the network with seeded weights. Needs no network connection."""
    layers = Layers(_SEED)
    scores = _network(layers)
    images = (photo_like_images(_IMAGES, SIDE, _SEED) - _MEAN) / _DEVIATION
    layers.normalise({INPUT: np.ascontiguousarray(images.transpose(0, 3, 1, 2))}, fused=("Gemm",))
    layers.graph.add_output(scores, ["N", CLASSES])
    return untrained_model(layers.graph, "resnet50", OPSET)


def _network(layers: Layers) -> str:
    layers.graph.add_input(INPUT, ["N", 3, SIDE, SIDE])
    layers.channels[INPUT] = 3
    stem = _relu(layers, layers.convolution("stem", INPUT, 64, 7, stride=2))
    tensor = layers.node("MaxPool", [stem], "stem_pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, (blocks, channels) in enumerate(_STAGES, start=1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            tensor = _block(layers, f"stage{stage}_block{block}", tensor, channels, stride, widens=block == 0)
    pooled = layers.node("GlobalAveragePool", [tensor], "pool")
    features = layers.node("Flatten", [pooled], "features", axis=1)
    return layers.dense(OUTPUT, features, CLASSES, _SCORES)


def _block(layers: Layers, name: str, source: str, channels: int, stride: int, *, widens: bool) -> str:
    """Add 1 x 1, 3 x 3 and 1 x 1 convolutions, plus the source. `widens`: a convolution widens the source to match."""
    wide = channels * _EXPANSION
    inner = _relu(layers, layers.convolution(f"{name}_reduce", source, channels, 1, stride=stride))
    inner = _relu(layers, layers.convolution(f"{name}_middle", inner, channels, 3))
    inner = layers.convolution(f"{name}_expand", inner, wide, 1)
    shortcut = layers.convolution(f"{name}_shortcut", source, wide, 1, stride=stride) if widens else source
    return layers.node("Relu", [layers.node("Add", [inner, shortcut], f"{name}_sum")], f"{name}_out")


def _relu(layers: Layers, source: str) -> str:
    return layers.node("Relu", [source], f"{source}_relu")
