"""Fish eyes and the correction of lenses, against loops over pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.rocal_operations import Array, make, picture, result

SIZES = [(1, 1), (4, 6), (24, 24), (31, 45)]


def fish_eye(pixels: Array, cut_halves: bool) -> Array:
    height, width = pixels.shape[:2]
    seen = np.zeros_like(pixels)
    for row, column in np.ndindex(height, width):
        y, x = 2 * row / height - 1, 2 * column / width - 1
        distance = math.hypot(y, x)
        if distance > 1:
            continue
        inner = (distance + 1 - math.sqrt(1 - distance * distance)) / 2
        direction = math.atan2(y, x)
        half_height, half_width = (side // 2 if cut_halves else side / 2 for side in (height, width))
        source = math.floor((inner * math.sin(direction) + 1) * half_height) * width
        source += math.floor((inner * math.cos(direction) + 1) * half_width)
        if 0 <= source < height * width:
            seen[row, column] = pixels[source // width, source % width]
    return seen


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_fish_eye(height: int, width: int, channels: int) -> None:
    pixels = picture(height, width, channels)
    given = result(make("fish_eye", channels), pixels)
    # Four pixels that all lie in the ellipse are found with half sides whose fraction is cut off, others with it.
    in_blocks, alone = fish_eye(pixels, cut_halves=True), fish_eye(pixels, cut_halves=False)
    either = (given == in_blocks).all(axis=2) | (given == alone).all(axis=2)
    # The rest lies so close to the edge of a pixel that 32 bits put it into the next.
    assert either.mean() > 0.97
    if height % 2 == width % 2 == 0:
        np.testing.assert_array_equal(in_blocks, alone)


def test_fish_eye_is_black_in_the_corners_and_true_in_the_middle() -> None:
    pixels = np.maximum(picture(40, 40), 1)
    given = result(make("fish_eye"), pixels)
    assert not given[0, 0].any() and not given[-1, -1].any()
    np.testing.assert_array_equal(given[20, 20], pixels[20, 20])


def corrected(pixels: Array, camera: list[float], distortion: list[float]) -> Array:
    focal_x, centre_x, focal_y, centre_y = camera
    k1, k2, p1, p2, k3 = distortion
    height, width = pixels.shape[:2]
    levels = np.full(pixels.shape, np.nan)
    for row, column in np.ndindex(height, width):
        x, y = (column - centre_x) / focal_x, (row - centre_y) / focal_y
        squares = x * x + y * y
        radial = 1 + k1 * squares + k2 * squares**2 + k3 * squares**3
        source_x = focal_x * (x * radial + 2 * p1 * x * y + p2 * (squares + 2 * x * x)) + centre_x
        source_y = focal_y * (y * radial + 2 * p2 * x * y + p1 * (squares + 2 * y * y)) + centre_y
        if source_x < -0.001 or source_y < -0.001 or source_x > width + 0.001 or source_y > height + 0.001:
            levels[row, column] = 0
        elif 0.001 < source_x < width - 2 and 0.001 < source_y < height - 2:
            top, left = math.floor(source_y), math.floor(source_x)
            below, right = source_y - top, source_x - left
            levels[row, column] = (
                (1 - below) * (1 - right) * pixels[top, left]
                + (1 - below) * right * pixels[top, left + 1]
                + below * (1 - right) * pixels[top + 1, left]
                + below * right * pixels[top + 1, left + 1]
            )
    return levels


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("camera", "distortion"),
    [
        ([30, 20, 30, 15], [0, 0, 0, 0, 0]),
        ([30, 20.5, 25, 14.25], [0.3, 0.05, 0, 0, 0.01]),
        ([40, 22, 40, 16], [-0.4, 0.1, 0.02, -0.03, 0]),
    ],
)
def test_lens_correction(channels: int, camera: list[float], distortion: list[float]) -> None:
    pixels = picture(31, 45, channels)
    operation = make("lens_correction", channels, camera_matrix=camera, distortion_coeffs=distortion)
    given = result(operation, pixels).astype(np.float64)
    expected = corrected(pixels, camera, distortion)
    known = ~np.isnan(expected)
    assert known.mean() > 0.6
    assert np.abs(given - expected)[known].max() <= 0.51


def test_a_lens_without_faults_changes_nothing_but_the_rims() -> None:
    pixels = picture(20, 30)
    operation = make("lens_correction", camera_matrix=[16, 8, 16, 8], distortion_coeffs=[0, 0, 0, 0, 0])
    np.testing.assert_array_equal(result(operation, pixels)[1:-1, 1:-1], pixels[1:-1, 1:-1])
