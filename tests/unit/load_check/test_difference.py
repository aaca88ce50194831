"""How far two arrays are apart, and where."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rocserve.load_check.difference import difference, differences, example

_F4 = np.float32


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1, 2, 4], [1, 2, 4], 0.0),
        ([1, 2, 4], [1, 2, 3], 0.25),
        ([0, 0], [0, 0], 0.0),
        ([1, 2], [[1, 2]], math.inf),
        ([1, np.nan], [1, np.nan], 0.0),
        ([1, np.nan], [1, 2], math.inf),
        ([1, 2], [1, np.inf], math.inf),
        ([1, np.inf], [2, np.inf], 0.5),
        ([1, np.inf], [1, -np.inf], math.inf),
        (2, 1, 0.5),
        ([], [], 0.0),
    ],
)
def test_is_relative_to_the_largest_value(one: object, other: object, expected: float) -> None:
    assert difference(np.array(one, _F4), np.array(other, _F4)) == expected


def test_compares_texts_of_both_kinds() -> None:
    texts = np.array(["a", "ü"], object)
    assert difference(texts, np.array([b"a", "ü".encode()], object)) == 0
    assert difference(texts, np.array(["a", "u"])) == math.inf


def test_a_missing_output_differs() -> None:
    assert differences({"y": np.zeros(1)}, {}) == {"y": math.inf}


@pytest.mark.parametrize(
    ("right", "other", "text"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3.5, 4]], "3.5 instead of 3 at [1, 0]"),
        ([1, 2, 3], [9, np.nan, 3], "nan instead of 2 at [1]"),
        ([np.nan, np.inf, 3], [np.nan, np.inf, 4], "4 instead of 3 at [2]"),
        (1, 2, "2 instead of 1 at []"),
        ([1, 2], [1], "shape [1] instead of [2]"),
        ([], [], "no difference"),
    ],
)
def test_an_example_names_the_place_that_differs_most(right: object, other: object, text: str) -> None:
    assert example(np.array(right, _F4), np.array(other, _F4)) == text


def test_an_example_of_conditions() -> None:
    assert example(np.array([True, True]), np.array([True, False])) == "False instead of True at [1]"


def test_an_example_of_texts() -> None:
    assert example(np.array(["a", "b"], object), np.array(["a", "c"], object)) == "'c' instead of 'b' at [1]"
