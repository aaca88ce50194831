"""Operations that are tables of levels, against their formulas level by level."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import half_even, make, picture, result

LEVELS = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)

CASES: list[tuple[str, dict[str, Any], Callable[[int], int]]] = [
    ("brightness", {"brightness": 1.25, "brightness_shift": 3.5}, lambda level: half_even(level * 1.25 + 3.5)),
    ("brightness", {"brightness": -0.5, "brightness_shift": 200}, lambda level: half_even(200 - level / 2)),
    ("brightness_fixed", {}, lambda level: level),
    ("brightness_fixed", {"brightness": 0.5}, lambda level: half_even(level / 2)),
    ("contrast", {"contrast": 2.25, "contrast_center": 100.5}, lambda level: half_even((level - 100.5) * 2.25 + 100.5)),
    ("contrast", {"contrast": 0, "contrast_center": 64}, lambda level: 64),
    ("exposure", {"exposure": -1}, lambda level: half_even(level / 2)),
    ("exposure", {"exposure": 3}, lambda level: half_even(level * 8)),
    ("exposure", {}, lambda level: half_even(level * 1.41421356237)),
    ("gamma_correction", {"gamma": 0}, lambda level: 255),
]


@pytest.mark.parametrize(("name", "keys", "formula"), CASES)
def test_each_level_becomes_what_the_formula_says(
    name: str, keys: dict[str, Any], formula: Callable[[int], int]
) -> None:
    given = result(make(name, channels=1, **keys), LEVELS)
    assert given.ravel().tolist() == [formula(level) for level in range(256)]


@pytest.mark.parametrize("gamma", [0.5, 1, 2.2])
def test_gamma_cuts_the_fraction_off(gamma: float) -> None:
    operation = make("gamma_correction", channels=1, gamma=gamma)
    given = result(operation, LEVELS).ravel()
    for level in range(256):
        fraction = np.float32(level) * np.float32(0.00392156862745)
        exact = float(np.float32(math.pow(fraction, np.float32(gamma)))) * 255
        assert given[level] == min(math.floor(exact), 255)


def test_gamma_is_a_half_unless_it_is_given() -> None:
    assert make("gamma_correction") == make("gamma_correction", gamma=0.5)


@pytest.mark.parametrize("adjustment", [50, -300, 0])
def test_colour_temperature_moves_the_first_and_the_last_channel(adjustment: int) -> None:
    pixels = picture(5, 7)
    given = result(make("color_temp", adjustment_value=adjustment), pixels)
    for row in range(5):
        for column in range(7):
            red, green, blue = (int(level) for level in pixels[row, column])
            expected = [half_even(red + adjustment), green, half_even(blue - adjustment)]
            assert given[row, column].tolist() == expected
