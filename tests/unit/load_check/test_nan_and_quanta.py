"""NaN in inputs counts only where it stays where it was, and steps of a quantised file are no errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rocserve.load_check.edge_inputs import NAN, PLAIN
from rocserve.load_check.reference import Case, ReferenceVerdict, compare
from rocserve.load_check.tensors import Array

X = np.array([[1, np.nan, -2], [3, -4, 5]], np.float32)
WEIGHTS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def compared(x: Array, right: Callable[[Array], Array], engine: Callable[[Array], Array]) -> ReferenceVerdict:
    case = Case(NAN, {"x": x}, {"y": right(x)}, {"y": 0.0})
    return compare([case], lambda feed: {"y": engine(feed["x"])}, "fp32")


def relu(x: Array) -> Array:
    return np.where(x < 0, 0, x).astype(np.float32)


def relu_without_nan(x: Array) -> Array:
    return np.where(x > 0, x, 0).astype(np.float32)


@pytest.mark.parametrize("x", [X, X[0], X[:1], X.reshape(1, 1, 2, 3), X[:, 1:]])
def test_an_engine_that_loses_nan_in_a_relu_alone_is_wrong(x: Array) -> None:
    found = compared(x, relu, relu_without_nan)
    assert not found.right
    assert found.reason.startswith("output 'y' is wrong with nan inputs: 0 instead of nan at ")
    assert compared(x, relu, relu).right


def test_a_network_in_which_nan_spreads_says_nothing() -> None:
    found = compared(X, lambda x: relu(x @ WEIGHTS), lambda x: relu_without_nan(x @ WEIGHTS))
    assert found.right and not found.remark


def test_what_has_no_nan_says_nothing() -> None:
    labels = compared(X, lambda x: x.argmax(1), lambda x: np.nan_to_num(x).argmax(1) + 1)
    assert labels.right
    assert compared(X, np.nan_to_num, np.nan_to_num).right


def test_a_step_of_a_quantised_file_is_rounding() -> None:
    right = np.array([[0, 128, 255]], np.uint8)
    case = Case(PLAIN, {"x": right}, {"y": right}, {"y": 0.0})

    def off_by(steps: int, precision: str) -> bool:
        return compare([case], lambda feed: {"y": np.array([[0, 128 + steps, 255]], np.uint8)}, precision).right

    assert off_by(1, "quantised") and not off_by(20, "quantised")
    assert not off_by(1, "fp32")
