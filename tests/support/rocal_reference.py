"""A slow and obvious version of what rocAL computes on the CPU after decoding. It follows RPP's x86 kernels for
interleaved images of three channels to the bit, including their mistakes, so that it can be compared with outputs of
real rocAL of which only a checksum is known. `Result.mistaken` marks the pixels in which RPP is wrong; the engine does
not follow RPP there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Operation = dict[str, Any]

VECTOR = 8
"""Pixels that a resizing kernel writes in one step; a scalar loop does the rest of the row."""


@dataclass(frozen=True)
class Result:
    pixels: Array
    """Height x width x 3, UINT8 or FP32: the whole buffer that the operation allocates."""
    height: int
    """Valid rows of `pixels`: what the next operation sees."""
    width: int
    mistaken: Array
    """Height x width x 3, true where RPP or rocAL gives a wrong value."""

    @property
    def valid(self) -> Array:
        return self.pixels[: self.height, : self.width]


def run_pipeline(operations: Sequence[Operation], decoded: Array) -> Result:
    """The output of the last operation. `mistaken` describes the last operation alone; earlier ones have no
    mistakes."""
    result = Result(decoded, *decoded.shape[:2], _nothing(decoded))
    for operation in operations:
        result = _OPERATIONS[operation["operation"]](result.valid, operation)
    return result


def resize(source: Array, operation: Operation) -> Result:
    return _stretched(source, operation["dest_height"], operation["dest_width"])


def resize_crop_mirror(source: Array, operation: Operation) -> Result:
    part = source[: operation["crop_h"] or None, : operation["crop_w"] or None]
    height, width = operation["dest_height"], operation["dest_width"]
    levels = _interpolated(part, height, width, last_read=2, mirror=operation["mirror"])
    pixels = _rounded(levels, _scalar_columns(width))
    return Result(pixels, min(part.shape[0], height), min(part.shape[1], width), _nothing(pixels))


def crop_resize(source: Array, operation: Operation) -> Result:
    image_height, image_width = source.shape[:2]
    target = operation["area"] * image_height * image_width
    width = int(math.sqrt(target * operation["aspect_ratio"]))
    height = int(math.sqrt(target / operation["aspect_ratio"]))
    if width < image_width and height < image_height:
        left = int(operation["x_center_drift"] * (image_width - width))
        top = int(operation["y_center_drift"] * (image_height - height))
    else:
        height, width = image_height, image_width
        if image_width / image_height < 0.75:
            height = int(image_width / 0.75)
        elif image_width / image_height > 1.333:
            width = int(1.333 * image_height)
        left, top = (image_width - width) // 2, (image_height - height) // 2
    part = source[top : top + height, left : left + width]
    result = _stretched(part, operation["dest_height"], operation["dest_width"])
    valid_height, valid_width = min(height, result.height), min(width, result.width)
    return Result(result.pixels, valid_height, valid_width, result.mistaken)


def resize_mirror_normalize(source: Array, operation: Operation) -> Result:
    height, width = operation["dest_height"], operation["dest_width"]
    mean = np.float32(operation["mean"])
    inverse = (1 / np.float32(operation["std_dev"]).astype(np.float64)).astype(np.float32)
    swapped = inverse[[1, 0, 2]]
    as_float = operation.get("dtype") == "FLOAT"
    levels = _interpolated(source, height, width, last_read=1 if as_float else 2, mirror=operation["mirror"])
    tail = _scalar_columns(width)
    if not as_float:
        # The scalar loop truncates the level to a whole number before it normalises.
        levels[:, tail] = np.trunc(levels[:, tail])
    results = (levels - mean) * inverse
    results[:, tail] = (levels[:, tail] - mean) * swapped
    pixels = results if as_float else np.clip(np.rint(results), 0, 255).astype(np.uint8)
    mistaken = _nothing(pixels)
    mistaken[:, tail] = inverse != swapped
    return Result(pixels, height, width, mistaken)


def crop_mirror_normalize(source: Array, operation: Operation) -> Result:
    height = min(operation["crop_height"], source.shape[0])
    width = min(operation["crop_width"], source.shape[1])
    top = int(np.rint(np.float32(operation["start_y"]) * (source.shape[0] - height)))
    left = int(np.rint(np.float32(operation["start_x"]) * (source.shape[1] - width)))
    part = source[top : top + height, left : left + width].astype(np.float64)
    if operation.get("mirror", False):
        part = part[:, ::-1]
    mean, deviation = np.float32(operation["mean"]), np.float32(operation["std_dev"])
    multiplier = np.float32(1) / deviation
    offset = -(mean * multiplier)
    results = _fused(part, multiplier, offset)
    buffer: Array = np.zeros((operation["crop_height"], operation["crop_width"], 3), np.float32)
    buffer[:height, :width] = results
    if operation.get("dtype") != "FLOAT":
        buffer = np.clip(np.rint(buffer), 0, 255).astype(np.uint8)
    return Result(buffer, height, width, _nothing(buffer))


def crop_fixed(source: Array, operation: Operation) -> Result:
    tops, height = _crop_side(operation["crop_pos_y"], operation["crop_height"], source.shape[0])
    lefts, width = _crop_side(operation["crop_pos_x"], operation["crop_width"], source.shape[1])
    buffer: Array = np.zeros((operation["crop_height"], operation["crop_width"], 3), np.uint8)
    buffer[:height, :width] = source[tops : tops + height, lefts : lefts + width]
    return Result(buffer, height, width, _nothing(buffer))


def _crop_side(position: float, size: int, available: int) -> tuple[int, int]:
    start = int(position)
    return (start if start < available else 0), min(size, available)


def _stretched(source: Array, height: int, width: int) -> Result:
    levels = _interpolated(source, height or source.shape[0], width or source.shape[1], last_read=2, mirror=False)
    pixels = _rounded(levels, _scalar_columns(levels.shape[1]))
    return Result(pixels, *pixels.shape[:2], _nothing(pixels))


def _interpolated(source: Array, height: int, width: int, last_read: int, mirror: bool) -> Array:
    """Bilinear levels, FP32. `last_read`: the last row and column that are read, counted from the end: 1 = the last."""
    rows, row_weights = _positions(source.shape[0], height)
    columns, column_weights = _positions(source.shape[1], width)
    if mirror:
        columns, column_weights = columns[::-1], column_weights[:, ::-1]
    last_row, last_column = source.shape[0] - last_read, source.shape[1] - last_read
    tops, bottoms = np.clip(rows, 0, last_row), np.clip(rows + 1, 0, last_row)
    lefts, rights = np.clip(columns, 0, last_column), np.clip(columns + 1, 0, last_column)
    # The vector loop bounds the right pixel only if it would read past the last column, and never the left one.
    vector = slice(0, width - width % VECTOR)
    lefts[vector] = np.clip(columns[vector], 0, source.shape[1] - 1)
    rights[vector] = np.where(columns[vector] >= last_column, lefts[vector], columns[vector] + 1)
    top, bottom = row_weights[:, :, np.newaxis]
    left, right = column_weights
    weights = (top * left, top * right, bottom * left, bottom * right)
    corners = ((tops, lefts), (tops, rights), (bottoms, lefts), (bottoms, rights))
    levels = np.zeros((height, width, 3), np.float32)
    for weight, (row, column) in zip(weights, corners, strict=True):
        levels = _fused(source[np.ix_(row, column)].astype(np.float64), weight[:, :, np.newaxis], levels)
    return levels


def _positions(source_size: int, size: int) -> tuple[Array, Array]:
    """For each destination pixel the first of its two source pixels (-1 = before the image), and both weights.
    Half-pixel centres: pixel d lies at (d + 0.5) * source_size / size - 0.5, in 32-bit floats."""
    ratio = np.float32(source_size) / np.float32(size)
    offset = _fused(ratio, 0.5, -1.5)
    places = _fused(np.arange(size, dtype=np.float64), ratio, offset)
    first = np.ceil(places)
    # The kernel's position lies one pixel to the left, so the distance to the next pixel is the first one's weight.
    first_weights = first - places
    return first.astype(np.int64), np.stack([first_weights, np.float32(1) - first_weights])


def _fused(factor: Array, other: Any, summand: Any) -> Array:
    """factor * other + summand, rounded once to 32 bits: the product of two 24-bit numbers is exact in 64 bits."""
    return (factor * np.asarray(other, np.float64) + np.asarray(summand, np.float64)).astype(np.float32)


def _scalar_columns(width: int) -> slice:
    return slice(width - width % VECTOR, width)


def _rounded(levels: Array, tail: slice) -> Array:
    rounded = np.rint(levels)
    rounded[:, tail] = np.trunc(levels[:, tail])
    return np.clip(rounded, 0, 255).astype(np.uint8)


def _nothing(pixels: Array) -> Array:
    return np.zeros(pixels.shape, bool)


_OPERATIONS = {
    "Resize": resize,
    "ResizeMirrorNormalize": resize_mirror_normalize,
    "CropMirrorNormalize": crop_mirror_normalize,
    "CropFixed": crop_fixed,
    "CropResizeFixed": crop_resize,
    "ResizeCropMirrorFixed": resize_crop_mirror,
}
