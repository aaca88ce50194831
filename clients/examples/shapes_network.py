"""Defines the network of `detect_shapes`, a small YOLO with two heads, and how to read its outputs. Needs PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import torch
from shapes import LABELS
from torch import Tensor, nn

INPUT_SIZE = 192
STRIDES = (8, 16)
ANCHORS = (((18, 19), (25, 26), (30, 40)), ((40, 33), (48, 49), (64, 70)))
"""For each head: width and height in pixels of the input, medians of six clusters of the shapes."""
XY_SCALES = (1.2, 1.1)
VALUES = 5 + len(LABELS)
OPSET = 17
"""Old enough for common versions of ONNX Runtime and MIGraphX."""


class ConvolutionBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1, inplace=True))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            ConvolutionBlock(channels, channels // 2, size=1), ConvolutionBlock(channels // 2, channels)
        )

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = features + self.inner(features)
        return result


class ShapesNetwork(nn.Module):
    """A network: FP32 [n, 3, 192, 192], 0..1 -> the raw heads, each [n, rows, columns, anchors, 5 + classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            ConvolutionBlock(3, 16, stride=2),
            ConvolutionBlock(16, 32, stride=2),
            Residual(32),
            ConvolutionBlock(32, 64, stride=2),
            Residual(64),
            Residual(64),
        )
        self.coarse = nn.Sequential(
            ConvolutionBlock(64, 96, stride=2), Residual(96), Residual(96), ConvolutionBlock(96, 96)
        )
        self.upward = nn.Sequential(ConvolutionBlock(96, 48, size=1), nn.Upsample(scale_factor=2, mode="nearest"))
        self.joined = ConvolutionBlock(64 + 48, 64)
        channels = len(ANCHORS[0]) * VALUES
        self.heads = nn.ModuleList([nn.Conv2d(64, channels, 1), nn.Conv2d(96, channels, 1)])
        for head in self.heads:
            # Objects are rare. Starting at "hardly any" spares the first passes from learning that.
            nn.init.constant_(head.bias.view(-1, VALUES)[:, 4], -5.0)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        fine = self.fine(images)
        coarse = self.coarse(fine)
        joined = self.joined(torch.cat([fine, self.upward(coarse)], dim=1))
        return tuple(_as_cells(head(features)) for head, features in zip(self.heads, (joined, coarse), strict=True))


class ServedNetwork(nn.Module):
    """The network as it is served, with the values of the object and the classes as probabilities."""

    def __init__(self, network: ShapesNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        heads = self.network(images)
        return tuple(torch.cat([head[..., :4], head[..., 4:].sigmoid()], dim=-1) for head in heads)


def decode_boxes(head: Tensor, index: int) -> Tensor:
    """Return x1, y1, x2, y2 in pixels of the input for a raw head: [n, rows, columns, anchors, 4]."""
    rows, columns = torch.meshgrid(*(torch.arange(side, device=head.device) for side in head.shape[1:3]), indexing="ij")
    cells = torch.stack([columns, rows], dim=-1).unsqueeze(2)
    scale = XY_SCALES[index]
    centres = (head[..., 0:2].sigmoid() * scale - (scale - 1) / 2 + cells) * STRIDES[index]
    halves = head[..., 2:4].clamp(max=6).exp() * torch.tensor(ANCHORS[index], device=head.device) / 2
    return torch.cat([centres - halves, centres + halves], dim=-1)


def write_onnx(network: ShapesNetwork, path: Path) -> None:
    """Write an ONNX file: IMAGE FP32 [n, 3, 192, 192] -> HEAD_0, HEAD_1. Its metadata say how to read the heads."""
    served = ServedNetwork(network).eval().cpu()
    images = torch.zeros(1, 3, INPUT_SIZE, INPUT_SIZE)
    names = [f"HEAD_{index}" for index in range(len(STRIDES))]
    torch.onnx.export(
        served,
        (images,),
        str(path),
        dynamo=False,
        opset_version=OPSET,
        input_names=["IMAGE"],
        output_names=names,
        dynamic_axes={name: {0: "n"} for name in ("IMAGE", *names)},
    )
    model = onnx.load(path)
    for output, stride in zip(model.graph.output, STRIDES, strict=True):
        sides = (INPUT_SIZE // stride, INPUT_SIZE // stride, len(ANCHORS[0]), VALUES)
        for dimension, size in zip(output.type.tensor_type.shape.dim[1:], sides, strict=True):
            dimension.dim_value = size
    metadata: dict[str, Any] = {
        "labels": ", ".join(LABELS),
        "strides": json.dumps(STRIDES),
        "anchors": json.dumps(ANCHORS),
        "xy_scale": json.dumps(XY_SCALES),
    }
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, path)


def _as_cells(features: Tensor) -> Tensor:
    """Return [n, anchors * values, rows, columns] as [n, rows, columns, anchors, values]."""
    rows, columns = features.shape[2:]
    return features.permute(0, 2, 3, 1).reshape(-1, rows, columns, len(ANCHORS[0]), VALUES)
