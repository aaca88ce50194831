"""Trains a small text encoder on Python's own manual, and writes a program of torch.export. Needs PyTorch.

    python clients/examples/quantisation_text.py --out build/quantisation

The encoder predicts the byte after each byte, from the bytes before. Its perplexity is the number of bytes between
which it is undecided. The text is that of `help()` (pydoc_data.topics); every tenth topic is held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from quantisation_digits import save_program
from torch import Tensor, nn
from torch.nn import functional
from train_digits import SEED

BYTES = 128
"""Byte values; higher ones are left out of the text."""
LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2
STEPS, BATCH = 300, 32
LEARNING_RATE = 3e-3
HELD_OUT_WINDOWS = 512
CALIBRATION_SAMPLES = 128

Array = np.ndarray[Any, Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out_of = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        parts = self.into(self.before(features)).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        features = features + self.out_of(seen.transpose(1, 2).flatten(2))
        result: Tensor = features + self.wide(self.between(features))
        return result


class TextEncoder(nn.Module):
    """A network: INT64 [n, 64] -> FP32 [n, 64, 128], the scores of the byte after each byte."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.letters = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.scores = nn.Linear(WIDTH, BYTES)

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.scores(self.layers(self.letters(text) + self.places))
        return result


def texts() -> tuple[Array, Array]:
    """Return the texts to learn from and the held-out texts: INT64, all topics one after the other."""
    numbered = enumerate(topics[name] for name in sorted(topics))
    learnt: list[str] = []
    held_out: list[str] = []
    for number, topic in numbered:
        (held_out if number % 10 == 0 else learnt).append(topic)
    return _as_bytes(learnt), _as_bytes(held_out)


def _as_bytes(parts: list[str]) -> Array:
    text = "\n".join(parts).encode("ascii", errors="ignore")
    return np.frombuffer(text, np.uint8).astype(np.int64)


def windows(text: Array, starts: Array) -> Array:
    """Return windows of the text, [n, 65]: the input, and one byte more, which follows."""
    return text[starts[:, None] + np.arange(LENGTH + 1)]


def held_out_windows() -> Array:
    _, held_out = texts()
    return windows(held_out, np.linspace(0, len(held_out) - LENGTH - 1, HELD_OUT_WINDOWS).astype(int))


def train(network: Any, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> None:
    text, _ = texts()
    random = np.random.default_rng(SEED)
    optimiser = torch.optim.AdamW(network.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=steps)
    for _ in range(steps):
        batch = torch.from_numpy(windows(text, random.integers(0, len(text) - LENGTH - 1, BATCH)))
        loss = functional.cross_entropy(network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def perplexity(scores: Array, follows: Array) -> float:
    exact = scores.astype(np.float64)
    exact -= exact.max(-1, keepdims=True)
    chosen = np.take_along_axis(exact, follows[..., None], -1)[..., 0]
    return float(np.exp(np.mean(np.log(np.exp(exact).sum(-1)) - chosen)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small text encoder on Python's own manual.")
    parser.add_argument("--out", type=Path, required=True, help="the folder for text.pt2 and text.npy")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    network = TextEncoder()
    train(network)
    save_program(network, torch.zeros(2, LENGTH, dtype=torch.int64), options.out / "text.pt2")
    text, _ = texts()
    starts = np.random.default_rng(SEED).integers(0, len(text) - LENGTH - 1, CALIBRATION_SAMPLES)
    np.save(options.out / "text.npy", windows(text, starts)[:, :-1])
    held_out = held_out_windows()
    with torch.no_grad():
        scores = network(torch.from_numpy(held_out[:, :-1])).numpy()
    print(f"{options.out / 'text.pt2'}: perplexity {perplexity(scores, held_out[:, 1:]):.3f} on held-out text")


if __name__ == "__main__":
    main()
