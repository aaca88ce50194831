"""Resizing by the nearest pixel and by weighted sums, with the rules of RPP's CPU kernels.

Bilinear resizing, which rocAL does by default, is in `sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rocserve.backends.rocal.image import Pixels


def resize_nearest(pixels: Pixels, width: int, height: int) -> Pixels:
    """The pixel that holds the middle of each pixel of the result; in the source's datatype."""
    rows = _nearest(pixels.shape[0], height)
    columns = _nearest(pixels.shape[1], width)
    picked: Pixels = np.take(np.take(pixels, rows, axis=0), columns, axis=1)
    return picked


def _nearest(source_size: int, size: int) -> Pixels:
    ratio = np.float32(source_size) / np.float32(size)
    # In 64 bits and rounded once, as a fused multiply-add does it.
    middles = np.arange(size) * np.float64(ratio) + np.float64(ratio * np.float32(0.5))
    return np.minimum(np.floor(middles.astype(np.float32)), source_size - 1).astype(np.intp)


def resize_by_weights(pixels: Pixels, width: int, height: int, kernel: str) -> Pixels:
    """Levels, FP32 and neither rounded nor clamped: rows first, then columns.

    `kernel` is CUBIC, LANCZOS, GAUSSIAN or TRIANGULAR. All but CUBIC widen where the image shrinks.
    """
    source_height, source_width, channels = pixels.shape
    levels = pixels.reshape(source_height, source_width * channels)
    rows = _weighted(levels, _taps(source_height, height, kernel))
    # What were columns are rows for the second pass, so that whole rows are added up in both.
    columns = np.ascontiguousarray(rows.reshape(height, source_width, channels).transpose(1, 0, 2))
    result = _weighted(columns.reshape(source_width, height * channels), _taps(source_width, width, kernel))
    return np.ascontiguousarray(result.reshape(width, height, channels).transpose(1, 0, 2))


def _weighted(rows: Pixels, taps: tuple[Pixels, list[Pixels]]) -> Pixels:
    """Weighted sums of rows, FP32; beyond the first and the last row these are repeated."""
    first, weights_of_taps = taps
    result = np.zeros((len(first), rows.shape[1]), dtype=np.float32)
    product = np.empty_like(result)
    for tap, weights in enumerate(weights_of_taps):
        taken = rows[np.clip(first + tap, 0, len(rows) - 1)]
        np.multiply(taken, weights[:, np.newaxis], out=product)
        result += product
    return result


def _taps(source_size: int, size: int, kernel: str) -> tuple[Pixels, list[Pixels]]:
    """For each pixel of the result the first one of the source, and the weights of it and of those that follow."""
    function, reach, widens = _KERNELS[kernel]
    ratio = np.float32(source_size) / np.float32(size)
    radius, scale = np.float32(reach), np.float32(1)
    if widens and source_size > size:
        radius, scale = np.float32(reach) * ratio, np.float32(1) / ratio
    offset = (ratio - np.float32(1)) * np.float32(0.5) - radius
    places = (np.arange(size) * np.float64(ratio) + np.float64(offset)).astype(np.float32)
    first = np.ceil(places)
    distance = (first - places) - radius
    weights = [function((distance + np.float32(tap)) * scale) for tap in range(math.ceil(2 * radius))]
    total = np.sum(weights, axis=0, dtype=np.float32)
    inverse = np.where(total != 0, np.float32(1) / np.where(total != 0, total, np.float32(1)), np.float32(1))
    return first.astype(np.intp), [weight * inverse for weight in weights]


def _cubic(distance: Pixels) -> Pixels:
    """Catmull and Rom's spline."""
    x = np.abs(distance)
    near = x * x * (np.float32(1.5) * x - np.float32(2.5)) + np.float32(1)
    far = x * x * (np.float32(-0.5) * x + np.float32(2.5)) - np.float32(4) * x + np.float32(2)
    return np.where(x >= 2, np.float32(0), np.where(x > 1, far, near))


def _lanczos(distance: Pixels) -> Pixels:
    shape = _sinc(distance) * _sinc(distance * np.float32(0.333333))
    return np.where(np.abs(distance) >= 3, np.float32(0), shape)


def _sinc(x: Pixels) -> Pixels:
    return np.sinc(x.astype(np.float64)).astype(np.float32)


def _gaussian(distance: Pixels) -> Pixels:
    """With a deviation of sqrt(1 / 8)."""
    shape: Pixels = np.exp(distance * distance * np.float32(-4))
    return shape


def _triangular(distance: Pixels) -> Pixels:
    return np.maximum(np.float32(1) - np.abs(distance), np.float32(0))


_KERNELS: dict[str, tuple[Callable[[Pixels], Pixels], float, bool]] = {
    "CUBIC": (_cubic, 2, False),
    "LANCZOS": (_lanczos, 3, True),
    "GAUSSIAN": (_gaussian, 1, True),
    "TRIANGULAR": (_triangular, 1, True),
}
"""Each with its reach in pixels and whether it widens where the image shrinks."""
