"""Operations that compute a pixel from its neighbours or its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import cv2
import numpy as np

from rocserve.backends.rocal import schema
from rocserve.backends.rocal.image import Pixels
from rocserve.backends.rocal.operations.base import KeptSizeOperation, PipelineOperation
from rocserve.backends.rocal.resampling import resize_nearest
from rocserve.backends.rocal.sampling import resize_to_bytes, with_channels
from rocserve.backends.rocal.schema import Key

_SIZES = 4
"""Sizes of images that vignettes are kept ready for."""


@dataclass(frozen=True)
class Blur(KeptSizeOperation):
    """The mean of 3 x 3 pixels; beyond the border its pixels are repeated.

    RPP's vector loop cuts the mean's fraction off, its scalar loop rounds: the first column and the last ones.
    rocAL takes a window and a sigma too, but hands neither on.
    """

    name: ClassVar[str] = "blur"
    keys: ClassVar[dict[str, Key]] = {}
    ignored_keys: ClassVar[dict[str, Key]] = {
        "window_size": Key(schema.read_size, default=3),
        "sigma": Key(schema.read_number, default=0),
    }

    def _process(self, pixels: Pixels) -> Pixels:
        width, channels = pixels.shape[1], pixels.shape[2]
        box = cv2.boxFilter(pixels, cv2.CV_16U, (3, 3), normalize=False, borderType=cv2.BORDER_REPLICATE)
        sums = with_channels(cast(Pixels, box))
        # 24 bytes at a time, after the first pixel and before the last.
        step = 24 // channels
        end = 1 + max(width - 2, 0) // step * step
        means = np.empty_like(pixels)
        means[:, 1:end] = sums[:, 1:end] // np.uint16(9)
        for columns in (slice(0, 1), slice(end, width)):
            means[:, columns] = (sums[:, columns] + np.uint16(4)) // np.uint16(9)
        return means


@dataclass(frozen=True)
class Pixelate(KeptSizeOperation):
    """Shrinks the image by `pixelate_percent` between pixels, and stretches it again by the nearest ones."""

    pixelate_percent: float

    name: ClassVar[str] = "pixelate"
    keys: ClassVar[dict[str, Key]] = {"pixelate_percent": Key(schema.read_percentage, default=50.0)}

    def _process(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        kept = np.float32(100) - np.float32(self.pixelate_percent)
        shrunk_height, shrunk_width = (
            max(int(np.float32(side) * kept / np.float32(100)), 1) for side in (height, width)
        )
        return resize_nearest(resize_to_bytes(pixels, shrunk_width, shrunk_height), width, height)


@dataclass(frozen=True)
class Vignette(KeptSizeOperation):
    """Darkens towards the corners: level * exp(-vignette / 4 * (distance / radius) ** 2).

    The distance is that from the middle, the radius half the longer side.
    """

    vignette: float

    name: ClassVar[str] = "vignette"
    keys: ClassVar[dict[str, Key]] = {"vignette": Key(schema.read_not_negative, default=0.5)}

    def _process(self, pixels: Pixels) -> Pixels:
        levels = pixels.astype(np.float32)
        levels *= self._shades(pixels.shape[0], pixels.shape[1])
        return with_channels(cv2.convertScaleAbs(levels))

    @cached_property
    def _shades(self) -> Callable[[int, int], Pixels]:
        return lru_cache(_SIZES)(self._shades_for)

    def _shades_for(self, height: int, width: int) -> Pixels:
        half_height, half_width = height // 2, width // 2
        radius = np.float32(max(half_height, half_width, 1))
        factor = -(np.float32(0.25) * np.float32(self.vignette)) / (radius * radius)
        rows = (np.arange(height, dtype=np.float32) - np.float32(half_height))[:, np.newaxis]
        columns = (np.arange(width, dtype=np.float32) - np.float32(half_width))[np.newaxis]
        return cast(Pixels, np.exp((columns * columns + rows * rows) * factor)[:, :, np.newaxis])


OPERATIONS: tuple[type[PipelineOperation], ...] = (Blur, Pixelate, Vignette)
