"""Flipping, transposing, turning, warping, fish eyes and lens correction, against loops over pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from support.rocal_operations import Array, assert_rounded, make, picture, result, seen

from rocserve.backends.rocal.image import Extent, ResultExtent
from rocserve.backends.rocal.operations.geometry import _fma

SIZES = [(1, 1), (2, 3), (9, 8), (12, 21), (16, 16)]
Place = tuple[np.float32, np.float32]


def places(matrix: Sequence[float], height: int, width: int, lanes: int) -> dict[tuple[int, int], Place]:
    """Row and column from which each pixel of the result is read, in 32 bits as a processor adds them."""
    factors = [np.float32(number) for number in matrix]
    half_height, half_width = height // 2, width // 2
    found: dict[tuple[int, int], Place] = {}
    for row in range(height):
        for axis, (by_column, by_row, offset, half) in enumerate(
            ((factors[3], factors[4], factors[5], half_height), (factors[0], factors[1], factors[2], half_width))
        ):
            start = np.float32(
                (row - half_height) * float(by_row) - half_width * float(by_column) + float(offset) + half
            )
            blocks_end = width - width % lanes
            for column in range(width):
                if column >= blocks_end:
                    place = np.float32(start + by_column * np.float32(blocks_end))
                    for _ in range(column - blocks_end):
                        place = np.float32(place + by_column)
                else:
                    place = np.float32(start + by_column * np.float32(column % lanes))
                    for _ in range(column // lanes):
                        place = np.float32(place + by_column * np.float32(lanes))
                other = found.get((row, column), (place, place))
                found[row, column] = (place, other[1]) if axis == 0 else (other[0], place)
    return found


def warped(pixels: Array, matrix: Sequence[float]) -> Array:
    """Levels between four pixels, not rounded; black outside; the last row and column are never read."""
    height, width, channels = pixels.shape
    levels = np.zeros((height, width, channels))
    for (row, column), (y, x) in places(matrix, height, width, lanes=8).items():
        top, left = math.floor(y), math.floor(x)
        if x < 0 or y < 0 or top > height - 1 or left > width - 1:
            continue
        below, right = float(y) - top, float(x) - left
        rows = [min(top, max(height - 2, 0)), min(top + 1, max(height - 2, 0))]
        columns = [min(left, max(width - 2, 0)), min(left + 1, max(width - 2, 0))]
        for source_row, row_weight in zip(rows, (1 - below, below), strict=True):
            for source_column, column_weight in zip(columns, (1 - right, right), strict=True):
                levels[row, column] += row_weight * column_weight * pixels[source_row, source_column]
    return levels


def warped_to_nearest(pixels: Array, matrix: Sequence[float]) -> Array:
    height, width = pixels.shape[:2]
    moved = np.zeros_like(pixels)
    for (row, column), (y, x) in places(matrix, height, width, lanes=4).items():
        if column < width - width % 4:
            source_row, source_column = round(float(y)), round(float(x))
        else:
            source_row, source_column = (
                int(math.copysign(math.floor(abs(place) + 0.5), place)) for place in (float(y), float(x))
            )
        if 0 <= source_row < height and 0 <= source_column < width:
            moved[row, column] = pixels[source_row, source_column]
    return moved


def rotation(degrees: float) -> tuple[float, ...]:
    radians = np.float32(degrees * math.pi / 180)
    return (math.cos(radians), -math.sin(radians), 0, math.sin(radians), math.cos(radians), 0)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("horizontal", [0, 1])
@pytest.mark.parametrize("vertical", [False, True])
def test_flip(height: int, width: int, channels: int, horizontal: int, vertical: bool) -> None:
    pixels = picture(height, width, channels)
    given = result(make("flip", channels, horizontal=horizontal, vertical=vertical), pixels)
    for row, column in np.ndindex(height, width):
        source_row = height - 1 - row if vertical else row
        source_column = width - 1 - column if horizontal else column
        np.testing.assert_array_equal(given[row, column], pixels[source_row, source_column])


@pytest.mark.parametrize("channels", [1, 3])
def test_transpose_exchanges_height_and_width(channels: int) -> None:
    pixels = picture(5, 9, channels)
    given = result(make("transpose", channels, perm=[1, 0, 2]), pixels)
    for row, column in np.ndindex(9, 5):
        np.testing.assert_array_equal(given[row, column], pixels[column, row])
    np.testing.assert_array_equal(result(make("transpose", channels, perm=[0, 1, 2]), pixels), pixels)


def test_transpose_turns_the_valid_part_too() -> None:
    turned = make("transpose", perm=[1, 0, 2]).run(seen(picture(6, 8), 3, 5), as_float=False)
    assert turned.padded.shape == (8, 6, 3)
    assert turned.valid.shape[:2] == (5, 3)
    known = make("transpose", perm=[1, 0, 2]).extent(ResultExtent(Extent(6, 8), Extent(None, None)))
    assert known == ResultExtent(Extent(8, 6), Extent(None, None))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("degrees", [0, 30, 90, -90, 180, 217.5])
def test_rotate_between_pixels(height: int, width: int, channels: int, degrees: float) -> None:
    pixels = picture(height, width, channels)
    assert_rounded(result(make("rotate", channels, angle=degrees), pixels), warped(pixels, rotation(degrees)))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("degrees", [0, 45, 90, 200.25])
def test_rotate_to_the_nearest_pixels(height: int, width: int, degrees: float) -> None:
    pixels = picture(height, width)
    given = result(make("rotate", angle=degrees, interpolation_type="NEAREST_NEIGHBOR_INTERPOLATION"), pixels)
    np.testing.assert_array_equal(given, warped_to_nearest(pixels, rotation(degrees)))


def test_rotate_turns_counter_clockwise_about_the_middle() -> None:
    pixels = np.zeros((9, 9, 1), dtype=np.uint8)
    pixels[4, 6] = 200
    given = result(make("rotate", channels=1, angle=90), pixels)
    # The part right of the middle is above it.
    assert given[2, 4, 0] >= 199
    assert given.sum() <= 202


MATRICES = [
    (1, 0, 0, 0, 1, 0),
    (1, 2.5, 0, 0, 1, -1.25),
    (0.5, 0, 0.25, -0.3, 1.2, 3),
    (-1, 0.5, 0, 0, -1, 0.5),
    (0, 0, 0, 0, 0, 0),
]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(("height", "width"), [(9, 8), (10, 21)])
def test_warp_affine_reads_where_the_matrix_says(matrix: tuple[float, ...], height: int, width: int) -> None:
    pixels = picture(height, width)
    # rocAL swaps the second and the third number.
    swapped = (matrix[0], matrix[2], matrix[1], *matrix[3:])
    assert_rounded(result(make("warp_affine", matrix=list(matrix)), pixels), warped(pixels, swapped))
    nearest = make("warp_affine", matrix=list(matrix), interpolation_type="NEAREST_NEIGHBOR")
    np.testing.assert_array_equal(result(nearest, pixels), warped_to_nearest(pixels, swapped))


def test_the_result_may_be_larger_or_smaller_than_the_source() -> None:
    pixels = picture(8, 12)
    moved = result(make("rotate", angle=10), pixels)
    larger = result(make("rotate", angle=10, dest_width=20, dest_height=9), pixels)
    assert larger.shape == (9, 20, 3)
    np.testing.assert_array_equal(larger[:8, :12], moved)
    assert not larger[8:].any() and not larger[:, 12:].any()
    smaller = result(make("rotate", angle=10, dest_width=5, dest_height=4), pixels)
    np.testing.assert_array_equal(smaller, moved[:4, :5])


def test_of_a_padded_image_the_valid_part_is_turned_and_all_is_handed_on() -> None:
    padded = np.zeros((10, 12, 3), dtype=np.uint8)
    padded[:8, :9] = picture(8, 9)
    operation = make("rotate", angle=25)
    turned = operation.run(seen(padded, 8, 9), as_float=True)
    assert turned.valid.shape == (10, 12, 3)
    np.testing.assert_array_equal(turned.padded[:8, :9], result(operation, picture(8, 9)))
    size = Extent(10, 12)
    assert operation.extent(ResultExtent(size, Extent(None, None))) == ResultExtent(size, size)


LENS_SIZES = [(1, 1), (4, 6), (24, 24), (31, 45)]


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


@pytest.mark.parametrize(("height", "width"), LENS_SIZES)
@pytest.mark.parametrize("channels", [1, 3])
def test_fish_eye(height: int, width: int, channels: int) -> None:
    pixels = picture(height, width, channels)
    given = result(make("fish_eye", channels), pixels)
    # A block of four pixels inside the ellipse uses truncated half sides, other pixels use exact ones.
    in_blocks, alone = fish_eye(pixels, cut_halves=True), fish_eye(pixels, cut_halves=False)
    either = (given == in_blocks).all(axis=2) | (given == alone).all(axis=2)
    # The rest lies so close to the edge of a pixel that 32 bits put it into the next one.
    assert either.mean() > 0.97
    if height % 2 == width % 2 == 0:
        np.testing.assert_array_equal(in_blocks, alone)


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


def test_a_fused_product_and_sum_are_rounded_once() -> None:
    factors = np.array([1 + 2**-12], dtype=np.float32)
    # The product's last bit, 2**-24, does not fit beside 1 into 32 bits. NumPy 1 would compute in 32 bits by itself.
    np.testing.assert_array_equal(_fma(factors, factors, np.float32(-1 - 2**-11)), [2**-24])
