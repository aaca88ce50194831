"""The longest inputs that models take, found by ONNX Runtime on made-up inputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.encoders import encoder
from support.load_check import load, model, normal, unhurried
from support.padded_models import Padded
from support.row_models import Make

from rocserve.load_check.budget import Budget
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.longest_lengths import longest_lengths

USUAL, MOST = 64, 256


def _sliced() -> onnx.ModelProto:
    """The positions are a part of a constant, as PyTorch's exporter writes it."""
    return model(
        """g (float[n, T, 4] x) => (float[n, T, 4] y) {
            s = Shape(x) e = Slice(s, one, two) p = Slice(places, zero, e, one) y = Add(x, p) }""",
        places=normal(1, 100, 4),
        zero=np.array([0]),
        one=np.array([1]),
        two=np.array([2]),
    )


def _offset(positions: int) -> onnx.ModelProto:
    """The first two positions are not used."""
    return model(
        """g (float[n, T, 4] x) => (float[n, T, 4] y) {
            s = Shape(x) n1 = Gather(s, one) r = Range(zero, n1, one) o = Add(r, two)
            p = Gather(places, o) y = Add(x, p) }""",
        places=normal(positions, 4),
        zero=np.array(0),
        one=np.array(1),
        two=np.array(2),
    )


def _pair() -> onnx.ModelProto:
    """Two dimensions that must be equal, of at most 20."""
    return model(
        """g (float[n, T, 4] x, float[n, U, 4] z) => (float[n, T, 4] y) {
            s = Shape(x) n1 = Gather(s, one) r = Range(zero, n1, one)
            p = Gather(places, r) a = Add(x, p) y = Add(a, z) }""",
        places=normal(20, 4),
        zero=np.array(0),
        one=np.array(1),
    )


@pytest.mark.parametrize(
    "make, longest",
    [
        (lambda: model("g (float[n, T, 4] x) => (float[n, T, 4] y) { y = Tanh(x) }"), USUAL),
        (lambda: encoder(layers=1, longest=20), 20),
        (lambda: encoder(layers=1, longest=USUAL), USUAL),
        (lambda: encoder(layers=1, longest=200), 200),
        (lambda: encoder(layers=1, longest=2000), USUAL),
        (_sliced, 100),
        (lambda: _offset(30), 28),
        (lambda: _offset(130), 128),
        (_pair, 20),
    ],
    ids=["any", "short", "usual", "long", "too long", "sliced", "short offset", "long offset", "two dimensions"],
)
def test_the_longest_length(make: Make, longest: int) -> None:
    loaded = load(make())
    labels = sorted({loaded.inputs[index].symbol(1) for index in range(len(loaded.inputs))})
    padding = Padded(make, dict.fromkeys(labels, (16, MOST))).padding(loaded)
    trials = LengthTrials(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, unhurried(), seed=1)
    assert longest_lengths(trials, padding, USUAL) == [longest] * len(labels)


def test_without_time_it_is_the_usual_one() -> None:
    loaded = load(encoder(layers=1, longest=20))
    padding = Padded(encoder, {"sequence": (16, MOST)}).padding(loaded)
    no_time = Budget(0.0, lambda: 0.0)
    trials = LengthTrials(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, no_time, seed=1)
    assert longest_lengths(trials, padding, USUAL) == [USUAL]
