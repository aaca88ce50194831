"""Networks as programs of torch.export, with data to judge them by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, parse_pipeline
from rocserve.core.datatypes import DataType
from support.rocal_operations import cpu_engine

Array = np.ndarray[Any, Any]

_ROOT = Path(__file__).parents[2]
_LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digits_network() -> nn.Module:
    """`input` FP32 [n, 1, 16, 16] -> ten scores: the sample's classifier with its trained weights."""
    file = _ROOT / "model_repository" / "digits_classifier" / "1" / "model.onnx"
    weights = {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}
    layers: list[nn.Module] = [nn.Flatten()]
    for place in range(3):
        matrix, bias = (
            torch.from_numpy(numpy_helper.to_array(weights[f"{name}_{place}"]).copy()) for name in ("weights", "biases")
        )
        layer = nn.Linear(*matrix.shape)
        layer.weight, layer.bias = nn.Parameter(matrix.T.contiguous()), nn.Parameter(bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def convolutions() -> nn.Module:
    """`input` FP32 [n, 1, 16, 16] -> ten scores: convolutions with batch normalisation and random weights."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).eval()


class Scaled(nn.Module):
    """`convolutions`, which takes and returns values that are not tensors, too."""

    def __init__(self) -> None:
        super().__init__()
        self.network = convolutions()

    def forward(self, times: int, x: torch.Tensor, other: torch.Tensor | None) -> Any:
        return x.shape[0], times * self.network(x), other


def save_program(network: nn.Module, path: Path, *shape: int) -> None:
    """Save a program that takes batches of up to 1024 rows of the shape."""
    rows = torch.export.Dim("rows", min=1, max=1024)
    torch.export.save(torch.export.export(network, (torch.zeros(2, *shape),), dynamic_shapes=({0: rows},)), path)


def held_out_digits() -> tuple[Array, Array]:
    """Images that the sample's classifier was not trained with, FP32 [n, 1, 16, 16], and their digits."""
    text = (_ROOT / "model_repository" / "digits_preprocess" / "1" / "pipeline.json").read_bytes()
    pipeline = parse_pipeline(text, ColorFormat.U8.channels)
    engine = cpu_engine(pipeline, OutputFormat(DataType.FP32, Layout.NCHW), color_format=ColorFormat.U8)
    files = sorted((_ROOT / "tests" / "data" / "digits").glob("*.jpg"))
    images = np.stack([engine.run_image(file.read_bytes())[0] for file in files])
    return images, np.array([_LABELS.index(file.stem.rpartition("_")[2]) for file in files])
