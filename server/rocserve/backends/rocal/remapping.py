"""Reads an image at given places, with RPP's rules.

A place outside the image gives zeros. Between the last two rows or columns RPP's CPU kernels read the last but one
twice: the last row and column are never read.
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.image import Pixels, PixelsError
from rocserve.backends.rocal.sampling import with_channels

_LONGEST_SIDE = 2**15 - 2
"""Of the images that OpenCV reads at given places."""


class BilinearPlaces:
    """Places to read between four pixels, made ready for images of one size; safe to use on several threads."""

    def __init__(self, rows: Pixels, columns: Pixels, height: int, width: int) -> None:
        """`rows` and `columns` are FP32, as large as the result, in pixels of the source.

        Raises:
            PixelsError: the image's sides are too long.
        """
        _check_sides(height, width)
        top, left = np.floor(rows), np.floor(columns)
        outside = (rows < 0) | (columns < 0) | (top > height - 1) | (left > width - 1)
        self._below = np.where(outside, np.float32(0), rows - top)
        self._right = np.where(outside, np.float32(0), columns - left)
        last_row, last_column = max(height - 2, 0), max(width - 2, 0)
        top, left = np.clip(top, 0, last_row), np.clip(left, 0, last_column)
        # Left of the image: OpenCV gives zeros for it.
        left[outside] = -1
        bottom, right = np.minimum(top + 1, last_row), np.where(outside, left, np.minimum(left + 1, last_column))
        self._corners = tuple((column, row) for row in (top, bottom) for column in (left, right))

    def read(self, pixels: Pixels) -> Pixels:
        """Levels, rounded to UINT8."""
        height, width = self._right.shape
        channels = pixels.shape[2]
        source = pixels.astype(np.float32)
        # Rows of all channels' levels: numpy is several times faster so than with an axis of three.
        top_left, top_right, bottom_left, bottom_right = (
            _read(source, columns, rows).reshape(height, width * channels) for columns, rows in self._corners
        )
        right, below = (np.repeat(weight, channels, axis=1) for weight in (self._right, self._below))
        top = _between(top_left, top_right, right)
        bottom = _between(bottom_left, bottom_right, right)
        return cv2.convertScaleAbs(_between(top, bottom, below)).reshape(height, width, channels)


class NearestPlaces:
    """Places to read the nearest pixel of, made ready for images of one size; safe to use on several threads."""

    def __init__(self, rows: Pixels, columns: Pixels, height: int, width: int) -> None:
        """`rows` and `columns` are whole numbers in FP32, as large as the result.

        Raises:
            PixelsError: the image's sides are too long.
        """
        _check_sides(height, width)
        outside = (rows < 0) | (columns < 0) | (rows > height - 1) | (columns > width - 1)
        self._rows = np.where(outside, np.float32(-1), rows)
        self._columns = np.where(outside, np.float32(-1), columns)

    def read(self, pixels: Pixels) -> Pixels:
        return _read(pixels, self._columns, self._rows)


def _check_sides(height: int, width: int) -> None:
    if max(height, width) > _LONGEST_SIDE:
        raise PixelsError(
            f"an image of {width}x{height} pixels cannot be rotated, warped or corrected; its sides may have"
            f" {_LONGEST_SIDE} pixels, so scale it before, or by the decoder's max_width and max_height"
        )


def _read(pixels: Pixels, columns: Pixels, rows: Pixels) -> Pixels:
    read = cv2.remap(pixels, columns, rows, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=0)
    return with_channels(cast(Pixels, read))


def _between(first: Pixels, second: Pixels, weight: Pixels) -> Pixels:
    """first + (second - first) * weight; `second` is overwritten."""
    second -= first
    second *= weight
    second += first
    return second
