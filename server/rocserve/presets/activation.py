"""Converts a network's scores to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def softmax(scores: Array) -> Array:
    """Return the softmax over the last dimension."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def _sigmoid(scores: Array) -> Array:
    # This form never overflows.
    result: Array = (np.tanh(scores / 2) + 1) / 2
    return result


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": _sigmoid,
    "none": lambda scores: scores,
}
