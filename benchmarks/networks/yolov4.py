"""Builds YOLOv4 (Bochkovskiy et al., 2020) for 416 x 416 pixels and COCO's 80 classes, like the ONNX Model Zoo's.

It consists of CSPDarknet53 with Mish, spatial pyramid pooling, and a path aggregation neck with leaky ReLUs.
Normalisations are fused into the convolutions, as in the published file.
"""

from __future__ import annotations

import numpy as np
import onnx

from benchmarks.networks.layers import Layers, Target, photo_like_images, untrained_model

INPUT = "input_1:0"
"""FP32 [N, 416, 416, 3], RGB, 0..1."""
OUTPUTS = ("Identity:0", "Identity_1:0", "Identity_2:0")
"""FP32 [N, 52, 52, 3, 85], [N, 26, 26, 3, 85] and [N, 13, 13, 3, 85]: row, column, anchor, values. The values are four
for the box, raw, then the objectness and 80 classes after a sigmoid."""
SIDE = 416
CLASSES = 80
ANCHORS = 3
OPSET = 11
_VALUES = 5 + CLASSES
_SEED = 4
_IMAGES = 6
_MEASURING_SIDE = 192
_LEAK = 0.1
_ONE = "one"
_STAGES = ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4))
"""Output channels of a stage, and its number of residual blocks."""

_BOX_CENTRE = (0.0, 1.0)
_BOX_SIZE = (0.0, 0.35)
_OBJECTNESS = (-3.7, 1.2)
_CLASS = (-2.0, 1.5)
"""Mean and deviation of the heads' raw values. Boxes stay near their anchors' sizes. Of the 10,647 predictions for an
image some dozens, not thousands, have a score above 0.25."""


def build() -> onnx.ModelProto:
    """Build the network with seeded weights. Needs no network connection."""
    layers = Layers(_SEED)
    heads = _network(layers)
    images = photo_like_images(_IMAGES, _MEASURING_SIDE, _SEED)
    layers.normalise({INPUT: images}, fused=("Conv",))
    for output, head, cells in zip(OUTPUTS, heads, (SIDE // 8, SIDE // 16, SIDE // 32), strict=True):
        _add_output(layers, head, output, cells)
    return untrained_model(layers.graph, "yolov4", OPSET)


def _network(layers: Layers) -> tuple[str, str, str]:
    """Add the network and return its three heads, the finest first: NCHW, 255 channels."""
    layers.graph.add_input(INPUT, ["N", SIDE, SIDE, 3])
    layers.graph.add_constant(_ONE, np.array(1, dtype=np.float32))
    tensor = layers.graph.add_node("Transpose", [INPUT], "planes", perm=[0, 3, 1, 2])
    layers.channels[tensor] = 3
    tensor = _mish(layers, "stem", tensor, 32, 3)
    stages = []
    for number, (channels, blocks) in enumerate(_STAGES, start=1):
        tensor = _stage(layers, f"stage{number}", tensor, channels, blocks)
        stages.append(tensor)
    tensor = _leaky_run(layers, "before_pools", tensor, ((512, 1), (1024, 3), (512, 1)))
    pools = [
        layers.node("MaxPool", [tensor], f"pool{size}", kernel_shape=[size] * 2, strides=[1, 1], pads=[size // 2] * 4)
        for size in (13, 9, 5)
    ]
    pooled = layers.concatenation("pools", *pools, tensor)
    coarse = _leaky_run(layers, "after_pools", pooled, ((512, 1), (1024, 3), (512, 1)))
    # The neck carries features of large areas to the finer maps, and back.
    middle = _upsampled_join(layers, "up_middle", coarse, stages[3], 256)
    fine = _upsampled_join(layers, "up_fine", middle, stages[2], 128)
    middle = _downsampled_join(layers, "down_middle", fine, middle, 256)
    coarse = _downsampled_join(layers, "down_coarse", middle, coarse, 512)
    return _head(layers, "fine", fine, 256), _head(layers, "middle", middle, 512), _head(layers, "coarse", coarse, 1024)


def _stage(layers: Layers, name: str, source: str, channels: int, blocks: int) -> str:
    """Add a stage that halves the sides. One part of the channels bypasses the residual blocks."""
    # Only the first stage splits no channels: each part has all of them.
    part = channels if blocks == 1 else channels // 2
    inside = channels // 2
    down = _mish(layers, f"{name}_down", source, channels, 3, stride=2)
    pooled = _mish(layers, f"{name}_around", down, part, 1)
    tensor = _mish(layers, f"{name}_in", down, part, 1)
    for block in range(blocks):
        inner = _mish(layers, f"{name}_block{block}_a", tensor, inside, 1)
        inner = _mish(layers, f"{name}_block{block}_b", inner, part, 3)
        tensor = layers.node("Add", [tensor, inner], f"{name}_block{block}")
    tensor = _mish(layers, f"{name}_out", tensor, part, 1)
    return _mish(layers, f"{name}_join", layers.concatenation(f"{name}_parts", tensor, pooled), channels, 1)


def _upsampled_join(layers: Layers, name: str, coarse: str, fine: str, channels: int) -> str:
    narrow = _leaky(layers, f"{name}_narrow", coarse, channels, 1)
    scales = layers.graph.add_constant(f"{name}_scales", np.array([1, 1, 2, 2], dtype=np.float32))
    no_region = layers.graph.add_constant(f"{name}_no_region", np.zeros(0, dtype=np.float32))
    large = layers.node(
        "Resize",
        [narrow, no_region, scales],
        f"{name}_large",
        mode="nearest",
        nearest_mode="floor",
        coordinate_transformation_mode="half_pixel",
    )
    joined = layers.concatenation(f"{name}_joined", _leaky(layers, f"{name}_side", fine, channels, 1), large)
    return _five_convolutions(layers, name, joined, channels)


def _downsampled_join(layers: Layers, name: str, fine: str, coarse: str, channels: int) -> str:
    small = _leaky(layers, f"{name}_small", fine, channels, 3, stride=2)
    return _five_convolutions(layers, name, layers.concatenation(f"{name}_joined", small, coarse), channels)


def _five_convolutions(layers: Layers, name: str, source: str, channels: int) -> str:
    wide = 2 * channels
    return _leaky_run(layers, name, source, ((channels, 1), (wide, 3), (channels, 1), (wide, 3), (channels, 1)))


def _head(layers: Layers, name: str, source: str, channels: int) -> str:
    wide = _leaky(layers, f"head_{name}_wide", source, channels, 3)
    values = np.array([_BOX_CENTRE] * 2 + [_BOX_SIZE] * 2 + [_OBJECTNESS] + [_CLASS] * CLASSES, dtype=np.float32)
    target = Target(*np.tile(values, (ANCHORS, 1)).T)
    return layers.convolution(f"head_{name}", wide, ANCHORS * _VALUES, 1, target=target)


def _add_output(layers: Layers, head: str, output: str, cells: int) -> None:
    """Convert a head from [N, 255, rows, columns] to the published layout, with a sigmoid on all values but the box."""
    graph = layers.graph
    last = graph.add_node("Transpose", [head], f"{head}_last", perm=[0, 2, 3, 1])
    # 0 keeps a dimension.
    shape = graph.add_constant(f"{head}_shape", np.array([0, 0, 0, ANCHORS, _VALUES], dtype=np.int64))
    by_anchor = graph.add_node("Reshape", [last, shape], f"{head}_by_anchor")
    box, objectness, classes = graph.add_split(by_anchor, 4, (4, 1, CLASSES), f"{head}_parts")
    objectness = graph.add_node("Sigmoid", [objectness], f"{head}_objectness")
    classes = graph.add_node("Sigmoid", [classes], f"{head}_classes")
    graph.add_node("Concat", [box, objectness, classes], output, axis=4)
    graph.add_output(output, ["N", cells, cells, ANCHORS, _VALUES])


def _leaky_run(layers: Layers, name: str, source: str, convolutions: tuple[tuple[int, int], ...]) -> str:
    for place, (channels, kernel) in enumerate(convolutions):
        source = _leaky(layers, f"{name}_{place}", source, channels, kernel)
    return source


def _leaky(layers: Layers, name: str, source: str, channels: int, kernel: int, stride: int = 1) -> str:
    tensor = layers.convolution(name, source, channels, kernel, stride=stride, pads=_pads(kernel, stride))
    return layers.node("LeakyRelu", [tensor], f"{name}_leaky", alpha=_LEAK)


def _mish(layers: Layers, name: str, source: str, channels: int, kernel: int, stride: int = 1) -> str:
    """Add a convolution and x * tanh(log(exp(x) + 1)) (Misra, 2019), without Softplus, like the published file."""
    tensor = layers.convolution(name, source, channels, kernel, stride=stride, pads=_pads(kernel, stride))
    power = layers.node("Exp", [tensor], f"{name}_exp")
    soft = layers.node("Log", [layers.node("Add", [power, _ONE], f"{name}_exp_and_one")], f"{name}_softplus")
    gate = layers.node("Tanh", [soft], f"{name}_gate")
    return layers.node("Mul", [tensor, gate], f"{name}_mish")


def _pads(kernel: int, stride: int) -> tuple[int, int, int, int]:
    """Return the padding. A convolution that halves the sides pads only at the top and on the left."""
    padding = kernel // 2
    return (1, 1, 0, 0) if stride == 2 else (padding, padding, padding, padding)
