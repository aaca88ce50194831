"""Trains and writes the sample repository's shape detector.

    pip install torch
    python clients/examples/train_shapes.py

The script draws the pictures of `shapes.py`, with one process per CPU, and trains `shapes_network.py` on them. On a GPU
with 16 CPUs, training takes five minutes, and reaches a mean average precision of 0.997 at an overlap of 0.5 on new
pictures. Two CPUs take about 20 minutes for `--pictures 6000 --passes 12 --batch-size 32`, and reach 0.975.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from shapes import LABELS, MOST_SHAPES, Picture, draw_picture
from shapes_network import ANCHORS, INPUT_SIZE, STRIDES, ShapesNetwork, decode_boxes, write_onnx
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
SEED = 2718
"""Of the training pictures: picture i is drawn from the seed (SEED, i), so no other seed draws it again."""

LEARNING_RATE = 3e-3
WEIGHT_DECAY = 5e-4
WARM_UP_STEPS = 300
ANCHOR_IOU = 0.45
"""An anchor learns a shape if they overlap this much with equal centres; the best anchor always learns it."""
IGNORED_IOU = 0.6
"""A box that is not a shape's own, but overlaps it at least this much, does not learn to be empty."""

Array = np.ndarray[Any, Any]


def prepare(picture: Picture) -> tuple[Array, Array]:
    """Return the network's view of a picture, UINT8 [3, 192, 192], and its truth.

    The view is that of model_repository/detect_shapes_preprocess, to within a grey level. The truth is FP32
    [MOST_SHAPES, 5]: label, x1, y1, x2, y2 in pixels of the input; the label of unused rows is -1.
    """
    decoded: Array = np.asarray(cv2.imdecode(np.frombuffer(picture.jpeg, dtype=np.uint8), cv2.IMREAD_COLOR_RGB))
    image = cv2.resize(decoded, (INPUT_SIZE, INPUT_SIZE), interpolation=cv2.INTER_LINEAR)
    truth = np.full((MOST_SHAPES, 5), -1, dtype=np.float32)
    scale = np.array([INPUT_SIZE / picture.width, INPUT_SIZE / picture.height] * 2)
    for row, shape in zip(truth, picture.shapes, strict=False):
        row[0], row[1:] = LABELS.index(shape.label), np.array(shape.box) * scale
    return image.transpose(2, 0, 1), truth


def prepare_numbered(number: int) -> tuple[Array, Array]:
    cv2.setNumThreads(1)
    return prepare(draw_picture(np.random.default_rng((SEED, number))))


def training_data(count: int) -> tuple[Tensor, Tensor]:
    """Return UINT8 [count, 3, 192, 192] and the truths."""
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        prepared = list(processes.map(prepare_numbered, range(count), chunksize=32))
    images, truths = zip(*prepared, strict=True)
    return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(truths))


def batches(images: Tensor, truths: Tensor, size: int, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end; each is mirrored, turned and coloured at random."""
    for _ in range(passes):
        for chosen in torch.randperm(len(images), device=images.device).split(size):
            yield vary(images[chosen].float() / 255, truths[chosen].clone())


def vary(images: Tensor, truths: Tensor) -> tuple[Tensor, Tensor]:
    is_shape = truths[:, :, :1] >= 0
    boxes = truths[:, :, 1:]
    if torch.rand(()) < 0.5:
        images, boxes = (
            images.flip(3),
            torch.stack([INPUT_SIZE - boxes[..., 2], boxes[..., 1], INPUT_SIZE - boxes[..., 0], boxes[..., 3]], -1),
        )
    if torch.rand(()) < 0.5:
        images, boxes = (
            images.flip(2),
            torch.stack([boxes[..., 0], INPUT_SIZE - boxes[..., 3], boxes[..., 2], INPUT_SIZE - boxes[..., 1]], -1),
        )
    if torch.rand(()) < 0.5:
        images, boxes = images.transpose(2, 3), boxes[..., [1, 0, 3, 2]]
    images = images[:, torch.randperm(3, device=images.device)]
    gain = torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(0.8, 1.25)
    images = (images * gain).clamp(0, 1)
    return images, torch.where(is_shape, torch.cat([truths[:, :, :1], boxes], dim=-1), truths)


def loss_of(heads: Sequence[Tensor], truths: Tensor) -> Tensor:
    """Return the loss: GIoU of the boxes, cross-entropy of object and classes, per box with a shape to learn."""
    boxes = torch.cat([decode_boxes(head, index).flatten(1, 3) for index, head in enumerate(heads)], dim=1)
    values = torch.cat([head.flatten(1, 3) for head in heads], dim=1)
    picture, place, shape = assign(truths)
    truth = truths[picture, shape]
    count = max(len(picture), 1)
    is_object = torch.zeros_like(values[..., 4])
    is_object[picture, place] = 1
    with torch.no_grad():
        overlaps = pair_overlap(boxes.unsqueeze(2), truths[:, None, :, 1:])[0]
        best = torch.where(truths[:, None, :, 0] >= 0, overlaps, 0).amax(dim=2)
        counts = (is_object > 0) | (best < IGNORED_IOU)
    object_losses = functional.binary_cross_entropy_with_logits(values[..., 4], is_object, reduction="none")
    box_loss = (1 - pair_overlap(boxes[picture, place], truth[:, 1:])[1]).sum()
    wanted = functional.one_hot(truth[:, 0].long(), len(LABELS)).float()
    class_loss = functional.binary_cross_entropy_with_logits(values[picture, place, 5:], wanted, reduction="sum")
    return (3 * box_loss + (object_losses * counts).sum() + class_loss) / count


def assign(truths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which boxes learn which shapes, as three equally long indices: the picture, the box in it, the shape in
    it.

    A shape is learnt in the cell with its centre, by all anchors that are similar enough.
    """
    sizes = truths[:, :, 3:5] - truths[:, :, 1:3]
    centres = (truths[:, :, 1:3] + truths[:, :, 3:5]) / 2
    anchors = torch.tensor(list(itertools.chain(*ANCHORS)), device=truths.device)
    common = torch.minimum(sizes.unsqueeze(2), anchors).prod(-1)
    likeness = common / (sizes.prod(-1, keepdim=True) + anchors.prod(-1) - common)
    learns = (likeness > ANCHOR_IOU) | (likeness == likeness.amax(dim=2, keepdim=True))
    learns &= truths[:, :, :1] >= 0
    places, first = [], 0
    for stride, of_head in zip(STRIDES, ANCHORS, strict=True):
        side = INPUT_SIZE // stride
        cells = (centres / stride).long().clamp(0, side - 1)
        for anchor in range(len(of_head)):
            places.append(first + (cells[..., 1] * side + cells[..., 0]) * len(of_head) + anchor)
        first += side * side * len(of_head)
    picture, shape, anchor = learns.nonzero(as_tuple=True)
    return picture, torch.stack(places, dim=2)[picture, shape, anchor], shape


def pair_overlap(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and generalised IoU (Rezatofighi et al., 2019) of boxes x1, y1, x2, y2 that broadcast."""
    low, high = torch.maximum(left[..., :2], right[..., :2]), torch.minimum(left[..., 2:], right[..., 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = (left[..., 2:] - left[..., :2]).prod(-1) + (right[..., 2:] - right[..., :2]).prod(-1)
    union = (areas - common).clamp(min=1e-6)
    hull_sides = torch.maximum(left[..., 2:], right[..., 2:]) - torch.minimum(left[..., :2], right[..., :2])
    hull = hull_sides.prod(-1).clamp(min=1e-6)
    return common / union, common / union - (hull - union) / hull


def train(images: Tensor, truths: Tensor, batch_size: int, passes: int) -> ShapesNetwork:
    network: ShapesNetwork = ShapesNetwork().to(images.device).train()
    steps = passes * math.ceil(len(images) / batch_size)
    optimiser = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def rate(step: int) -> float:
        """Return the factor of the learning rate: a short warm-up, then a cosine down to zero."""
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    started = time.monotonic()
    for step, (batch, truth) in enumerate(batches(images, truths, batch_size, passes)):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type == "cuda"):
            heads = network(batch)
        loss = loss_of([head.float() for head in heads], truth)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimiser.step()
        schedule.step()
        if step % max(steps // 20, 1) == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s", flush=True)
    network.eval()
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the sample repository's shape detector.")
    parser.add_argument("--pictures", type=int, default=24000, help="how many are drawn (default 24000)")
    parser.add_argument("--passes", type=int, default=50, help="how often each is seen (default 50)")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "model_repository" / "detect_shapes_network" / "1" / "model.onnx"
    )
    options = parser.parse_args()
    torch.manual_seed(SEED)
    started = time.monotonic()
    images, truths = training_data(options.pictures)
    print(f"drew {len(images)} pictures in {time.monotonic() - started:.0f} s")
    network = train(images.to(options.device), truths.to(options.device), options.batch_size, options.passes)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_onnx(network, options.output)
    weights = sum(parameter.numel() for parameter in network.parameters())
    print(f"{options.output}: {weights:,} weights, {options.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
