"""Blur, pixels made large, and vignettes, against loops over pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.rocal_operations import Array, assert_rounded, make, picture, result
from support.rocal_reference import run_pipeline

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
    # A vector loop writes whole blocks after the first column and before the last, and cuts off.
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
