"""Writes EfficientNet-Lite0, with its weights trained on ImageNet, as a program of torch.export. Needs PyTorch.

    rocserve get efficientnet_lite0
    python clients/examples/quantisation_photographs.py model_repository/efficientnet_lite0/1/model.onnx model.pt2

`rocserve quantise` can then quantise the program.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from quantisation_digits import save_program
from torch import Tensor, nn

SIDE = 224


def as_network(model: onnx.ModelProto) -> nn.Module:
    """Return the network of an ONNX file that `rocserve get efficientnet_lite0` has written: six kinds of nodes."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    layers: dict[str, nn.Module] = {}
    steps: list[tuple[str, list[str], str]] = []
    for number, node in enumerate(model.graph.node):
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        layers[str(number)] = _layer(node.op_type, [constants.get(name) for name in node.input], attributes)
        steps.append((str(number), [name for name in node.input if name not in constants], node.output[0]))
    return _Network(nn.ModuleDict(layers), steps, model.graph.input[0].name, model.graph.output[0].name).eval()


class _Network(nn.Module):
    def __init__(
        self, layers: nn.ModuleDict, steps: list[tuple[str, list[str], str]], source: str, result: str
    ) -> None:
        super().__init__()
        self.layers, self.steps, self.source, self.result = layers, steps, source, result

    def forward(self, images: Tensor) -> Tensor:
        values = {self.source: images}
        for layer, sources, result in self.steps:
            values[result] = self.layers[layer](*(values[name] for name in sources))
        return values[self.result]


class _Sum(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def _layer(kind: str, constants: list[Any], attributes: dict[str, Any]) -> nn.Module:
    if kind == "Conv":
        return _convolution(constants[1], constants[2], attributes)
    if kind == "Gemm":
        linear = nn.Linear(*reversed(constants[1].shape))
        _fill(linear, constants[1], constants[2])
        return linear
    simple: dict[str, nn.Module] = {
        "Clip": nn.ReLU6(),
        "Add": _Sum(),
        "GlobalAveragePool": nn.AdaptiveAvgPool2d(1),
        "Flatten": nn.Flatten(),
    }
    return simple[kind]


def _convolution(weight: Any, bias: Any, attributes: dict[str, Any]) -> nn.Module:
    top, left, bottom, right = attributes["pads"]
    groups = attributes["group"]
    layer = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        weight.shape[2],
        stride=attributes["strides"],
        padding=(top, left) if (top, left) == (bottom, right) else 0,
        groups=groups,
    )
    _fill(layer, weight, bias)
    return layer if (top, left) == (bottom, right) else nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), layer)


def _fill(layer: Any, weight: Any, bias: Any) -> None:
    layer.weight = nn.Parameter(torch.from_numpy(weight.copy()))
    layer.bias = nn.Parameter(torch.from_numpy(bias.copy()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write EfficientNet-Lite0 as a program of torch.export.")
    parser.add_argument("onnx", type=Path, help="the file that `rocserve get efficientnet_lite0` has written")
    parser.add_argument("out", type=Path, help="the .pt2 to write")
    parser.add_argument("--side", type=int, default=SIDE, help="of its images, in pixels (default 224)")
    options = parser.parse_args()
    save_program(as_network(onnx.load(options.onnx)), torch.zeros(2, 3, options.side, options.side), options.out)


if __name__ == "__main__":
    main()
