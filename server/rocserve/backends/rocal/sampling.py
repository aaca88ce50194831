"""Resizes and samples images with the same results as rocAL's CPU kernels (RPP's, for x86), by OpenCV and numpy.

Bilinear resizing, rocAL's default: half-pixel centres, two taps, no antialiasing, in 32-bit floats. The kernel for
UINT8 has peculiarities that are visible in the result. Models were tuned to them, so they are reproduced:
- It never reads the last source row. It uses the last source column only for places to the right of its centre.
- It rounds half to even, but truncates in the last (width modulo 8) columns, which a scalar loop writes.
The kernel for FP32 has none of these.

OpenCV's levels differ by a few thousandths at most. That matters only if a level is so close to the middle between two
integers that it is rounded the other way. These few levels are computed again, operation by operation as in RPP.

Reading at given places: a place outside the image gives zeros. Between the last two rows or columns RPP's CPU kernels
read the last but one twice, and never the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.image import Part, Pixels, PixelsError, cached_by_size, with_channels

_GRIDS = 64
_LONG_GRIDS = 2
_LONG_SIDE = 1 << 14
"""Numbers of cached pairs of sizes: with sides up to this length in pixels, and with a longer side. An entry has dozens
of bytes per pixel of a side."""


_BAND = 4
"""Result pixels per matrix product. With a larger band more zeros are multiplied."""

_NUMBER_BLOCK = 1 << 15
_EXACT_BLOCK = 1 << 12
"""Numbers that are compared, and recomputed, per block."""


@dataclass(frozen=True)
class Scaling:
    """Mean and factor of each channel: a level becomes (level - mean) * factor before rounding."""

    mean: Pixels
    factor: Pixels

    @staticmethod
    @lru_cache
    def of(mean: tuple[float, ...], deviation: tuple[float, ...]) -> Scaling:
        # 1 / std_dev is computed in 64 bits and stored in 32, as in RPP.
        inverse = 1 / np.asarray(deviation, dtype=np.float32).astype(np.float64)
        return Scaling(np.asarray(mean, dtype=np.float32), inverse.astype(np.float32))

    def apply(self, levels: Pixels) -> Pixels:
        """Scale FP32 levels, height x width x channels, in place."""
        rows = levels.reshape(levels.shape[0], -1)
        # numpy is several times faster with one long row of means than with broadcasting over the channels.
        rows -= np.tile(self.mean, levels.shape[1])
        rows *= np.tile(self.factor, levels.shape[1])
        return levels


def resize_to_floats(
    pixels: Pixels, width: int, height: int, mirror: bool = False, scaling: Scaling | None = None
) -> Pixels:
    """Return the FP32 kernel's result: `height` x `width` x channels, `mirror` flips left to right."""
    results = _bilinear(pixels.astype(np.float32), width, height, mirror)
    if scaling is not None:
        scaling.apply(results)
        if np.any(scaling.mean):
            # Near the mean, OpenCV's error is not small compared with the result.
            # More than five grey levels from the mean, OpenCV's error is hardly ever more than a thousandth of the
            # result.
            limit = 5.0 * float(np.max(np.abs(scaling.factor)))
            grid = _grid(pixels.shape, width, height, mirror, False)
            numbers = results.reshape(-1)
            # The blocks fit into the CPU's cache.
            starts = range(0, len(numbers), _NUMBER_BLOCK)
            found = np.concatenate(
                [np.flatnonzero(np.abs(numbers[start : start + _NUMBER_BLOCK]) < limit) + start for start in starts]
            )
            numbers[found] = _exact_levels(found, (0, 0, height, width), pixels, grid, scaling)
    return results


def resize_to_bytes(
    pixels: Pixels,
    width: int,
    height: int,
    mirror: bool = False,
    scaling: Scaling | None = None,
    part: Part | None = None,
) -> Pixels:
    """Return the UINT8 kernel's result, or a part of it: `height` x `width` x channels, `mirror` flips left to
    right."""
    top, left, part_height, part_width = part = part or (0, 0, height, width)
    channels = pixels.shape[2]
    source = pixels.astype(np.float32)
    if source.shape[0] > 1:
        source[-1] = source[-2]
    results = _bilinear(source, width, height, mirror)[top : top + part_height, left : left + part_width]
    grid = _grid(pixels.shape, width, height, mirror, True)
    error = grid.error
    if scaling is not None:
        results = scaling.apply(np.ascontiguousarray(results))
        np.clip(results, 0, 255, out=results)
        error *= float(np.max(np.abs(scaling.factor)))
    rounded, other = (cv2.convertScaleAbs(results, beta=beta).reshape(-1) for beta in (-error, error))
    # Recompute levels near a rounding boundary, and columns that OpenCV reads otherwise.
    unlike = grid.unlike_opencv[(grid.unlike_opencv >= left) & (grid.unlike_opencv < left + part_width)] - left
    pixels_unlike = (np.arange(part_height)[:, np.newaxis] * part_width + unlike).reshape(-1, 1)
    numbers_unlike = (pixels_unlike * channels + np.arange(channels)).reshape(-1)
    doubtful = np.concatenate((np.flatnonzero(rounded != other), numbers_unlike))
    levels = _exact_levels(doubtful, part, pixels, grid, scaling)
    rounded[doubtful] = np.clip(np.rint(levels), 0, 255)
    return cast(Pixels, rounded.reshape(results.shape))


def to_bytes(levels: Pixels) -> Pixels:
    """Round FP32 levels half to even and clip them to 0..255. The argument is overwritten."""
    np.clip(levels, 0, 255, out=levels)
    return with_channels(cv2.convertScaleAbs(levels))


class _Grid:
    """Computes the places and levels of destination pixels in the arithmetic of an RPP kernel. A row of an image is
    a row of numbers here, with a pixel's channels next to each other."""

    def __init__(
        self, source_shape: tuple[int, int, int], width: int, height: int, mirror: bool, for_bytes: bool
    ) -> None:
        source_height, source_width, channels = source_shape
        last_row, last_column = (max(side - (2 if for_bytes else 1), 0) for side in (source_height, source_width))
        rows, self._tops, self._bottoms = _places(source_height, height)
        columns, lefts, rights = _places(source_width, width)
        # If the weights are multiples of 1/128, arithmetic in 32 bits never rounds.
        is_exact = not any(np.any(weights * 128 % 1) for weights in (self._tops, lefts))
        # Both compute places in 32 bits, whose precision falls with the source's longer side.
        self.error = 0.0 if is_exact else 3e-6 * max(source_height, source_width)
        """Usual largest difference of OpenCV's levels from RPP's; 0 = none. One level in 10,000 is further away, and
        none more than twice as far."""
        if mirror:
            columns, lefts, rights = columns[::-1], lefts[::-1], rights[::-1]
        row_length = source_width * channels
        self._top_rows = np.clip(rows, 0, last_row) * row_length
        self._bottom_rows = np.clip(rows + 1, 0, last_row) * row_length
        # RPP's vectorised loop writes eight pixels at a time; the rest of a row goes through its scalar loop.
        is_scalar = np.arange(width) >= (width - width % 8 if for_bytes else width)
        is_last = columns >= last_column
        left_columns = np.clip(columns, 0, np.where(is_scalar, last_column, source_width - 1))
        right_columns = np.where(is_last, left_columns, columns + 1)
        self.unlike_opencv = np.flatnonzero(is_last | is_scalar)
        """Columns for which OpenCV reads other pixels, or whose fraction RPP truncates."""
        offsets = np.arange(channels)
        self._left_columns = (left_columns[:, np.newaxis] * channels + offsets).reshape(-1)
        self._right_columns = (right_columns[:, np.newaxis] * channels + offsets).reshape(-1)
        self._lefts, self._rights = np.repeat(lefts, channels), np.repeat(rights, channels)
        self._is_scalar = np.repeat(is_scalar, channels) if np.any(is_scalar) else None

    def levels(self, source: Pixels, rows: Pixels, columns: Pixels) -> Pixels:
        """Return the FP32 levels at these rows and columns, which numpy broadcasts. A column is a number's index in
        its row. `source`: all numbers of the image in one row. In the UINT8 kernel's last columns the levels are
        truncated."""
        top, bottom, left, right = self._tops[rows], self._bottoms[rows], self._lefts[columns], self._rights[columns]
        top_row, bottom_row = self._top_rows[rows], self._bottom_rows[rows]
        left_column, right_column = self._left_columns[columns], self._right_columns[columns]
        # The first product of a byte and a weight is exact except for the rounding to 32 bits.
        levels: Pixels = source[top_row + left_column] * (top * left)
        for place, weight in (
            (top_row + right_column, top * right),
            (bottom_row + left_column, bottom * left),
            (bottom_row + right_column, bottom * right),
        ):
            # A fused multiply-add: the product is exact in 64 bits, and the sum is rounded once, to 32 bits.
            levels = (source[place] * weight.astype(np.float64) + levels).astype(np.float32)
        return levels if self._is_scalar is None else np.where(self._is_scalar[columns], np.floor(levels), levels)


_grid = cached_by_size(
    _GRIDS, _LONG_GRIDS, lambda source_shape, width, height, mirror, for_bytes: max(width, height) > _LONG_SIDE
)(_Grid)


def _exact_levels(places: Pixels, part: Part, pixels: Pixels, grid: _Grid, scaling: Scaling | None) -> Pixels:
    """Return the levels at `places`, the indices of numbers in a part of the result, in RPP's arithmetic."""
    top, left, _, width = part
    source, channels = np.ascontiguousarray(pixels).reshape(-1), pixels.shape[2]
    exact = np.empty(len(places), np.float32)
    # In blocks, because memory beyond the CPU's cache and the allocator's cached sizes is several times slower.
    for start in range(0, len(places), _EXACT_BLOCK):
        some = places[start : start + _EXACT_BLOCK]
        rows = some // (width * channels)
        columns = some - rows * (width * channels)
        levels = grid.levels(source, rows + top, columns + left * channels)
        if scaling is not None:
            levels = (levels - scaling.mean[columns % channels]) * scaling.factor[columns % channels]
        exact[start : start + _EXACT_BLOCK] = levels
    return exact


def _places(source_size: int, size: int) -> tuple[Pixels, Pixels, Pixels]:
    """For each destination pixel along a side, return its first source pixel and the weights of this and the next."""
    ratio = _ratio(source_size, size)
    offset = np.float32(np.float64(ratio) * 0.5 - 1.5)
    # Places are counted from one pixel to the left, so that rounding up gives the first pixel.
    places = (np.arange(size) * np.float64(ratio) + np.float64(offset)).astype(np.float32)
    first = np.ceil(places)
    weights = first - places
    return first.astype(np.intp), weights, np.float32(1) - weights


def _bilinear(source: Pixels, width: int, height: int, mirror: bool) -> Pixels:
    # With ratios instead of sizes, OpenCV computes with the 32-bit ratios of RPP.
    across, down = _ratio(source.shape[1], width), _ratio(source.shape[0], height)
    resized = cv2.resize(source, None, fx=1 / float(across), fy=1 / float(down), interpolation=cv2.INTER_LINEAR)
    if mirror:
        resized = cv2.flip(resized, 1)
    return with_channels(cast(Pixels, resized))


def _ratio(source_size: int, size: int) -> np.float32:
    return np.float32(source_size) / np.float32(size)


def bilinear_places(rows: Pixels, columns: Pixels, height: int, width: int) -> Callable[[Pixels], Pixels]:
    """Return a function that samples images of one size between four pixels and rounds to UINT8. `rows` and `columns`
    are the FP32 places in the source, in the result's shape. Raises PixelsError if a side is too long."""
    _check_sides(height, width)
    top, left = np.floor(rows), np.floor(columns)
    outside = (rows < 0) | (columns < 0) | (top > height - 1) | (left > width - 1)
    all_below = np.where(outside, np.float32(0), rows - top)
    all_right = np.where(outside, np.float32(0), columns - left)
    last_row, last_column = max(height - 2, 0), max(width - 2, 0)
    top, left = np.clip(top, 0, last_row), np.clip(left, 0, last_column)
    # -1 is left of the image, where OpenCV reads zeros.
    left[outside] = -1
    bottom, right = np.minimum(top + 1, last_row), np.where(outside, left, np.minimum(left + 1, last_column))
    corners = tuple((column, row) for row in (top, bottom) for column in (left, right))

    def read(pixels: Pixels) -> Pixels:
        height, width = all_right.shape
        channels = pixels.shape[2]
        source = pixels.astype(np.float32)
        # numpy is several times faster with rows of all channels than with an axis of three.
        top_left, top_right, bottom_left, bottom_right = (
            _read(source, columns, rows).reshape(height, width * channels) for columns, rows in corners
        )
        right, below = (np.repeat(weight, channels, axis=1) for weight in (all_right, all_below))
        top = _between(top_left, top_right, right)
        bottom = _between(bottom_left, bottom_right, right)
        return cv2.convertScaleAbs(_between(top, bottom, below)).reshape(height, width, channels)

    return read


def nearest_places(rows: Pixels, columns: Pixels, height: int, width: int) -> Callable[[Pixels], Pixels]:
    """Return a function that reads the nearest pixels of images of one size. `rows` and `columns` are integers in FP32,
    in the result's shape. Raises PixelsError if a side is too long."""
    _check_sides(height, width)
    outside = (rows < 0) | (columns < 0) | (rows > height - 1) | (columns > width - 1)
    rows, columns = (np.where(outside, np.float32(-1), places) for places in (rows, columns))
    return lambda pixels: _read(pixels, columns, rows)


def _check_sides(height: int, width: int) -> None:
    # Limit of OpenCV's remap.
    longest_side = 2**15 - 2
    if max(height, width) > longest_side:
        raise PixelsError(
            f"an image of {width}x{height} pixels cannot be rotated, warped or corrected; its sides may have"
            f" {longest_side} pixels, so scale it before, or by the decoder's max_width and max_height"
        )


def _read(pixels: Pixels, columns: Pixels, rows: Pixels) -> Pixels:
    read = cv2.remap(pixels, columns, rows, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=0)
    return with_channels(cast(Pixels, read))


def _between(first: Pixels, second: Pixels, weight: Pixels) -> Pixels:
    """Return first + (second - first) * weight; `second` is overwritten."""
    second -= first
    second *= weight
    second += first
    return second


def resize_nearest(pixels: Pixels, width: int, height: int) -> Pixels:
    """Return for each pixel of the result the source pixel at its middle, in the source's datatype."""
    rows = _nearest(pixels.shape[0], height)
    columns = _nearest(pixels.shape[1], width)
    picked: Pixels = np.take(np.take(pixels, rows, axis=0), columns, axis=1)
    return picked


def _nearest(source_size: int, size: int) -> Pixels:
    ratio = _ratio(source_size, size)
    # In 64 bits and rounded once, as by a fused multiply-add.
    middles = np.arange(size) * np.float64(ratio) + np.float64(ratio * np.float32(0.5))
    return np.minimum(np.floor(middles.astype(np.float32)), source_size - 1).astype(np.intp)


def resize_by_weights(
    pixels: Pixels, width: int, height: int, kernel: str, as_float: bool, part: Part | None = None
) -> Pixels:
    """Resize rows, then columns, to FP32 without rounding and clipping, or to UINT8; or a part of the result.

    `kernel` is CUBIC, LANCZOS, GAUSSIAN or TRIANGULAR. All but CUBIC widen if the image shrinks. For UINT8, matrix
    products add the same numbers in another order, several times faster. A level that may be rounded the other way for
    that reason is computed again, in the order of FP32.
    """
    top, left, _, _ = part = part or (0, 0, height, width)
    down, across = _taps(pixels.shape[0], height, kernel), _taps(pixels.shape[1], width, kernel)
    if as_float:
        return _in_two_passes(pixels, down, across, _weighted, part)
    results = np.clip(_in_two_passes(pixels, down, across, _multiplied, part), 0, 255)
    # The largest difference per summand between two orders of adding weighted levels: 24 bits of 255, twice, and
    # weights whose absolute values add up to 1.4.
    error = 6e-5 * (len(down.weights) + len(across.weights))
    rounded, other = (cv2.convertScaleAbs(results, beta=beta).reshape(-1) for beta in (-error, error))
    doubtful = np.flatnonzero(rounded != other)
    if len(doubtful) * len(down.weights) * len(across.weights) > pixels.size:
        # Computing the levels one by one would read more numbers than the image has.
        return to_bytes(_in_two_passes(pixels, down, across, _weighted, part))
    rows, columns, channels = np.unravel_index(doubtful, results.shape)
    rows, columns = rows + top, columns + left
    levels = np.zeros(len(doubtful), np.float32)
    for right, of_column in enumerate(across.weights):
        column = np.clip(across.first[columns] + right, 0, pixels.shape[1] - 1)
        in_column = np.zeros_like(levels)
        for below, of_row in enumerate(down.weights):
            row = np.clip(down.first[rows] + below, 0, pixels.shape[0] - 1)
            in_column += pixels[row, column, channels] * of_row[rows]
        levels += in_column * of_column[columns]
    rounded[doubtful] = np.clip(np.rint(levels), 0, 255)
    return cast(Pixels, rounded.reshape(results.shape))


def _in_two_passes(
    pixels: Pixels,
    down: _Taps,
    across: _Taps,
    added_up: Callable[[Pixels, _Taps, int, int, int], Pixels],
    part: Part,
) -> Pixels:
    top, left, part_height, part_width = part
    source_height, _, channels = pixels.shape
    # The source columns that the part needs.
    begin, end = across.source(left, part_width)
    levels = pixels.reshape(source_height, -1)[:, begin * channels : end * channels]
    rows = added_up(levels, down, top, part_height, 0).reshape(part_height, end - begin, channels)
    # The second pass also adds whole rows. OpenCV transposes several times faster than numpy.
    columns = added_up(cv2.transpose(rows).reshape(end - begin, -1), across, left, part_width, begin)
    return with_channels(cast(Pixels, cv2.transpose(columns.reshape(part_width, part_height, channels))))


@dataclass(frozen=True, slots=True)
class _Taps:
    """The source pixels and weights of each pixel of the result along a side."""

    first: Pixels
    """First source pixel for each pixel of the result. Beyond an end of the side the side's last pixel is repeated."""
    weights: Pixels
    """A row for the first source pixel and for each following one, with a weight for each pixel of the result."""
    starts: list[int]
    """First source pixel of each band of the result."""
    matrix: Pixels
    """For each pixel of the result, the weights of the source pixels from the start of its band."""

    def source(self, start: int, count: int) -> tuple[int, int]:
        """Return the range of source pixels that the bands of these pixels of the result need."""
        return self.starts[start // _BAND], self.starts[(start + count - 1) // _BAND] + self.matrix.shape[1]


def _multiplied(rows: Pixels, taps: _Taps, start: int, count: int, begin: int) -> Pixels:
    first, length = start // _BAND, taps.matrix.shape[1]
    # Whole bands, except at the end of the side.
    result = np.empty((len(taps.matrix) - first * _BAND, rows.shape[1]), dtype=np.float32)
    for index in range(first, (start + count - 1) // _BAND + 1):
        source = taps.starts[index] - begin
        weights = taps.matrix[index * _BAND : (index + 1) * _BAND]
        source_rows = rows[source : source + length].astype(np.float32, copy=False)
        np.matmul(weights, source_rows, out=result[(index - first) * _BAND :][: len(weights)])
    return result[start - first * _BAND :][:count]


def _weighted(rows: Pixels, taps: _Taps, start: int, count: int, begin: int) -> Pixels:
    """Return weighted sums of rows in FP32, rounded after each product and sum as in RPP: `count` rows of the result
    from `start`. `rows` are the source's rows from `begin`."""
    some = slice(start, start + count)
    result = np.zeros((count, rows.shape[1]), dtype=np.float32)
    product = np.empty_like(result)
    for tap, weights in enumerate(taps.weights):
        source_rows = rows[np.clip(taps.first[some] + tap - begin, 0, len(rows) - 1)]
        np.multiply(source_rows, weights[some, np.newaxis], out=product)
        result += product
    return result


@cached_by_size(_GRIDS, _LONG_GRIDS, lambda source_size, size, kernel: max(source_size, size) > _LONG_SIDE)
def _taps(source_size: int, size: int, kernel: str) -> _Taps:
    function, reach, widens = _KERNELS[kernel]
    ratio = _ratio(source_size, size)
    radius, scale = np.float32(reach), np.float32(1)
    if widens and source_size > size:
        radius, scale = np.float32(reach) * ratio, np.float32(1) / ratio
    offset = (ratio - np.float32(1)) * np.float32(0.5) - radius
    places = (np.arange(size) * np.float64(ratio) + np.float64(offset)).astype(np.float32)
    ceilings = np.ceil(places)
    distance, first = (ceilings - places) - radius, ceilings.astype(np.intp)
    # There may be a million rows of few weights, or a few rows of tens of thousands. A block fits into the CPU's cache.
    taps = np.arange(math.ceil(2 * radius))[:, np.newaxis]
    at_once = max(1, (1 << 16) // size)
    blocks = [slice(start, start + at_once) for start in range(0, len(taps), at_once)]
    weights = np.empty((len(taps), size), np.float32)
    for block in blocks:
        weights[block] = function((distance + taps[block].astype(np.float32)) * scale)
    total = np.sum(weights, axis=0, dtype=np.float32)
    weights *= np.where(total != 0, np.float32(1) / np.where(total != 0, total, np.float32(1)), np.float32(1))
    last = source_size - 1
    starts = np.repeat(np.clip(first[::_BAND], 0, last), _BAND)[:size]
    length = int(np.max(np.clip(first + (len(taps) - 1), 0, last) - starts)) + 1
    starts = np.minimum(starts, source_size - length)
    matrix = np.zeros((size, length), np.float32)
    rows = np.arange(size) * length - starts
    for block in blocks:
        # Beyond the ends of the side one pixel has several weights, which are added in their order.
        numbers = np.clip(first + taps[block], 0, last) + rows
        np.add.at(matrix.reshape(-1), numbers.reshape(-1), weights[block].reshape(-1))
    return _Taps(first, weights, starts[::_BAND].tolist(), matrix)


def _cubic(distance: Pixels) -> Pixels:
    """Catmull-Rom spline."""
    x = np.abs(distance)
    near = x * x * (np.float32(1.5) * x - np.float32(2.5)) + np.float32(1)
    far = x * x * (np.float32(-0.5) * x + np.float32(2.5)) - np.float32(4) * x + np.float32(2)
    return np.where(x >= 2, np.float32(0), np.where(x > 1, far, near))


def _sinc(x: Pixels) -> Pixels:
    return np.sinc(x.astype(np.float64)).astype(np.float32)


_KERNELS: dict[str, tuple[Callable[[Pixels], Pixels], float, bool]] = {
    "CUBIC": (_cubic, 2, False),
    "LANCZOS": (lambda x: np.where(np.abs(x) >= 3, np.float32(0), _sinc(x) * _sinc(x * np.float32(0.333333))), 3, True),
    # The standard deviation is sqrt(1 / 8).
    "GAUSSIAN": (lambda x: np.exp(x * x * np.float32(-4)), 1, True),
    "TRIANGULAR": (lambda x: np.maximum(np.float32(1) - np.abs(x), np.float32(0)), 1, True),
}
"""Kernel name -> function, reach in pixels, and whether the kernel widens if the image shrinks."""
