"""Trains a network of convolutions on the digits, and writes a program of torch.export. Needs PyTorch.

    python clients/examples/quantisation_digits.py --out build/quantisation

`train` is also what `rocserve quantise --method qat --train clients/examples/quantisation_digits.py` calls, with a
network that rounds; `train` then trains it a little further.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from train_digits import HELD_OUT_SHARE, LABELS, ROOT, SEED, preprocess, sample_pipeline, training_images

MOST_ROWS = 256
PASSES, PASSES_AFTER = 6, 2
"""Epochs over all drawings: from the beginning, and with rounding."""
BATCH = 128
LEARNING_RATE, LEARNING_RATE_AFTER = 2e-3, 2e-4
CALIBRATION_SAMPLES = 512

Array = np.ndarray[Any, Any]


def new_network() -> nn.Module:
    """Return a network: FP32 [n, 1, 16, 16] -> the ten scores."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 256),
        nn.ReLU(),
        nn.Linear(256, len(LABELS)),
    )


@cache
def training_data() -> tuple[Array, Array]:
    """Return the training data of the sample's classifier, FP32 [n, 1, 16, 16], and the labels."""
    digits, labels = load_digits(return_X_y=True)
    trained, _ = train_test_split(np.arange(len(labels)), test_size=HELD_OUT_SHARE, stratify=labels, random_state=SEED)
    random = np.random.default_rng(SEED)
    jpegs, labels = training_images(digits.reshape(-1, 8, 8)[trained], labels[trained], random)
    return preprocess(
        sample_pipeline(ROOT / "model_repository" / "digits_preprocess" / "1" / "pipeline.json"), jpegs
    ), labels


def held_out_data() -> tuple[Array, Array]:
    """Return images that no network here has been trained with, and their labels."""
    files = sorted((ROOT / "tests" / "data" / "digits").glob("*.jpg"))
    engine = sample_pipeline(ROOT / "model_repository" / "digits_preprocess" / "1" / "pipeline.json")
    labels = np.array([LABELS.index(file.stem.rpartition("_")[2]) for file in files])
    return preprocess(engine, [file.read_bytes() for file in files]), labels


def train(network: Any, passes: int = PASSES_AFTER, learning_rate: float = LEARNING_RATE_AFTER) -> None:
    images, labels = (torch.from_numpy(array) for array in training_data())
    optimiser = torch.optim.Adam(network.parameters(), learning_rate)
    steps = passes * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(passes):
        for chosen in torch.randperm(len(images)).split(BATCH):
            loss = functional.cross_entropy(network(images[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


def save_program(network: nn.Module, example: Any, path: Path) -> None:
    rows = torch.export.Dim("rows", min=1, max=MOST_ROWS)
    torch.export.save(torch.export.export(network.eval(), (example,), dynamic_shapes=({0: rows},)), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network of convolutions on the digits.")
    parser.add_argument("--out", type=Path, required=True, help="the folder for digits.pt2 and digits.npy")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    network = new_network()
    train(network, PASSES, LEARNING_RATE)
    save_program(network, torch.zeros(2, 1, 16, 16), options.out / "digits.pt2")
    images, _ = training_data()
    chosen = np.random.default_rng(SEED).choice(len(images), CALIBRATION_SAMPLES, replace=False)
    np.save(options.out / "digits.npy", images[chosen])
    held_out, labels = held_out_data()
    with torch.no_grad():
        found = network(torch.from_numpy(held_out)).argmax(1).numpy()
    print(f"{options.out / 'digits.pt2'}: {np.mean(found == labels):.2%} of {len(labels)} held-out digits are read")


if __name__ == "__main__":
    main()
