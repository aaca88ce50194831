"""Bilinear resizing with rocAL's rules, on OpenCV.

Half-pixel centres, two taps, no antialiasing, in 32-bit floats. RPP's CPU kernels have three habits that show in the
result and are kept here, because models were tuned to them:
- the kernel that writes UINT8 never reads the last source row, nor, when shrinking, the last source column;
- it rounds half to even, except in the last (width modulo 8) columns, where it truncates;
- the kernel that writes FP32 has none of this.
"""

from __future__ import annotations

from typing import cast

import cv2
import numpy as np

from rocserve.backends.rocal.image import Pixels

_VECTOR_WIDTH = 8
"""Pixels that RPP's vectorised loop writes at once; the rest of a row goes through its scalar loop."""


def resize_for_floats(pixels: Pixels, width: int, height: int) -> Pixels:
    """Grey levels as the FP32 kernel finds them: FP32, `height` x `width` x channels."""
    return _bilinear(pixels.astype(np.float32), width, height)


def resize_for_bytes(pixels: Pixels, width: int, height: int) -> Pixels:
    """Grey levels as the UINT8 kernel finds them, not yet rounded: FP32, `height` x `width` x channels."""
    source = pixels.astype(np.float32)
    if source.shape[0] > 1:
        source[-1] = source[-2]
    if source.shape[1] > max(width, 1):
        source[:, -1] = source[:, -2]
    return _bilinear(source, width, height)


def scalar_columns(width: int) -> slice:
    """The last columns of a row, those that RPP's scalar loop writes."""
    return slice(width - width % _VECTOR_WIDTH, width)


def to_bytes(levels: Pixels) -> Pixels:
    """FP32 grey levels to UINT8 as RPP's vectorised and scalar loops do it.

    `levels` may be overwritten.
    """
    np.clip(levels, 0, 255, out=levels)
    tail = levels[:, scalar_columns(levels.shape[1])]
    np.floor(tail, out=tail)
    return with_channels(cv2.convertScaleAbs(levels))


def with_channels(pixels: Pixels) -> Pixels:
    """OpenCV drops a channel axis of one; this puts it back."""
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def _bilinear(source: Pixels, width: int, height: int) -> Pixels:
    resized = cv2.resize(source, (width, height), interpolation=cv2.INTER_LINEAR)
    return with_channels(cast(Pixels, resized))
