"""Writes the sample repository's shape detector, with its trained weights, as a program of torch.export. Needs PyTorch.

    python clients/examples/quantisation_shapes.py --out build/quantisation

`train` is also what `rocserve quantise --method qat --train clients/examples/quantisation_shapes.py` calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from average_precision import LabelledBox, mean_average_precision
from onnx import numpy_helper
from quantisation_digits import save_program
from shapes import LABELS, Picture, draw_pictures
from shapes_network import ANCHORS, INPUT_SIZE, STRIDES, XY_SCALES, ConvolutionBlock, ServedNetwork, ShapesNetwork
from torch import nn
from train_shapes import ROOT, batches, loss_of, prepare, training_data

from rocserve.presets.yolo import HeadGeometry, Resize, Thresholds, detect

WEIGHTS = ROOT / "model_repository" / "detect_shapes_network" / "1" / "model.onnx"
CALIBRATION_SAMPLES = 128
TRAINING_PICTURES = 512
BATCH = 16
LEARNING_RATE = 1e-5
HELD_OUT_SEED, HELD_OUT_PICTURES = 2026, 48
"""The pictures of the demo."""
THRESHOLDS = Thresholds(score=0.25, iou=0.45, max_boxes=50)
"""The thresholds of detect_shapes_postprocess."""
LEAST_PROBABILITY = 1e-6
"""Smaller probabilities have no finite logit."""

Array = np.ndarray[Any, Any]


def trained_network() -> nn.Module:
    """Return the network: FP32 [n, 3, 192, 192] -> two heads. The file's convolutions include batch normalisation."""
    model = onnx.load(WEIGHTS)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    network = ShapesNetwork()
    for block in [module for module in network.modules() if isinstance(module, ConvolutionBlock)]:
        block[0].bias = nn.Parameter(torch.zeros(block[0].out_channels))
        block[1] = nn.Identity()
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    nodes = [node for node in model.graph.node if node.op_type == "Conv"]
    for convolution, node in zip(convolutions, nodes, strict=True):
        weight, bias = (torch.from_numpy(constants[name].copy()) for name in node.input[1:])
        convolution.load_state_dict({"weight": weight, "bias": bias})
    return ServedNetwork(network)


def train(network: Any) -> None:
    """Train one epoch of new pictures at a small learning rate."""
    images, truths = training_data(TRAINING_PICTURES)
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    for batch, truth in batches(images, truths, BATCH, passes=1):
        heads = [torch.cat([head[..., :4], head[..., 4:].logit(LEAST_PROBABILITY)], dim=-1) for head in network(batch)]
        loss = loss_of(heads, truth)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def as_inputs(pictures: Sequence[Picture]) -> Array:
    return np.stack([prepare(picture)[0] for picture in pictures]).astype(np.float32) / 255


def held_out_pictures() -> list[Picture]:
    return draw_pictures(HELD_OUT_SEED, HELD_OUT_PICTURES)


def precision(heads: Sequence[Array], pictures: Sequence[Picture]) -> float:
    """Return the mean average precision of the boxes in the heads."""
    geometries = [HeadGeometry(*numbers) for numbers in zip(STRIDES, ANCHORS, XY_SCALES, strict=True)]
    found, true = [], []
    for number, picture in enumerate(pictures):
        own = [head[number] for head in heads]
        detections = detect(own, geometries, Resize.STRETCH, (picture.height, picture.width), THRESHOLDS)
        for box, score, label in zip(detections.boxes, detections.scores, detections.classes, strict=True):
            found.append(LabelledBox(str(number), LABELS[label], tuple(box), score))
        true += [LabelledBox(str(number), shape.label, shape.box) for shape in picture.shapes]
    return mean_average_precision(found, true)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the shape detector as a program of torch.export.")
    parser.add_argument("--out", type=Path, required=True, help="the folder for shapes.pt2 and shapes.npy")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    network = trained_network()
    save_program(network, torch.zeros(2, 3, INPUT_SIZE, INPUT_SIZE), options.out / "shapes.pt2")
    images, _ = training_data(CALIBRATION_SAMPLES)
    np.save(options.out / "shapes.npy", images.numpy().astype(np.float32) / 255)
    pictures = held_out_pictures()
    with torch.no_grad():
        heads = [head.numpy() for head in network(torch.from_numpy(as_inputs(pictures)))]
    print(f"{options.out / 'shapes.pt2'}: mean average precision {precision(heads, pictures):.4f} on held-out pictures")


if __name__ == "__main__":
    main()
