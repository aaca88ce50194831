"""Reads an image at given places, with RPP's rules.

A place outside the image gives zeros. Between the last two rows or columns RPP's CPU kernels read the last but one
twice: the last row and column are never read.
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.image import Pixels
from rocserve.backends.rocal.sampling import with_channels


class BilinearPlaces:
    """Places to read between four pixels, made ready for images of one size; safe to use on several threads."""

    def __init__(self, rows: Pixels, columns: Pixels, height: int, width: int) -> None:
        """`rows` and `columns` are FP32, as large as the result, in pixels of the source."""
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
        channels = pixels.shape[2]
        right, below = (_repeated(weight, channels) for weight in (self._right, self._below))
        left, above = 1 - right, 1 - below
        levels = np.zeros(right.shape, dtype=np.float32)
        weights = (above * left, above * right, below * left, below * right)
        for (columns, rows), weight in zip(self._corners, weights, strict=True):
            weight *= _read(pixels, columns, rows).reshape(right.shape)
            levels += weight
        height, width = self._right.shape
        return cv2.convertScaleAbs(levels).reshape(height, width, channels)


class NearestPlaces:
    """Places to read the nearest pixel of, made ready for images of one size; safe to use on several threads."""

    def __init__(self, rows: Pixels, columns: Pixels, height: int, width: int) -> None:
        """`rows` and `columns` are whole numbers in FP32, as large as the result."""
        outside = (rows < 0) | (columns < 0) | (rows > height - 1) | (columns > width - 1)
        self._rows = np.where(outside, np.float32(-1), rows)
        self._columns = np.where(outside, np.float32(-1), columns)

    def read(self, pixels: Pixels) -> Pixels:
        return _read(pixels, self._columns, self._rows)


def _read(pixels: Pixels, columns: Pixels, rows: Pixels) -> Pixels:
    read = cv2.remap(pixels, columns, rows, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=0)
    return with_channels(cast(Pixels, read))


def _repeated(weight: Pixels, channels: int) -> Pixels:
    """One weight for each channel of each pixel, a row of the result a row."""
    return np.repeat(weight, channels, axis=1) if channels > 1 else weight
