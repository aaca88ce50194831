"""Operations on levels: hue and saturation against the standard library's colour models, tables of levels against their
formulas, blur, pixelation and vignettes against loops over pixels."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rocal_operations import Array, assert_rounded, half_even, make, picture, result
from support.rocal_reference import run_pipeline


def reference(
    pixels: Array, degrees: float = 0, saturation: float = 1, brightness: float = 1, contrast: float = 0
) -> Array:
    """Levels, neither rounded nor clamped."""
    changed = np.empty(pixels.shape)
    for row, column in np.ndindex(pixels.shape[:2]):
        hue, colourfulness, value = colorsys.rgb_to_hsv(*(int(level) / 255 for level in pixels[row, column]))
        turned = colorsys.hsv_to_rgb((hue + degrees / 360) % 1, min(colourfulness * saturation, 1), value)
        changed[row, column] = [part * brightness * 255 + contrast for part in turned]
    return changed


def colours() -> Array:
    """All colours made of five levels, black, white and greys among them, and some others."""
    levels = np.array([0, 51, 102, 204, 255], dtype=np.uint8)
    regular = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(5, 25, 3)
    return np.concatenate((regular, picture(8, 25)))


@pytest.mark.parametrize("degrees", [0, 30, 90.5, 180, 359, 360, 400, -45])
def test_hue_is_turned_by_degrees(degrees: float) -> None:
    given = result(make("hue", hue=degrees), colours())
    assert_rounded(given, reference(colours(), degrees=degrees))


def test_hue_of_nothing_changes_nothing() -> None:
    np.testing.assert_array_equal(result(make("hue", hue=0), colours()), colours())
    np.testing.assert_array_equal(result(make("hue", hue=360), colours()), colours())


@pytest.mark.parametrize("factor", [0, 0.3, 1, 1.7, 100])
def test_saturation_is_multiplied(factor: float) -> None:
    given = result(make("saturation", saturation=factor), colours())
    assert_rounded(given, reference(colours(), saturation=factor))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"contrast": 0}, {}),
        ({}, {"contrast": 1}),
        ({"brightness": 1.3, "contrast": -20}, {"brightness": 1.3, "contrast": -20}),
        ({"contrast": 0, "hue": 70.9}, {"degrees": 70}),
        ({"contrast": 0, "hue": -100}, {"degrees": -100}),
        ({"contrast": 0, "hue": 725}, {"degrees": 5}),
        ({"contrast": 0, "saturation": 0.4}, {"saturation": 0.4}),
        ({"contrast": 5, "saturation": 2, "brightness": 0.7}, {"contrast": 5, "saturation": 2, "brightness": 0.7}),
        ({"contrast": 5, "saturation": 2, "hue": 200}, {"contrast": 5, "saturation": 2, "degrees": 200}),
    ],
)
def test_colour_twist_adds_its_contrast(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    given = result(make("color_twist", **keys), colours())
    assert_rounded(given, reference(colours(), **expected))


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


@pytest.mark.parametrize("adjustment", [50, -300, 0])
def test_colour_temperature_moves_the_first_and_the_last_channel(adjustment: int) -> None:
    pixels = picture(5, 7)
    given = result(make("color_temp", adjustment_value=adjustment), pixels)
    for row in range(5):
        for column in range(7):
            red, green, blue = (int(level) for level in pixels[row, column])
            expected = [half_even(red + adjustment), green, half_even(blue - adjustment)]
            assert given[row, column].tolist() == expected


SIZES = [(1, 1), (2, 3), (5, 10), (4, 16), (7, 27), (3, 40)]


def sum_around(pixels: Array, row: int, column: int, channel: int) -> int:
    height, width = pixels.shape[:2]
    return sum(
        int(pixels[min(max(row + down, 0), height - 1), min(max(column + right, 0), width - 1), channel])
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    )


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_blur_is_the_mean_of_nine(height: int, width: int, channels: int) -> None:
    pixels = picture(height, width, channels)
    given = result(make("blur", channels), pixels)
    # A vector loop writes whole blocks after the first column and before the last, and truncates.
    block = 8 if channels == 3 else 24
    blocks_end = 1 + max(width - 2, 0) // block * block
    for row, column, channel in np.ndindex(pixels.shape):
        mean = sum_around(pixels, row, column, channel) / 9
        expected = math.floor(mean) if 1 <= column < blocks_end else round(mean)
        assert given[row, column, channel] == expected


def test_blur_takes_a_window_and_does_nothing_with_it() -> None:
    assert make("blur", window_size=9, sigma=2.5) == make("blur")


@pytest.mark.parametrize(("height", "width"), [(8, 8), (13, 22), (30, 17)])
@pytest.mark.parametrize("percent", [0, 30, 50, 87.5, 99.5])
def test_pixelate_shrinks_and_repeats(height: int, width: int, percent: float) -> None:
    pixels = picture(height, width)
    given = result(make("pixelate", pixelate_percent=percent), pixels)
    small_height, small_width = (max(int(side * (100 - percent) / 100), 1) for side in (height, width))
    resize = {"operation": "Resize", "dest_width": small_width, "dest_height": small_height}
    small = run_pipeline([resize], pixels).valid
    for row, column in np.ndindex(height, width):
        small_row = math.floor((row + 0.5) * small_height / height)
        small_column = math.floor((column + 0.5) * small_width / width)
        np.testing.assert_array_equal(given[row, column], small[small_row, small_column])


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("strength", [0, 0.5, 6])
@pytest.mark.parametrize("channels", [1, 3])
def test_vignette_darkens_by_distance(height: int, width: int, strength: float, channels: int) -> None:
    pixels = picture(height, width, channels)
    expected = np.empty(pixels.shape)
    radius = max(height // 2, width // 2, 1)
    for row, column, channel in np.ndindex(pixels.shape):
        distance = (row - height // 2) ** 2 + (column - width // 2) ** 2
        shade = math.exp(-0.25 * strength * distance / radius**2)
        expected[row, column, channel] = pixels[row, column, channel] * shade
    assert_rounded(result(make("vignette", channels, vignette=strength), pixels), expected)
