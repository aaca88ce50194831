"""Images that are sent as pixels: taken as they are, as rocAL's external source does in its RAW_UNCOMPRESSED mode."""

from __future__ import annotations

from typing import Any

import numpy as np

from rocserve.backends.rocal.decoding.faults import ImageError
from rocserve.backends.rocal.image import Pixels


def pixels_of(image: np.ndarray[Any, Any], channels: int) -> Pixels:
    """The image as height x width x channels, a view where possible.

    Raises:
        ImageError: it has no pixels, or other channels than the pipeline.
    """
    pixels = image[:, :, np.newaxis] if image.ndim == 2 and channels == 1 else image
    if pixels.ndim != 3 or pixels.shape[2] != channels:
        expected = "[height, width, 1] or [height, width]" if channels == 1 else f"[height, width, {channels}]"
        raise ImageError(f"raw pixels must have shape {expected}, not {list(image.shape)}")
    if not pixels.size:
        raise ImageError(f"it has no pixels: its shape is {list(image.shape)}")
    return np.ascontiguousarray(pixels)
